"""Memory of a machine or a container, and the object store that Ray makes of it: Ray's own functions are told of the same files."""

from __future__ import annotations

import builtins
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray._common import utils as common_utils
from ray._private import ray_constants, utils

from actors.doctor import gather, own_memory
from actors.doctor.own_memory import memory_bytes, own_store_bytes

GB = 10**9
NO_LIMIT = 9_223_372_036_854_771_712
"""Of version 1, where nobody has set one."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 2 TB, of which 700 GB are used. Returns: the folder that this process and Ray find at /sys/fs/cgroup, empty."""
    root = "/sys/fs/cgroup"
    plain_open, plain_exists = builtins.open, os.path.exists

    def opened(path: Any, *args: Any, **options: Any) -> io.IOBase:
        return plain_open(str(path).replace(root, str(tmp_path)), *args, **options)

    for module in (utils, common_utils):
        monkeypatch.setattr(module, "open", opened, raising=False)
    monkeypatch.setattr(os.path, "exists", lambda path: plain_exists(str(path).replace(root, str(tmp_path))))
    monkeypatch.setattr(own_memory, "_ROOT", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2000 * GB, available=1400 * GB, used=700 * GB))
    shared(monkeypatch, 400)
    return tmp_path


def shared(monkeypatch: pytest.MonkeyPatch, gigabytes: float) -> None:
    """Have so much of /dev/shm free."""
    monkeypatch.setattr(own_memory, "shared_memory_bytes", lambda: int(gigabytes * GB))
    monkeypatch.setattr(utils, "get_shared_memory_bytes", lambda: int(gigabytes * GB))


def ray_s_own() -> int:
    return int(utils.resolve_object_store_memory(utils.estimate_available_memory()))


def write_group(root: Path, version: int, *, limit: str, used: int, files: tuple[int, int] = (0, 0)) -> None:
    """Args: used, files: bytes in use, and of them those of inactive and active pages of files."""
    folder, prefix, names = root, "", ("memory.max", "memory.current")
    if version == 1:
        folder, prefix, names = root / "memory", "total_", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder.mkdir()
    own = "".join(f"{kind}_file 1\n" for kind in ("inactive", "active")) if prefix else ""
    statistics = f"anon 7\n{own}{prefix}inactive_file {files[0]}\n{prefix}active_file {files[1]}\n"
    for name, text in zip((*names, "memory.stat"), (f"{limit}\n", f"{used}\n", statistics), strict=True):
        (folder / name).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("limit_gb", "expected"), [(64, 0.3 * 54 * GB), (None, 200 * GB), (4000, 200 * GB)])
def test_a_container_s_object_store_is_made_of_its_limit(machine: Path, version: int, limit_gb: int | None, expected: float) -> None:
    """Not of the machine around it, which has 2 TB: a container with 64 GB would be promised a store of 200. Pages of files aren't used."""
    limit = str(limit_gb * GB) if limit_gb else (str(NO_LIMIT) if version == 1 else "max")
    write_group(machine, version, limit=limit, used=30 * GB, files=(15 * GB, 5 * GB))
    assert own_store_bytes() == ray_s_own() == int(expected)
    assert memory_bytes() == common_utils.get_system_memory() == (64 if limit_gb == 64 else 2000) * GB
    assert gather.this_node("").memory == memory_bytes()


@pytest.mark.parametrize("shm_gb", [0.064, 16, 400])
@pytest.mark.parametrize(("total_gb", "most"), [(80, None), (2000, None), (2000, 5 * 10**11)])
def test_a_private_ray_s_object_store_is_as_large_as_ray_makes_it(
    machine: Path, total_gb: int, most: int | None, shm_gb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with 16 GB of /dev/shm has a store of 15, however much memory the machine has: two versions of an 8B model don't fit.
    Without a control group, and with one that tells no pages of files, the machine's own numbers count."""
    total = total_gb * GB
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total, available=total, used=total // 3))
    shared(monkeypatch, shm_gb)
    if most is not None:
        monkeypatch.setenv("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(most))
        monkeypatch.setattr(ray_constants, "DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", most)
    assert own_store_bytes() == ray_s_own()
    (machine / "memory.current").write_text("5\n")
    (machine / "memory.stat").write_text("anon 7\n")
    assert own_store_bytes() == ray_s_own()
