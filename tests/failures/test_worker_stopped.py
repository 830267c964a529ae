"""The process of a rollout worker, not its engine's, stops answering, and is killed later: what hangs on it goes with it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.launch import RECIPE, Run, command_of, living
from tests.failures.books import check_end
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUPS, HEARTBEAT_S = 8, 9


def test_a_worker_that_stops_and_is_killed_then(small_model: Path, tmp_path: Path) -> None:
    """Its engine goes on sampling what it was given, for nobody: neither that nor the scorers may outlive it.

    Answers have half an hour at least: it is the heartbeat that has its groups sampled elsewhere.
    """
    run_dir = tmp_path / "run"
    words = ["rollout.workers=2", f"groups_per_step={GROUPS}", "evaluation.problems=4", "checkpoint.every_steps=5"]
    words += [f"rollout.engine.deadlines.heartbeat_s={HEARTBEAT_S}", "deadlines.tokens_per_s=0.05"]
    run = Run(run_dir, str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", "rollout.sampling.max_tokens=96", *words)
    try:
        run.wait_until(lambda: len(run.metrics()) >= 2 and "rollout 1 is up" in run.events(), "two workers and two steps")
        worker = psutil.Process(int(re.findall(r"rollout 1 is up \(process (\d+)", run.events())[0]))
        below = worker.children(recursive=True)
        for name in ("sglang::scheduler", "reward_process"):
            assert any(name in command_of(process) for process in below), "or its end says nothing"
        follows = "its groups go to others; its engine and its scorers end with it"
        recovery = Recovery(run, f"rollout worker stopped (heartbeat_s {HEARTBEAT_S}), and killed then", follows)
        os.kill(worker.pid, signal.SIGSTOP)
        run.wait_until(lambda: "rollout worker 1 is gone: missed its heartbeat" in run.events(), "the heartbeat to be missed")
        taken = ("all groups of rollout worker 1 are under way again", "it had no group under way")  # it may just have had none
        run.wait_until(lambda: any(text in run.events() for text in taken), "others to have its groups")
        if worker.is_running():
            worker.kill()
        left = [command_of(process) for process in living([worker, *below], timeout_s=30.0)]
        assert left == []
        recovery.wait(steps=2)
        run.wait_until(lambda: "rollout 2 is up" in run.events(), "a worker in its place")
        run.interrupt()
        assert run.wait() == 0, run.output()[-4000:]
        check_end(run, groups_per_step=GROUPS, within_s=60.0)
        assert run.events().count(" is gone: ") == 1
    finally:
        run.close()
