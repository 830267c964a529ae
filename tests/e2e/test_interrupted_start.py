"""Ctrl-C while the parts start: the run ends before they are up, in one line, and leaves no process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launch import RAY_AGENTS, RECIPE, Run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROCESSES = ("raylet", "RolloutWorker", "LearnerRankActor", "reward_process")
SCHEDULER = "multiprocessing.spawn import spawn_main"
"""In the command of an engine's process until it has imported SGLang, and names itself."""


def parts_are_asked_for(run: Run) -> bool:
    return all(name in run.seen_commands for name in ("raylet", "RolloutWorker", "LearnerRankActor"))


def an_engine_is_half_up(run: Run) -> bool:
    return all(name in run.seen_commands for name in (*PROCESSES, SCHEDULER))


@pytest.mark.parametrize("moment", [parts_are_asked_for, an_engine_is_half_up])
def test_ctrl_c_ends_a_start_at_once(small_model: Path, tmp_path: Path, moment: Callable[[Run], bool]) -> None:
    """The fast suite has it in simulated runs (tests/actors/driver/test_controller.py), Ctrl-C at an earlier moment of a real start
    (tests/failures/test_interrupted_early.py) and in a real run (test_several_workers.py), an engine whose owner is killed
    (test_asynchronous_run.py), and the children of one whose start fails (tests/rollout/test_engine_children.py)."""
    run = Run(tmp_path / "run", str(RECIPE), f"model={small_model}", f"run_dir={tmp_path / 'run'}")
    try:
        run.wait_until(lambda: moment(run), moment.__name__)
        run.interrupt()
        assert run.wait(120.0) == 130
        assert "rollout 0 is up" not in run.events(), "it waited for the engine"
        assert "interrupted (Ctrl-C): ending at once" in run.events()
        ended = f"evenkeel: interrupted\nrun folder: {run.run_dir}, without a checkpoint\n"
        assert run.output().endswith(ended) and "Traceback" not in run.output()
        assert not (run.run_dir / "report.html").exists(), "there is nothing to report"
        assert run.orphans(but=RAY_AGENTS) == []
    finally:
        run.close()
