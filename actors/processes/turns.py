"""Turns of an event loop, for calls that begin together: hundreds in one turn would hold up everything else for a tenth of a second,
and one in each turn would cost more, since the calls of a turn share the work of waking Ray's threads."""

from __future__ import annotations

import asyncio
from collections import deque

SHARED_BY = 8
"""Calls of a turn: two to three milliseconds."""


class Turns:
    """The turns of one event loop: each is given to the first few of the callers that wait."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def mine(self) -> None:
        """Wait for a turn of the event loop. At most SHARED_BY callers get the same one."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._give)
        self._waiting.append(mine := loop.create_future())
        await mine

    def _give(self) -> None:
        given = 0
        while self._waiting and given < SHARED_BY:
            if not (first := self._waiting.popleft()).done():  # a caller cancelled meanwhile gets no turn
                first.set_result(None)
                given += 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._give)
