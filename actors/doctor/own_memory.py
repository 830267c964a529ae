"""Memory of this machine, or of the container that this process is in, as Ray 2.60 counts it (ray._common.utils.get_system_memory,
ray._private.utils.get_used_memory). Ray isn't imported for it: that takes half a second."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

from actors.doctor.facts import MOST_STORED, STORE_SHARE

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


def own_store_bytes() -> int:
    """Bytes of the object store of a Ray that a run starts for itself, which leaves the size to Ray: a share of the memory that isn't used,
    at most what /dev/shm has, or 10 GB, and never more than 200 GB (its resolve_object_store_memory)."""
    share, most = float(os.environ.get(STORE_SHARE, 0.3)), int(os.environ.get(MOST_STORED, 200 * 10**9))
    return min(int(share * max(0, memory_bytes() - _used_bytes())), most, max(10**10, int(0.95 * shared_memory_bytes())))


def shared_memory_bytes() -> int:
    """Bytes of /dev/shm that are free."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0


def _used_bytes() -> int:
    """Bytes in use in the container, pages of files aside, or on the machine."""
    for _, use, statistics, prefix in _VERSIONS:
        if (_ROOT / use).exists() and (_ROOT / statistics).exists():
            found = dict(line.split()[:2] for line in (_ROOT / statistics).read_text().splitlines())
            files = (f"{prefix}inactive_file", f"{prefix}active_file")
            if all(name in found for name in files):
                return int((_ROOT / use).read_text()) - sum(int(found[name]) for name in files)
            break
    return psutil.virtual_memory().used
