"""Measures how late an event loop runs its callbacks: what blocks the loop (packing, pickling, a slow disk) delays the whole process."""

from __future__ import annotations

import asyncio
import math

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
