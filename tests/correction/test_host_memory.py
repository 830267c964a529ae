"""Holes in the heap are given back, and what stays between them keeps its bytes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from correction.engines import host_memory

PROGRAM = """
import ctypes, psutil
from correction.engines import host_memory
libc, size = ctypes.CDLL(None), 100_000
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(size) for _ in range(1000)]
for value, block in enumerate(blocks):
    ctypes.memset(block, value % 251, size)
for block in (b for i, b in enumerate(blocks) if i % 10):
    libc.free(ctypes.c_void_p(block))
held = psutil.Process().memory_info().rss
host_memory.give_back_now_and_then()
print(held - psutil.Process().memory_info().rss)
assert all(set(ctypes.string_at(b, size)) == {10 * i % 251} for i, b in enumerate(blocks[::10]))
"""


@pytest.mark.skipif(host_memory._trim() is None, reason="this C library has no malloc_trim")
def test_holes_between_what_stays_are_given_back() -> None:
    """900 of 1,000 blocks of 100 kB are free, each tenth stays: 90 MB less what shares a page with these."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert 80e6 < int(done.stdout) < 91e6


def test_it_is_done_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[float] = []
    clock = iter([100.0, 110.0, 129.9, 130.0, 131.0])
    monkeypatch.setattr(host_memory, "_next_s", 0.0)
    monkeypatch.setattr(host_memory.time, "monotonic", lambda: now.append(value := next(clock)) or value)
    monkeypatch.setattr(host_memory, "give_back", lambda: done.append(now[-1]))
    now: list[float] = []
    for _ in range(5):
        host_memory.give_back_now_and_then()
    assert done == [100.0, 130.0]
