"""kill -9 of one of the two ranks of a run's only engine: the worker is lost and replaced, its groups are sampled again.

Behaviours locked here: the other rank doesn't hold anybody up, the replacement gets all weights with each rank's part compared, no prompt
is trained or discarded twice, and the learner agrees with what two ranks sample to 1e-5 nats, before and after.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.launch import RECIPE, Run, evenkeel
from tests.failures.books import check_end
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUPS = 4


def test_a_killed_rank_costs_the_worker_and_nothing_else(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    made = evenkeel("init-model", str(RECIPE), f"model={tmp_path / 'model'}", "init.architecture.key_value_heads=2")
    assert made.returncode == 0, made.stdout + made.stderr
    words = ["rollout.engine.tensor_parallel=2", "max_staleness=0", "evaluation.problems=4", "checkpoint.every_steps=2", "steps=8"]
    run = Run(run_dir, str(RECIPE), f"model={tmp_path / 'model'}", f"run_dir={run_dir}", *words)
    try:
        run.wait_until(lambda: len(run.metrics()) >= 2, "two steps")
        ranks = run.pids("sglang::scheduler")
        assert len(ranks) == 2
        recovery = Recovery(run, "SGLang's scheduler killed, one of two ranks of the only engine", "its worker is replaced")
        os.kill(max(ranks), signal.SIGKILL)
        run.wait_until(lambda: "rollout worker 0 is gone" in run.events(), "the loss of the worker")
        recovery.wait()
        assert run.wait() == 0, run.output()[-4000:]
        check_end(run, groups_per_step=GROUPS, steps=8)
        assert "the scheduler process" in run.events() and "rollout 1 is up" in run.events()
        assert all(0 < line["mismatch/max_abs_log_ratio"] < 1e-5 for line in run.metrics()), "at equal weights"
    finally:
        run.close()
