"""The rollout pool: workers come, take work, fail and are replaced; it works with as many as are there. (A worker's life: workers.py. What
became of it and of groups: faults.py.)

A joined worker takes work while it holds a receipt for the published version; how much of it, dispatch.py says. One whose engine says that
it is dirty (a weight update failed half-way) stays joined, and works again after a full sync.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ray.exceptions import RayError

from actors import workers
from actors.admission import PatientQueue
from actors.carriers import FAILED, LOST, GroupFailure, GroupSummary, Ticket, WorkerLoad
from actors.config import DeadlinesConfig
from actors.deadlines import group_s
from actors.dispatch import Questions, WaitingWork
from actors.faults import STRIKES, GroupBook, LossBook
from actors.rollout_worker import WorkerSettings
from actors.supervision import counted, unwrapped, wait_for
from actors.trajectory_queue import ANSWER_S
from actors.weight_sync import SyncTarget, WeightSync
from actors.workers import PoolObserver, WorkerHandle, WorkerState
from correction.errors import DeadlineExceeded, EngineDirty, EngineError, EvenkeelError, LateError
from rollout.config import AnswerSampling
from rollout.trajectory import Prompt, Trajectory

log = logging.getLogger("evenkeel.pool")
_MAX_RESYNCS = 3
"""Full syncs that a worker gets for an engine that says it is dirty, before it is replaced; counted anew with each finished group."""
_CALL = "a worker's call"
_ANSWERS = 32
"""Of an evaluation, in one call to a worker."""


class RolloutPool:
    """Starts workers, gives them groups, replaces those that fail. One event loop uses it."""

    def __init__(self, settings: WorkerSettings, deadlines: DeadlinesConfig, queue: Any, observer: PoolObserver) -> None:
        self._settings, self._config, self._deadlines = settings, settings.rollout, deadlines
        self._queue, self._observer = PatientQueue(queue, late=lambda text: observer.event("warning", text)), observer
        self._sync: WeightSync | None = None
        self._work = WaitingWork(self._config.slots_per_worker, self._config.sampling.samples_per_group)
        self._workers: dict[str, WorkerHandle] = {}
        self._born = 0
        self._losses, self._groups = LossBook(), GroupBook()
        self._lost_with: dict[Questions, int] = {}
        """Engines, by the part of an evaluation that they were asked."""
        self._has_begun = False
        """A worker has joined."""
        self._progressed = self._attended = asyncio.get_running_loop().time()
        self._is_stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._generation = 0
        self._changed = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure.add_done_callback(lambda failure: failure.cancelled() or failure.exception())  # it may come when nobody listens

    # -- workers -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask for all workers; they join as they come."""
        for _ in range(self._config.workers):
            self._start_worker()
        self._spawn(self._watch())

    def follow(self, sync: WeightSync) -> None:
        """From now on joined workers get their weights through `sync`."""
        self._sync = sync
        for worker in self._joined():
            sync.join(worker.sync)

    async def withdraw(self) -> None:
        """Take all work back, and all weights: the workers go on to nothing, until `serve`, `follow` and `feed`."""
        self._sync = None
        calls = [task for task in self._tasks if task.get_name() == _CALL]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)  # they settle what they have counted
        self._work = WaitingWork(self._config.slots_per_worker, self._config.sampling.samples_per_group)
        self._groups, self._lost_with = GroupBook(), {}  # the same numbers come again

    def serve(self, queue: Any, generation: int) -> None:
        """Finished groups go to another queue from now on; what the workers have under way is given up."""
        self._queue, self._generation = self._queue.replaced_by(queue), generation
        self._progressed = self._now()
        for worker in self._workers.values():
            worker.follow(queue, generation)

    async def first_worker(self) -> None:
        """Wait until one engine is up; each worker's own start gives notice. Raises: the error of its start."""
        has_one = self._until(lambda: any(True for _ in self._joined()))
        await wait_for(has_one, "the first rollout worker", deadline_s=self._no_workers_s, notice=log.debug)

    def versions(self) -> dict[str, int]:
        """Weight version of each worker that has joined, by its last receipt; -1 before the first, and for one that is dirty."""
        return {worker.name: worker.sync.version for worker in self._joined()}

    def counts(self) -> tuple[int, int]:
        """(workers that have joined, of these with a receipt for the published version)."""
        joined = list(self._joined())
        return len(joined), sum(self._is_current(w) for w in joined)

    def attended_since(self) -> float:
        """Time of the event loop, seconds, until which no worker could work; now, if none can."""
        if not any(self._is_current(w) for w in self._joined()):
            self._attended = self._now()
        return self._attended

    def last_progress(self) -> float:
        """Time of the event loop, seconds, when a group was last finished or a worker came or was lost; now, if none can work."""
        return max(self._progressed, self.attended_since())

    def is_moving(self) -> bool:
        """The last progress is not so long ago that a batch is late."""
        return self._now() - self.last_progress() < self._deadlines.batch_s

    async def raise_on_failure(self) -> None:
        """Never returns; raises when the pool can't go on."""
        await asyncio.shield(self._failure)

    @property
    def _no_workers_s(self) -> float:
        return self._deadlines.no_workers_s or math.inf

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _start_worker(self) -> None:
        name = str(self._born)
        self._born += 1
        worker = workers.create(name, self._settings, self._queue.actor, self._losses.avoided(self._now()))
        worker.follow(self._queue.actor, self._generation)
        self._workers[name] = worker
        self._spawn(self._bring_up(worker))

    async def _replace(self, pause_s: float) -> None:
        if pause_s:
            self._observer.event("warning", f"workers are lost one after the other: the next replacement starts in {pause_s:.0f} s")
            await asyncio.sleep(pause_s)
        self._start_worker()

    async def _bring_up(self, worker: WorkerHandle) -> None:
        try:
            info = await workers.started(worker, self._settings, self._deadlines)
        except (EvenkeelError, RayError) as error:
            self._lost(worker, f"did not start: {unwrapped(error)}", unwrapped(error))
            return
        worker.state, worker.info = WorkerState.JOINED, info
        self._has_begun, self._progressed = True, self._now()
        self._observer.joined(info)
        self._spawn(self._follow_heartbeat(worker))
        if self._sync is not None:
            self._sync.join(worker.sync)
        self.wake()

    def _lost(self, worker: WorkerHandle, reason: str, error: BaseException | None = None) -> None:
        """Give a worker up; start another in its place, unless that has been in vain for too long."""
        if worker.state is WorkerState.GONE or self._is_stopping:
            return
        never_worked = worker.state is WorkerState.STARTING
        worker.state = WorkerState.GONE
        del self._workers[worker.name]
        if self._sync is not None:
            self._sync.leave(worker.name)
        self._observer.left(f"rollout-{worker.name}")
        workers.kill(worker.actor)
        groups = counted(len(worker.groups), "group")
        self._observer.event("warning", f"rollout worker {worker.name} is gone: {reason}; others take its {groups}")
        self._progressed = self._now()
        self._losses.lost(self._now(), worker.info.node if worker.info else "")
        if never_worked and not self._has_begun and not self._workers:
            self._fail(error if isinstance(error, EvenkeelError) else EngineError(f"rollout worker {worker.name} {reason}"))
        else:
            try:
                self._losses.check(self._config.workers, f"rollout worker {worker.name}: {reason}")
                self._spawn(self._replace(self._losses.pause_s(self._config.workers)))
            except EngineError as hopeless:
                self._fail(hopeless)
        self.wake()

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _follow_heartbeat(self, worker: WorkerHandle) -> None:
        self._lost(worker, await workers.until_lost(worker, self._config.engine.deadlines.heartbeat_s))

    def _engine_failed(self, worker: WorkerHandle, error: EvenkeelError) -> None:
        """A call to a worker failed: a dirty engine is synced again, anything else means that the worker is lost."""
        if not isinstance(error, EngineDirty):
            self._lost(worker, str(error))
        elif self._sync is not None and self._is_current(worker):  # if not, the sync knows of its failure already, and is at it
            worker.resyncs += 1
            if worker.resyncs > _MAX_RESYNCS:
                self._lost(worker, f"dirty again after {_MAX_RESYNCS} full syncs: {error}")
                return
            self._sync.resync(worker.sync, str(error))

    def report_unsyncable(self, target: SyncTarget, reason: str) -> None:
        """The weight sync gave an engine up."""
        worker = self._workers.get(target.name)
        if worker is not None:
            self._lost(worker, reason)

    # -- work --------------------------------------------------------------------------------------------------------

    async def feed(self, prompts: Iterator[Prompt], unfinished: Sequence[Ticket], on_admitted: Callable[[list[Ticket]], None]) -> None:
        """Admit prompts as places become free and hand them to workers, until cancelled.

        Args:
            unfinished: tickets of a restored queue, sampled first.
            on_admitted: told of tickets before workers get them.
        """
        self._work.is_fed = True
        self._spawn(self._queue.sample_again(self._observer.lost, self._work.add_groups, self.wake))
        try:
            self._work.add_groups(unfinished)
            self.wake()
            async for tickets in self._queue.admit(prompts, self._deadlines.notice_s):
                on_admitted(tickets)
                self._work.add_groups(tickets)
                self.wake()
        finally:
            self._work.is_fed = False

    async def _sample(self, worker: WorkerHandle, tickets: Sequence[Ticket]) -> None:
        """Have a worker sample groups that it took; if it fails they wait again, and the queue takes each once."""
        ids = [ticket.group_id for ticket in tickets]
        lived = False
        try:
            if self._groups.were_lost(ids):  # on a worker that died together with others, without it
                await wait_for(worker.actor.load.remote(), f"sign of life <- rollout worker {worker.name}", deadline_s=ANSWER_S)
            lived = True
            call = worker.actor.generate_groups.remote(tickets)
            outcomes = await self._worked(call, f"groups {ids} <- rollout worker {worker.name}")
        except EngineError as error:
            self._engine_failed(worker, error)
            guilty = self._groups.lost(ids, worker.name) if lived and not isinstance(error, EngineDirty) else []
            for ticket in tickets:
                if ticket.group_id in guilty:
                    self._discard(ticket, LOST, f"a third engine was lost while it was sampled: {error}")
                elif self._groups.is_suspect(ticket.group_id):
                    self._work.suspect(ticket.group_id)
            self._work.add_groups([ticket for ticket in tickets if ticket.group_id not in guilty])
        except (DeadlineExceeded, LateError) as error:  # the worker answers its heartbeat: it waits for others
            self._observer.event("warning", f"others sample groups {ids} again, worker {worker.name} goes on: {error}")
            self._work.add_groups(tickets)
        else:
            self._take(worker, tickets, outcomes)
        finally:
            worker.groups.difference_update(ids)
        self.wake()

    def _take(self, worker: WorkerHandle, tickets: Sequence[Ticket], outcomes: Sequence[GroupSummary | GroupFailure]) -> None:
        """What became of the groups of a call."""
        for ticket, outcome in zip(tickets, outcomes, strict=True):
            if not isinstance(outcome, GroupFailure):
                worker.resyncs, self._progressed = 0, self._now()
                self._losses.worked()
                self._groups.finished(ticket.group_id, worker.name)
                self._work.forget(ticket.group_id)
                self._observer.group_finished(outcome)
            elif not outcome.is_final and self._groups.failed(ticket.group_id, worker.name):
                self._observer.event("warning", f"group {ticket.group_id} is sampled again: {outcome.reason}")
                self._work.add_failed(ticket, worker)
            else:
                self._discard(ticket, FAILED, outcome.reason)
        if self._groups.is_sick(worker.name):
            self._engine_failed(worker, EngineDirty("its last requests have all failed, of different groups: it gets all weights anew"))

    def _discard(self, ticket: Ticket, reason: str, why: str) -> None:
        self._observer.event("warning", f"group {ticket.group_id} ({ticket.prompt.prompt_id}) is discarded, {reason}: {why}")
        self._work.forget(ticket.group_id)
        self._spawn(self._queue.give_up(ticket.group_id, reason))
        self._groups.discarded(ticket.group_id, why)

    async def answer(self, prompts: Sequence[Prompt], how: AnswerSampling) -> list[tuple[Trajectory, ...]]:
        """Scored answers to each prompt, spread over the workers."""
        loop = asyncio.get_running_loop()
        size = max(1, _ANSWERS // how.samples)
        parts = [Questions(prompts[i : i + size], how, loop.create_future()) for i in range(0, len(prompts), size)]
        self._work.add_questions(parts)
        self.wake()
        try:
            return [t for answers in await asyncio.gather(*(part.answers for part in parts)) for t in answers]
        finally:
            for part in parts:
                part.answers.cancel()  # those that nobody waits for any more

    async def _ask(self, worker: WorkerHandle, part: Questions) -> None:
        """Have a worker answer questions that it took; if it fails they wait again."""
        try:
            call = worker.actor.answer.remote(list(part.prompts), part.how)
            answers = await self._worked(call, f"evaluation answers <- rollout worker {worker.name}")
            self._progressed = self._now()
            if not part.answers.done():
                part.answers.set_result(answers)
        except EngineError as error:
            self._engine_failed(worker, error)
            if self._is_too_dangerous(part, error) and not part.answers.done():
                part.answers.set_exception(error)
            self._work.add_questions([part])
        except Exception as error:  # is the evaluation's, which need not end the run
            if not part.answers.done():
                part.answers.set_exception(error)
        finally:
            worker.questions -= part.size
        self.wake()

    def _is_too_dangerous(self, part: Questions, error: EngineError) -> bool:
        """So many engines were lost with these questions that the evaluation is ended rather than another one."""
        if not isinstance(error, EngineDirty):
            self._lost_with[part] = self._lost_with.get(part, 0) + 1
        return self._lost_with.get(part, 0) >= STRIKES

    async def _worked(self, call: Any, what: str) -> Any:
        """The result of a call to a worker. Requests and rewards have deadlines of their own, which come first."""
        limit_s = group_s(self._config)
        return await wait_for(call, what, deadline_s=limit_s, notice_s=limit_s)

    async def loads(self) -> dict[str, WorkerLoad]:
        """Running totals, by name, of the workers that answer within a few seconds."""
        return await workers.loads(list(self._joined()))

    async def _watch(self) -> None:
        """Say so when work waits and no worker may take it. Raises: DeadlineExceeded when that lasts longer than is configured."""
        while True:
            await self._until(self._is_stuck)
            await wait_for(
                self._until(lambda: not self._is_stuck()),
                f"{self._work} <- a rollout worker with weights v{self._sync.version if self._sync else -1}",
                deadline_s=self._no_workers_s,
                notice_s=self._deadlines.notice_s,
                notice=lambda text: self._observer.event("warning", text),
                detail=self._missing,
            )

    def _is_stuck(self) -> bool:
        return bool(self._work) and not any(self._is_current(w) for w in self._joined())

    async def _missing(self) -> str:
        joined, current = self.counts()
        return f"{counted(joined, 'worker')} joined, {current} of them with these weights, {len(self._workers) - joined} starting"

    # -- end ---------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End all workers, engines first."""
        self._is_stopping = True
        for task in list(self._tasks):
            task.cancel()
        await workers.end(list(self._workers.values()))
        self._workers.clear()

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _joined(self) -> Iterator[WorkerHandle]:
        return (w for w in list(self._workers.values()) if w.state is WorkerState.JOINED)

    def _is_current(self, worker: WorkerHandle) -> bool:
        return self._sync is not None and worker.sync.version >= 0 and worker.sync.version == self._sync.version

    def wake(self) -> None:
        """Something has changed that waiting work looks at: a worker, a receipt, or the work itself."""
        self._changed.set()
        if self._is_stopping:
            return
        current = [w for w in self._joined() if self._is_current(w)]
        soon = [w for w in self._joined() if w.sync.version >= 0]  # without one that is new or dirty: a full sync takes its time
        for worker, work in self._work.take(current, soon):
            self._spawn(self._ask(worker, work) if isinstance(work, Questions) else self._sample(worker, work), name=_CALL)

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self._failure.done():
                self._failure.result()
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 0.5)
            except TimeoutError:
                continue

    def _spawn(self, work: Any, *, name: str | None = None) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self.note_end)

    def note_end(self, task: asyncio.Task[Any]) -> None:
        """A task of the pool has ended; its error, if any, is the pool's."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)
