"""Spreads calls that begin together over iterations of the event loop: hundreds in one would hold up everything else for a tenth of a
second, and one in each would cost more, since the calls of an iteration share the work of waking Ray's threads."""

from __future__ import annotations

import asyncio
from collections import deque

CALLS_PER_ITERATION = 8
"""They take two to three milliseconds."""


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
