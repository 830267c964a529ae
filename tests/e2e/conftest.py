"""A model for end-to-end runs, made by the real `evenkeel init-model`, once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.e2e.launch import RECIPE, said_here


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "small" / "model"  # one for all processes of the suite
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            assert "supervised warm-up: 4 steps" in said_here("init-model", str(RECIPE), f"model={folder}")
    return folder
