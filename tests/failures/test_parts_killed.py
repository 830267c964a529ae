"""kill -9, or SIGSTOP for good, of the processes that hold a run's state, one after the other in one run.

Of the death of one of the learner's two ranks the run goes back to its last checkpoint; the correction service is replaced where it
stands. It does both by itself, with the engine that it has, and its books are those of an undisturbed run. A rank that
stops: test_rank_stopped.py.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.launch import RECIPE, Run
from tests.failures.books import check_end
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, GROUPS, EVERY, HEARTBEAT_S = 18, 4, 6, 12
GOES_BACK = "the run goes back to its last checkpoint, in the same process; engines stay up"
REPLACED = "a new one packs again; learner and engines go on with what they have under way"
RANK, SERVICE = "LearnerRankActor", "CorrectionService"
PARTS = {RANK: "learner rank 1", SERVICE: "correction service"}


def _rank_one(run: Run) -> int:
    """Process id of the second rank, as the run has told it."""
    return int(re.findall(r"learner 1 is up \(process (\d+)", run.events())[-1])


def lose(run: Run, process: str, number: signal.Signals, *, after: int) -> None:
    """One part gets this signal, and the run gets over it."""
    run.wait_until(lambda: len(run.metrics()) >= after, f"{after} steps")
    # Ray gives a process that it kills five seconds, and the stopped one before needs them: it may be there still.
    there = [_rank_one(run)] if process == RANK else run.pids(process)
    (pid,) = [one for one in there if psutil.Process(one).status() != psutil.STATUS_STOPPED]
    name = PARTS[process].removesuffix(" 1")
    follows = GOES_BACK if process == RANK else REPLACED
    if number == signal.SIGKILL:
        recovery = Recovery(run, f"{name} killed", follows)
    else:
        recovery = Recovery(run, f"{name} stopped for good (part_heartbeat_s {HEARTBEAT_S})", f"it is ended; {follows}")
    os.kill(pid, number)
    run.wait_until(lambda: f"lost: {PARTS[process]} " in run.events(), f"the end of {process} to be noticed")
    if process == RANK:
        recovery.begins_here()
    recovery.wait()


@pytest.mark.parametrize(
    ("number", "processes"), [(signal.SIGKILL, (RANK, SERVICE, SERVICE)), (signal.SIGSTOP, (SERVICE, SERVICE))], ids=["killed", "stopped"]
)
def test_every_part_is_lost(number: signal.Signals, processes: Sequence[str], small_model: Path, tmp_path: Path) -> None:
    run_dir, goes_back = tmp_path / "run", RANK in processes
    words = [f"model={small_model}", f"run_dir={run_dir}", f"steps={STEPS}", f"groups_per_step={GROUPS}", f"checkpoint.every_steps={EVERY}"]
    words += ["learner.data_parallel=2"] * goes_back  # one of two ranks is lost: the other, which waits for it, starts anew as well
    words += [f"deadlines.part_heartbeat_s={HEARTBEAT_S}"] * (number == signal.SIGSTOP)
    run = Run(run_dir, str(RECIPE), *words)
    try:
        for i, process in enumerate(processes):  # the first after the first step, without a checkpoint to go back to
            lose(run, process, number, after=max(1, i * (EVERY + 1)))
        assert run.wait() == 0, run.output()[-4000:]
        check_end(run, groups_per_step=GROUPS, steps=STEPS, goes_back=goes_back)
        told = [event.text for event in RunFolder.view(run_dir).read_events()]
        losses = [text for text in told if text.startswith("lost: ")]
        assert [text.split(" (")[0] for text in losses] == [f"lost: {PARTS[process]}" for process in processes]
        if goes_back:
            assert losses.pop(0).endswith("; going back to the last checkpoint")
            assert len([text for text in told if text.startswith("The run goes back to its beginning (it has no checkpoint); ")]) == 1
        assert all("A new one goes on after step" in text for text in losses)
        silent = f"it gave no sign for {HEARTBEAT_S} s (deadlines.part_heartbeat_s), and its process was ended"
        assert all((silent in text) == (number == signal.SIGSTOP) for text in losses)
        assert run.metrics()[-1].get("steps/returns_total", 0) == goes_back and run.metrics()[-1]["service/replaced_total"] == 2
        assert "rollout worker 0 is gone" not in run.events() and "rollout 1 is up" not in run.events(), "its engine stays"
        for rank in range(1 + goes_back):
            assert run.events().count(f"learner {rank} is up") == 1 + goes_back, "at first, and for a lost one; others' loss is no matter"
        assert all(line["staleness/max"] <= 1 for line in run.metrics())
    finally:
        run.close()
