"""A judge that is down as a run is resumed is waited for, by the workers that start; real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.launch import RECIPE, Run, environment
from tests.failures.books import check_books
from tests.failures.test_driver_killed import child_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, GROUPS = 8, 4
JUDGE = """
from pathlib import Path
from e2e_reward import vowels

def score(completion):
    if Path(__file__).with_name("away").exists():
        raise TimeoutError("the judge is away")
    return vowels(completion)
"""


def test_a_judge_that_is_away_as_a_run_is_resumed(small_model: Path, tmp_path: Path) -> None:
    """The next process starts all the same, and says why its worker doesn't; when the judge is back, it does."""
    (tmp_path / "far_judge.py").write_text(JUDGE)
    run_dir, away = tmp_path / "run", tmp_path / "away"
    words = [f"model={small_model}", f"steps={STEPS}", f"groups_per_step={GROUPS}", "checkpoint.every_steps=1", "evaluation.problems=4"]
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])
    run = Run(run_dir, str(RECIPE), f"run_dir={run_dir}", *words, "rollout.reward.path=far_judge:score", "--retries", "1", PYTHONPATH=path)
    try:
        run.wait_until(lambda: bool(run.steps()), "a step")
        folder = RunFolder.view(run_dir)
        run.wait_until(lambda: len(folder.checkpoints()) >= 1, "a checkpoint")
        away.touch()
        os.kill(child_of(run), signal.SIGKILL)
        waits = "the reward of a worker that starts gives no score: the next replacement starts in 4 s"
        run.wait_until(lambda: waits in run.events(), "a worker that has not started for the second time")
        away.unlink()
        assert run.wait() == 0, run.output()[-4000:]
        check_books(run, groups_per_step=GROUPS, steps=STEPS)
        told = run.events()
        assert "rollout.reward (far_judge:score): the reward raised TimeoutError: the judge is away (tried on " in told
        assert "The run has had scores, and goes on: its workers try that again for 30 minutes" in told
        assert "workers are lost one after the other" not in told
        assert run.orphans(30.0) == []
    finally:
        run.close()
