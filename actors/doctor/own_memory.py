"""Memory of this machine, or of the container that this process is in, as Ray 2.60 counts it (ray._common.utils.get_system_memory,
ray._private.utils.get_used_memory). Ray isn't imported for it: that takes half a second."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_VERSIONS = (
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
    ("memory.max", "memory.current", "memory.stat", ""),
)
"""Files of control groups, version 1 and 2: limit, use, and statistics, with the prefix of their names."""


def memory_bytes() -> int:
    """Bytes of the machine's memory, or of the container's limit."""
    there = psutil.virtual_memory().total
    limit = next((path.read_text().strip() for name, *_ in _VERSIONS if (path := _ROOT / name).exists()), "max")
    return min(int(limit), there) if limit.isdigit() else there


def shared_memory_bytes() -> int:
    """Bytes of /dev/shm that are free."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0


