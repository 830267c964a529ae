"""Calls that every rank of the learner runs once, all ranks in the same order, also when the network loses a call or an answer.

The caller numbers them from 1 and makes one at a time: the next one starts when all ranks have answered the last one, when a rank has
failed, or at its deadline. A rank that can't be reached is called again under the same number; the other ranks may be in the middle of
that call and wait for it. If it has run the call and only its answer was lost, it must not run it again: each rank keeps its last answer.
A call that some rank has not begun by its deadline is lost work: Ray fetches a call's arguments first, for as long as that takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any, TypeVar, cast

import ray

from evenkeel.actors.processes.supervision import abandon, argument_gone, call_with_retries, has_failed
from evenkeel.correction.errors import (
    ActorLost,
    ActorUnavailable,
    DeadlineExceeded,
    EngineError,
    EvenkeelError,
    RankFailed,
    StepAborted,
    one_line,
)

# What befalls a learner rank whose process lives: its device or a collective fails, and torch raises in the middle of a call.
#
# The other ranks may still wait in that call, and what the rank holds may be of no one step. So it counts as lost, like one that has died,
# and the run goes back to its last checkpoint (actors/driver/recovery.py). Any other error is a bug, and stays what it is.

log = logging.getLogger("evenkeel.ranks")
M = TypeVar("M", bound=Callable[..., Any])
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
# In what torch says, in small letters, where it has no class of its own for it; gloo gives the path of its source file.
_FAILED = (
    *("cuda error", "cuda driver error", "cublas error", "cudnn error", "triton error"),
    *("nccl error", "gloo/"),
)
_LONGEST = 200
_REMEDY = (
    "lower learner.tokens_per_microbatch, set learner.recompute_activations: true, or spread the model over more ranks "
    "(`evenkeel plan RECIPE` counts what each of them needs)"
)


def as_rank_failure(error: BaseException, rank: str, method: str) -> BaseException:
    """RankFailed, in a sentence, if this is what torch raises when a device or a collective fails; any other error itself.

    The traceback goes to the log of the rank's process: who gets the sentence can't see it.
    Args:
        rank: its name in messages.
        method: of the rank, which has raised it.
    """
    if isinstance(error, EvenkeelError) or not isinstance(error, RuntimeError | MemoryError):
        return error
    import torch  # not in the driver; a rank has it by now

    what, plain = one_line(error, named=True)[:_LONGEST], one_line(error)[:_LONGEST].lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in plain for sign in _OUT_OF_MEMORY):
        failure = RankFailed(f"{rank}: out of memory in {method} ({what})", remedy=_REMEDY, rank=rank)
    elif isinstance(error, torch.AcceleratorError | torch.distributed.DistError) or any(sign in plain for sign in _FAILED):
        failure = RankFailed(f"{rank}: its device or a collective has failed in {method} ({what})", rank=rank)
    else:
        return error
    log.error("%s", failure, exc_info=error)
    failure.__cause__ = error
    return failure


def names_failures(method: M) -> M:
    """Decorates a method of a NumberedRank that is no collective call: raises as `as_rank_failure` says."""

    @wraps(method)
    def call(rank: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return method(rank, *arguments, **named)
        except Exception as error:
            if (failure := as_rank_failure(error, rank.name, method.__name__)) is error:
                raise
            raise failure from error

    return cast(M, call)


# Seconds in which a rank answers out of turn, as which call it has begun.
_ANSWER_S = 10.0


class NumberedRank:
    """The rank's side. Its calls run one after the other."""

    def __init__(self, name: str) -> None:
        """Args: name: of the rank, for error messages."""
        self.name, self._calls = name, 0
        # Method of the last call, and its result or error.
        self._last: tuple[str, Future[Any]] = "", Future()

    def calls(self) -> int:
        """Number of the last collective call."""
        return self._calls

    @ray.method(concurrency_group="heartbeat")
    def begun(self) -> int:
        """Number of the last collective call that has begun; answers while it runs."""
        return self._calls

    def _in_order(self, number: int, what: str) -> None:
        """Count a call. Raises: EngineError if its number is not the next."""
        due = self._calls + 1
        if number != due:
            raise EngineError(
                f"{self.name}: {what} came as collective call {number}, but {due} is the next: the ranks would wait for each "
                "other in different calls. Only one LearnerGroup may call them; resume the run from its last checkpoint"
            )
        self._calls = number

    def _go_on_from(self, number: int) -> None:
        """Count a call that may skip numbers. Raises: EngineError if a call of this or a later number has run."""
        if number <= self._calls:
            raise EngineError(f"{self.name}: collective call {number} came after call {self._calls}")
        self._calls = number


