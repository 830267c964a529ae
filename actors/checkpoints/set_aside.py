"""Checkpoints that could not be read, and were set aside: the newest one stays, to be looked at; older ones, too, until the next save.

If the next checkpoint lacks room, the oldest go earlier, the newest last; but only if that makes enough.
"""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path

from actors.record.run_folder import Checkpoint, RunFolder

_NAME = re.compile(r"step_\d{6,}\.damaged(-\d+)?")
KEPT = 1
"""Those that stay when a checkpoint has been saved."""


def set_aside(checkpoint: Checkpoint) -> Path:
    """Rename a checkpoint so that nothing reads it; no file is removed. Returns: its new path."""
    names = (checkpoint.path.with_name(f"{checkpoint.path.name}.damaged{number}") for number in ("", *(f"-{i}" for i in range(2, 100))))
    return checkpoint.path.rename(next(name for name in names if not name.exists()))


def superseded(folder: RunFolder, keep: int) -> list[Path]:
    """All that were set aside but the `keep` that were written last; oldest first. Raises: OSError."""
    oldest_first = _oldest_first(folder)
    return oldest_first[: max(0, len(oldest_first) - keep)]


def to_free(folder: RunFolder, lacking: float) -> list[Path]:
    """The oldest that were set aside, as many as have `lacking` bytes together; none if all of them have fewer. Raises: OSError."""
    oldest_first = _oldest_first(folder)
    sizes = accumulate(map(bytes_under, oldest_first))
    return oldest_first[: next((number for number, size in enumerate(sizes, 1) if size >= lacking), 0)]


def bytes_under(folder: Path) -> int:
    """Bytes of all files in a folder. Raises: OSError."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _oldest_first(folder: RunFolder) -> list[Path]:
    found = [path for path in (folder.path / "checkpoints").glob("step_*.damaged*") if _NAME.fullmatch(path.name)]
    return [path for _, path in sorted((path.stat().st_mtime_ns, path) for path in found)]
