"""One folder for the temporary files of an engine and its scorers: deleted when they end, or at the next start if they were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evenkeel.correction.errors import ConfigError

_PREFIX = "evenkeel-engine-"
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
# Bytes that the kernel allows for the path of a socket.
_SOCKET = 107
LONGEST_TMPDIR = _SOCKET - len(f"/{_PREFIX}12345678/pymp-12345678/listener-12345678")
"""Bytes. SGLang's sockets lie below an engine's folder, and deepest those of multiprocessing, by which tensors are handed on."""
# Folders of living engines of this process, and descriptors that hold their locks.
_held: dict[Path, int] = {}


@contextmanager
def own_folder() -> Iterator[Path]:
    """Within the block, temporary files of this process and of those that it starts go into a new folder. It stays until `remove`.

    SGLang leaves sockets and files behind at each start, and a killed process leaves all of its own. Torch's compiled code goes elsewhere,
    so that the next engine finds it.
    Raises: ConfigError as check_tmpdir.
    """
    root = _without_own(Path(tempfile.gettempdir()))
    check_tmpdir(str(root))
    _remove_those_of_the_dead(root)
    folder = _locked_folder(root)
    os.environ.setdefault(_INDUCTOR, str(root / f"torchinductor_{os.getuid()}"))
    with files_in(folder):
        yield folder


@contextmanager
def files_in(folder: Path) -> Iterator[None]:
    """Within the block, temporary files go into one of `own_folder`'s: for an engine that takes the place of its first one."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        os.environ["TMPDIR"] = tempfile.tempdir = str(_without_own(folder))


@contextmanager
def passing_folder() -> Iterator[Path]:
    """A folder as of own_folder, for an engine that ends within the block: the folder goes with it."""
    with own_folder() as folder:
        try:
            yield folder
        finally:
            remove(folder)


def check_tmpdir(path: str) -> None:
    """Raises: ConfigError if sockets of an engine find no room below this folder for temporary files."""
    if (size := len(os.fsencode(path))) > LONGEST_TMPDIR:
        raise ConfigError(
            f"TMPDIR = {path}: {size} bytes. Sockets of an engine lie below it, and the system allows {_SOCKET} for the whole path of one",
            remedy=f"set TMPDIR to a folder whose path has at most {LONGEST_TMPDIR}, such as /tmp",
        )


def remove(folder: Path) -> None:
    """Remove an engine's folder, once its processes have ended."""
    shutil.rmtree(folder, ignore_errors=True)
    if (held := _held.pop(folder, None)) is not None:
        os.close(held)


def _without_own(folder: Path) -> Path:
    """The folder without the part that an engine has added, even if another engine of this process is starting."""
    return _without_own(folder.parent) if folder.name.startswith(_PREFIX) else folder


def _locked_folder(root: Path) -> Path:
    """A new folder, locked as long as this process lives. It has its name only then: a start in another container, for which this process
    is none of its own, takes an engine's folder without a lock for one of the dead."""
    made = Path(tempfile.mkdtemp(prefix="evenkeel-new-", dir=root))
    held = os.open(made, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a disk without locks: nobody gets one, and so nobody removes anything
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = made.rename(root / f"{_PREFIX}{made.name.rpartition('-')[2]}")
    _held[folder] = held
    return folder


def _remove_those_of_the_dead(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # its owner lives, or is another user
            held = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder)
            finally:
                os.close(held)
