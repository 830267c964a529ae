"""Checkpoints that could not be read, and were set aside: the newest one stays, to be looked at; older ones, too, until the next save."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from actors.record.run_folder import Checkpoint, RunFolder

_NAME = re.compile(r"step_\d{6,}\.damaged(-\d+)?")
KEPT = 1
"""Those that stay when a checkpoint has been saved."""


def set_aside(checkpoint: Checkpoint) -> Path:
    """Rename a checkpoint so that nothing reads it; no file is removed. Returns: its new path."""
    names = (checkpoint.path.with_name(f"{checkpoint.path.name}.damaged{number}") for number in ("", *(f"-{i}" for i in range(2, 100))))
    return checkpoint.path.rename(next(name for name in names if not name.exists()))


def remove_oldest(folder: RunFolder, keep: int) -> list[Path]:
    """Remove all that were set aside but the `keep` that were written last. Returns: those removed. Raises: OSError."""
    found = [path for path in (folder.path / "checkpoints").glob("step_*.damaged*") if _NAME.fullmatch(path.name)]
    oldest_first = [path for _, path in sorted((path.stat().st_mtime_ns, path) for path in found)]
    removed = oldest_first[: max(0, len(oldest_first) - keep)]
    for path in removed:
        shutil.rmtree(path)
    return removed
