"""An engine that stops answering, in a synchronous run with two real workers: nobody sends it weights, so only its heartbeat tells.

Behaviours locked here: it is condemned long before any of its answers is late, its groups are sampled by the other worker and its
replacement, the batch that needed them is trained, and the books hold every prompt once.
"""

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

HEARTBEAT_S, GROUPS = 9, 8


def test_a_frozen_engine_is_condemned_by_its_heartbeat_and_the_run_goes_on(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["max_staleness=0", "rollout.workers=2", f"groups_per_step={GROUPS}", "evaluation.problems=4", "checkpoint.every_steps=0"]
    waits = [f"rollout.engine.deadlines.heartbeat_s={HEARTBEAT_S}", "deadlines.tokens_per_s=0.05"]
    run = Run(run_dir, str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", "rollout.sampling.max_tokens=96", *words, *waits)
    try:
        run.wait_until(lambda: len(run.metrics()) >= 2 and "rollout 1 is up" in run.events(), "two workers and two steps")
        frozen = run.pids("sglang::scheduler")[0]
        recovery = Recovery(run, f"SGLang's scheduler stopped for good (heartbeat_s {HEARTBEAT_S})", "its worker is replaced")
        os.kill(frozen, signal.SIGSTOP)
        run.wait_until(lambda: "missed its heartbeat" in run.events(), "the frozen engine's condemnation")
        recovery.wait()
        before = len(run.metrics())
        run.wait_until(lambda: len(run.metrics()) >= before + 3, "three more steps")
        run.interrupt()
        assert run.wait() == 0, run.output()[-4000:]
        assert len(re.findall(r"rollout worker \d+ is gone", run.events())) == 1, run.events()
        check_books(run, groups_per_step=GROUPS)
        assert run.orphans(60.0) == []
    finally:
        run.close()
