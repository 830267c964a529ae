"""One folder for the temporary files of an engine and its scorers: deleted when they end, or at the next start if they were killed."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "evenkeel-engine-"
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def own_folder() -> Iterator[Path]:
    """Within the block, temporary files of this process and of those that it starts go into a new folder. It stays until `remove`.

    SGLang leaves sockets and files behind at each start, and a killed process leaves all of its own. Torch's compiled code goes elsewhere,
    so that the next engine finds it.
    """
    root = _without_own(Path(tempfile.gettempdir()))
    _remove_those_of_the_dead(root)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
    os.environ.setdefault(_INDUCTOR, str(root / f"torchinductor_{getpass.getuser()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield folder
    finally:
        os.environ["TMPDIR"] = tempfile.tempdir = str(root)


def _without_own(folder: Path) -> Path:
    """The folder without the part that an engine has added, even if another engine of this process is starting."""
    return _without_own(folder.parent) if folder.name.startswith(_PREFIX) else folder


def remove(folder: Path) -> None:
    """Remove an engine's folder, once its processes have ended."""
    shutil.rmtree(folder, ignore_errors=True)


def _remove_those_of_the_dead(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            remove(folder)
