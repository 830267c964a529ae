"""Turns of an event loop, for calls that begin together: to make hundreds of them in one turn would hold up all else for a tenth of a
second."""

from __future__ import annotations

import asyncio


class Turns:
    """Of one event loop: each is given to one of those who wait, first come, first served."""

    def __init__(self) -> None:
        self._waiting = asyncio.Lock()

    async def mine(self) -> None:
        """Returns in a turn that nobody else here is given."""
        async with self._waiting:
            await asyncio.sleep(0)
