"""The heartbeat of a run's process under `evenkeel train --retries`: its event loop beats into a pipe, and its parent listens.

Each beat says after how many seconds of silence the process counts as hung. Before the first beat and after the last one nothing is
expected: what comes before the event loop and after it has deadlines of its own. After the last one the child closes its end, too: a
pipe that is full, as its parent has been stopped for hours, takes no beat, and its end is seen all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import struct
from collections.abc import Iterator

_VARIABLE = "EVENKEEL_HEARTBEAT"
"""Environment variable: the descriptor that the child inherits."""
_BEAT = struct.Struct("d")
_BEATS = 100
"""In the time after which the process counts as hung."""
_TURN_S = 1.0
_writer: int | None = None


class HeartbeatListener:
    """The parent's side of the pipe."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self.environment = {**os.environ, _VARIABLE: str(self.writer)}
        """Of the child, which also inherits `writer`."""
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

    @property
    def is_half_over(self) -> bool:
        """Half of the time for a beat. Once in a silence."""
        return 0.0 <= self.silent_s - self.limit_s / 2 < _TURN_S

    def close(self) -> None:
        os.close(self._reader)


def inherit() -> None:
    """Take the pipe over from the parent, in its child; no process below this one does."""
    global _writer
    if (number := os.environ.pop(_VARIABLE, "")).isdigit():
        _writer = int(number)
        os.set_inheritable(_writer, False)
        os.set_blocking(_writer, False)


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
