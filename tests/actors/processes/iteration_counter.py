"""Which iteration of the event loop it is."""

from __future__ import annotations

import asyncio


class IterationCounter:
    """Counts the iterations of the present loop."""

    iteration = 0

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self.iteration += 1
        self._loop.call_soon(self._next)
