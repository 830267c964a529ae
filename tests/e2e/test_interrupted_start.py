"""Ctrl-C while the engine starts: the run ends before the engine is up, in one line, and leaves no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launch import RAY_AGENTS, RECIPE, Run

pytestmark = pytest.mark.engine

PROCESSES = ("raylet", "RolloutWorker", "LearnerRankActor", "reward_process")
SCHEDULER = "multiprocessing.spawn import spawn_main"
"""In the command of an engine's process until it has imported SGLang, and names itself."""


def test_ctrl_c_ends_a_start_at_once(small_model: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", str(RECIPE), f"model={small_model}", f"run_dir={tmp_path / 'run'}")
    try:
        run.wait_until(lambda: all(name in run.seen_commands for name in (*PROCESSES, SCHEDULER)), "a process of the engine")
        run.interrupt()
        assert run.wait(120.0) == 130
        assert "rollout 0 is up" not in run.events(), "it waited for the engine"
        assert "interrupted (Ctrl-C): ending at once" in run.events()
        assert run.output().endswith("evenkeel: interrupted\n") and "Traceback" not in run.output()
        assert not (run.run_dir / "report.html").exists(), "there is nothing to report"
        assert run.orphans(but=RAY_AGENTS) == []
    finally:
        run.close()
