"""Where a run's processes look for modules, and names in the user's folder that are others'."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from evenkeel.rollout.module_path import checkout, taken_names

ROOT = Path(__file__).parents[2]


def test_names_that_are_others_modules(tmp_path: Path) -> None:
    for name in ("rollout.py", "socket.py", "evenkeel.py", "rewards.py", "token.txt"):
        (tmp_path / name).touch()
    for name in ("select", "json", "learner"):
        (tmp_path / name).mkdir()
    (tmp_path / "select" / "__init__.py").touch()
    assert taken_names(tmp_path) == ["evenkeel.py", "select", "socket.py"]
    assert taken_names(ROOT) == [] and taken_names(tmp_path / "gone") == []


def test_a_start_by_m_leaves_the_working_folder_out(tmp_path: Path) -> None:
    """All but the package that `-m` itself looks for. From a checkout, where nothing is installed, that is what has the packages."""
    for name in ("socket", "token", "asyncio", "rollout", "learner", "typer"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError(f'{__file__} was imported')")
    command = [sys.executable, "-m", "evenkeel", "presets", "icepop"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    there = subprocess.run(command, cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    here = subprocess.run(command, cwd=ROOT, env=environment | {"PYTHONPATH": ""}, capture_output=True, text=True)
    assert there.returncode == 0 and "icepop" in there.stdout and there.stdout == here.stdout, there.stderr + here.stderr
    assert checkout() == [str(ROOT)]
