"""The control service or the raylet of a private Ray dies: the run says which, ends at once, and with `--retries` goes on by itself. So it
does once Ray has given up a raylet that hangs."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.launch import RECIPE, Run
from tests.failures.books import check_books
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, GROUPS = 8, 4
AGAIN = "the run's process ended with exit code 1 after step "
ENDS_S = 60.0
"""Ray's own processes take as long to give up."""
GIVEN_UP_S = 65.0
"""After so long the control service has given up a raylet that answers none of its five probes (3 s each, and 10 s for an answer)."""


def kill_of_ray(run: Run, name: str) -> Recovery:
    """kill -9 of one process of Ray's, and one sentence about it. Returns: what that costs."""
    follows = "the run ends at once and says so; a new process goes on from the last checkpoint, with new engines"
    recovery = Recovery(run, f"{name} of a run's own Ray killed, with `--retries`", follows)
    (pid,) = (process.pid for process in run.processes() if process.name() == name)
    os.kill(pid, signal.SIGKILL)
    said = f"this run's own Ray is gone: its {name} (process {pid}) was killed by SIGKILL, "
    run.wait_until(lambda: said in run.events(), f"a sentence about the {name}", timeout_s=ENDS_S)
    run.wait_until(lambda: AGAIN in run.events().rpartition(said)[2], "the next attempt", timeout_s=ENDS_S)
    recovery.begins_here()
    return recovery


def words_of(model: Path, run_dir: Path, steps: int) -> list[str]:
    words = [f"model={model}", f"steps={steps}", f"groups_per_step={GROUPS}", "checkpoint.every_steps=2", "evaluation.problems=4"]
    return [str(RECIPE), f"run_dir={run_dir}", *words, "--retries", "2"]


def test_each_process_that_a_private_ray_cannot_do_without(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = Run(run_dir, *words_of(small_model, run_dir, STEPS))
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


def test_a_raylet_that_hangs_is_told_and_the_run_goes_on_without_it(small_model: Path, tmp_path: Path) -> None:
    """It is stopped for good, and the object store with it: that is said after half a minute, and all actors are lost in the end."""
    run_dir, steps = tmp_path / "run", 1000
    run = Run(run_dir, *words_of(small_model, run_dir, steps))
    try:
        run.wait_until(lambda: max(run.steps(), default=0) >= 3, "a step after a checkpoint")
        (pid,) = (process.pid for process in run.processes() if process.name() == "raylet")
        before, began = max(run.steps()), time.monotonic()
        follows = "said after half a minute; after another one the run ends and says so, and a new process goes on from the last checkpoint"
        recovery = Recovery(run, "raylet of a run's own Ray stopped for good, with `--retries`", follows)
        os.kill(pid, signal.SIGSTOP)
        named = f"the raylet of this run's own Ray (process {pid}, at "
        hangs = re.compile(rf"{re.escape(named)}\S+\) hangs: it listens, ")
        run.wait_until(lambda: hangs.search(run.events()) is not None, "that it hangs", timeout_s=ENDS_S)
        assert time.monotonic() - began >= 25.0
        assert max(run.steps()) <= before + 2, "but for what is under way the run stands still: the object store is in that process"
        run.wait_until(lambda: AGAIN in run.events(), "the next attempt", timeout_s=2 * GIVEN_UP_S)
        ended_s = time.monotonic() - began
        recovery.begins_here()
        recovery.wait()
        assert GIVEN_UP_S - 5.0 <= ended_s <= GIVEN_UP_S + 30.0, "not before Ray gives it up, when it could still have been woken"
        assert re.search(rf"^evenkeel: {re.escape(named)}.* hangs: it has answered nothing for ", run.output(), re.MULTILINE)
        run.interrupt()
        assert run.wait() == 0, run.output()[-4000:]
        check_books(run, groups_per_step=GROUPS)
        assert run.events().count(AGAIN) == 1 and "Traceback" not in run.output() and run.orphans(30.0) == []
    finally:
        run.close()
