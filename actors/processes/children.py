"""The processes below this one: found, adopted when their parent dies, and ended; and the signs of life that one of them gives.

Under `evenkeel train --retries` the event loop of a run's process beats into a pipe, and its parent listens. Each beat says after how many
seconds of silence the process counts as hung. Before the first beat and after the last one nothing is expected: what comes before the event
loop and after it has deadlines of its own. After the last one the child closes its end, too: a pipe that is full, as its parent has been
stopped for hours, takes no beat, and its end is seen all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from evenkeel.rollout.parent_death import adopt_orphans, signal_at_parents_death

if TYPE_CHECKING:
    import psutil

# Longest wait for a killed process to be gone.
_ENDED_S = 5.0


def descendants(process: psutil.Process | None = None) -> list[psutil.Process]:
    """All processes below a process, or below this one."""
    import psutil

    try:
        return (process or psutil.Process()).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command_of(process: psutil.Process) -> str:
    """A process's command line; empty if the process is gone."""
    import psutil

    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextlib.contextmanager
def adopted_orphans() -> Iterator[None]:
    """Within the block a descendant whose parent dies stays a descendant (on Linux), so that `end_new` finds it.

    Ray's daemon starts two agents that outlive it by a minute. If it is killed while it starts them, they could not be found otherwise.
    """
    _set_subreaper(True)
    try:
        yield
    finally:
        _set_subreaper(False)


def _set_subreaper(is_on: bool) -> None:
    with contextlib.suppress(OSError, AttributeError):
        adopt_orphans(is_on=is_on)


def end(processes: list[psutil.Process], *, grace_s: float = 0.0) -> None:
    """Kill those that are there after `grace_s` seconds, and wait a little for them to be gone."""
    import psutil

    _, left = psutil.wait_procs(processes, timeout=grace_s)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_ENDED_S)


def end_new(before: Collection[psutil.Process] = ()) -> None:
    """Kill all descendants but those of `before`, and those that they started while they were being killed."""
    until = time.monotonic() + _ENDED_S
    while (left := [process for process in descendants() if process not in before]) and time.monotonic() < until:
        end(left)


# Environment variable: the descriptor that the child inherits.
_VARIABLE = "EVENKEEL_HEARTBEAT"
_BEAT = struct.Struct("d")
# In the time after which the process counts as hung.
_BEATS = 100
_TURN_S = 1.0
_writer: int | None = None


class HeartbeatListener:
    """The parent's side of the pipe."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self.environment = {**os.environ, _VARIABLE: str(self.writer)}
        """Environment of the child, which also inherits `writer`."""
        self.limit_s, self.silent_s = math.inf, 0.0
        self.is_over = False
        """All who could beat have ended."""

    def child_has_begun(self) -> None:
        os.close(self.writer)  # or its end could not be seen here

    def hangs(self) -> bool:
        """Wait for a beat, for a second at most. Returns: whether there was none for `limit_s`.

        Waits are counted, not what a clock says, so that a time in which this process doesn't run, either, counts as one second at most:
        while both are stopped, and while a laptop sleeps (CLOCK_MONOTONIC, by which the kernel ends a wait, stands still then on Linux).
        """
        if select.select([self._reader], [], [], _TURN_S)[0]:
            beats = os.read(self._reader, 512 * _BEAT.size)
            self.is_over, self.silent_s = not beats, 0.0
            if beats:
                (self.limit_s,) = _BEAT.unpack(beats[-_BEAT.size :])
        else:
            self.silent_s += _TURN_S
        return self.silent_s >= self.limit_s

    def close(self) -> None:
        os.close(self._reader)


def inherit() -> None:
    """In the child of such a parent: take the pipe over, which no process below this one does, and end in order with the parent."""
    global _writer
    if not (number := os.environ.pop(_VARIABLE, "")).isdigit():
        return
    _writer = int(number)
    os.set_inheritable(_writer, False)
    os.set_blocking(_writer, False)
    parent = os.getppid()
    signal_at_parents_death(signal.SIGTERM)  # with a checkpoint
    if sys.platform == "linux" and (parent == 1 or os.getppid() != parent):
        sys.exit(128 + signal.SIGTERM)


@contextlib.contextmanager
def beating(limit_s: float) -> Iterator[None]:
    """In this context, the only one of a process, the event loop beats, if there is somebody to listen.

    Args: limit_s: silence after which it counts as hung.
    """
    global _writer
    if (writer := _writer) is None:
        yield
        return
    task = asyncio.get_running_loop().create_task(_beat(writer, limit_s))
    try:
        yield
    finally:
        task.cancel()
        _write(writer, math.inf)  # a process that was forked may keep the pipe open
        _writer = None
        os.close(writer)


async def _beat(writer: int, limit_s: float) -> None:
    while True:
        _write(writer, limit_s)
        await asyncio.sleep(limit_s / _BEATS)


def _write(writer: int, limit_s: float) -> None:
    with contextlib.suppress(OSError):  # full, as the parent has been stopped for hours, or is gone
        os.write(writer, _BEAT.pack(limit_s))
