"""The rollout pool: workers come, take work, fail and are replaced; it works with as many as are there.

States of a worker, and what moves it:

    STARTING   created; Ray may still be looking for a node that offers the rollout resource
    JOINED     its engine is up; the weight sync owns its version from here
    GONE       its process or its engine died, or it took no weights; a replacement is started, its groups go to other workers

A joined worker takes work while it holds a receipt for the published version; how much of it, dispatch.py says. One whose engine says that
it is dirty (a weight update failed half-way) stays joined, and works again after a full sync.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import ray

from actors.carriers import ActorInfo, GroupSummary, Ticket, WorkerLoad
from actors.cluster import kill, lower_priority
from actors.config import DeadlinesConfig
from actors.dispatch import Questions, WaitingWork
from actors.payloads import sample_again
from actors.rollout_worker import RolloutWorker, WorkerSettings
from actors.supervision import USUAL_START, counted, unwrapped, wait_for
from actors.trajectory_queue import ANSWER_S
from actors.weight_sync import SyncTarget, WeightSync
from correction.errors import DeadlineExceeded, EngineDirty, EngineError, EvenkeelError
from rollout.config import AnswerSampling
from rollout.trajectory import Prompt, Trajectory

log = logging.getLogger("evenkeel.pool")
_MAX_REPLACEMENTS = 10
_MAX_RESYNCS = 3
"""Full syncs that a worker gets for an engine that says it is dirty, before it is replaced; counted anew with each finished group."""
_SCORING_S = 300.0
_LOAD_S = 5.0
_ANSWERS = 32
"""Of an evaluation, in one call to a worker."""


class WorkerState(StrEnum):
    STARTING = "starting"
    JOINED = "joined"
    GONE = "gone"


@dataclass(slots=True)
class WorkerHandle:
    """One rollout worker, as the pool sees it."""

    name: str
    actor: Any
    sync: SyncTarget
    state: WorkerState = WorkerState.STARTING
    groups: set[int] = field(default_factory=set)
    """Groups that it is sampling."""
    questions: int = 0
    """Answers to questions of evaluations that it is sampling."""
    resyncs: int = 0
    """Full syncs asked for since its last finished group."""
    info: ActorInfo | None = None


class PoolObserver(Protocol):
    """Is told what happens in the pool."""

    def joined(self, info: ActorInfo) -> None: ...

    def left(self, key: str) -> None:
        """key: as ActorInfo.key."""

    def group_finished(self, summary: GroupSummary) -> None: ...

    def lost(self, tickets: Sequence[Ticket]) -> None: ...

    def event(self, level: str, text: str) -> None: ...


class RolloutPool:
    """Starts workers, gives them groups, replaces those that fail. One event loop uses it."""

    def __init__(self, settings: WorkerSettings, deadlines: DeadlinesConfig, queue: Any, observer: PoolObserver) -> None:
        self._settings, self._config, self._deadlines = settings, settings.rollout, deadlines
        self._queue, self._observer = queue, observer
        self._sync: WeightSync | None = None
        self._work = WaitingWork(self._config.slots_per_worker, self._config.sampling.samples_per_group)
        self._workers: dict[str, WorkerHandle] = {}
        self._born = 0
        self._replaced = 0
        self._is_stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()
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

    async def first_worker(self) -> None:
        """Wait until one engine is up. Raises: the error of its start."""
        await wait_for(
            self._until(lambda: any(True for _ in self._joined())),
            "the first rollout worker",
            deadline_s=self._deadlines.start_s,
            notice=log.debug,  # each worker's own start gives notice
        )

    def versions(self) -> dict[str, int]:
        """Weight version of each worker that has joined, by its last receipt; -1 before the first, and for one that is dirty."""
        return {worker.name: worker.sync.version for worker in self._joined()}

    def counts(self) -> tuple[int, int]:
        """(workers that have joined, of these with a receipt for the published version)."""
        joined = list(self._joined())
        return len(joined), sum(self._is_current(w) for w in joined)

    async def raise_on_failure(self) -> None:
        """Never returns; raises when the pool can't go on."""
        await asyncio.shield(self._failure)

    def _start_worker(self) -> None:
        name = str(self._born)
        self._born += 1
        engine = self._config.engine
        on_gpu = engine.resolved_device == "cuda"
        actor = (
            ray.remote(RolloutWorker)
            .options(
                num_cpus=1,
                num_gpus=1 if on_gpu else 0,
                resources={self._settings.resource: 1},
                max_concurrency=4096,
                max_restarts=0,  # a restarted engine has no weights; the pool makes a new worker instead
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(engine.threads)}},
            )
            .remote(name, self._settings, self._queue)
        )
        lower_priority(actor)
        worker = WorkerHandle(name, actor, SyncTarget(name, actor))
        self._workers[name] = worker
        self._spawn(self._bring_up(worker))

    async def _bring_up(self, worker: WorkerHandle) -> None:
        try:
            info = await wait_for(
                worker.actor.start.remote(0),
                f"start of rollout worker {worker.name} (a node with the resource {self._settings.resource!r}, then its engine)",
                deadline_s=self._deadlines.start_s,
                notice_s=self._deadlines.notice_s,
                usual_s=USUAL_START * self._deadlines.start_s,
            )
        except (EvenkeelError, ray.exceptions.RayError) as error:
            self._lost(worker, f"did not start: {unwrapped(error)}", unwrapped(error))
            return
        worker.state, worker.info = WorkerState.JOINED, info
        self._observer.joined(info)
        if self._sync is not None:
            self._sync.join(worker.sync)
        self.wake()

    def _lost(self, worker: WorkerHandle, reason: str, error: BaseException | None = None) -> None:
        """Give a worker up; start another in its place, unless that has been tried too often."""
        if worker.state is WorkerState.GONE or self._is_stopping:
            return
        never_worked = worker.state is WorkerState.STARTING
        worker.state = WorkerState.GONE
        del self._workers[worker.name]
        if self._sync is not None:
            self._sync.leave(worker.name)
        self._observer.left(f"rollout-{worker.name}")
        kill(worker.actor)
        groups = counted(len(worker.groups), "group")
        self._observer.event("warning", f"rollout worker {worker.name} is gone: {reason}; others take its {groups}")
        is_waiting_for_a_node = never_worked and isinstance(error, DeadlineExceeded) and any(True for _ in self._joined())
        self._replaced += not is_waiting_for_a_node
        is_hopeless = never_worked and not self._workers
        if is_hopeless or self._replaced > _MAX_REPLACEMENTS:
            if not self._failure.done():
                cause = error if isinstance(error, EvenkeelError) else EngineError(f"rollout worker {worker.name} {reason}")
                self._failure.set_exception(cause)
        else:
            self._start_worker()
        self.wake()

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
        self._spawn(sample_again(self._queue, self._take_again))
        try:
            self._work.add_groups(unfinished)
            self.wake()
            await self._admit(prompts, on_admitted)
        finally:
            self._work.is_fed = False

    async def _admit(self, prompts: Iterator[Prompt], on_admitted: Callable[[list[Ticket]], None]) -> None:
        held: list[Prompt] = []
        places = 0
        while True:
            call = self._queue.wait_for_places.remote(self._deadlines.notice_s)  # no place for long is no fault; no answer is one
            limit_s = self._deadlines.notice_s + ANSWER_S
            waiting = asyncio.ensure_future(wait_for(call, "free places <- trajectory queue", deadline_s=limit_s, notice_s=ANSWER_S))
            while len(held) < places and not waiting.done():  # as many as last time, made while the engines are at work
                held.append(next(prompts))
                await asyncio.sleep(0)
            places = await waiting
            while len(held) < places:
                held.append(next(prompts))
            if not places:
                continue
            call = self._queue.admit.remote(held[:places])
            tickets = await wait_for(call, f"admission of {places} groups <- trajectory queue", deadline_s=ANSWER_S)
            held = held[len(tickets) :]
            on_admitted(tickets)
            self._work.add_groups(tickets)
            self.wake()

    def _take_again(self, tickets: Sequence[Ticket]) -> None:
        self._observer.lost(tickets)
        self._work.add_groups(tickets)
        self.wake()

    async def _sample(self, worker: WorkerHandle, tickets: Sequence[Ticket]) -> None:
        """Have a worker sample groups that it took; if it fails they wait again, and the queue takes each once."""
        ids = [ticket.group_id for ticket in tickets]
        try:
            call = worker.actor.generate_groups.remote(tickets)
            for summary in await self._worked(call, f"groups {ids} <- rollout worker {worker.name}"):
                self._observer.group_finished(summary)
            worker.resyncs = 0
            self._replaced = 0  # the limit is on losses without any work done, not on those of a long life on nodes that come and go
        except (EngineError, DeadlineExceeded) as error:
            self._engine_failed(worker, error)
            self._work.add_groups(tickets)
        finally:
            worker.groups.difference_update(ids)
        self.wake()

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
            if not part.answers.done():
                part.answers.set_result(answers)
        except (EngineError, DeadlineExceeded) as error:
            self._engine_failed(worker, error)
            self._work.add_questions([part])
        except Exception as error:  # is the evaluation's, which need not end the run
            if not part.answers.done():
                part.answers.set_exception(error)
        finally:
            worker.questions -= part.size
        self.wake()

    async def _worked(self, call: Any, what: str) -> Any:
        """The result of a call to a worker. The engine's own deadline comes first, unless its process hangs."""
        limit_s = self._config.engine.deadlines.generate_s + _SCORING_S
        return await wait_for(call, what, deadline_s=limit_s, notice_s=limit_s)

    async def loads(self) -> dict[str, WorkerLoad]:
        """Running totals, by name, of the workers that answer within a few seconds."""

        async def ask(worker: WorkerHandle) -> WorkerLoad | None:
            try:
                return await wait_for(worker.actor.load.remote(), f"load <- rollout worker {worker.name}", deadline_s=_LOAD_S)
            except (EvenkeelError, ray.exceptions.RayError):
                return None

        workers = list(self._joined())
        answers = await asyncio.gather(*(ask(w) for w in workers))
        return {worker.name: load for worker, load in zip(workers, answers, strict=True) if load is not None}

    async def _watch(self) -> None:
        """Say so when work waits and no worker may take it. Raises: DeadlineExceeded when that lasts too long."""
        while True:
            await self._until(self._is_stuck)
            await wait_for(
                self._until(lambda: not self._is_stuck()),
                f"{self._work} <- a rollout worker with weights v{self._sync.version if self._sync else -1}",
                deadline_s=self._deadlines.start_s + 3 * self._deadlines.sync_s,  # of a new engine and its three attempts at a sync
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
        stopping = [w.actor.stop.remote() for w in self._joined()]
        if stopping:
            await asyncio.to_thread(ray.wait, stopping, num_returns=len(stopping), timeout=20.0)
        for worker in self._workers.values():
            kill(worker.actor)
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
            self._spawn(self._ask(worker, work) if isinstance(work, Questions) else self._sample(worker, work))

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self._failure.done():
                self._failure.result()
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 0.5)
            except TimeoutError:
                continue

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self.note_end)

    def note_end(self, task: asyncio.Task[Any]) -> None:
        """A task of the pool has ended; its error, if any, is the pool's."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)
