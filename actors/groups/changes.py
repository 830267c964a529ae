"""Wakes who waits for something in the driver's book of groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """One event loop uses it."""

    def __init__(self) -> None:
        # For each waiting caller its condition, and the future that wakes it.
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._is_telling = self._is_stale = False

    def tell(self) -> None:
        """Something has changed: wake the callers whose condition holds, and no others, because a run has thousands of changes. Looking may
        change something itself."""
        self._is_stale = True
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._is_stale:
                self._is_stale = False
                for ready, woken in list(self._waiting):
                    if not woken.done() and ready():
                        woken.set_result(None)
        finally:
            self._is_telling = False

    async def until(self, ready: Callable[[], bool], *, within_s: float | None = None) -> None:
        """Wait for a change that makes ready() true, or until `within_s` seconds have passed."""
        if ready():
            return
        waiting = ready, asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(within_s):
                await waiting[1]
        except TimeoutError:
            return
        finally:
            self._waiting.remove(waiting)
