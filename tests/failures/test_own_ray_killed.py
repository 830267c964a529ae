"""The control service or the raylet of a private Ray dies: the run says which, ends at once, and with `--retries` goes on by itself."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.launch import RECIPE, Run
from tests.failures.books import check_books
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, GROUPS = 8, 4
AGAIN = "the run's process found no Ray cluster, or lost its own, after step "
ENDS_S = 60.0
"""Ray's own processes take as long to give up."""


def kill_of_ray(run: Run, name: str) -> Recovery:
    """kill -9 of one process of Ray's, and one sentence about it. Returns: what that costs."""
    follows = "the run ends at once and says so; a new process goes on from the last checkpoint, with new engines"
    recovery = Recovery(run, f"{name} of a run's own Ray killed, with `--retries`", follows)
    (pid,) = (process.pid for process in run.processes() if process.name() == name)
    os.kill(pid, signal.SIGKILL)
    said = f"this run's own Ray is gone: its {name} (process {pid}) was killed by SIGKILL, "
    run.wait_until(lambda: said in run.events(), f"a sentence about the {name}", timeout_s=ENDS_S)
    run.wait_until(lambda: AGAIN in run.events().rpartition(said)[2], "the next attempt", timeout_s=ENDS_S)
    recovery.has_ended()
    return recovery


def test_each_process_that_a_private_ray_cannot_do_without(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", f"steps={STEPS}", f"groups_per_step={GROUPS}", "checkpoint.every_steps=2", "evaluation.problems=4"]
    run = Run(run_dir, str(RECIPE), f"run_dir={run_dir}", *words, "--retries", "2")
    try:
        for number, name in enumerate(("gcs_server", "raylet")):
            run.wait_until(lambda reached=3 + 2 * number: max(run.steps(), default=0) >= reached, "a step after a checkpoint")
            kill_of_ray(run, name).wait()
        assert run.wait() == 0, run.output()[-4000:]
        check_books(run, groups_per_step=GROUPS, steps=STEPS)
        assert len(re.findall(r"^evenkeel: this run's own Ray is gone: ", run.output(), re.MULTILINE)) == 2
        assert run.events().count(AGAIN) == 2
        assert "Traceback" not in run.output() and run.orphans(30.0) == []
    finally:
        run.close()
