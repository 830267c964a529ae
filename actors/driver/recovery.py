"""What a run does when a part that holds its state dies: it goes back to its last checkpoint in the same process; the engines stay up.

The parts are the learner's ranks and the correction service. If only the service dies, the driver replaces it at the present step
(batches.py), because it knows what it held. The weights and the optimizer's state of a rank that dies are nowhere else. Then book,
service and learner start again from the last complete checkpoint, as after a resume: the ledger is cut back to
it, and the data go on at its position. The same happens if the device of a rank or a collective fails, which ends the rank, if a part dies
while the run starts, or if an answer of the learner is lost. All steps since the checkpoint are done again. A learner whose ranks are all
alive loads the checkpoint without a restart.

Weights published after the checkpoint are withdrawn: their version numbers will come again, with other weights. The generation, a number
that grows by one at each rollback, distinguishes them: the weight sync accepts receipts of its own generation only, a worker drops all
requests under way before it gets the next generation, and the pool waits for no answer of an earlier one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ray.exceptions import ActorUnavailableError, NodeDiedError, OutOfMemoryError, RayActorError, RayError, WorkerCrashedError

from evenkeel.actors.carriers import EventLevel, Notify, WaitNotice
from evenkeel.actors.checkpoints.reader import ResumePoint, newest_readable, take_back
from evenkeel.actors.driver.parts import SERVICE, StartingPoint
from evenkeel.actors.processes.pacing import doubled_pause_s
from evenkeel.actors.processes.part_heartbeat import TakeReport, raise_when_silent
from evenkeel.actors.processes.supervision import argument_gone, call_with_retries, first_error, kill, no_room, unless_failed, wait_for
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.record.disk_waits import ByDisk
from evenkeel.actors.record.disk_writer import DiskWriter
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.settings.deadlines import REPLACEMENT_PAUSE_S
from evenkeel.correction.errors import ActorLost, ActorUnavailable, DataError, DeadlineExceeded, RankFailed
from evenkeel.rollout.tasks.mixture import Mixture

# Who of a run's parts is gone: the learner's ranks and the correction service, which hold its state.
#
# A part is gone when Ray has seen its process end, when its heartbeat or its answers stop, or when a rank says that its device or a
# collective has failed. An answer can be lost while all parts live. What the run does then is the second half of this file.

T = TypeVar("T")
# Seconds between two checks whether a part's process is there.
_LOOK_S = 1.0
# Seconds in which an idle, living part answers, and Ray notices a death.
_ANSWER_S = 10.0
# Errors that Ray raises for a process that has ended. A kill by its memory monitor is no RayActorError.
_DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError)
# Attempts at one call, each with the whole deadline, while the actor answers `__ray_ready__`.
_ATTEMPTS = 10


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

    Two errors of the infrastructure look as if the called code had raised them: an argument of the call was lost, so that it never ran; or
    there was no room for its result in the object store. What called code raises itself is none, unless it is an ActorLost (RankFailed).
    """
    return str(error) if isinstance(error, ActorLost) else no_room(error) or argument_gone(error)


