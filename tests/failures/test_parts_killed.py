"""kill -9 of the processes that hold a run's state, one after the other in one run: learner rank, trajectory queue, correction service.

Each time the run goes back to its last checkpoint by itself, with the engine that it has, and its books are those of an undisturbed run. A
learner that lives reads the checkpoint in the process that it has.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from actors.record.run_folder import RunFolder
from actors.resume import TrainingState
from tests.e2e.launch import RECIPE, Run
from tests.failures.books import check_books
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, GROUPS, EVERY = 18, 4, 6
PARTS = {"LearnerRankActor": "learner rank 0", "TrajectoryQueueActor": "trajectory queue", "CorrectionService": "correction service"}


def kill(run: Run, process: str, *, after: int, generation: int) -> None:
    run.wait_until(lambda: len(run.metrics()) >= after, f"{after} steps")
    (pid,) = run.pids(process)
    follows = "the run goes back to its last checkpoint, in the same process; engines stay up"
    recovery = Recovery(run, f"{PARTS[process].removesuffix(' 0')} killed", follows)
    os.kill(pid, signal.SIGKILL)
    run.wait_until(lambda: f"(generation {generation})" in run.events(), f"the end of {process} to be noticed")
    recovery.wait()


def test_every_part_dies_once(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", f"run_dir={run_dir}", f"steps={STEPS}", f"groups_per_step={GROUPS}", f"checkpoint.every_steps={EVERY}"]
    run = Run(run_dir, str(RECIPE), *words)
    try:
        for number, process in enumerate(PARTS):  # the first after the first step, without a checkpoint to go back to
            kill(run, process, after=max(1, number * (EVERY + 1)), generation=number + 1)
        assert run.wait() == 0, run.output()[-4000:]
        folder = RunFolder.view(run_dir)
        state = TrainingState.load(folder.latest_checkpoint().state)
        assert run.steps() == list(range(1, STEPS + 1)) and state.step == STEPS
        check_books(run, state, groups_per_step=GROUPS)
        went_back = [event.text for event in folder.read_events() if "The run goes back to" in event.text]
        assert [text.split(" (")[0] for text in went_back] == [f"lost: {name}" for name in PARTS.values()]
        assert "its beginning (it has no checkpoint)" in went_back[0] and "the checkpoint of step" in went_back[1]
        assert run.metrics()[-1]["steps/returns_total"] == len(PARTS)
        assert "rollout worker 0 is gone" not in run.events() and "rollout 1 is up" not in run.events(), "its engine stays"
        assert run.events().count("learner 0 is up") == 2, "the second time for the killed one; it stays when others die"
        assert all(line["staleness/max"] <= 1 for line in run.metrics())
        assert "Traceback" not in run.output() and run.orphans(30.0) == []
    finally:
        run.close()
