"""How far a checkpoint is read, for whoever waits for it: a large one takes minutes, on a slow disk hours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from actors.config import DeadlinesConfig
from actors.processes.disk_at_start import by_disk_at_start
from actors.record.run_folder import Checkpoint
from actors.settings.deadlines import reading_s

T = TypeVar("T")


class Reading:
    """How far a checkpoint is read: threads that read tell it, and whoever waits for them looks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._name, self._bytes, self._read = "", 0, 0
        self.began = time.monotonic()

    def begins(self, checkpoint: Checkpoint) -> None:
        with self._lock:
            self._name, self._bytes, self._read, self.began = checkpoint.path.name, 0, 0, time.monotonic()

    def has_files(self, manifest: Mapping[str, Any]) -> None:
        """Args: manifest: of the checkpoint; it has the bytes of each file."""
        self._bytes = sum(file["bytes"] for file in manifest["files"].values())

    def add(self, size: int) -> None:
        with self._lock:
            self._read += size

    def limit_s(self, deadlines: DeadlinesConfig) -> float:
        """Longest time from `began` on: that of a checkpoint that is written, by the bytes of this one (disk_s)."""
        return reading_s(deadlines.disk_s, self._bytes, deadlines.bytes_per_s)

    def __str__(self) -> str:
        if not self._bytes:
            return self._name
        return f"{self._name}: {self._read / 1e9:.3g} of {self._bytes / 1e9:.3g} GB are read"


def read_at_start(look: Callable[[Reading], T], deadlines: DeadlinesConfig) -> T:
    """What `look` finds in the newest checkpoint: all of it is read, which may take hours on a slow disk. Each half minute says how far.

    Raises: as `look`; DiskLate.
    """
    reading = Reading()
    return by_disk_at_start(
        lambda: look(reading),
        "files of the newest checkpoint",
        limit_s=lambda: reading.limit_s(deadlines),
        counts_from=lambda: reading.began,
        detail=lambda: str(reading),
    )
