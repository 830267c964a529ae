"""Calls that do their work once, however often they arrive: of one that is late, or whose actor can't be reached, who knows if it has run?

The caller numbers its calls from 1, makes one after the other, and asks again under the same number; the actor keeps the last answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from actors.supervision import patiently
from correction.errors import LateError


class NumberedCaller:
    """The side that asks."""

    def __init__(self, actor: Any, late: Callable[[str], None]) -> None:
        """Args: late: told when the actor hasn't answered in time; it is asked again."""
        self._actor, self._late = actor, late
        self._calls = 0

    async def ask(self, method: str, *arguments: Any, what: str, deadline_s: float, **named: Any) -> Any:
        """Args: as patiently. Raises: likewise."""
        self._calls += 1
        call = partial(getattr(self._actor, method).remote, *arguments, number=self._calls)
        return await patiently(call, what, deadline_s=deadline_s, late=self._late, **named)


class NumberedCalls:
    """The side that answers one caller."""

    def __init__(self) -> None:
        self._number = 0
        self._work: asyncio.Future[Any] | None = None

    async def once(self, number: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What the work gives, or has given. Args: number: 0: it is not asked again. Raises: LateError for an older number."""
        if not number:
            return await work()
        if number > self._number or self._work is None:
            self._number, self._work = number, asyncio.ensure_future(work())
        elif number < self._number:
            raise LateError(f"call {number} came after call {self._number} of the same caller, who waits for it no more")
        return await asyncio.shield(self._work)
