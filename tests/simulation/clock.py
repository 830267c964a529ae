"""An asyncio loop in virtual time, without a selector and without threads; `installed` gives its clock to all that asks for the time."""

from __future__ import annotations

import asyncio
import gc
import heapq
import os
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any
from unittest import mock

# By which time goes on at least: a wait for the rest of a wait, which rounding has made 0, has to end.
_LEAST_S = 1e-9


class NothingLeftError(AssertionError):
    """Everybody waits for somebody: neither a callback nor a timer is left."""


class Clock:
    """Virtual time, seconds; the loops of all drivers of a run advance it, one after the other."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _Due:
    """A callback that waits for its turn or for its time."""

    __slots__ = ("args", "callback", "context")

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context | None) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.args, self.context = args, context or copy_context()

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None


class VirtualLoop(asyncio.BaseEventLoop):
    """Callbacks run in the order in which they were scheduled; when none is left, the clock jumps to the next timer. Timers of one moment
    run in the order in which they were set.

    A run is some ten thousand callbacks that do little each, so that what a loop does for each of them is most of the run: this one leaves
    out what asyncio's does for threads and for its debug mode.
    """

    def __init__(self, clock: Clock, after_step: Callable[[], None], *, most_steps: int = 800_000) -> None:
        """Args: after_step: called after each round of callbacks. most_steps: of them, for what runs on without time going by."""
        super().__init__()
        self._clock, self._after_step, self._steps_left = clock, after_step, most_steps
        self._due: deque[_Due] = deque()
        # A heap, by their time and their number.
        self._timers: list[tuple[float, int, _Due]] = []
        self._timers_set = 0

    def time(self) -> float:
        return self._clock.now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        due = _Due(callback, args, context)
        self._due.append(due)
        return due

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        due = _Due(callback, args, context)
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, due))
        return due

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        return self.call_at(self._clock.now + delay, callback, *args, context=context)

    call_soon_threadsafe = call_soon
    """There is no other thread."""

    def _run_once(self) -> None:
        due, timers, clock = self._due, self._timers, self._clock
        while timers and timers[0][2].callback is None:
            heapq.heappop(timers)
        if not due:
            if not timers:
                raise NothingLeftError("nothing is left to do: everybody waits for somebody else")
            clock.now = max(clock.now + _LEAST_S, timers[0][0])
        while timers and timers[0][0] <= clock.now:
            due.append(heapq.heappop(timers)[2])
        for _ in range(len(due)):
            next_one = due.popleft()
            if next_one.callback is None:
                continue
            try:
                next_one.context.run(next_one.callback, *next_one.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": "a callback has failed", "exception": error})
        self._steps_left -= 1
        if self._steps_left < 0:
            raise NothingLeftError("the run goes round in circles")
        self._after_step()

    def close(self) -> None:
        self._due.clear()
        self._timers.clear()
        super().close()


@contextmanager
def installed(clock: Clock, seed: int, to_thread: Callable[..., Any]) -> Iterator[None]:
    """While this lasts, everybody's clock, threads and chances are the simulation's. Args: to_thread: in place of asyncio's."""
    chances = random.Random(seed)
    with (
        mock.patch.object(time, "monotonic", clock.time),
        mock.patch.object(time, "time", lambda: 1.7e9 + clock.now),
        mock.patch.object(asyncio, "to_thread", to_thread),
        mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(int=chances.getrandbits(128), version=4)),
        mock.patch.object(os, "urandom", chances.randbytes),
        mock.patch.object(gc, "freeze", lambda: None),  # a process that simulates thousands of runs would keep them all
    ):
        yield
