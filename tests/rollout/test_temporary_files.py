"""Temporary files of an engine's processes: where they lie, and that they don't pile up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path

import pytest

from evenkeel.correction.errors import ConfigError
from evenkeel.rollout.engine.temporary_files import LONGEST_TMPDIR, check_tmpdir, own_folder, passing_folder, remove


@pytest.fixture
def tmp_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Below it sockets have room. What an engine's start sets goes with it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_files_of_a_killed_engine_go_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children's too; those of one that lives stay, and so does what torch has compiled for all."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    child = "import tempfile; print(tempfile.mkdtemp())"
    script = (
        "import subprocess, sys; from evenkeel.rollout.engine.temporary_files import own_folder\n"
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


LIVES = """
import sys
from evenkeel.rollout.engine.temporary_files import own_folder
with own_folder() as folder: print(folder, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_its_owner_s_until_that_ends_whatever_proc_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a start in another container an owner in this one is no process: /proc doesn't show it there, or shows another by its number."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with subprocess.Popen([sys.executable, "-c", LIVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        monkeypatch.setattr(Path, "exists", lambda path: not path.is_relative_to("/proc") and os.path.exists(path))
        with passing_folder() as mine:
            assert folder.is_dir() and mine.is_dir()
        owner.kill()
    assert not mine.is_dir() and folder.is_dir()
    with passing_folder():
        assert not folder.is_dir()


def test_the_deepest_socket_of_an_engine_has_room_below_the_longest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And below one that is a byte longer it has none. It is one of multiprocessing, by which tensors are handed to another process."""
    for size, has_room in ((LONGEST_TMPDIR, True), (LONGEST_TMPDIR + 1, False)):
        root = tmp_path / ("x" * (size - len(str(tmp_path)) - 1))
        (folder := root / "evenkeel-engine-12345678" / "pymp-12345678").mkdir(parents=True)
        place = str(folder / "listener-12345678")
        if has_room:
            check_tmpdir(str(root))
            connection.Listener(place, "AF_UNIX").close()
        else:
            with pytest.raises(ConfigError, match=rf"TMPDIR = {root}: {size} bytes.* such as /tmp"):
                check_tmpdir(str(root))
            with pytest.raises(OSError, match="too long"):
                connection.Listener(place, "AF_UNIX")
