"""Temporary files of an engine's processes: where they lie, and that they don't pile up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rollout.engine.temporary_files import own_folder, remove


def test_files_of_a_killed_engine_go_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children's too; those of one that lives stay, and so does what torch has compiled for all."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    child = "import tempfile; print(tempfile.mkdtemp())"
    script = (
        "import subprocess, sys; from rollout.engine.temporary_files import own_folder\n"
        f"with own_folder() as folder: print(folder, subprocess.check_output([sys.executable, '-c', {child!r}], text=True).strip())"
    )
    command = [sys.executable, "-c", script]
    dead, dead_child = map(Path, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert dead.parent == tmp_path and dead_child.parent == dead and dead_child.is_dir()
    with own_folder() as mine:
        assert not dead.exists() and Path(tempfile.gettempdir()) == mine == Path(os.environ["TMPDIR"])
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{tmp_path}/torchinductor_")
        with own_folder() as inner:
            assert mine.is_dir() and inner.parent == mine.parent
        remove(inner)
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path)
    remove(mine)
    assert list(tmp_path.iterdir()) == []
