"""What a call to a simulated actor returns at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any

import ray.exceptions


class Ref:
    """A reference to what a call will return, or to what was put into the object store; any number may await it."""

    __slots__ = ("_error", "_loop", "_value", "_waiters", "is_done", "on_done", "owner", "place")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.is_done = loop, False
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self.on_done: Callable[[Any, BaseException | None], None] | None = None
        """Is told of the end, by value or error, before whoever waits."""
        self.owner: Any = None
        """Process that put it into the store, and with which it is gone; None: the driver's, or of a call."""
        self.place: Any = None
        """Node in whose store the value lies; None: it comes with the answer, or nobody reads it."""

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.is_done:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            yield from waiter
        if self.owner is not None and self.owner.is_dead:
            raise ray.exceptions.OwnerDiedError("0" * 56, b"", "")  # type: ignore[no-untyped-call]
        if self.place is not None:
            yield from self.place.read().__await__()
        return self.result()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def resolve(self, value: Any) -> None:
        self._end(value, None)

    def fail(self, error: BaseException) -> None:
        self._end(None, error)

    def _end(self, value: Any, error: BaseException | None) -> None:
        if self.is_done:
            return
        self.is_done, self._value, self._error = True, value, error
        if self.on_done is not None:
            self.on_done(value, error)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


def as_ray_says(error: BaseException, function: str) -> BaseException:
    if not isinstance(error, Exception):
        return error
    wrapped = ray.exceptions.RayTaskError(function, f"a traceback, {error!r}", error)
    return wrapped.as_instanceof_cause()  # type: ignore[no-any-return]


def compute(refs: Sequence[Ref], function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """A task's: each of several references gets one of the function's results, or all get its error."""
    try:
        found = function(*(a.result() if isinstance(a, Ref) else a for a in args), **named)
    except Exception as error:
        for ref in refs:
            ref.fail(as_ray_says(error, function.__name__))
    else:
        for ref, one in zip(refs, found if len(refs) > 1 else [found], strict=True):
            ref.resolve(one)
