"""An asyncio loop in virtual time, without a selector and without threads; `installed` gives its clock to all that asks for the time."""

from __future__ import annotations

import asyncio
import gc
import heapq
import inspect
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_LEAST_S = 1e-9
"""By which time goes on at least: a wait for the rest of a wait, which rounding has made 0, has to end."""


class NothingLeftError(AssertionError):
    """Everybody waits for somebody: neither a callback nor a timer is left."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Callbacks run in the order in which they were scheduled; when none is left, the clock jumps to the next timer."""

    def __init__(self, now: float, after_step: Callable[[], None], *, most_steps: int = 800_000) -> None:
        """Args: after_step: called after each round of callbacks. most_steps: of them, for what runs on without time going by."""
        super().__init__()
        self.now, self._after_step, self._steps_left = now, after_step, most_steps

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
            heapq.heappop(timers)._scheduled = False
        if not ready:
            if not timers:
                raise NothingLeftError("nothing is left to do: everybody waits for somebody else")
            self.now = max(self.now + _LEAST_S, timers[0]._when)
        while timers and timers[0]._when <= self.now:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()
        self._steps_left -= 1
        if self._steps_left < 0:
            raise NothingLeftError("the run goes round in circles")
        self._after_step()

    def _write_to_self(self) -> None:
        """There is no other thread to be woken by."""


async def _beside(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """In place of asyncio.to_thread: a moment later, whole."""
    await asyncio.sleep(0.002)
    result = function(*args, **named)
    return await result if inspect.isawaitable(result) else result


@contextmanager
def installed(now: Callable[[], float], seed: int) -> Iterator[None]:
    """While this lasts, everybody's clock, threads and chances are the simulation's."""
    chances = random.Random(seed)
    with (
        mock.patch.object(time, "monotonic", now),
        mock.patch.object(time, "time", lambda: 1.7e9 + now()),
        mock.patch.object(asyncio, "to_thread", _beside),
        mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(int=chances.getrandbits(128), version=4)),
        mock.patch.object(gc, "freeze", lambda: None),  # a process that simulates thousands of runs would keep them all
    ):
        yield
