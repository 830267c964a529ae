"""How late an event loop runs what is due: what blocks it (packing, pickling, a slow disk) delays all of its process."""

from __future__ import annotations

import asyncio
import math
import time

TICK_S = 0.05
"""A tick takes 0.1 to 0.2 ms of processor time in a process that has nothing else to do."""


class LoopClock:
    """Ticks on the loop on which it is started. A tick that comes late is followed at once by those missed meanwhile, so that a loop which
    stood still for a second counts with all of that second."""

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
        """Seconds by which 99 % of what was due since the last reading was late at most; 0 if nothing was due."""
        late, self._late = sorted(self._late), []
        return late[math.ceil(0.99 * len(late)) - 1] if late else 0.0

    async def _tick(self) -> None:
        due = time.monotonic()
        while True:
            due += TICK_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._late.append(max(0.0, time.monotonic() - due))
