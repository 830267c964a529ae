"""The rollout pool: workers come, take work, fail and are replaced; it works with as many as are there.

States of a worker, and what moves it:

    STARTING   created; Ray may still be looking for a node that offers the rollout resource
    JOINED     its engine is up; the weight sync owns its version from here
    GONE       its process died or it took no weights; a replacement is started, its groups go to other workers

A joined worker takes groups while it holds a receipt for the published version.
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
from actors.rollout_worker import GroupSummary, RolloutWorker, WorkerLoad
from actors.supervision import unwrapped, wait_for
from actors.trajectory_queue import Ticket
from actors.weight_sync import SyncTarget, WeightSync
from correction.errors import DeadlineExceeded, EngineError, EvenkeelError
from rollout.config import RolloutConfig
from rollout.trajectory import Prompt, Trajectory

log = logging.getLogger("evenkeel.pool")
_MAX_REPLACEMENTS = 10
_SCORING_S = 300.0


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
        notice_s: float,
        topk: int = 0,
        on_joined: Callable[[ActorInfo], None],
        on_left: Callable[[str], None],
        on_finished: Callable[[GroupSummary], None],
        on_event: Callable[[str, str], None],
    ) -> None:
        self._config, self._model, self._queue, self._sample_prompt = config, model, queue, sample_prompt
        self._resource, self._bind, self._start_s, self._notice_s, self._topk = resource, bind, start_s, notice_s, topk
        self._on_joined, self._on_left, self._on_finished, self._on_event = on_joined, on_left, on_finished, on_event
        self._sync: WeightSync | None = None
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
            notice_s=self._notice_s,
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
            .remote(name, self._config, self._queue, bind=self._bind, topk=self._topk)
        )
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
            )
        except (EvenkeelError, ray.exceptions.RayError) as error:
            self._lost(worker, f"did not start: {unwrapped(error)}", unwrapped(error))
            return
        worker.state, worker.info = WorkerState.JOINED, info
        self._on_joined(info)
        if self._sync is not None:
            self._sync.join(worker.sync)
        self._wake()

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
        self._spawn(_kill(worker.actor))
        self._on_event("warning", f"rollout worker {worker.name} is gone: {reason}; its {len(worker.groups)} groups go to others")
        is_waiting_for_a_node = never_worked and isinstance(error, DeadlineExceeded) and any(True for _ in self._joined())
        self._replaced += not is_waiting_for_a_node
        is_hopeless = never_worked and not self._workers
        if is_hopeless or self._replaced > _MAX_REPLACEMENTS:
            if not self._failure.done():
                cause = error if isinstance(error, EvenkeelError) else EngineError(f"rollout worker {worker.name} {reason}")
                self._failure.set_exception(cause)
        else:
            self._start_worker()
        self._wake()

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
        for ticket in unfinished:
            self._spawn(self._sample(ticket))
        held: list[Prompt] = []
        while True:
            places = await self._queue.wait_for_places.remote(self._notice_s)
            while len(held) < places:
                held.append(next(prompts))
            tickets = await self._queue.admit.remote(held[:places]) if places else []
            held = held[len(tickets) :]
            on_admitted(tickets)
            for ticket in tickets:
                self._spawn(self._sample(ticket))

    async def _sample(self, ticket: Ticket) -> None:
        """Have a group sampled, on another worker if the first one fails; the queue takes it once."""
        limit_s = self._config.engine.deadlines.generate_s + _SCORING_S  # the engine's own deadline comes first, unless its process hangs
        while True:
            worker = await self._current_worker(f"group {ticket.group_id}")
            worker.groups.add(ticket.group_id)
            try:
                what = f"group {ticket.group_id} <- rollout worker {worker.name}"
                self._on_finished(await wait_for(worker.actor.generate_group.remote(ticket), what, deadline_s=limit_s, notice_s=limit_s))
                self._replaced = 0  # the limit is on losses without any work done, not on those of a long life on nodes that come and go
                return
            except (EngineError, DeadlineExceeded) as error:
                self._lost(worker, str(error))
            finally:
                worker.groups.discard(ticket.group_id)
                self._wake()

    async def answer(self, prompts: Sequence[Prompt], temperature: float) -> list[Trajectory]:
        """One scored answer to each prompt, spread over the workers."""

        limit_s = self._config.engine.deadlines.generate_s + _SCORING_S

        async def ask(part: Sequence[Prompt]) -> list[Trajectory]:
            while True:
                worker = await self._current_worker("evaluation")
                what = f"evaluation answers <- rollout worker {worker.name}"
                worker.questions += len(part)
                try:
                    call = worker.actor.answer.remote(list(part), temperature)
                    answers: list[Trajectory] = await wait_for(call, what, deadline_s=limit_s, notice_s=limit_s)
                    return answers
                except (EngineError, DeadlineExceeded) as error:
                    self._lost(worker, str(error))
                finally:
                    worker.questions -= len(part)

        size = 32
        parts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        return [t for answers in await asyncio.gather(*(ask(p) for p in parts)) for t in answers]

    async def load(self) -> WorkerLoad:
        """Totals of the workers that answer."""
        loads = []
        for worker in list(self._joined()):
            try:
                loads.append(await wait_for(worker.actor.load.remote(), f"load <- rollout worker {worker.name}", deadline_s=30.0))
            except (EvenkeelError, ray.exceptions.RayError):
                continue
        n = max(1, len(loads))
        return WorkerLoad(
            busy_s=sum(w.busy_s for w in loads) / n,
            up_s=sum(w.up_s for w in loads) / n,
            generated_tokens=sum(w.generated_tokens for w in loads),
            requests_in_flight=sum(w.requests_in_flight for w in loads),
        )

    async def _current_worker(self, what: str) -> WorkerHandle:
        """The least loaded worker that holds the published weights; waits for one."""
        began = noticed = time.monotonic()
        while True:
            current = [w for w in self._joined() if self._is_current(w)]
            if current:
                return min(current, key=self._requests)
            now = time.monotonic()
            if now - noticed > self._notice_s:
                noticed = now
                joined, _ = self.counts()
                log.warning("%s has waited %.0f s for a worker with the published weights (%d joined)", what, now - began, joined)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 0.25)
            except TimeoutError:
                continue

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
            ray.kill(worker.actor)
        self._workers.clear()

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _joined(self) -> Iterator[WorkerHandle]:
        return (w for w in list(self._workers.values()) if w.state is WorkerState.JOINED)

    def _is_current(self, worker: WorkerHandle) -> bool:
        return self._sync is not None and worker.sync.version >= 0 and worker.sync.version == self._sync.version

    def _requests(self, worker: WorkerHandle) -> int:
        """Trajectories that a worker is sampling."""
        return len(worker.groups) * self._config.sampling.samples_per_group + worker.questions

    def _wake(self) -> None:
        self._changed.set()

    def wake(self) -> None:
        """Something that waiting groups look at has changed: a receipt has come."""
        self._wake()

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


async def _kill(actor: Any) -> None:
    """Kill an actor that may be gone already."""
    try:
        ray.kill(actor)
    except Exception as error:  # nothing to kill is what we wanted
        log.debug("kill: %s", error)
