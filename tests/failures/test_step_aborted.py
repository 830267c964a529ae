"""SIGTERM in the middle of a long step: the last finished one is saved at once, and a resume trains on the groups of the other."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from actors.record.run_folder import RunFolder
from actors.state.resume import TrainingState
from tests.e2e.launch import RECIPE, Run
from tests.failures.books import check_books
from tests.failures.measured import REAL, Measured

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUPS, MORE = 64, 2
_BEGUN_S = 15.0
"""Then the next step has its batch, and can't come to its end without the rank that stands still."""


def test_the_last_finished_step_is_saved_without_the_one_under_way(small_model: Path, tmp_path: Path) -> None:
    """Of two ranks, one of which stands still meanwhile, so that the other is ahead: they have to agree on where to end. Steps are long, so
    that it isn't the hand-over of weights that has to wait for it."""
    folder = RunFolder(tmp_path / "run")
    words = [f"model={small_model}", f"groups_per_step={GROUPS}", "learner.data_parallel=2", "learner.tokens_per_microbatch=32"]
    rest = ["checkpoint.every_steps=0", "evaluation.problems=4", "max_staleness=2"]
    run = Run(folder.path, str(RECIPE), f"run_dir={folder.path}", *words, *rest)
    try:
        run.wait_until(lambda: len(run.metrics()) >= 2, "two steps")
        behind = run.pids("LearnerRankActor")[1]
        os.kill(behind, signal.SIGSTOP)
        time.sleep(_BEGUN_S)
        run.process.send_signal(signal.SIGTERM)
        run.wait_until(lambda: "interrupted (SIGTERM)" in run.events(), "the signal to be noticed")
        began = time.monotonic()
        os.kill(behind, signal.SIGCONT)
        assert run.wait() == 128 + signal.SIGTERM, run.output()[-4000:]
        seconds = time.monotonic() - began
        assert run.orphans(30.0) == []
    finally:
        run.close()
    (aborted,) = map(int, re.findall(r"step (\d+) was aborted; a resume trains on its groups", run.events()))
    assert max(run.steps()) == aborted - 1 == folder.latest_checkpoint().step, "whose only checkpoint this is"
    check_books(run, groups_per_step=GROUPS)
    held = {group.prompt.prompt_id for group in TrainingState.load(folder.latest_checkpoint().state).queue.finished}
    assert len(held) >= GROUPS, "among them those of the aborted step are finished, and not sampled again"
    follows = "the last finished step is saved; the one under way is aborted, and a resume trains on its groups"
    Measured("SIGTERM in a step of two ranks, one ahead of the other", follows, seconds, "the begun micro-batches", REAL).write()

    resumed = Run(folder.path, "--resume", str(folder.path), f"steps={aborted + MORE}")
    try:
        assert resumed.wait() == 0, resumed.output()[-4000:]
    finally:
        resumed.close()
    check_books(resumed, groups_per_step=GROUPS, steps=aborted + MORE)
    trained = {entry["prompt_id"] for entry in resumed.ledger() if entry["outcome"] == "trained" and entry["step"] == aborted}
    assert trained <= held
