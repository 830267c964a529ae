"""Holes in the heap are given back, and what stays between them keeps its bytes."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from evenkeel.engines import machine as host_memory

PROGRAM = """
import ctypes, psutil
from evenkeel.engines import machine as host_memory
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


def test_one_thread_gives_back_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trim takes until the test lets it end. Three calls come meanwhile, each of them due: they return, and make one trim. The next
    call after its end makes the second."""
    begun, may_end, asked = threading.Semaphore(0), threading.Event(), []

    def slow(keep: int) -> None:
        asked.append(keep)
        begun.release()
        assert may_end.wait(30.0)

    monkeypatch.setattr(host_memory, "_next_s", 0.0)
    monkeypatch.setattr(host_memory, "_PERIOD_S", 0.0)
    monkeypatch.setattr(host_memory, "_trim", lambda: slow)
    for _ in range(3):
        host_memory.give_back_in_thread()
    assert begun.acquire(timeout=30.0) and asked == [0], "they are back while it goes on"
    may_end.set()
    assert host_memory._at_work.acquire(timeout=30.0)
    host_memory._at_work.release()
    host_memory.give_back_in_thread()
    assert begun.acquire(timeout=30.0) and asked == [0, 0]
    assert host_memory._at_work.acquire(timeout=30.0), "the thread has ended its work before the patches go"
    host_memory._at_work.release()


def test_in_a_thread_it_is_done_now_and_then_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls in a row: one thread, since 30 s have to pass."""
    done = threading.Semaphore(0)
    monkeypatch.setattr(host_memory, "_next_s", 0.0)
    monkeypatch.setattr(host_memory, "give_back", done.release)
    host_memory.give_back_in_thread()
    assert done.acquire(timeout=30.0)
    with host_memory._at_work:
        pass
    host_memory.give_back_in_thread()
    with host_memory._at_work:
        assert not done.acquire(blocking=False)
