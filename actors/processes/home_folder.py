"""A home for a user who has none: an id without an entry in /etc/passwd, as containers are often given one, and no HOME."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def home_of_the_homeless() -> dict[str, str]:
    """HOME, where it can't be determined; nothing where it can. Libraries look for their caches below it: some fail without, some make a
    folder called "~" where the run was started."""
    with contextlib.suppress(RuntimeError):
        Path.home()
        return {}
    folder = Path(tempfile.gettempdir(), f"evenkeel-home-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return {"HOME": str(folder) if is_ours else tempfile.mkdtemp(prefix=f"{folder.name}-")}
