"""Several runs that start at once on few cores: each gets its own Ray, one after the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.launch import RECIPE, Run

pytestmark = pytest.mark.slow  # four imports of torch and three Rays at the same time: two minutes on two cores


def test_three_starts_at_once_all_come_up(model: Path, tmp_path: Path) -> None:
    runs = [Run(tmp_path / f"run-{i}", str(RECIPE), f"model={model}", f"run_dir={tmp_path / f'run-{i}'}") for i in range(3)]
    try:
        for run in runs:
            run.wait_until(lambda run=run: "output of the actors: " in run.events(), "its Ray", 400.0)  # type: ignore[misc]
        for run in runs:
            os.kill(run.process.pid, signal.SIGTERM)
        assert [run.wait(60.0) for run in runs] == [143] * 3
        assert [run.orphans(30.0) for run in runs] == [[]] * 3
        assert all("Traceback" not in run.output() for run in runs)
    finally:
        for run in runs:
            run.close()
