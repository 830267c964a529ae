"""A user whom /etc/passwd doesn't know, and no HOME."""

from __future__ import annotations

import importlib
import os
import pwd
import stat
import tempfile
from pathlib import Path

import pytest

from evenkeel.actors.cluster import cluster as security
from evenkeel.cli import home_of_the_homeless
from evenkeel.rollout.engine import temporary_files


def unknown(uid: int) -> None:
    raise KeyError(f"getpwuid(): uid not found: {uid}")


@pytest.fixture(autouse=True)
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_user_without_a_home_gets_one_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same one each time, for its caches; and never one that somebody else has put there, or may read."""
    with pytest.raises(RuntimeError):
        Path.home()
    (home,) = home_of_the_homeless().values()
    assert Path(home).parent == tmp_path and stat.S_IMODE(os.stat(home).st_mode) == 0o700
    assert home_of_the_homeless() == {"HOME": home}
    os.chmod(home, 0o755)
    (other,) = home_of_the_homeless().values()
    assert other != home and stat.S_IMODE(os.stat(other).st_mode) == 0o700
    monkeypatch.setenv("HOME", home)
    assert home_of_the_homeless() == {}


@pytest.mark.parametrize("module", [security, temporary_files])
def test_no_import_asks_for_a_home_or_a_name(module: object) -> None:
    importlib.reload(module)  # type: ignore[arg-type]


def test_an_engine_s_folder_needs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "TMPDIR", temporary_files._INDUCTOR):
        monkeypatch.setenv(name, "")  # also of one that isn't there it is known then that it wasn't: what the block sets doesn't stay
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        with temporary_files.passing_folder():
            assert os.environ[temporary_files._INDUCTOR] == f"{short}/torchinductor_{os.getuid()}"
