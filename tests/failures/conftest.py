"""A model folder that passes every check at start-up, without weights worth the name: most tests here start no engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import small_model as small_model  # for those that do start engines
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    folder.mkdir()
    return save_tiny_model(save_tiny_tokenizer(folder))
