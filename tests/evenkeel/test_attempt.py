"""By which exit code an attempt of `evenkeel train --retries` says to its parent what has ended it."""

from __future__ import annotations

import errno
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from evenkeel import attempt
from evenkeel import training as train
from evenkeel.actors.cluster.address import NoClusterError
from evenkeel.actors.config import RunConfig
from evenkeel.actors.processes import driver_heartbeat, interrupts
from evenkeel.actors.processes.disk_at_start import DiskLate
from evenkeel.actors.processes.interrupts import NO_CLUSTER
from evenkeel.actors.processes.output import refused_file
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.errors import ConfigError, DataError, DeadlineExceeded, EngineError, LateError, LedgerError
from evenkeel.retries import AWAY, NOT_AGAIN


@pytest.fixture
def attempted(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Exit code of an attempt to resume the run, in this process."""
    monkeypatch.setattr(interrupts, "is_attempt", False)
    monkeypatch.setattr(interrupts, "has_trained", False)
    monkeypatch.setattr(driver_heartbeat, "_writer", None)
    monkeypatch.setattr(sys, "argv", ["evenkeel", "train", "--resume", str(folder.path)])
    monkeypatch.setattr(attempt.sys, "platform", "other")  # this process doesn't end with its parent
    folder.close()

    def run() -> Any:
        with pytest.raises(SystemExit) as ended:
            attempt.main()
        return ended.value.code

    return run


STALE = OSError(errno.ESTALE, "Stale file handle", "rows.jsonl")
ENDS: list[tuple[Exception, Any, Any]] = [
    (DataError("rows.jsonl: no such file"), AWAY, "evenkeel: rows.jsonl: no such file"),
    (DiskLate("questions -> their disk: not done in 1800 s"), AWAY, "evenkeel: questions -> their disk: not done in 1800 s"),
    (STALE, AWAY, f"evenkeel: {refused_file(STALE)}"),
    (DeadlineExceeded("weights -> engine: not done"), *["evenkeel: weights -> engine: not done"] * 2),
    (LateError("no batch"), *["evenkeel: no batch"] * 2),
    (ConfigError("no room"), NOT_AGAIN, NOT_AGAIN),
    (NoClusterError("no cluster"), NO_CLUSTER, NO_CLUSTER),
    (EngineError("failed"), "evenkeel: failed", "evenkeel: failed"),
    (LedgerError("lost"), "evenkeel: lost", "evenkeel: lost"),
]
"""(what ends a run, exit code at its start, exit code in training); a sentence is printed by Python, and its exit code is 1."""


@pytest.mark.parametrize(("error", "at_start", "in_training"), ENDS, ids=[type(error).__name__ for error, *_ in ENDS])
@pytest.mark.parametrize("trains", [False, True], ids=["start", "training"])
def test_what_a_start_lacks_is_told_from_what_training_does(
    attempted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, trains: bool, error: Exception, at_start: Any, in_training: Any
) -> None:
    """A DataError of a batch, or of three failed checkpoints, comes again; one of a file that isn't there may pass."""

    def train_run(*_: Any, **__: Any) -> None:
        interrupts.has_trained = trains
        raise error

    monkeypatch.setattr(train, "train_run", train_run)
    assert attempted() == (in_training if trains else at_start)


def test_an_error_of_a_disk_that_names_no_file_may_pass_too(
    attempted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of reading, after a file was opened. There is no sentence for it, so its traceback is printed."""

    def train_run(*_: Any, **__: Any) -> None:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(train, "train_run", train_run)
    assert attempted() == AWAY and "Connection timed out" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["data", "model", "checkpoint"])
def test_data_and_a_model_that_are_away_at_a_resume(
    attempted: Callable[..., Any], folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """Whole looks of a resume: at the questions' file, at the reference policy, at the run's own checkpoints."""
    content: dict[str, Any] = yaml.safe_load(folder.recipe_path.read_text())
    if what == "data":
        content["rollout"]["task"] = {"kind": "file", "path": str(tmp_path / "rows.jsonl")}
    elif what == "model":
        content["model"] = str(tmp_path / "gone")
        content["learner"]["report_kl_every"] = 1
    else:
        for checkpoint in folder.checkpoints():
            shutil.rmtree(checkpoint.hf)
    folder.write_recipe(content)
    folder.write_config(with_devices(RunConfig.model_validate(content), has_gpu=False))
    assert attempted() == AWAY
    file, gone = r"rollout\.task\.path = \S+rows\.jsonl: no such file", "model = .*gone: no such folder"
    assert re.search({"data": file, "model": gone}.get(what, "is not there"), capsys.readouterr().err)
