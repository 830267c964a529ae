"""Times and pauses of an event loop: how long the phases of a step take, how late the loop runs, how far apart things begin."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Phase:
    """One stretch of a step: measured once, and read by all who need it."""

    began: float
    """Event-loop time (s)."""
    seconds: float = 0.0
    """How long it took; 0 while it lasts."""


class Stopwatch:
    """Seconds by phase since the last reading. One task uses it; phases don't overlap a reading."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        clock = asyncio.get_running_loop().time
        phase = Phase(clock())
        try:
            yield phase
        finally:
            phase.seconds = clock() - phase.began
            self._seconds[name] = self._seconds.get(name, 0.0) + phase.seconds

    def read(self) -> dict[str, float]:
        """Seconds by phase, and start anew."""
        seconds, self._seconds = self._seconds, {}
        return seconds


TICK_S = 0.05
"""Seconds between ticks."""


class LoopClock:
    """Ticks on the event loop that starts it. Ticks missed meanwhile follow a late one at once, so that a loop that stood still for a
    second counts with the whole second. A tick is a timer's callback: to wake a task takes several times as long, twenty times a second."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._wait_until((loop := asyncio.get_running_loop()).time() + TICK_S, loop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def read(self) -> float:
        """Lateness of ticks since the last reading, 99th percentile, seconds; 0 if there were none."""
        late, self._late = sorted(self._late), []
        return late[math.ceil(0.99 * len(late)) - 1] if late else 0.0

    def _wait_until(self, due: float, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_at(due, self._tick, due, loop)

    def _tick(self, due: float, loop: asyncio.AbstractEventLoop) -> None:
        self._late.append(max(0.0, loop.time() - due))
        self._wait_until(due + TICK_S, loop)


CALLS_PER_ITERATION = 8
"""Calls for each turn of the event loop: they take two to three milliseconds."""


class CallThrottle:
    """Lets a few callers go on in each iteration of one event loop, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for an iteration in which fewer than CALLS_PER_ITERATION callers have gone on."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._release)
        self._waiting.append(released := loop.create_future())
        await released

    def _release(self) -> None:
        released = 0
        while self._waiting and released < CALLS_PER_ITERATION:
            if not (first := self._waiting.popleft()).done():  # a caller cancelled meanwhile counts for nothing
                first.set_result(None)
                released += 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._release)


# A float takes no more than 1023. Any pause has reached its longest by then.
_MOST_DOUBLINGS = 1000


def doubled_pause_s(number: int, first_s: float, most_s: float) -> float:
    """Seconds of a pause: `first_s`, 2 `first_s`, 4 `first_s` ... up to `most_s`.

    Args: number: of the pause, from 1; below that there is none (0 s).
    """
    return min(most_s, first_s * 2.0 ** min(number - 1, _MOST_DOUBLINGS)) if number > 0 else 0.0