async def while_they_answer(
    parts: Mapping[str, Any], call: Callable[[], Awaitable[T]], what: str, *, deadline_s: float, notify: Notify
) -> T:
    """The result, as of `call_with_retries`; past the deadline the call is made again if all parts answer `__ray_ready__`, up to _ATTEMPTS
    times in all.

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


Found = tuple[StartingPoint, list[tuple[EventLevel, str]]]
MOST_ROLLBACKS = 3
"""Most rollbacks to one checkpoint, within ROLLBACKS_S or from the same step. The fourth such death ends the run: a further attempt would
most likely die, too."""
ROLLBACKS_S = 3600.0
# Replacements of the service within ROLLBACKS_S without a pause. After each further one the next starts later: 2, 4, 8 ... up to
# REPLACEMENT_PAUSE_S seconds.
_FREE_REPLACEMENTS = 10
# Seconds that the learner's ranks have to finish their calls (at least; as long as their start took, if that was longer). Ranks that don't
# are killed and started again.
_IDLE_S = 30.0
_DISK_ATTEMPTS, _DISK_AGAIN_S = 30, 10.0


async def end_parts(
    parts: Mapping[str, Any],
    learner: LearnerGroup | None,
    lost: Lost,
    notice: Callable[[WaitNotice], None] | None = None,
) -> tuple[LearnerGroup | None, dict[str, Any]]:
    """Kill all parts. The learner's ranks are kept if none of them is lost and all finish their calls in time (_IDLE_S).

    The results of these calls are dropped, and the restore that follows overwrites what they changed.
    Args:
        parts: actors by name.
        learner: the run's. After a start that failed, the parts may contain other ranks than its own, or none.
        notice: takes each notice of the wait for the ranks; None: the log.
    Returns: the learner if it is kept, and the parts that are left.
    """
    ranks = learner.ranks if learner is not None else {}
    may_stay = bool(ranks) and not lost.answer and all(parts.get(name) is rank and name not in lost.parts for name, rank in ranks.items())
    kill(*(part for name, part in parts.items() if not may_stay or name not in ranks))
    if not may_stay or learner is None:
        return None, {}
    answers = asyncio.gather(*(is_gone(rank) for rank in ranks.values()))
    try:
        limit_s = max(_IDLE_S, learner.start_took_s)
        found = await wait_for(answers, "calls under way <- learner ranks, which may stay", deadline_s=limit_s, notice=notice)
        are_idle = not any(gone is not False for gone in found)
    except DeadlineExceeded:
        are_idle = False
    if are_idle:
        return learner, dict(ranks)
    kill(*ranks.values())
    return None, {}


class Rollbacks:
    """Counts how often a run goes back to a checkpoint, and finds the checkpoint."""

    def __init__(self, folder: RunFolder, task: Mixture) -> None:
        self._folder, self._task = folder, task
        self._goal = -1
        # Rollbacks to the present checkpoint: (time in seconds, step, whether only the service was replaced, at that step).
        self._before: list[tuple[float, int, bool]] = []
        # Times of the latest replacements of the service.
        self._replaced: list[float] = []

    def allow(self, lost: Lost, error: BaseException, *, saved: int, step: int, is_replaced: bool = False) -> None:
        """Count one more rollback. Deaths that are hours apart, each at another step, are taken for chance.

        Args:
            error: by which it was found lost.
            saved: step of the newest checkpoint; 0: there is none.
            step: the last one that the run has finished.
            is_replaced: the service is replaced at that step, so that only deaths at the same step count. However many come at
                others, the run makes progress; `pause` sees to it that most of the time is not for replacements.
        Raises: the error itself, if nothing is lost; ActorLost after more than MOST_ROLLBACKS to one checkpoint.
        """
        if not lost:
            raise error
        now = time.monotonic()
        self._replaced = [at for at in self._replaced if now - at < ROLLBACKS_S] + [now] * is_replaced
        before = self._before if saved == self._goal else []
        self._goal, self._before = saved, [*before, (now, step, is_replaced)]
        times = sum(
            reached == step or (now - at < ROLLBACKS_S and not (is_replaced or was_replaced)) for at, reached, was_replaced in self._before
        )
        if times > MOST_ROLLBACKS:
            raise ActorLost(
                f"{lost}: the {times}th death after step {saved}, before there was another checkpoint: {_reason(error)}"
            ) from error

    async def pause(self, notify: Notify) -> None:
        """Wait before the service is replaced again, if that has happened often lately. Args: notify: takes level and sentence."""
        number = len(self._replaced)
        if number <= _FREE_REPLACEMENTS:
            return
        pause_s = doubled_pause_s(number - _FREE_REPLACEMENTS, 2.0, REPLACEMENT_PAUSE_S)
        notify("warning", f"the service was lost {number} times in {ROLLBACKS_S / 60:.0f} minutes: a new one in {pause_s:.0f} s")
        await asyncio.sleep(pause_s)

    async def found(self, model: Path, disk: DiskWriter, notify: Notify, by_disk: ByDisk) -> Found:
        """Find the newest readable checkpoint, and cut the run folder back to it, after all lines that wait for the disk.

        While the disk refuses, this is tried again every _DISK_AGAIN_S, _DISK_ATTEMPTS times in all.
        Args: notify: takes level and sentence.
        Raises: DataError after the last attempt; DeadlineExceeded if the disk hangs.
        """
        for attempt in itertools.count(1):
            try:
                # A rewind that nobody waits for any more, as the pool failed meanwhile, goes on in its thread: it ends first.
                await by_disk(disk.result(lambda: None), "rewind of the run's lines")
                whole = await self._newest(by_disk)
                back = disk.taken_back(partial(self._take_back, model, whole), lambda found: found[0].step)
                found: Found = await by_disk(back, "rewind of the run's lines")
                return found
            except DeadlineExceeded:  # an OSError, too, but a disk that hangs is not asked again
                raise
            except OSError as error:
                if attempt == _DISK_ATTEMPTS:
                    raise DataError(f"{self._folder.path}: the run can't go back to its last checkpoint: {error}") from error
                notify("warning", f"the run can't go back to its last checkpoint, and tries again in {_DISK_AGAIN_S:.0f} s: {error}")
                await asyncio.sleep(_DISK_AGAIN_S)
        raise AssertionError

    async def _newest(self, by_disk: ByDisk) -> ResumePoint | None:
        """Reads all of a checkpoint, while the thread of the disk writes on what happens. Each checkpoint has the deadline of one that is
        written. Returns: None if there is none."""
        clock = asyncio.get_running_loop().time
        began = [clock()]

        def newest() -> ResumePoint | None:
            self._folder.clear_partial_checkpoints(ignore_errors=True)  # one that was to be replaced as its save was given up is put back
            return newest_readable(self._folder, begins=lambda: began.append(clock())) if self._folder.checkpoints() else None

        reading = asyncio.to_thread(newest)
        whole: ResumePoint | None = await by_disk(reading, "files of the newest checkpoint", counts_from=lambda: began[-1])
        return whole

    def _take_back(self, model: Path, whole: ResumePoint | None) -> Found:
        """Remove all of later steps from the run folder. Blocks while the disk works.

        Args:
            model: that the run began with.
            whole: None: the run begins anew.
        Returns: where the run goes on from, and what to say about it, as (level, sentence).
        """
        if whole is None:
            self._folder.rewind(0)
            self._task.restore(None)
            return StartingPoint(model), []
        point, said = take_back(self._folder, whole, self._task)
        return StartingPoint(model, point.checkpoint, point.state), said


def what_is_lost(lost: Lost, error: BaseException) -> str:
    """One sentence for the run's events, before anything is waited for."""
    return f"lost: {lost} ({_reason(error)}); going back to the last checkpoint"


def what_is_done_again(point: StartingPoint, *, step: int, version: int, generation: int) -> str:
    """Event text, logged once the run is back at the checkpoint.

    Args:
        step, version: as far as the run had come.
        generation: the next one.
    """
    again = f"steps {point.step + 1} to {step} are done again with their diagnostics"
    steps = again if step > point.step else "no finished step is lost"
    withdrawn = f", weights v{point.version + 1} to v{version} are withdrawn" if version > point.version else ""
    return (
        f"The run goes back to {point}; {steps}, "
        f"what was under way is sampled again{withdrawn}; the engines stay up (generation {generation})"
    )


def what_goes_on(lost: Lost, error: BaseException, *, step: int) -> str:
    """One sentence for the run's events when the service is replaced. Args: step: the last finished one."""
    return (
        f"lost: {lost} ({_reason(error)}). A new one goes on after step {step}, with all groups that are under way. "
        "No step is lost. The diagnostics of the batches that it held are lost"
    )


def _reason(error: BaseException) -> str:
    return lost_answer(error) or str(error)
