"""An engine that is killed half-way in a broadcast of weights, in a run of two: the others of the group stand in the same collective.

Its scheduler is stopped as the learner begins to send, and killed while the learner, or the other engine, waits for it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from evenkeel.actors.metrics.step_metrics import by_worker
from tests.e2e.launch import RECIPE, Run, command_of
from tests.failures.books import check_end
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUPS, BUCKET = 4, 16 << 10
"""Bytes: about twenty calls of each engine in a broadcast."""
HELD_S = 1.0
"""From the stop to the kill: what could end without the stopped one has ended."""


def are_both_at_work(run: Run) -> bool:
    """Both hold the weights that the last step was published with, or those before."""
    lines = run.metrics()
    return bool(lines) and len(by_worker(lines[-1], "weight_version")) == 2


def stop_in_a_broadcast(run: Run) -> psutil.Process:
    """Returns: a scheduler that was stopped in it."""
    (rank,) = (psutil.Process(pid) for pid in run.pids("LearnerRankActor"))
    schedulers = [psutil.Process(pid) for pid in run.pids("sglang::scheduler")]
    assert len(schedulers) == 2
    ends = time.monotonic() + 120.0
    while not command_of(rank).startswith("ray::LearnerRankActor.export"):
        assert time.monotonic() < ends, "no weights were published"
        time.sleep(0.001)
    schedulers[0].suspend()
    return schedulers[0]


def test_an_engine_dies_half_way_in_a_broadcast(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", f"run_dir={run_dir}", f"groups_per_step={GROUPS}", "rollout.workers=2", "evaluation.problems=4"]
    words += ["weight_sync.transport=broadcast", f"weight_sync.bucket_bytes={BUCKET}", "rollout.sampling.max_tokens=96"]
    run = Run(run_dir, str(RECIPE), *words)
    try:
        run.wait_until(lambda: len(run.metrics()) >= 2 and are_both_at_work(run), "two workers at work")
        before = len(run.metrics())
        run.wait_until(lambda: len(run.metrics()) >= before + 2, "broadcasts to both")
        assert "broadcast of v" not in run.events(), "none has failed so far"
        engine = stop_in_a_broadcast(run)
        time.sleep(HELD_S)
        follows = "the others take that version through the object store, its worker is replaced, and broadcasts go on with the new one"
        recovery = Recovery(run, "engine killed half-way in a broadcast of weights", follows)
        with suppress(psutil.NoSuchProcess):
            os.kill(engine.pid, signal.SIGKILL)
        run.wait_until(lambda: "is gone" in run.events(), "the engine's end to be noticed")
        recovery.wait(steps=2)
        run.wait_until(lambda: "rollout 2 is up" in run.events() and are_both_at_work(run), "a new worker at work", 240.0)
        failed, reached = run.events().count("broadcast of v"), len(run.metrics())
        run.wait_until(lambda: len(run.metrics()) >= reached + 3, "three more steps")
        assert run.events().count("broadcast of v") == failed, "broadcasts to the new group arrive"
        run.interrupt()
        assert run.wait() == 0, run.output()[-4000:]

        events = run.events()
        assert re.search(r"broadcast of v\d+ failed, it goes through the object store", events), "it was half-way"
        assert len(re.findall(r"rollout worker \d+ is gone", events)) == 1, events
        check_end(run, groups_per_step=GROUPS, within_s=60.0)
        assert all(line["staleness/max"] <= 1 for line in run.metrics())
    finally:
        run.close()
