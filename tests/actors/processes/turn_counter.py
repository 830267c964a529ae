"""Which turn of the event loop it is."""

from __future__ import annotations

import asyncio


class TurnCounter:
    """Counts the turns of the present loop."""

    turn = 0

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self.turn += 1
        self._loop.call_soon(self._next)
