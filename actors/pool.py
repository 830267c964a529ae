"""The rollout pool: workers come, take work, fail and are replaced; it works with as many as are there.

States of a worker, and what moves it:

    STARTING   created; Ray may still be looking for a node that offers the rollout resource
    JOINED     its engine is up; the weight sync owns its version from here
    GONE       its process or its engine died, or it took no weights; a replacement is started, its groups go to other workers

A joined worker takes groups while it holds a receipt for the published version. One whose engine says that it is dirty (a weight update
failed half-way) stays joined, and works again after a full sync.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import ray

from actors.actor_info import ActorInfo
from actors.cluster import give_way
from actors.rollout_worker import GroupSummary, RolloutWorker, WorkerLoad
from actors.supervision import USUAL_START, counted, unwrapped, wait_for
from actors.trajectory_queue import ANSWER_S, Ticket
from actors.weight_sync import SyncTarget, WeightSync
from correction.errors import DeadlineExceeded, EngineDirty, EngineError, EvenkeelError
from rollout.config import RolloutConfig
from rollout.trajectory import Prompt, Trajectory

log = logging.getLogger("evenkeel.pool")
_MAX_REPLACEMENTS = 10
_MAX_RESYNCS = 3
"""Full syncs that a worker gets for an engine that says it is dirty, before it is replaced; counted anew with each finished group."""
_SCORING_S = 300.0
_LOAD_S = 5.0
_HANDFUL = 4
"""Groups in one call to a worker, at most."""


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
    """Questions of evaluations that it is answering."""
    resyncs: int = 0
    """Full syncs asked for since its last finished group."""
    info: ActorInfo | None = None


class RolloutPool:
    """Starts workers, gives them groups, replaces those that fail. One event loop uses it."""

    def __init__(
        self,
        config: RolloutConfig,
        model: Path,
        queue: Any,
        sample_prompt: Prompt,
        *,
        resource: str,
        bind: str,
        start_s: float,
        worker_s: float,
        notice_s: float,
        seed: int = 0,
        topk: int = 0,
        on_joined: Callable[[ActorInfo], None],
        on_left: Callable[[str], None],
        on_finished: Callable[[GroupSummary], None],
        on_event: Callable[[str, str], None],
    ) -> None:
        """
        Args:
            start_s: a worker's engine has to be up by then.
            worker_s: a group or an evaluation may wait so long for a worker with the published weights.
            notice_s: between notices of what is waited for.
            seed: of the run's samples.
        """
        self._config, self._model, self._queue, self._sample_prompt = config, model, queue, sample_prompt
        self._resource, self._bind, self._seed = resource, bind, seed
        self._start_s, self._worker_s, self._notice_s, self._topk = start_s, worker_s, notice_s, topk
        self._on_joined, self._on_left, self._on_finished, self._on_event = on_joined, on_left, on_finished, on_event
        self._sync: WeightSync | None = None
        self._workers: dict[str, WorkerHandle] = {}
        self._born = 0
        self._replaced = 0
        self._noticed = -notice_s
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
            deadline_s=self._start_s,
            notice=log.debug,  # each worker's own start gives notice
        )

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
                resources={self._resource: 1},
                max_concurrency=4096,
                max_restarts=0,  # a restarted engine has no weights; the pool makes a new worker instead
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(engine.threads)}},
            )
            .remote(name, self._config, self._queue, bind=self._bind, seed=self._seed, topk=self._topk)
        )
        give_way(actor)
        worker = WorkerHandle(name, actor, SyncTarget(name, actor))
        self._workers[name] = worker
        self._spawn(self._bring_up(worker))

    async def _bring_up(self, worker: WorkerHandle) -> None:
        try:
            info = await wait_for(
                worker.actor.start.remote(self._model, 0, self._sample_prompt),
                f"start of rollout worker {worker.name} (a node with the resource {self._resource!r}, then its engine)",
                deadline_s=self._start_s,
                notice_s=self._notice_s,
                usual_s=USUAL_START * self._start_s,
            )
        except (EvenkeelError, ray.exceptions.RayError) as error:
            self._lost(worker, f"did not start: {unwrapped(error)}", unwrapped(error))
            return
        worker.state, worker.info = WorkerState.JOINED, info
        self._on_joined(info)
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
        self._on_left(worker.name)
        _kill(worker.actor)
        groups = counted(len(worker.groups), "group")
        self._on_event("warning", f"rollout worker {worker.name} is gone: {reason}; others take its {groups}")
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
            on_admitted: told of tickets before they are handed out.
        """
        self._hand_out(unfinished)
        held: list[Prompt] = []
        places = 0
        while True:
            call = self._queue.wait_for_places.remote(self._notice_s)  # no place for long is no fault; no answer is one
            waiting = asyncio.ensure_future(
                wait_for(call, "free places <- trajectory queue", deadline_s=self._notice_s + ANSWER_S, notice_s=ANSWER_S)
            )
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
            self._hand_out(tickets)

    def _hand_out(self, tickets: Sequence[Ticket]) -> None:
        """A call for each handful of groups: one for each group would keep the driver and the workers busy with calls."""
        size = max(1, min(_HANDFUL, len(tickets) // (8 * max(1, len(self._workers)))))
        for i in range(0, len(tickets), size):
            self._spawn(self._sample(tickets[i : i + size]))

    async def _sample(self, tickets: Sequence[Ticket]) -> None:
        """Have groups sampled, on another worker if the first one fails; the queue takes each once."""
        limit_s = self._config.engine.deadlines.generate_s + _SCORING_S  # the engine's own deadline comes first, unless its process hangs
        ids = [ticket.group_id for ticket in tickets]
        while True:
            worker = await self._current_worker(f"groups {ids}")
            worker.groups.update(ids)
            try:
                what = f"groups {ids} <- rollout worker {worker.name}"
                call = worker.actor.generate_groups.remote(tickets)
                for summary in await wait_for(call, what, deadline_s=limit_s, notice_s=limit_s):
                    self._on_finished(summary)
                worker.resyncs = 0
                self._replaced = 0  # the limit is on losses without any work done, not on those of a long life on nodes that come and go
                return
            except (EngineError, DeadlineExceeded) as error:
                self._engine_failed(worker, error)
            finally:
                worker.groups.difference_update(ids)
                self.wake()

    async def answer(self, prompts: Sequence[Prompt], temperature: float) -> list[Trajectory]:
        """One scored answer to each prompt, spread over the workers."""

        limit_s = self._config.engine.deadlines.generate_s + _SCORING_S

        async def ask(part: Sequence[Prompt]) -> list[Trajectory]:
            while True:
                worker = await self._current_worker(f"{len(part)} evaluation answers")
                what = f"evaluation answers <- rollout worker {worker.name}"
                worker.questions += len(part)
                try:
                    call = worker.actor.answer.remote(list(part), temperature)
                    answers: list[Trajectory] = await wait_for(call, what, deadline_s=limit_s, notice_s=limit_s)
                    return answers
                except (EngineError, DeadlineExceeded) as error:
                    self._engine_failed(worker, error)
                finally:
                    worker.questions -= len(part)

        size = 32
        parts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        return [t for answers in await asyncio.gather(*(ask(p) for p in parts)) for t in answers]

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

    async def _current_worker(self, what: str) -> WorkerHandle:
        """The least loaded worker that holds the published weights; waits for one. Raises: DeadlineExceeded."""
        while not (current := [w for w in self._joined() if self._is_current(w)]):
            await wait_for(
                self._until(lambda: self.counts()[1] > 0),
                f"{what} <- a rollout worker with weights v{self._sync.version if self._sync else -1}",
                deadline_s=self._worker_s,
                notice_s=self._notice_s,
                notice=self._note_waiting,
                detail=self._missing,
            )
        return min(current, key=self._requests)

    def _note_waiting(self, text: str) -> None:
        """Many groups wait for the same worker; one of them says so."""
        now = time.monotonic()
        if now - self._noticed >= 0.9 * self._notice_s:
            self._noticed = now
            self._on_event("warning", text)

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
            _kill(worker.actor)
        self._workers.clear()

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _joined(self) -> Iterator[WorkerHandle]:
        return (w for w in list(self._workers.values()) if w.state is WorkerState.JOINED)

    def _is_current(self, worker: WorkerHandle) -> bool:
        return self._sync is not None and worker.sync.version >= 0 and worker.sync.version == self._sync.version

    def _requests(self, worker: WorkerHandle) -> int:
        """Trajectories that a worker is sampling."""
        return len(worker.groups) * self._config.sampling.samples_per_group + worker.questions

    def wake(self) -> None:
        """Something that waiting groups look at has changed: a worker, or a receipt."""
        self._changed.set()

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


def _kill(actor: Any) -> None:
    """Kill an actor that may be gone already."""
    try:
        ray.kill(actor)
    except Exception as error:  # nothing to kill is what we wanted
        log.debug("kill: %s", error)
