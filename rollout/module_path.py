"""Where a run's processes find modules: evenkeel and the standard library first. The folder of the run's start comes last, and only in the
processes that score: elsewhere a file of the user's called evenkeel.py or socket.py would stand in for that module."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from pathlib import Path

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""As `python -P`, for all Python processes below: neither `-m` nor `-c` puts the working folder first, nor a script its own folder. By `-c`
multiprocessing starts what it spawns."""
_ROOT = Path(__file__).absolute().parents[2]  # of evenkeel/rollout, which is a link in a checkout
_NAMES = sys.stdlib_module_names | {"evenkeel"}


def checkout() -> list[str]:
    """The folder that evenkeel lies in, to be put first in a child's path; none if it is installed, and so in every path anyway."""
    return [] if str(_ROOT) in map(sysconfig.get_path, ("purelib", "platlib")) else [str(_ROOT)]


def taken_names(folder: Path) -> list[str]:
    """Files and packages in a folder with the name of a module of the standard library, or evenkeel's: an import would get them."""
    if folder.resolve() == _ROOT.resolve():
        return []
    with contextlib.suppress(OSError):
        found = [name for name in os.listdir(folder) if name.removesuffix(".py") in _NAMES]
        return sorted(name for name in found if name.endswith(".py") or (folder / name / "__init__.py").exists())
    return []
