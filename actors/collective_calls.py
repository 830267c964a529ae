"""Calls that all of the learner's ranks get, once each, in one order, also when the network loses some of them.

Who asks numbers them from 1 and lets each have its turn: the next one is made when all ranks have answered the one before, when one has
failed, or its time is over. A rank that can't be reached is asked again under the same number, while the others may wait for it in the
middle of that call. It may have done its part, and only the answer was lost: so each rank keeps its last answer. A call that some rank has
not begun with when its time is over is lost work: Ray fetches what it is to work on first, for as long as that takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any, TypeVar, cast

import ray

from actors.supervision import persistently
from correction.errors import ActorLost, ActorUnavailable, DeadlineExceeded, EngineError

M = TypeVar("M", bound=Callable[..., Any])
_ANSWER_S = 10.0
"""A rank says within it which calls it has begun with."""


class NumberedRank:
    """A rank's side. Its calls run one after the other."""

    def __init__(self, name: str) -> None:
        """Args: name: in errors."""
        self._name, self._calls = name, 0
        self._last: tuple[str, Future[Any]] = "", Future()
        """Method of the last call, and how it ended."""

    def calls(self) -> int:
        """Collective ones so far."""
        return self._calls

    @ray.method(concurrency_group="heartbeat")
    def begun(self) -> int:
        """Number of the last collective call that has begun; answers beside it."""
        return self._calls

    def _in_order(self, number: int, what: str) -> None:
        """Raises: EngineError for a call that isn't the next."""
        due = self._calls + 1
        if number != due:
            raise EngineError(
                f"{self._name}: {what} came as collective call {number}, but {due} is the next: the ranks would wait for each "
                "other in different calls. Only one LearnerGroup may call them; resume the run from its last checkpoint"
            )
        self._calls = number

    def _go_on_from(self, number: int) -> None:
        """Calls before this one don't count. Raises: EngineError if a later one has been here: this one comes too late."""
        if number <= self._calls:
            raise EngineError(f"{self._name}: collective call {number} came after call {self._calls}")
        self._calls = number


def collective(method: M) -> M:
    """A method of a NumberedRank that takes its number first, and begins with `_in_order` or `_go_on_from`.

    Asked again under the last number it does nothing, and ends as it has ended.
    """

    @wraps(method)
    def once(rank: Any, number: int, *arguments: Any) -> Any:
        if (number, method.__name__) == (rank._calls, rank._last[0]):
            return rank._last[1].result()
        end: Future[Any] = Future()
        try:
            end.set_result(method(rank, number, *arguments))
        except BaseException as error:
            end.set_exception(error)
        if number == rank._calls:  # it was the next; who isn't changes nothing, and may come again
            rank._last = method.__name__, end
        return end.result()

    return cast(M, once)


class CollectiveCaller:
    """The side that asks."""

    def __init__(self, ranks: Mapping[str, Any]) -> None:
        """Args: ranks: by what they are called in messages."""
        self._ranks = ranks
        self.calls = 0
        """Made so far."""
        self._turn = asyncio.Lock()
        self._asking: set[asyncio.Task[Any]] = set()
        self._missed = ""
        """Why some rank may lack a call that others have: none takes another one until `begin_anew`. Empty: none does."""

    async def ask(self, method: str, *arguments: Any, what: str, deadline_s: float, results: int) -> list[list[Any]]:
        """Have all ranks do it, when all that they were asked before is over. That goes on if who asks is cancelled: a rank that can't be
        reached for a moment would lack a call that the others have.

        Args:
            deadline_s: of each attempt, from its turn on.
            results: of each rank; the first is fetched, and for the others there are references.
        Returns: those of each rank.
        Raises: the first error of any rank, as persistently; ActorLost while a rank may lack a call, and for one that a rank has not begun
            with in time.
        """
        asking = asyncio.ensure_future(self._in_turn(method, arguments, what, deadline_s, results))
        self._asking.add(asking)
        asking.add_done_callback(self._over)
        return await asyncio.shield(asking)

    async def settled(self, *, deadline_s: float) -> None:
        """Wait until the ranks have done all that they were asked. Raises: ActorLost if one of them lacks a call."""
        async with self._turn:
            asked = {name: rank.calls.remote for name, rank in self._ranks.items()}
            done = await all_of(persistently(call, f"count of its calls <- {name}", deadline_s=deadline_s) for name, call in asked.items())
            if self._missed or any(calls != self.calls for calls in done):
                raise ActorLost(self._missed or f"learner: of {self.calls} collective calls its ranks have had {done}")

    def begin_anew(self) -> None:
        """Of what the ranks were asked before nobody waits for anything; the next call may come to them wherever they stand."""
        for asking in self._asking:
            asking.cancel()
        self._missed = ""

    async def _in_turn(self, method: str, arguments: tuple[Any, ...], what: str, deadline_s: float, results: int) -> list[list[Any]]:
        async with self._turn:
            if self._missed:
                raise ActorLost(f"{self._missed}; its ranks can be called again after a restore")
            self.calls += 1
            calls = {
                name: partial(_answer, partial(getattr(rank, method).options(num_returns=results).remote, self.calls, *arguments), results)
                for name, rank in self._ranks.items()
            }
            try:
                return await all_of(persistently(call, f"{what} <- {name}", deadline_s=deadline_s) for name, call in calls.items())
            except ActorUnavailable as error:
                self._missed = str(error)
                raise
            except DeadlineExceeded as error:
                if not (idle := await self._not_begun()):
                    raise
                self._missed = f"{error}; not begun by {' and '.join(idle)}: what it was to work on did not come"
                raise ActorLost(self._missed) from error

    async def _not_begun(self) -> list[str]:
        """Ranks that answer, and have not begun with the last call."""
        asks = (persistently(rank.begun.remote, f"last call <- {name}", deadline_s=_ANSWER_S) for name, rank in self._ranks.items())
        begun = await asyncio.gather(*asks, return_exceptions=True)
        return [name for name, number in zip(self._ranks, begun, strict=True) if isinstance(number, int) and number < self.calls]

    def _over(self, asking: asyncio.Task[Any]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()  # read, or asyncio would report it: who has asked may be gone


async def all_of(waits: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """What all of them return. Raises: the first error of any of them at once, not after the others' deadlines."""
    running = [asyncio.ensure_future(wait) for wait in waits]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for one in running:
            one.cancel()


async def _answer(call: Callable[[], Any], results: int) -> list[Any]:
    asked = call()
    first, *others = asked if results > 1 else [asked]
    return [await first, *others]
