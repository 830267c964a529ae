"""Faults on a Ray cluster that was there before the run, and is there after it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.cluster import RunningCluster, ray_cluster
from tests.e2e.launch import RECIPE, Run, living
from tests.failures.books import check_books
from tests.failures.measured import Recovery
from tests.failures.test_driver_killed import child_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, GROUPS = 6, 4
OURS = ("ray::RolloutWorker", "ray::LearnerRankActor", "ray::CorrectionService", "sglang::", "reward_process")
"""What a run starts on a cluster."""


def check_nothing_is_held(cluster: RunningCluster, within_s: float = 30.0) -> None:
    """By any job. Ray tells free resources a moment later."""
    until = time.monotonic() + within_s
    while True:
        state = cluster.look()
        held = {name: there - state["free"].get(name, 0.0) for name, there in state["there"].items() if name in ("CPU", "rollout")}
        if not any(held.values()) and not state["actors"]:
            break
        assert time.monotonic() < until, state
    assert set(state["placement_groups"]) <= {"REMOVED"}, state


def test_a_driver_that_is_killed_there(small_model: Path, tmp_path: Path) -> None:
    """The cluster has room for one run: the new driver gets its places because nothing of the old one's job is left."""
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", f"steps={STEPS}", f"groups_per_step={GROUPS}", "checkpoint.every_steps=2", "evaluation.problems=4"]
    with ray_cluster() as cluster:
        arguments = (str(RECIPE), f"run_dir={run_dir}", *words, "--retries", "1")
        run = Run(run_dir, *arguments, address=cluster.address, **cluster.variables)
        try:
            run.wait_until(lambda: len(run.metrics()) >= 3, "a step after the first checkpoint")
            folder = RunFolder.view(run_dir)
            run.wait_until(lambda: len(folder.checkpoints()) >= 1, "a checkpoint")
            of_first = {name: cluster.head.processes(name) for name in OURS}
            assert all(of_first.values()), "each must have been seen, or its end says nothing"
            follows = "Ray ends all that it had there; a new process goes on from the last checkpoint, with new engines"
            recovery = Recovery(run, "driver killed on a cluster that it has joined, with `--retries`", follows)
            os.kill(child_of(run), signal.SIGKILL)
            left = living([process for found in of_first.values() for process in found], timeout_s=60.0)
            assert left == [], "the dead job's"
            recovery.wait()
            assert run.wait() == 0, run.output()[-4000:]
            assert [process for name in OURS for process in living(cluster.head.processes(name), timeout_s=30.0)] == []
            check_nothing_is_held(cluster)
            assert run.orphans(30.0) == []
        finally:
            run.close()
    check_books(run, groups_per_step=GROUPS, steps=STEPS)
    (retried,) = [event.text for event in folder.read_events() if "(retry" in event.text]
    assert "killed by SIGKILL" in retried and "it goes on from the checkpoint of step" in retried
