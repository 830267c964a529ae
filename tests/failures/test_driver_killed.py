"""`evenkeel train --retries` goes on by itself after kill -9 of the run's process, before its first step, in the middle of training and in
the last evaluation; and when that process hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.stack_summary import newest_stack_summary
from evenkeel.doctor.run_doctor import left_after_training
from tests.e2e.launch import RECIPE, Run
from tests.failures.books import check_books
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, GROUPS, HEARTBEAT_S = 6, 4, 12


def child_of(run: Run) -> int:
    """The process that trains; the parent is the one that was started."""
    (child,) = (p.pid for p in psutil.Process(run.process.pid).children() if "evenkeel.cli" in " ".join(p.cmdline()))
    return child


def test_two_crashes_in_one_run(small_model: Path, tmp_path: Path) -> None:
    """The first before there is a checkpoint, so that the run begins anew in its folder; the second goes on from a checkpoint."""
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", f"steps={STEPS}", f"groups_per_step={GROUPS}", "checkpoint.every_steps=2", "evaluation.problems=4"]
    run = Run(run_dir, str(RECIPE), f"run_dir={run_dir}", *words, "--retries", "2")
    try:
        run.wait_until(lambda: "learner 0 is up" in run.events(), "a learner, and no step yet")
        os.kill(first := child_of(run), signal.SIGKILL)
        folder = RunFolder.view(run_dir)
        run.wait_until(lambda: len(folder.checkpoints()) >= 1 and len(run.metrics()) >= 3, "a checkpoint, and a step after it")
        second = child_of(run)
        recovery = Recovery(run, "driver killed, with `--retries`", "a new process goes on from the last checkpoint, with new engines")
        os.kill(second, signal.SIGKILL)
        assert first != second
        recovery.wait()
        assert run.wait() == 0, run.output()[-4000:]
        check_books(run, groups_per_step=GROUPS, steps=STEPS)
        events = [event.text for event in folder.read_events()]
        retried = [text for text in events if "retry" in text]
        assert [text[text.index("(retry") :] for text in retried] == ["(retry 1 of 2)", "(retry 2 of 2)"]
        assert retried[0].startswith("the run's process was killed by SIGKILL after step 0; it goes on from its newest checkpoint")
        assert all(f"evenkeel: {text}" in run.output() for text in retried), "a line each"
        assert run.orphans(30.0) == [], "what a killed child leaves is ended before the next one starts, Ray's agents too"
    finally:
        run.close()


def test_a_crash_in_the_last_evaluation(small_model: Path, tmp_path: Path) -> None:
    """All steps are made and saved: the next process makes the evaluation and the report. A resume after that has nothing to do."""
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", "steps=2", f"groups_per_step={GROUPS}", "evaluation.problems=64", f"run_dir={run_dir}"]
    run = Run(run_dir, str(RECIPE), *words, "--retries", "1")
    try:
        run.wait_until(lambda: "evaluating after training" in run.events(), "the last evaluation")
        os.kill(child_of(run), signal.SIGKILL)
        assert run.wait() == 0, run.output()[-4000:]
        folder = RunFolder.view(run_dir)
        assert left_after_training(folder, 2) == ()
        check_books(run, groups_per_step=GROUPS, steps=2)
        texts = [event.text for event in folder.read_events()]
        assert "step 2; it goes on from its newest checkpoint in 1 s (retry 1 of 1)" in "\n".join(texts)
        assert sum("evaluating after training" in text for text in texts) == 2
    finally:
        run.close()
    again = Run(run_dir, "--resume", str(run_dir), "--retries", "1")
    try:
        assert again.wait() == 0 and "is complete: all of its 2 steps are made, saved and evaluated" in again.output()
    finally:
        again.close()


def test_a_driver_that_is_stopped_for_good(small_model: Path, tmp_path: Path) -> None:
    """Its parent misses its signs of life."""
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", f"steps={STEPS}", f"groups_per_step={GROUPS}", "checkpoint.every_steps=2", "evaluation.problems=4"]
    run = Run(run_dir, str(RECIPE), f"run_dir={run_dir}", *words, f"deadlines.part_heartbeat_s={HEARTBEAT_S}", "--retries", "1")
    try:
        run.wait_until(lambda: run.metrics() != [], "a step")
        folder = RunFolder.view(run_dir)
        run.wait_until(lambda: len(folder.checkpoints()) >= 1 and len(run.metrics()) >= 3, "a checkpoint, and a step after it")
        follows = f"it is killed after {5 * HEARTBEAT_S} s, and a new process goes on from the last checkpoint, with new engines"
        recovery = Recovery(run, f"driver stopped for good (part_heartbeat_s {HEARTBEAT_S}), with `--retries`", follows)
        os.kill(child_of(run), signal.SIGSTOP)
        recovery.wait()
        assert run.wait() == 0, run.output()[-4000:]
        check_books(run, groups_per_step=GROUPS, steps=STEPS)
        texts = [event.text for event in folder.read_events() if "sign of life" in event.text]
        assert texts[0].startswith("the run's process has given no sign of life for 60 s, and is killed; where it stands is in")
        assert texts[1].startswith("the run's process hung, without a sign of life for 60 s, and was killed after step ")
        assert len(texts) == 2
        assert "says nothing; state T (stopped)" in newest_stack_summary(run_dir)[1]
        assert run.orphans(30.0) == []
    finally:
        run.close()
