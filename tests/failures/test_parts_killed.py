"""kill -9 of the processes that hold a run's state, one after the other in one run: learner rank, trajectory queue, correction service.

Of the learner's death the run goes back to its last checkpoint; queue and service are replaced where it stands. It does both by itself,
with the engine that it has, and its books are those of an undisturbed run.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from actors.record.run_folder import RunFolder
from tests.e2e.launch import RECIPE, Run
from tests.failures.books import check_end
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, GROUPS, EVERY = 18, 4, 6
GOES_BACK = "the run goes back to its last checkpoint, in the same process; engines stay up"
REPLACED = "queue and service are replaced; learner and engines go on with what they have under way"
PARTS = {"LearnerRankActor": "learner rank 0", "TrajectoryQueueActor": "trajectory queue", "CorrectionService": "correction service"}


def kill(run: Run, process: str, *, after: int) -> None:
    run.wait_until(lambda: len(run.metrics()) >= after, f"{after} steps")
    (pid,) = run.pids(process)
    follows = GOES_BACK if process == "LearnerRankActor" else REPLACED
    recovery = Recovery(run, f"{PARTS[process].removesuffix(' 0')} killed", follows)
    os.kill(pid, signal.SIGKILL)
    run.wait_until(lambda: f"lost: {PARTS[process]} " in run.events(), f"the end of {process} to be noticed")
    recovery.wait()


def test_every_part_dies_once(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", f"run_dir={run_dir}", f"steps={STEPS}", f"groups_per_step={GROUPS}", f"checkpoint.every_steps={EVERY}"]
    run = Run(run_dir, str(RECIPE), *words)
    try:
        for number, process in enumerate(PARTS):  # the first after the first step, without a checkpoint to go back to
            kill(run, process, after=max(1, number * (EVERY + 1)))
        assert run.wait() == 0, run.output()[-4000:]
        check_end(run, groups_per_step=GROUPS, steps=STEPS, goes_back=True)
        losses = [event.text for event in RunFolder.view(run_dir).read_events() if event.text.startswith("lost: ")]
        assert [text.split(" (")[0] for text in losses] == [f"lost: {name}" for name in PARTS.values()]
        assert "its beginning (it has no checkpoint)" in losses[0] and all("New ones go on after step" in text for text in losses[1:])
        assert run.metrics()[-1]["steps/returns_total"] == 1 and run.metrics()[-1]["queue/replaced_total"] == 2
        assert "rollout worker 0 is gone" not in run.events() and "rollout 1 is up" not in run.events(), "its engine stays"
        assert run.events().count("learner 0 is up") == 2, "the second time for the killed one; others' deaths don't concern it"
        assert all(line["staleness/max"] <= 1 for line in run.metrics())
    finally:
        run.close()
