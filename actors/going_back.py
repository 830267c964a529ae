"""A part that holds a run's state dies, and the run goes back to its last checkpoint in the same process; its engines stay up.

Queue and correction service alone are replaced where the run stands (batch_source.py): the driver knows what they held. What dies with a
learner's rank nobody else has, so all three begin anew then, at one moment that is whole on disk, as after a resume: the ledger is cut back
to it, the position in the data is the queue's. So they do if a part dies while the run starts, or an answer of the learner is lost. Lost is
the work since then, and its diagnostics; all of it is done again. A learner whose ranks all live reads the checkpoint where it is.

Weights that were published after that moment are withdrawn: the same version numbers will come again with other weights. A generation,
which grows by one each time, tells them apart: the weight sync takes receipts of its own generation, and a worker gives up all that it has
under way before it hears of the next one. The pool waits for no answer of an earlier one any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from actors.learner_group import LearnerGroup
from actors.part_heartbeat import raise_when_silent
from actors.parts import StartingPoint
from actors.payloads import no_room
from actors.record.checkpoint_reader import ResumePoint, newest_readable, take_back
from actors.record.patience import PatientWriter
from actors.record.run_folder import RunFolder
from actors.supervision import first_error, kill, persistently, unless_failed
from correction.errors import ActorLost, ActorUnavailable, DataError, DeadlineExceeded
from rollout.tasks import Task

T = TypeVar("T")
Found = tuple[StartingPoint, list[tuple[str, str]]]
MOST_RETURNS = 3
"""To one checkpoint, within the time of RETURNS_S or from the same step: what has died four times so would die again."""
RETURNS_S = 3600.0
_LOOK_S = 1.0
"""Between two looks at a part."""
_ANSWER_S = 10.0
"""A part that is alive and has nothing to do answers within it; and Ray knows of a death."""
_IDLE_S = 30.0
"""A learner that is to go on ends what it has under way within it, or within the time that its start took, or is started anew."""
_DISK_ATTEMPTS, _DISK_AGAIN_S = 30, 10.0
_DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError)
"""What Ray says of a process that has ended. A kill by its memory monitor is no RayActorError."""
_ATTEMPTS = 10
"""Of a call to an actor that answers `__ray_ready__`, each with its whole deadline."""
_ANSWER = "an answer"
"""What is lost when no part is."""


async def raise_when_lost(parts: Mapping[str, Any], heartbeat_s: float, tell: Callable[[str, str], None]) -> None:
    """Never returns. Raises: ActorLost naming the first of these actors, by name, whose process ends, or gives no sign for so long.

    Args: tell: told, with a level, what a part tells with its heartbeat.
    """
    await unless_failed(_raise_when_gone(parts), raise_when_silent(parts, heartbeat_s, tell))


async def _raise_when_gone(parts: Mapping[str, Any]) -> None:
    async def look(name: str, actor: Any) -> None:
        while True:
            if await _is_gone(actor):
                raise ActorLost(f"{name}: its process is gone")
            await asyncio.sleep(_LOOK_S)

    await first_error(look(name, actor) for name, actor in parts.items())


async def lost_among(parts: Mapping[str, Any], error: BaseException) -> list[str]:
    """Names of these actors whose process is gone; if none is, and the error is a deadline, of those that don't answer.

    An answer that is lost for good, though all of them are there, is a loss, too: nobody knows whether the call has run.
    """
    asked = {name: asyncio.ensure_future(_is_gone_for_good(actor)) for name, actor in parts.items()}
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_until_one_is_gone(list(asked.values())), _ANSWER_S)
    gone = [name for name, task in asked.items() if task.done() and task.result()]
    is_late = isinstance(error, DeadlineExceeded | ActorUnavailable)
    silent = [name for name, task in asked.items() if not task.done()] if is_late else []
    silent = [name for name in silent if "learner" not in name] or silent  # ranks compute for longer than that
    for task in asked.values():
        task.cancel()
    return gone or silent or ([_ANSWER] if lost_answer(error) else [])


def lost_answer(error: BaseException) -> str:
    """What is lost by an error though all actors may be there, in a sentence; empty: nothing.

    A call that never ran, as its argument had gone with who made it, and one whose result found no room, have failed, says Ray, as if
    their own code had.
    """
    cause = getattr(error, "cause", None)
    if isinstance(error, ActorLost) or not isinstance(cause, RayError) or isinstance(cause, RayTaskError):
        return str(error) if isinstance(error, ActorLost) else ""
    return no_room(cause) or f"what a call was to work on is gone ({type(cause).__name__})"


async def while_they_answer(
    parts: Mapping[str, Any], call: Callable[[], Awaitable[T]], what: str, *, deadline_s: float, tell: Callable[[str, str], None]
) -> T:
    """As `persistently`; past its deadline the call is made again, ten times at most, if all of these parts live and answer by now.

    Args: parts: actors by name. tell: told each time, with a level.
    Raises: as `persistently`; ActorLost if one of these parts answers nothing any more.
    """
    attempts = 0
    while True:
        try:
            return await persistently(call, what, deadline_s=deadline_s)
        except DeadlineExceeded as error:
            attempts += 1
            if attempts == _ATTEMPTS:  # an actor may answer whose method hangs
                raise
            if lost := await lost_among(parts, error):  # judged once: who is looked at again may have come back meanwhile
                kill(*(parts[name] for name in lost if name in parts))
                raise ActorLost(f"{error}; {' and '.join(lost)} answered nothing for {_ANSWER_S:g} s more") from error
            tell("warning", f"{error}; who was late answers again, and is asked again")


async def end_parts(
    parts: Mapping[str, Any], learner: LearnerGroup | None, lost: Sequence[str]
) -> tuple[LearnerGroup | None, dict[str, Any]]:
    """Kill all but the learner's ranks, if these may go on: none of them is lost, and all have soon nothing under way any more.

    What was under way with them is discarded, and a restore overwrites all that it has changed.
    Args:
        parts: by name.
        learner: the run's; of a start that failed there may be other ranks among the parts, or none.
        lost: names of parts.
    Returns: the learner, if it goes on; and what is left of the parts.
    """
    ranks = learner.ranks if learner is not None else {}
    may_stay = bool(ranks) and all(parts.get(name) is rank and name not in lost for name, rank in ranks.items()) and _ANSWER not in lost
    kill(*(part for name, part in parts.items() if not may_stay or name not in ranks))
    if not may_stay or learner is None:
        return None, {}
    answers = asyncio.gather(*(_is_gone(rank) for rank in ranks.values()))
    try:
        are_idle = not any(gone is not False for gone in await asyncio.wait_for(answers, max(_IDLE_S, learner.start_took_s)))
    except TimeoutError:
        are_idle = False
    if are_idle:
        return learner, dict(ranks)
    kill(*ranks.values())
    return None, {}


class Returns:
    """How often a run has gone back, and to where it goes."""

    def __init__(self, folder: RunFolder, task: Task) -> None:
        self._folder, self._task = folder, task
        self._goal = -1
        self._before: list[tuple[float, int]] = []
        """Returns to the goal: when, and from which step."""

    def allow(self, lost: list[str], error: BaseException, *, step: int, is_replaced: bool = False) -> None:
        """Count one more. Deaths that are hours apart, and come at another step each time, are chance.

        Args: step: that the run had come to. is_replaced: what is lost is replaced there, so that another step is progress.
        Raises: the error, if nothing is lost by it; ActorLost if it has been often enough for one checkpoint.
        """
        if not lost:
            raise error
        saved = self._folder.checkpoints()
        goal = saved[-1].step if saved else 0
        now = time.monotonic()
        before = self._before if goal == self._goal else []
        self._goal, self._before = goal, [*before, (now, step)]
        times = sum((now - at < RETURNS_S and not is_replaced) or reached == step for at, reached in self._before)
        if times > MOST_RETURNS:
            raise ActorLost(
                f"{', '.join(lost)}: the {times}th death after step {goal}, before there was another checkpoint: "
                f"{lost_answer(error) or error}"
            ) from error

    async def found(self, model: Path, disk: PatientWriter, tell: Callable[[str, str], object]) -> Found:
        """The point, when all lines before it are written. The disk has to take what is taken back: while it refuses it is asked again.

        Args: tell: takes level and sentence.
        Raises: DataError when it has refused for some minutes.
        """
        for attempt in itertools.count(1):
            try:
                # Hashes of a large checkpoint take minutes, in which the disk's thread writes on what happens.
                whole = await asyncio.to_thread(self._newest)
                return await disk.taken_back(partial(self._take_back, model, whole), lambda found: found[0].step)
            except OSError as error:
                if attempt == _DISK_ATTEMPTS:
                    raise DataError(f"{self._folder.path}: the run can't go back to its last checkpoint: {error}") from error
                tell("warning", f"the run can't go back to its last checkpoint, and tries again in {_DISK_AGAIN_S:.0f} s: {error}")
                await asyncio.sleep(_DISK_AGAIN_S)
        raise AssertionError

    def _newest(self) -> ResumePoint | None:
        """Waits for the disk, and reads all of a checkpoint. Returns: None if there is none."""
        return newest_readable(self._folder) if self._folder.checkpoints() else None

    def _take_back(self, model: Path, whole: ResumePoint | None) -> Found:
        """The folder has nothing of later steps any more. Waits for the disk.

        Args:
            model: that the run began with.
            whole: None: the run begins anew.
        Returns: where the run goes on from, and what to say about it, as (level, sentence).
        """
        if whole is None:
            self._folder.rewind(0)
            return StartingPoint(model), []
        point, said = take_back(self._folder, whole, self._task)
        return StartingPoint(model, point.checkpoint, point.state), said


def what_is_done_again(lost: list[str], error: BaseException, point: StartingPoint, *, step: int, version: int, generation: int) -> str:
    """One sentence for the run's events.

    Args:
        step, version: as far as the run had come.
        generation: the next one.
    """
    steps = f"steps {point.step + 1} to {step} are done again" if step > point.step else "no finished step is lost"
    withdrawn = f", weights v{point.version + 1} to v{version} are withdrawn" if version > point.version else ""
    return (
        f"lost: {', '.join(lost)} ({lost_answer(error) or error}). The run goes back to {point}; {steps} with their diagnostics, "
        f"what was under way is sampled again{withdrawn}; the engines stay up (generation {generation})"
    )


def what_goes_on(lost: list[str], error: BaseException, *, step: int) -> str:
    """As what_is_done_again, when queue and service are replaced. Args: step: the last one that is settled."""
    return (
        f"lost: {', '.join(lost)} ({lost_answer(error) or error}). New ones go on after step {step}, with all groups that are under way; "
        "no step is lost, but diagnostics of the batches that the service held are"
    )


async def _until_one_is_gone(asked: list[asyncio.Future[bool]]) -> None:
    for answer in asyncio.as_completed(asked):
        if await answer:
            return


async def _is_gone_for_good(actor: Any) -> bool:
    while (gone := await _is_gone(actor)) is None:
        await asyncio.sleep(0.5)
    return gone


async def _is_gone(actor: Any) -> bool | None:
    """Answers when the actor's calls before are done; None: can't be reached, for now."""
    try:
        await actor.__ray_ready__.remote()
    except ActorUnavailableError:
        return None
    except _DEATHS:
        return True
    except RayError:
        return False
    return False
