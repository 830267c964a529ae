"""Measures how late an event loop runs its callbacks: what blocks the loop (packing, pickling, a slow disk) delays the whole process."""

from __future__ import annotations

import asyncio
import math
import time

TICK_S = 0.05
"""Seconds between ticks; a tick takes 0.1 to 0.2 ms of processor time in an idle process."""


class LoopClock:
    """Ticks on the event loop that starts it. Ticks missed meanwhile follow a late one at once, so that a loop that stood still for a
    second counts with the whole second."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def read(self) -> float:
        """Lateness of ticks since the last reading, 99th percentile, seconds; 0 if there were none."""
        late, self._late = sorted(self._late), []
        return late[math.ceil(0.99 * len(late)) - 1] if late else 0.0

    async def _tick(self) -> None:
        due = time.monotonic()
        while True:
            due += TICK_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._late.append(max(0.0, time.monotonic() - due))
