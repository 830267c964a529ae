"""Every wait has a name, says what it waits for, and ends.

What Ray raises becomes one of ours here: what another process raised, as itself; anything else that Ray says of a call means that its
process has died or can't be reached, or that its answer was lost with a node (ActorLost).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import ray
import ray.exceptions

from evenkeel.actors.carriers import WaitNotice
from evenkeel.correction.errors import ActorLost, ActorUnavailable, DeadlineExceeded, EvenkeelError, one_line

log = logging.getLogger("evenkeel")
_NO_ROOM = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
T = TypeVar("T")
USUAL_START = 1 / 3
"""Share of the start deadline. If the start of an engine or a rank takes longer, its notices become warnings."""


@dataclass(frozen=True, slots=True)
class LongWait:
    """A wait so long that the stacks of all processes are wanted."""

    what: str
    """What is waited for, as in a WaitNotice."""
    has_deadline: bool = True
    """Half of its deadline has passed; False: it has none."""

    def __str__(self) -> str:
        return f"half of the time for {self.what} is over" if self.has_deadline else f"a long wait for {self.what} (no deadline)"


HALF_OVER: ContextVar[Callable[[LongWait], None] | None] = ContextVar("half_over", default=None)
"""Called, in tasks of this context, with each long wait that has used half of its deadline. One that has none is long after _ENDLESS_S, or
after `usual_s` if that is later."""
_LONG_S, _ENDLESS_S = 60.0, 600.0
# Longest wait, seconds, for the clause that says what is missing.
_DETAIL_S = 5.0
AGAIN_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses between attempts to reach an unavailable actor, seconds: a network that comes back within half a minute does no harm."""


async def wait_for(
    awaitable: Awaitable[T],
    what: str,
    *,
    deadline_s: float,
    notice_s: float = 30.0,
    notice: Callable[[WaitNotice], None] | None = None,
    usual_s: float = 0.0,
    detail: Callable[[], Awaitable[str]] | None = None,
    counts_from: Callable[[], float] | None = None,
    raises: type[DeadlineExceeded] = DeadlineExceeded,
) -> T:
    """Await something that another process does.

    Args:
        awaitable: an ObjectRef or coroutine.
        what: phase, actor and version, as they stand in notices and in the error ("weight sync v12 -> worker 3").
        deadline_s: seconds until DeadlineExceeded.
        notice_s: seconds between notices while waiting.
        notice: takes each notice; None: the log, as information until `usual_s`, as a warning from then on.
        usual_s: notices of shorter waits are information, those of longer ones warnings. Infinite: to wait is no symptom (HALF_OVER).
        detail: asked for one clause on what exactly is missing, before each notice.
        counts_from: time of the event loop, seconds, from which the deadline counts if it is later than the call: that of the last
            progress. Notices count from the call.
        raises: kind of error at the deadline.
    Raises: DeadlineExceeded; errors of the other process, as themselves; ActorLost if it has died or its answer was lost.
    """
    clock = asyncio.get_running_loop().time
    began, (half_s, half_over) = (said_at := clock()), _half(what, deadline_s, usual_s)
    task = asyncio.ensure_future(_as_coroutine(awaitable))
    try:
        while True:
            counted_s = clock() - max(began, counts_from() if counts_from else began)
            until_s = min(said_at + notice_s - clock(), deadline_s - counted_s, *([half_s - counted_s] if half_over else []))
            done, _ = await asyncio.wait({task}, timeout=max(0.0, until_s))
            if done:
                return task.result()
            if half_over and clock() - max(began, counts_from() if counts_from else began) >= half_s:
                half_over()
                half_over = None
                continue
            waited = clock() - began
            missing = await _ask(detail) if detail else ""
            if clock() - max(began, counts_from() if counts_from else began) >= deadline_s:
                clause = f" ({missing})" if missing else ""
                raise raises(f"{what}: not done in {deadline_s:.0f} s{clause}", what=what, seconds=waited, setting="deadlines")
            (notice or (log.warning if waited >= usual_s else log.info))(WaitNotice(what, round(waited), missing))
            said_at = clock()
    except ray.exceptions.RayTaskError as error:
        raise unwrapped(error) from error
    except ray.exceptions.ActorUnavailableError as error:
        raise ActorUnavailable(f"{what}: the actor can't be reached ({type(error).__name__})") from error
    except ray.exceptions.RayError as error:
        died = f"the actor's process has died, or its answer was lost ({type(error).__name__}{_reason(error)})"
        raise ActorLost(f"{what}: {no_room(error) or died}") from error
    finally:
        abandon(task)  # it may have failed just when this wait was cancelled


def no_room(error: BaseException) -> str:
    """A sentence with what a node needs whose object store this error calls full; empty for any other error."""
    for one in (getattr(error, "cause", None), error):
        if isinstance(one, _NO_ROOM):
            needs = "more memory in /dev/shm, or more free disk where Ray has its session (ray.temp_dir)"
            return f"no room in Ray's object store ({type(one).__name__}): its node needs {needs}"
    return ""


