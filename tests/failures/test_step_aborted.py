"""SIGTERM in the middle of a long step: the last finished one is saved at once, and a resume trains on the groups of the other. It
goes to the run's whole process group, as `timeout` and `kill -- -PGID` send it, and so does the SIGHUP of a lost terminal, which ends the
resume."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from evenkeel.actors.checkpoints.state import TrainingState
from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.launch import RECIPE, Run
from tests.failures.books import check_books
from tests.failures.measured import REAL, Measured

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUPS, MORE = 64, 2


@contextmanager
def slowed(pids: list[int]) -> Iterator[None]:
    """They compute for a fifth of the time, each at its own moments: a step takes long, and one rank is ahead of the other."""
    over = threading.Event()

    def slow(pid: int, rank: int) -> None:
        with suppress(ProcessLookupError):
            while not over.wait(0.02 + 0.01 * rank):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.1)
                os.kill(pid, signal.SIGCONT)

    threads = [threading.Thread(target=slow, args=(pid, rank)) for rank, pid in enumerate(pids)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def hanging_up() -> Iterator[None]:
    """What is started meanwhile ends by SIGHUP, also where these tests are started with nohup: a handler becomes the default."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_last_finished_step_is_saved_without_the_one_under_way(small_model: Path, tmp_path: Path) -> None:
    """Of two ranks that have to agree on where to end. They are so slow that a batch is always there: the line of a step is written when
    the next one has begun."""
    folder = RunFolder(tmp_path / "run")
    words = [f"model={small_model}", f"groups_per_step={GROUPS}", "learner.data_parallel=2", "learner.tokens_per_microbatch=32"]
    rest = ["checkpoint.every_steps=0", "evaluation.problems=4", "max_staleness=2"]
    run = Run(folder.path, str(RECIPE), f"run_dir={folder.path}", *words, *rest)
    try:
        run.wait_until(lambda: len(run.metrics()) >= 1, "a step")
        with slowed(run.pids("LearnerRankActor")):
            before = len(run.metrics())
            run.wait_until(lambda: len(run.metrics()) >= before + 2, "two slow steps")
            takes_s = run.metrics()[-1]["time/train_s"]
            time.sleep(takes_s / 4)
            began = time.monotonic()
            run.signal_group(signal.SIGTERM)
            assert run.wait() == 128 + signal.SIGTERM, run.output()[-4000:]
            seconds = time.monotonic() - began
        assert run.orphans(30.0) == []
    finally:
        run.close()
    assert "interrupted (SIGTERM): ending with a checkpoint of the last finished step" in run.events()
    (aborted,) = map(int, re.findall(r"step (\d+) was aborted; a resume trains on its groups", run.events()))
    assert max(run.steps()) == aborted - 1 == folder.checkpoints()[-1].step, "whose only checkpoint this is"
    check_books(run, groups_per_step=GROUPS)
    held = {group.prompt.prompt_id for group in TrainingState.load(folder.checkpoints()[-1].state).book.finished}
    assert len(held) >= GROUPS, "among them those of the aborted step are finished, and not sampled again"
    follows = f"the last finished step is saved; the one under way, of {takes_s:.0f} s, is aborted, and a resume trains on its groups"
    Measured("SIGTERM in a step of two ranks", follows, seconds, "the begun micro-batches", REAL).write()

    with hanging_up():
        resumed = Run(folder.path, "--resume", str(folder.path), "steps=1000")
    try:
        resumed.wait_until(lambda: max(resumed.steps(), default=0) >= aborted + MORE, "two steps more")
        began = time.monotonic()
        resumed.signal_group(signal.SIGHUP)
        assert resumed.wait() == 128 + signal.SIGHUP, resumed.output()[-4000:]
        seconds = time.monotonic() - began
        assert resumed.orphans(30.0) == []
    finally:
        resumed.close()
    assert "interrupted (SIGHUP): ending with a checkpoint after the step under way" in resumed.events()
    assert max(resumed.steps()) == folder.checkpoints()[-1].step
    check_books(resumed, groups_per_step=GROUPS)
    Measured("SIGHUP, as of a lost terminal", "the step under way is finished, and saved", seconds, "nothing", REAL).write()
    trained = {entry["prompt_id"] for entry in resumed.ledger() if entry["outcome"] == "trained" and entry["step"] == aborted}
    assert trained <= held
