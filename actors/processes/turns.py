"""Turns of an event loop, for calls that begin together: to make hundreds of them in one turn would hold up all else for a tenth of a
second, and one to a turn would cost more, since those of a turn share what wakes Ray's threads."""

from __future__ import annotations

import asyncio
from collections import deque

SHARED_BY = 8
"""Calls of a turn: two to three milliseconds."""


class Turns:
    """Of one event loop: a turn is given to the first few of those who wait."""

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
            if not (first := self._waiting.popleft()).done():  # who was cancelled meanwhile takes none
                first.set_result(None)
                given += 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._give)
