"""A model for end-to-end runs, made by the real `evenkeel init-model`, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launch import RECIPE, evenkeel


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "model"
    made = evenkeel("init-model", str(RECIPE), f"model={folder}")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "supervised warm-up: 4 steps" in made.stdout
    return folder
