"""Calls that run only once, however often they are sent. If a call is late or its actor can't be reached, the caller doesn't know whether
it ran, and sends it again.

The caller gives each call a number above the last one, from 1 on, makes one at a time, and repeats a call under the same number. The actor
keeps its last answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from actors.processes.supervision import call_until_answered
from correction.errors import LateError


class NumberedCaller:
    """The caller's side, for one actor."""

    def __init__(self, actor: Any, late: Callable[[str], None]) -> None:
        """Args: late: called with a sentence when the actor has not answered in time; the call is then repeated."""
        self._actor, self._late = actor, late
        self._calls = 0

    async def ask(self, method: str, *arguments: Any, what: str, deadline_s: float, **named: Any) -> Any:
        """Call a method of the actor, and repeat the call until it answers. Args, raises: as `call_until_answered`."""
        self._calls += 1
        call = partial(getattr(self._actor, method).remote, *arguments, number=self._calls)
        return await call_until_answered(call, what, deadline_s=deadline_s, late=self._late, **named)


class NumberedCalls:
    """The actor's side, for one caller."""

    def __init__(self) -> None:
        self._number = 0
        self._work: asyncio.Future[Any] | None = None

    async def once(self, number: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run the work, or return the result of the run under this number.

        Args: number: of the call; 0: the caller doesn't repeat it.
        Raises: LateError for a number below the last one.
        """
        if not number:
            return await work()
        if number > self._number or self._work is None:
            self._number, self._work = number, asyncio.ensure_future(work())
        elif number < self._number:
            late = f"call {number} came after call {self._number} of the same caller"
            raise LateError(f"{late}, so it is not run: the caller waits only for its latest call")
        return await asyncio.shield(self._work)
