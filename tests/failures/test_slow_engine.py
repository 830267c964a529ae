"""One of two engines runs at a fifth of its speed, for most of a run: its scheduler is stopped and let go on again and again, each time for
less than the heartbeat's limit. It is a straggler, which costs nobody's groups: it is not lost, and gets what it can do."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.launch import RECIPE, Run, command_of
from tests.failures.books import check_end
from tests.failures.measured import REAL, Measured

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUPS, STEPS, HEARTBEAT_S = 8, 20, 12
SLOW_S = 4.0 * HEARTBEAT_S
"""An engine that is lost for being slow would be by then."""
STOPPED_S, RUNS_S = 2.0, 0.5
SLOW, FAST = "1", "0"
"""Names of the workers."""


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """It is stopped for STOPPED_S of every STOPPED_S + RUNS_S."""
    is_over = threading.Event()

    def stop_and_go() -> None:
        while not is_over.is_set():
            os.kill(pid, signal.SIGSTOP)
            is_over.wait(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            is_over.wait(RUNS_S)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def groups_of(run: Run, *, after: int) -> Counter[str]:
    """Trained in later steps, by the worker that sampled them."""
    found = Counter[str]()
    for line in run.metrics():
        if line["step"] > after:
            found.update({name: int(line.get(f"worker/groups/{name}", 0)) for name in (SLOW, FAST)})
    return found


def test_a_slow_engine_is_kept_and_gets_fewer_groups(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["rollout.workers=2", f"groups_per_step={GROUPS}", "max_staleness=2", "evaluation.problems=4", "checkpoint.every_steps=5"]
    words += [f"rollout.engine.deadlines.heartbeat_s={HEARTBEAT_S}", "rollout.sampling.max_tokens=96"]
    run = Run(run_dir, str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", *words)
    try:
        run.wait_until(lambda: len(run.metrics()) >= 2 and "rollout 1 is up" in run.events(), "two workers and two steps")
        worker = psutil.Process(int(re.findall(rf"rollout {SLOW} is up \(process (\d+)", run.events())[0]))
        (scheduler,) = [process.pid for process in worker.children(recursive=True) if "sglang::scheduler" in command_of(process)]
        with slowed(scheduler):
            begun = max(run.steps()) + 3  # until then groups come that were sampled before
            until = time.monotonic() + SLOW_S
            run.wait_until(lambda: max(run.steps()) >= begun + STEPS and time.monotonic() > until, f"{STEPS} steps with a slow engine")
            groups = groups_of(run, after=begun)
        before_end = max(run.steps())
        run.wait_until(lambda: max(run.steps()) >= before_end + 2, "two steps after it")
        run.interrupt()
        assert run.wait() == 0, run.output()[-4000:]
        assert " is gone: " not in run.events() and "rollout 2" not in run.events(), run.events()
        check_end(run, groups_per_step=GROUPS, within_s=60.0)
    finally:
        run.close()
    assert 0 < groups[SLOW] < groups[FAST] * 2 / 3, groups
    every_s = STOPPED_S + RUNS_S
    fault = f"SGLang's scheduler of one of two engines stopped {STOPPED_S:g} s of every {every_s:g} s (heartbeat_s {HEARTBEAT_S})"
    follows = f"no worker is lost; the slow one gets fewer groups ({groups[SLOW]} of {groups.total()})"
    Measured(fault, follows, None, "nothing", REAL).write()
