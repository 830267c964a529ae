"""Every wait has a name, says what it waits for, and ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import ray.exceptions

from correction.errors import DeadlineExceeded, EngineError, EvenkeelError

log = logging.getLogger("evenkeel")
T = TypeVar("T")
USUAL_START = 1 / 3
"""Share of its deadline: if the start of an engine or a rank takes longer, its notices become warnings."""

ACTOR_LOST = (ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError, ray.exceptions.WorkerCrashedError)
"""What Ray raises when the process behind a handle is gone; the call may or may not have run."""


async def wait_for(
    awaitable: Awaitable[T],
    what: str,
    *,
    deadline_s: float,
    notice_s: float = 30.0,
    notice: Callable[[str], None] | None = None,
    usual_s: float = 0.0,
    detail: Callable[[], Awaitable[str]] | None = None,
) -> T:
    """Await something that another process does.

    Args:
        awaitable: an ObjectRef or coroutine.
        what: phase, actor and version, as they stand in notices and in the error ("weight sync v12 -> worker 3").
        deadline_s: seconds until DeadlineExceeded.
        notice_s: seconds between notices while waiting.
        notice: takes each notice; None: the log, as information until `usual_s`, as a warning from then on.
        usual_s: a wait of up to so many seconds is nothing unusual.
        detail: asked for one clause on what exactly is missing, before each notice.
    Raises: DeadlineExceeded; EvenkeelError kinds of the other process, as themselves; EngineError when its process is gone.
    """
    now = asyncio.get_running_loop().time
    began = now()
    task = asyncio.ensure_future(_as_coroutine(awaitable))
    try:
        while True:
            remaining = began + deadline_s - now()
            done, _ = await asyncio.wait({task}, timeout=max(0.0, min(notice_s, remaining)))
            if done:
                return task.result()
            waited = now() - began
            clause = f" ({await _ask(detail)})" if detail else ""
            if waited >= deadline_s:
                raise DeadlineExceeded(f"{what}: not done in {deadline_s:.0f} s{clause}; the deadline is set under deadlines")
            say = notice or (log.warning if waited >= usual_s else log.info)
            say(f"waiting {waited:.0f} s for {what}{clause}")
    except ray.exceptions.RayTaskError as error:
        raise unwrapped(error) from error
    except ACTOR_LOST as error:
        raise EngineError(f"{what}: the actor's process is gone ({type(error).__name__})") from error
    finally:
        if not task.done():
            task.cancel()
        elif not task.cancelled():
            task.exception()  # read, or asyncio would report it: this wait may be cancelled just when the task fails


async def unless_failed(work: Coroutine[Any, Any, T], failure: Coroutine[Any, Any, None]) -> T:
    """The result of `work`, or the error of `failure`, which never returns, if that comes first; what is left is cancelled."""
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


def abandon(task: asyncio.Task[Any]) -> None:
    """Cancel a task whose end nobody waits for any more; an error that it has ended with counts as known."""
    if not task.cancel() and not task.cancelled():
        task.exception()


def unwrapped(error: BaseException) -> BaseException:
    """The error as the other process raised it, if it is one of ours; Ray wraps it together with a long traceback."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, EvenkeelError) else error


def counted(number: int, what: str) -> str:
    """"1 rollout worker", "2 rollout workers"."""
    return f"{number} {what}{'s' * (number != 1)}"


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _ask(detail: Callable[[], Awaitable[str]]) -> str:
    try:
        return await asyncio.wait_for(_as_coroutine(detail()), 5.0)
    except Exception as error:  # a notice must not fail because its detail did
        return f"no detail: {type(error).__name__}"


class Stopwatch:
    """Seconds by phase since the last reading. One task uses it; phases don't overlap a reading."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def read(self) -> dict[str, float]:
        """Seconds by phase, and start anew."""
        seconds, self._seconds = self._seconds, {}
        return seconds
