"""Waiting until a process falls silent: it is called again and again, for as long as it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ray.exceptions import ActorUnavailableError

from evenkeel.actors.processes.long_wait import LongWait
from evenkeel.actors.processes.supervision import HALF_OVER, wait_for
from evenkeel.correction.errors import DeadlineExceeded

T = TypeVar("T")
_UNREACHED_S = 1.0
"""Seconds until a process that can't be reached is called again."""


async def until_silent(
    call: Callable[[], Awaitable[T]],
    what: str,
    *,
    limit_s: float,
    misses: int,
    on_answer: Callable[[T], float],
    pause: Callable[[], Awaitable[None]],
    half_over: Callable[[], object] = lambda: None,
) -> None:
    """Returns when a process has given no sign for `limit_s` seconds: no answer to `misses` calls in a row, each waited for as long as the
    others. Calls are counted, not time: this process may have stood still itself. At half of the limit stacks are collected (HALF_OVER).

    Args:
        call: asks for a sign. Where the process can't be reached, which Ray says at once, it is made again: a moment later there may be a
            network again.
        what: the wait's name.
        on_answer: takes an answer. Returns: seconds of limit_s for which what the process looks after has been silent itself.
        pause: waits after an answer, until the process is to be called again.
        half_over: called when half of the limit is over.
    Raises: as wait_for, but for the deadline: what the process raises, or ActorLost.
    """
    missed, is_reported = 0, False
    while missed < misses:
        try:
            answer = await wait_for(_reached(call), what, deadline_s=limit_s / misses, notice_s=limit_s)
        except DeadlineExceeded:
            missed += 1
            silent_s = missed * limit_s / misses
        else:
            missed, silent_s = 0, on_answer(answer)
        if silent_s >= limit_s / 2 and not is_reported:
            half_over()
            if (collect := HALF_OVER.get()) is not None:
                collect(LongWait(what))
        is_reported = silent_s >= limit_s / 2
        if not missed:
            await pause()


async def _reached(call: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await call()
        except ActorUnavailableError:
            await asyncio.sleep(_UNREACHED_S)
