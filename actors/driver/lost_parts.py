"""Who of a run's parts is gone: the learner's ranks and the correction service, which hold its state.

A part is gone when Ray has seen its process end, when its heartbeat or its answers stop, or when a rank says that its device or a
collective has failed. An answer can be lost while all parts live. What the run does then: recovery.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)

from evenkeel.actors.driver.parts import SERVICE
from evenkeel.actors.processes.event_level import Notify
from evenkeel.actors.processes.part_heartbeat import TakeReport, raise_when_silent
from evenkeel.actors.processes.supervision import argument_gone, call_with_retries, first_error, kill, no_room, unless_failed
from evenkeel.correction.errors import ActorLost, ActorUnavailable, DeadlineExceeded, RankFailed

T = TypeVar("T")
_LOOK_S = 1.0
"""Seconds between two checks whether a part's process is there."""
_ANSWER_S = 10.0
"""Seconds in which an idle, living part answers, and Ray notices a death."""
_DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError)
"""Errors that Ray raises for a process that has ended. A kill by its memory monitor is no RayActorError."""
_ATTEMPTS = 10
"""Attempts at one call, each with the whole deadline, while the actor answers `__ray_ready__`."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What a failure has cost a run. False if nothing is lost: then the error itself ends the run."""

    parts: tuple[str, ...] = ()
    """Their names."""
    answer: str = ""
    """What else is lost for good (`lost_answer`) while all parts are there: nobody knows whether that call has run. Empty if parts are
    lost."""

    def __bool__(self) -> bool:
        return bool(self.parts or self.answer)

    def __str__(self) -> str:
        return ", ".join(self.parts) or "an answer"

    @property
    def is_replaceable(self) -> bool:
        """Whether the driver knows all that is lost, so that new parts can go on where the run stands."""
        return not self.answer and set(self.parts) <= {SERVICE}


async def raise_when_lost(parts: Mapping[str, Any], heartbeat_s: float, notify: TakeReport) -> None:
    """Watch actors; never returns. Raises: ActorLost naming the first whose process ends, or sends no heartbeat for `heartbeat_s` seconds.

    Args:
        parts: actors by name.
        notify: takes level and sentence: what a part reports with its heartbeat.
    """
    await unless_failed(_raise_when_gone(parts), raise_when_silent(parts, heartbeat_s, notify))


async def _raise_when_gone(parts: Mapping[str, Any]) -> None:
    async def look(name: str, actor: Any) -> None:
        while True:
            if await is_gone(actor):
                raise ActorLost(f"{name}: its process is gone")
            await asyncio.sleep(_LOOK_S)

    await first_error(look(name, actor) for name, actor in parts.items())


async def lost_among(parts: Mapping[str, Any], error: BaseException) -> Lost:
    """The actors whose process is gone. If there are none and a deadline has passed: those that don't answer within _ANSWER_S.

    If all actors are there: the learner's rank that has failed, by this error; the service, if what the error says is gone is an object of
    its own, a batch; otherwise the answer, if the error says that one is lost.
    Args: parts: actors by name.
    """
    asked = {name: asyncio.ensure_future(_is_gone_for_good(actor)) for name, actor in parts.items()}
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_until_one_is_gone(list(asked.values())), _ANSWER_S)
    gone = [name for name, task in asked.items() if task.done() and task.result()]
    is_late = isinstance(error, DeadlineExceeded | ActorUnavailable)
    silent = [name for name, task in asked.items() if not task.done()] if is_late else []
    silent = [name for name in silent if name == SERVICE] or silent  # a busy rank answers only after its step
    for task in asked.values():
        task.cancel()
    failed = [error.rank] if isinstance(error, RankFailed) and error.rank in parts else []  # by the end of another rank, if one is gone
    failed += [SERVICE] if argument_gone(error) and SERVICE in parts else []
    lost = tuple(gone or silent or failed)
    return Lost(lost) if lost else Lost(answer=lost_answer(error))


def lost_answer(error: BaseException) -> str:
    """Says what is lost for good by this error, though all actors may be alive; empty if nothing is.

    Two such errors look as if the called code had raised them: an argument of the call was lost, so that it never ran; or there was no room
    for its result in the object store. What called code raises itself is none, unless it is an ActorLost (RankFailed).
    """
    return str(error) if isinstance(error, ActorLost) else no_room(error) or argument_gone(error)


async def while_they_answer(
    parts: Mapping[str, Any], call: Callable[[], Awaitable[T]], what: str, *, deadline_s: float, notify: Notify
) -> T:
    """As `call_with_retries`; past the deadline the call is made again if all parts answer `__ray_ready__`, up to _ATTEMPTS times in all.

    Args:
        parts: actors by name.
        deadline_s: of each attempt.
        notify: takes level and sentence, at each further attempt.
    Raises: as `call_with_retries`; ActorLost if a part doesn't answer within _ANSWER_S after the deadline; it is killed.
    """
    attempts = 0
    while True:
        try:
            return await call_with_retries(call, what, deadline_s=deadline_s)
        except DeadlineExceeded as error:
            attempts += 1
            if attempts == _ATTEMPTS:  # an actor whose method hangs may still answer __ray_ready__
                raise
            if lost := await lost_among(parts, error):  # asked once only: a part may answer again a moment later
                kill(*(parts[name] for name in lost.parts))
                raise ActorLost(f"{error}; {lost} gave no answer for another {_ANSWER_S:g} s") from error
            notify("warning", f"{error}; the late part answers again; the call is repeated")


async def _until_one_is_gone(asked: list[asyncio.Future[bool]]) -> None:
    for answer in asyncio.as_completed(asked):
        if await answer:
            return


async def _is_gone_for_good(actor: Any) -> bool:
    while (gone := await is_gone(actor)) is None:
        await asyncio.sleep(0.5)
    return gone


async def is_gone(actor: Any) -> bool | None:
    """Whether the actor's process is gone; an actor answers after the calls before this one. None: it can't be reached at present."""
    try:
        await actor.__ray_ready__.remote()
    except ActorUnavailableError:
        return None
    except _DEATHS:
        return True
    except RayError:
        return False
    return False
