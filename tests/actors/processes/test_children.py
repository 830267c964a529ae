"""Processes below this one, and what a run's says to its parent of how it is. Whole ones that hang: tests/evenkeel/test_retries.py."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import struct
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from evenkeel.actors.driver.controller import run_controller
from evenkeel.actors.processes import children
from evenkeel.actors.processes.children import HeartbeatListener, adopted_orphans, descendants, end_new


@pytest.mark.skipif(sys.platform != "linux", reason="adoption is Linux's")
def test_an_orphan_of_a_killed_child_is_found_and_ended() -> None:
    """Ray's daemon was killed while it started its agents: they became children of init, and lived on for a minute."""
    before = descendants()
    with adopted_orphans():
        child = subprocess.Popen(["sh", "-c", "sleep 300 & echo started; wait"], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"started\n"
        (orphan,) = psutil.Process(child.pid).children()
        child.kill()
        child.wait()
        until = time.monotonic() + 10.0
        while orphan not in descendants() and time.monotonic() < until:
            time.sleep(0.01)
        assert orphan in descendants(), "adopted"
        end_new(before)
    assert not orphan.is_running()
    assert [process for process in descendants() if process not in before] == []
    child.stdout.close()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> HeartbeatListener:
    """Of this process, which is its own child."""
    monkeypatch.setattr(children, "_writer", None)
    made = HeartbeatListener()
    monkeypatch.setenv("EVENKEEL_HEARTBEAT", made.environment["EVENKEEL_HEARTBEAT"])
    children.inherit()
    return made


def beats(listener: HeartbeatListener) -> list[float]:
    return [limit_s for (limit_s,) in struct.iter_unpack("d", os.read(listener._reader, 2**16))]


def run(seconds: float, error: BaseException | None = None) -> Any:
    async def train() -> None:
        await asyncio.sleep(seconds)
        if error is not None:
            raise error

    return SimpleNamespace(run=train)


@pytest.mark.parametrize("error", [None, OSError("no space left")], ids=["ends", "fails"])
def test_a_run_beats_from_its_event_loops_begin_to_its_end(listener: HeartbeatListener, error: OSError | None) -> None:
    assert "EVENKEEL_HEARTBEAT" not in os.environ and not os.get_inheritable(listener.writer), "it is this process's alone"
    with contextlib.nullcontext() if error is None else pytest.raises(OSError, match="no space left"):
        run_controller(run(0.5, error), silence_s=4.0)
    *during, last = beats(listener)
    assert set(during) == {4.0} and 4 <= len(during) <= 14, "one in 0.04 s"
    assert last == math.inf
    listener.close()


def test_a_run_without_such_a_parent_beats_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_writer", None)
    monkeypatch.delenv("EVENKEEL_HEARTBEAT", raising=False)
    children.inherit()
    before = set(os.listdir("/dev/fd"))
    run_controller(run(0.0), silence_s=4.0)
    assert children._writer is None and set(os.listdir("/dev/fd")) <= before


def test_a_parent_that_reads_nothing_or_is_gone_ends_no_run(listener: HeartbeatListener) -> None:
    """A pipe holds hours of beats; what doesn't fit is left out."""
    while True:
        try:
            os.write(listener.writer, bytes(8))
        except BlockingIOError:
            break
    children._write(listener.writer, 4.0)
    listener.close()
    run_controller(run(0.1), silence_s=4.0)


def test_a_parent_that_was_stopped_for_hours_hears_of_the_end(listener: HeartbeatListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe is full, so the last beat, after which none is expected, is not in it. What the child still does has no deadline."""
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(listener.writer, struct.pack("d", 0.05))
    run_controller(run(0.0), silence_s=4.0)
    monkeypatch.setattr(children, "_TURN_S", 0.01)
    turns = 0
    while not listener.is_over and turns < 100:
        assert not listener.hangs()
        turns += 1
    assert listener.is_over and turns < 100
    listener.close()


def test_silence_counts_from_the_last_beat(listener: HeartbeatListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first beat there is none."""
    monkeypatch.setattr(children, "_TURN_S", 0.01)
    assert not listener.hangs()
    told = []
    for _ in range(2):
        for _ in range(3):
            os.write(listener.writer, struct.pack("d", 0.035))
        found = [listener.hangs() for _ in range(4)]
        told.append(found)
    assert told == [[False] * 4] * 2
    assert listener.hangs()
    os.write(listener.writer, struct.pack("d", math.inf))
    assert not listener.hangs() and not listener.is_over
    listener.child_has_begun()
    assert not listener.hangs() and listener.is_over
    listener.close()