def argument_gone(error: BaseException) -> str:
    """If a call has not run because the object of one of its arguments is gone, with its owner or its node: a clause that says so. Empty
    for any other error; such a one looks as if the called code had raised it."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, ray.exceptions.RayError) or isinstance(cause, ray.exceptions.RayTaskError) or no_room(cause):
        return ""
    return f"an argument of a call is gone ({type(cause).__name__})"


def _half(what: str, deadline_s: float, usual_s: float) -> tuple[float, Callable[[], None] | None]:
    """Seconds after which half of a wait is over, and what is called then."""
    tell, has_deadline = HALF_OVER.get(), deadline_s < math.inf
    half_s = deadline_s / 2 if has_deadline else max(_ENDLESS_S, usual_s)
    if tell is None or deadline_s < _LONG_S or half_s == math.inf:
        return half_s, None
    return half_s, partial(tell, LongWait(what, has_deadline))


async def call_with_retries(call: Callable[[], Awaitable[T]], what: str, *, deadline_s: float, **named: Any) -> T:
    """The result of a call that may run twice, as of wait_for: asked again, with growing pauses, while its actor is alive but can't be
    reached.

    Args:
        call: makes the call; once for each attempt.
        deadline_s: of each attempt.
        named: as wait_for.
    Raises: as wait_for; ActorUnavailable when it could not be reached for half a minute.
    """
    for pause_s in AGAIN_S:
        try:
            return await wait_for(call(), what, deadline_s=deadline_s, **named)
        except ActorUnavailable as error:
            log.info("%s; asked again in %g s", error, pause_s)
            await asyncio.sleep(pause_s)
    return await wait_for(call(), what, deadline_s=deadline_s, **named)


async def call_until_answered(
    call: Callable[[], Awaitable[T]], what: str, *, deadline_s: float, late: Callable[[str], None] = log.warning, **named: Any
) -> T:
    """The result, as of `call_with_retries`, but past each deadline it says so and asks again instead of raising.

    Args:
        call: may run twice.
        late: called each time.
    Raises: as `call_with_retries`, but for the deadline. The end of the wait is the caller's.
    """
    waited_s = 0.0
    while True:
        try:
            return await call_with_retries(call, what, deadline_s=deadline_s, **named)
        except DeadlineExceeded:
            waited_s += deadline_s
            late(f"{what}: late, no answer in {waited_s:.0f} s; it is asked again")


# Seconds until a process that can't be reached is called again.
_UNREACHED_S = 1.0


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
    """Returns when a process has given no sign for `limit_s` seconds: no answer to `misses` calls in a row, each within limit_s / misses.
    Calls are counted, not time: this process may have stood still itself. At half of the limit stacks are collected (HALF_OVER).

    Args:
        call: asks for a sign. Where the process can't be reached, which Ray says at once, it is made again: a moment later there may be a
            network again.
        what: the wait's name.
        on_answer: takes an answer. Returns: for how many seconds of limit_s the engine that it looks after has been silent.
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
        except ray.exceptions.ActorUnavailableError:
            await asyncio.sleep(_UNREACHED_S)


async def lost_if_late(work: Coroutine[Any, Any, T]) -> T:
    """The result of work that callers repeat when it is late. Raises: ActorLost if a deadline within it passes: repeating would not
    help."""
    try:
        return await work
    except DeadlineExceeded as error:
        raise ActorLost(str(error)) from error


async def unless_failed(work: Coroutine[Any, Any, T], failure: Coroutine[Any, Any, None]) -> T:
    """The result of `work`. Raises: the error of `failure`, which never returns, if it comes first. The other one is cancelled."""
    task, failing = asyncio.ensure_future(work), asyncio.ensure_future(failure)
    try:
        await asyncio.wait({task, failing}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            failing.result()
        return await task
    finally:
        for waiting in (task, failing):
            waiting.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await waiting


async def first_error(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines that never return; with none, wait for ever. Raises: the first error of one of them; the others are cancelled."""
    running = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(running or [asyncio.get_running_loop().create_future()], return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()
    finally:
        for task in running:
            task.cancel()


async def unless_set(event: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of `work`; None if the event comes first, and the work is cancelled."""
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, waiting):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def done_or_reported(work: Awaitable[Any], what: str, deadline_s: float, notify: Callable[[str], None]) -> None:
    """Wait for `work` while a run ends. Its error goes to `notify` instead of being raised, so that it doesn't replace the error that ended
    the run."""
    try:
        await wait_for(work, what, deadline_s=deadline_s)
    except Exception as error:
        notify(f"{what}: given up ({error})")


def abandon(task: asyncio.Task[Any]) -> None:
    """Cancel a task that nobody waits for any more; if it has ended with an error, the error is dropped."""
    if not task.cancel():
        has_failed(task)


def has_failed(ended: asyncio.Future[Any]) -> bool:
    """Whether a task has ended with an error. The error is retrieved: asyncio logs one that nobody retrieves."""
    return not ended.cancelled() and ended.exception() is not None


def kill(*actors: Any) -> None:
    """Kill actors that may be gone already."""
    for actor in actors:
        try:
            ray.kill(actor)
        except Exception as error:  # nothing to kill is what was wanted
            log.debug("kill: %s", error)


def unwrapped(error: BaseException) -> BaseException:
    """The error as the other process raised it, if it is one of ours; Ray wraps it together with a long traceback."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, EvenkeelError) else error


def _reason(error: BaseException) -> str:
    """The first line of what Ray says, for an error whose name alone says little."""
    return f": {one_line(error)[:200]}" if str(error).strip() and not isinstance(error, ray.exceptions.RayActorError) else ""


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _ask(detail: Callable[[], Awaitable[str]]) -> str:
    try:
        return await asyncio.wait_for(_as_coroutine(detail()), _DETAIL_S)
    except Exception as error:  # a notice must not fail because its detail did
        return f"no detail: {type(error).__name__}"
