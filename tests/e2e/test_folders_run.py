"""recipes/nano_folders.yaml from start to end: task folders in sandboxes, a model that has seen two solutions, exact turns."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.launch import Run, evenkeel
from tests.rollout.folder_scene import bubblewrap, needs_bubblewrap

__all__ = ["bubblewrap"]
pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_bubblewrap, pytest.mark.usefixtures("bubblewrap")]
ROOT = Path(__file__).parents[2]
STEPS, GROUPS = 3, 4


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder of temporary files, with a short path."""
    folder = tempfile.mkdtemp(prefix="fo-", dir="/tmp")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_run_over_task_folders(tmp_path: Path, scratch: Path) -> None:
    """Rewards are what the folders' tests say, some right and some not; engine and learner agree on each token of both turns; each prompt
    is accounted for; no process and no sandbox's files are left."""
    recipe, model = str(ROOT / "recipes" / "nano_folders.yaml"), tmp_path / "model"
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    made = evenkeel("init-model", recipe, f"model={model}", cwd=tmp_path, timeout_s=1200.0)
    assert made.returncode == 0, made.stdout + made.stderr
    words = [f"model={model}", f"run_dir={tmp_path / 'run'}", f"steps={STEPS}"]
    run = Run(tmp_path / "run", recipe, *words, cwd=tmp_path, TMPDIR=str(scratch))
    try:
        assert run.wait(1500.0) == 0, run.output()[-4000:]
        lines = run.metrics()
        assert len(lines) == STEPS and all(line["turns/max"] == 2 and line["turns/tool_s"] > 0 for line in lines)
        assert 0 < sum(line["reward/mean"] for line in lines) / STEPS < 1
        assert not any(line.get("reward/exceptions_total") for line in lines)
        known = [line["mismatch/k3"] for line in lines if "mismatch/k3" in line]
        assert known and max(known) < 1e-12
        trained = [entry["step"] for entry in run.ledger() if entry["outcome"] == "trained"]
        assert [trained.count(step) for step in range(1, STEPS + 1)] == [GROUPS] * STEPS
        assert "bwrap" in run.seen_commands and run.orphans(60.0) == []
        assert not list(scratch.rglob("sandbox-*"))
    finally:
        run.close()
