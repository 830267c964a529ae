"""The folder of a run, to be resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evenkeel.actors.record.run_folder import RunFolder
from tests.evenkeel.finished_run import make_finished_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, each with a checkpoint."""
    return make_finished_run(tmp_path_factory.mktemp("resume"))


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> RunFolder:
    """A copy, and so a run folder in another place than where it was made."""
    return RunFolder.open(Path(shutil.copytree(finished, tmp_path / "run")))
