"""Memory of a machine or a container: Ray's own function is told of the same files."""

from __future__ import annotations

import builtins
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray._common import utils

from evenkeel.doctor import gather
from evenkeel.doctor.gather import memory_bytes

GB = 10**9
NO_LIMIT = 9_223_372_036_854_771_712
"""Of version 1, where nobody has set one."""


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limit_gb", [64, None, 4000])
def test_a_container_s_memory_is_its_limit_as_ray_has_it(
    version: int, limit_gb: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the machine around it, which has 2 TB."""
    root = "/sys/fs/cgroup"
    plain_open, plain_exists = builtins.open, os.path.exists

    def opened(path: Any, *args: Any, **options: Any) -> io.IOBase:
        return plain_open(str(path).replace(root, str(tmp_path)), *args, **options)

    monkeypatch.setattr(utils, "open", opened, raising=False)
    monkeypatch.setattr(os.path, "exists", lambda path: plain_exists(str(path).replace(root, str(tmp_path))))
    monkeypatch.setattr(gather, "_ROOT", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2000 * GB, available=1400 * GB, used=700 * GB))
    file = tmp_path / ("memory/memory.limit_in_bytes" if version == 1 else "memory.max")
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{limit_gb * GB if limit_gb else (NO_LIMIT if version == 1 else 'max')}\n")
    assert memory_bytes() == utils.get_system_memory() == (64 if limit_gb == 64 else 2000) * GB
    assert gather.this_node("").memory == memory_bytes()