def collective(method: M) -> M:
    """Decorates a method of a NumberedRank whose first argument is the call's number, and which begins with `_in_order` or `_go_on_from`.

    Called again under the last number it doesn't run, and returns or raises what it did before. Raises: RankFailed if the rank's device or
    a collective has failed.
    """

    @wraps(method)
    def once(rank: Any, number: int, *arguments: Any) -> Any:
        if (number, method.__name__) == (rank._calls, rank._last[0]):
            return rank._last[1].result()
        end: Future[Any] = Future()
        try:
            end.set_result(method(rank, number, *arguments))
        except BaseException as error:
            end.set_exception(as_rank_failure(error, rank.name, method.__name__))
        if number == rank._calls:  # it was counted; a call that was refused is not kept
            rank._last = method.__name__, end
        return end.result()

    return cast(M, once)


class CollectiveCaller:
    """The caller's side."""

    def __init__(self, ranks: Mapping[str, Any]) -> None:
        """Args: ranks: actors, by their names in messages."""
        self._ranks = ranks
        self.calls = 0
        """Number of the last call."""
        self._one_at_a_time = asyncio.Lock()
        self._asking: set[asyncio.Task[Any]] = set()
        # Why some rank may have missed a call that others have run; no further call is made until `begin_anew`. Empty: no rank has.
        self._missed = ""
        # Method of the call under way; empty: there is none.
        self._under_way = ""
        # Methods that are not called any more until `begin_anew`.
        self._refused: frozenset[str] = frozenset()

    async def ask(self, method: str, *arguments: Any, what: str, deadline_s: float, results: int) -> list[list[Any]]:
        """Call a method on all ranks, after all calls before. The call goes on if this task is cancelled: otherwise a rank that can't be
        reached at that moment would miss a call that the others run.

        Args:
            what: is called, in words, for messages.
            deadline_s: of each attempt, from the end of the call before.
            results: number of results of a rank; the first is fetched, for the others references are returned.
        Returns: for each rank the list of its results.
        Raises: the first error of any rank, as `call_with_retries`; ActorLost while a rank may have missed a call, and for a call that a
            rank has not begun by the deadline; StepAborted after `refuse`.
        """
        asking = asyncio.ensure_future(self._ask_in_order(method, arguments, what, deadline_s, results))
        self._asking.add(asking)
        asking.add_done_callback(self._over)
        return await asyncio.shield(asking)

    async def settled(self, *, deadline_s: float) -> None:
        """Wait until the ranks have run all calls. Raises: ActorLost if one of them has missed one."""
        async with self._one_at_a_time:
            asked = {f"count of its calls <- {name}": rank.calls.remote for name, rank in self._ranks.items()}
            done = await all_of(call_with_retries(call, what, deadline_s=deadline_s) for what, call in asked.items())
            if self._missed or any(calls != self.calls for calls in done):
                raise ActorLost(self._missed or f"learner: of {self.calls} collective calls its ranks have had {done}")

    def begin_anew(self) -> None:
        """Stop waiting for earlier calls. The next call must be of a method that may skip numbers (`_go_on_from`)."""
        for asking in self._asking:
            asking.cancel()
        self._missed, self._refused = "", frozenset()

    def refuse(self, methods: frozenset[str]) -> None:
        """Make no further calls of these methods; they raise StepAborted."""
        self._refused = methods

    async def abort(self) -> None:
        """Have all ranks end the call under way, if its method is a refused one, before the same micro-batch. Whether that came in time
        shows in the result of the call itself."""
        if self._under_way not in self._refused:
            return
        number, before = self.calls, None
        try:
            places = await self._ask_out_of_turn("hold", number)
            before = None if None in places else max(places)
        finally:
            await self._ask_out_of_turn("release", number, before)

    async def _ask_out_of_turn(self, method: str, *arguments: Any) -> list[Any]:
        """Answers of all ranks to a call that they can answer while a collective call runs."""
        calls = {name: partial(getattr(rank, method).remote, *arguments) for name, rank in self._ranks.items()}
        return await all_of(call_with_retries(call, f"{method} <- {name}", deadline_s=_ANSWER_S) for name, call in calls.items())

    async def _ask_in_order(self, method: str, arguments: tuple[Any, ...], what: str, deadline_s: float, results: int) -> list[list[Any]]:
        async with self._one_at_a_time:
            if self._missed:
                raise ActorLost(f"{self._missed}; its ranks can be called again after a restore")
            if method in self._refused:
                raise StepAborted(f"{what}: not begun, as the run ends")
            self.calls += 1
            self._under_way = method
            calls = {
                name: partial(_answer, partial(getattr(rank, method).options(num_returns=results).remote, self.calls, *arguments), results)
                for name, rank in self._ranks.items()
            }
            running = [
                asyncio.ensure_future(call_with_retries(call, f"{what} <- {name}", deadline_s=deadline_s)) for name, call in calls.items()
            ]
            try:
                return await all_of(running)
            except ray.exceptions.RayTaskError as error:
                if argument_gone(error):
                    await self._take_back(running, error)
                raise
            except ActorUnavailable as error:
                self._missed = str(error)
                raise
            except DeadlineExceeded as error:
                if not (idle := await self._not_begun()):
                    raise
                why = "it is still in an earlier call, or the call's arguments did not arrive"
                self._missed = f"{error}; not begun by {' and '.join(idle)}: {why}"
                raise ActorLost(self._missed) from error
            finally:
                self._under_way = ""
                for one in running:
                    abandon(one)

    async def _take_back(self, running: Sequence[asyncio.Future[Any]], error: BaseException) -> None:
        """Of a call whose argument is gone: if no rank has begun it, its number is the next one's. Raises: ActorLost otherwise."""
        await asyncio.wait(running, timeout=_ANSWER_S)
        ends = [one.exception() if one.done() and not one.cancelled() else None for one in running]
        if all(end is not None and argument_gone(end) for end in ends):
            self.calls -= 1
            return
        self._missed = f"{argument_gone(error)}, and some rank has begun that call"
        raise ActorLost(self._missed) from error

    async def _not_begun(self) -> list[str]:
        """Names of the ranks that answer and have not begun the last call."""
        asks = (call_with_retries(rank.begun.remote, f"last call <- {name}", deadline_s=_ANSWER_S) for name, rank in self._ranks.items())
        begun = await asyncio.gather(*asks, return_exceptions=True)
        return [name for name, number in zip(self._ranks, begun, strict=True) if isinstance(number, int) and number < self.calls]

    def _over(self, asking: asyncio.Task[Any]) -> None:
        self._asking.discard(asking)
        has_failed(asking)  # its caller may be cancelled


async def all_of(waits: Iterable[Coroutine[Any, Any, Any] | asyncio.Future[Any]]) -> list[Any]:
    """The results of all. Raises: the first error of any of them at once, without waiting for the others' deadlines. StepAborted is raised
    only when all have ended, because calls go on after it, and the next call must not reach a rank that has not begun this one."""
    running = [asyncio.shield(wait) if isinstance(wait, asyncio.Future) else asyncio.ensure_future(wait) for wait in waits]
    try:
        return list(await asyncio.gather(*running))
    except StepAborted as aborted:
        ends = await asyncio.gather(*running, return_exceptions=True)
        raise next((end for end in ends if isinstance(end, BaseException) and not isinstance(end, StepAborted)), aborted) from None
    finally:
        for one in running:
            one.cancel()


async def _answer(call: Callable[[], Any], results: int) -> list[Any]:
    asked = call()
    first, *others = asked if results > 1 else [asked]
    return [await first, *others]
