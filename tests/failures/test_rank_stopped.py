"""The process of a learner rank stops for good (SIGSTOP): its heartbeat tells, long before its step is late, and the run goes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.launch import RECIPE, Run
from tests.failures.books import check_end
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, GROUPS, EVERY = 10, 4, 3
HEARTBEAT_S = 12


def test_a_rank_that_stops_is_ended_and_the_run_goes_back(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", f"run_dir={run_dir}", f"steps={STEPS}", f"groups_per_step={GROUPS}", f"checkpoint.every_steps={EVERY}"]
    words.append(f"deadlines.part_heartbeat_s={HEARTBEAT_S}")
    run = Run(run_dir, str(RECIPE), *words)
    try:
        run.wait_until(lambda: len(run.metrics()) >= EVERY + 1, "a checkpoint and a step")
        (rank,) = run.pids("LearnerRankActor")
        follows = "it is ended, and the run goes back to its last checkpoint, in the same process; engines stay up"
        recovery = Recovery(run, f"learner rank stopped for good (part_heartbeat_s {HEARTBEAT_S})", follows)
        os.kill(rank, signal.SIGSTOP)
        run.wait_until(lambda: "learner rank 0: it gave no sign for 12 s" in run.events(), "its heartbeat to be missed")
        recovery.begins_here()
        recovery.wait()
        assert run.wait() == 0, run.output()[-4000:]
        check_end(run, groups_per_step=GROUPS, steps=STEPS, goes_back=True)
        (lost,) = [event.text for event in RunFolder.view(run_dir).read_events() if event.text.startswith("lost: ")]
        assert lost.startswith("lost: learner rank 0 (learner rank 0: it gave no sign for 12 s (deadlines.part_heartbeat_s)")
        assert "rollout worker 0 is gone" not in run.events(), "its engine stays"
    finally:
        run.close()
