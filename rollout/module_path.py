"""Where a run's processes find modules: those of evenkeel and of the standard library first. The folder of the run's start comes last,
and only in the processes that score: elsewhere a file of the user's called rollout.py or socket.py would stand in for that module."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from pathlib import Path

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""As `python -P`, for all Python processes below: neither `-m` nor `-c` puts the working folder first, nor a script its own folder. By `-c`
multiprocessing starts what it spawns."""
_ROOT = Path(__file__).resolve().parents[1]
_NAMES = sys.stdlib_module_names | {"actors", "correction", "evenkeel", "learner", "rollout"}


def checkout() -> list[str]:
    """The folder of evenkeel's packages, to be put first in a child's path; none if they are installed, and so in every path anyway."""
    return [] if str(_ROOT) in map(sysconfig.get_path, ("purelib", "platlib")) else [str(_ROOT)]


def taken_names(folder: Path) -> list[str]:
    """Files and packages in a folder with the name of a module of evenkeel's or of the standard library, which is what an import gets."""
    if folder.resolve() == _ROOT:
        return []
    with contextlib.suppress(OSError):
        found = [name for name in os.listdir(folder) if name.removesuffix(".py") in _NAMES]
        return sorted(name for name in found if name.endswith(".py") or (folder / name / "__init__.py").exists())
    return []
