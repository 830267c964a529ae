"""The life of a rollout worker, from its actor's creation to its end. The pool decides who gets work, and who is replaced.

States, and what moves a worker:

    STARTING   created; Ray may still be looking for a node that offers the rollout resource, and then its engine starts
    JOINED     its engine is up; the weight sync owns its version from here
    LEAVING    the pool shrinks, or its node is taken away: it gets no work, ends what it can, hands back the rest, and is ended
    GONE       its process or its engine died, or it took no weights; a replacement is started, its groups go to other workers
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

from evenkeel.actors.carriers import ActorInfo, LaneReport, WorkerSettings
from evenkeel.actors.cluster.cluster import lower_priority
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.pool.rollout_worker import RolloutWorker
from evenkeel.actors.processes.pacing import CallThrottle
from evenkeel.actors.processes.supervision import USUAL_START, call_with_retries, kill, until_silent, unwrapped, wait_for
from evenkeel.actors.weights.weight_sync import SyncTarget
from evenkeel.correction.errors import EvenkeelError
from evenkeel.rollout.engine.heartbeat import MISSES
from evenkeel.rollout.trajectory import UnfinishedGroup, WorkerLoad

_LOAD_S = 5.0
# Longest wait for receipts on their way. A worker whose receipt comes later is asked for its load.
_RECEIPT_S = 1.0
STOP_S = 20.0
"""Longest wait for the end of an engine, seconds."""
_NODE_ID = "ray.io/node-id"
# Heartbeats per limit_s of a worker that gives no other sign of life, in a pool of up to FEW workers and in a larger one. The driver of 500
# workers would make a hundred calls a second. A process that ends is noticed at once in any case: it has a call open, `end_notice`.
_PROBES, _PROBES_OF_MANY = 6, 2
FEW = 64
"""Workers of a pool that isn't large: each gets all the attention that it can use. A larger pool would leave the driver no time."""


class WorkerState(StrEnum):
    STARTING = "starting"
    JOINED = "joined"
    LEAVING = "leaving"
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
    in_slots: set[int] = field(default_factory=set)
    """Of these, those that take a slot each."""
    failed: set[int] = field(default_factory=set)
    """Groups whose requests to it have failed since it last finished one."""
    questions: int = 0
    """Answers to questions of evaluations that it is sampling."""
    resyncs: int = 0
    """Full syncs asked for since its last finished group."""
    info: ActorInfo | None = None
    attempt: int = 1
    """Number of this start, from 1; the earlier starts in its place failed."""
    unscored: int = 0
    """Starts in its place that failed by their reward alone, since another one failed or succeeded; none of them counts as an attempt."""
    asked_at: float = field(default_factory=lambda: time.monotonic())
    """time.monotonic() when Ray was asked for it."""
    placed_at: float | None = None
    """time.monotonic() when its process was placed; None: it waits for a node."""
    up_at: float = 0.0
    """time.monotonic() when its engine was ready."""
    has_worked: bool = False
    """The worker has finished a group."""
    leaves: bool = False
    """True once it is LEAVING: a call that fails then says nothing about its group."""
    handed_back: list[UnfinishedGroup] = field(default_factory=list)
    turns_so_far: Any = None
    """Reference to what there was of its groups with turns when it last said so, by id."""
    worked_at: float = -math.inf
    """Event-loop time (s) when it last finished a group."""

    @property
    def has_node(self) -> bool:
        return self.placed_at is not None

    @property
    def source(self) -> str:
        """Who it is and where, as StoredGroup has it."""
        node = self.info.node if self.info is not None else ""
        return f"rollout worker {self.name}" + (f" on node {node[:8]}" if node else "")

    def follow(self, generation: int) -> None:
        """Have it abort all work, and count it as without weights; see actors/driver/recovery.py."""
        if generation:
            self.turns_so_far = None
            self.sync = SyncTarget(self.name, self.actor, node=self.sync.node)
            self.actor.follow.remote(generation)


def create(name: str, settings: WorkerSettings, avoided: Sequence[str] = ()) -> WorkerHandle:
    """A worker whose actor Ray has been asked for.

    Args: avoided: ids of nodes that it gets only if there is no room elsewhere.
    """
    on_gpu = settings.rollout.engine.resolved_device == "cuda"
    actor = (
        ray.remote(RolloutWorker)
        .options(
            num_cpus=settings.rollout.engine.tensor_parallel,  # as many processes compute
            num_gpus=settings.rollout.gpus_of_a_worker if on_gpu else 0,
            resources={settings.resource: 1},
            max_concurrency=4096,
            max_restarts=0,  # a restarted engine has no weights; the pool makes a new worker instead
            runtime_env={"env_vars": dict(settings.environment)},
            scheduling_strategy=NodeLabelSchedulingStrategy({}, soft={_NODE_ID: NotIn(*avoided)}) if avoided else None,  # type: ignore[no-untyped-call]
        )
        .remote(name, settings)
    )
    lower_priority(actor)
    return WorkerHandle(name, actor, SyncTarget(name, actor))


async def started(worker: WorkerHandle, settings: WorkerSettings, deadlines: DeadlinesConfig) -> ActorInfo:
    """Wait for its node, as long as that takes, and until its engine is up. Raises: the error of its start."""
    worker.sync.node = await call_with_retries(
        lambda: worker.actor.node_id.remote(),
        f"a node with the resource {settings.resource!r} for rollout worker {worker.name}",
        deadline_s=math.inf,  # who waits for work has deadlines.no_workers_s
        notice_s=deadlines.notice_s,
        usual_s=USUAL_START * deadlines.start_s,
    )
    worker.placed_at = time.monotonic()
    info: ActorInfo = await call_with_retries(
        lambda: worker.actor.start.remote(0),
        f"start of rollout worker {worker.name}",
        deadline_s=deadlines.start_s,
        notice_s=deadlines.notice_s,
        usual_s=USUAL_START * deadlines.start_s,
    )
    worker.up_at = time.monotonic()
    return info


def first_work(worker: WorkerHandle) -> str:
    """A sentence for a worker that has finished its first group: how the time since it was asked for was spent."""
    now, placed_at = time.monotonic(), worker.placed_at or worker.asked_at
    parts = {"node": placed_at - worker.asked_at, "engine": worker.up_at - placed_at, "weights and group": now - worker.up_at}
    spent = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts.items())
    return f"rollout worker {worker.name} sampled its first group {now - worker.asked_at:.1f} s after it was asked for: {spent}"


async def until_worker_lost(worker: WorkerHandle, limit_s: float, pool_size: Callable[[], int], told: Callable[[WorkerLoad], None]) -> str:
    """Ask a worker for its load when it has given no other sign of life for a while, and return the reason when it is lost. (The worker
    watches its engine itself.) When half of the limit is over for it or its engine, stacks are collected.

    A worker that hangs is lost limit_s after the next heartbeat: that begins limit_s / 6 after its last sign of life (an answer, a finished
    group, a receipt, an answered probe of the weights), in a pool of more than 64 workers limit_s / 2. If its engine was silent at the last
    heartbeat it is limit_s / 6 in any pool, or half of the engine's limit could pass unseen.

    Args: limit_s: seconds without an answer. told: takes each load.
    """
    clock, engine_silent_s = asyncio.get_running_loop().time, 0.0

    def pause_s() -> float:
        return limit_s / (_PROBES if pool_size() <= FEW or engine_silent_s > 0.0 else _PROBES_OF_MANY)

    async def pause() -> None:
        answered_at = clock()
        while (rest_s := max(answered_at, worker.worked_at, worker.sync.answered_at) + pause_s() - clock()) > 0.0:
            await asyncio.sleep(rest_s)

    def note_silence(load: WorkerLoad) -> float:
        nonlocal engine_silent_s
        told(load)
        engine_silent_s = load.silent_s
        return engine_silent_s

    what = f"heartbeat <- rollout worker {worker.name}"
    await pause()
    try:
        await until_silent(lambda: worker.actor.load.remote(), what, limit_s=limit_s, misses=MISSES, on_answer=note_silence, pause=pause)
    except (EvenkeelError, ray.exceptions.RayError) as error:
        return str(unwrapped(error))
    return f"missed its heartbeat: its process answered none of {MISSES} probes in {limit_s:g} s"


async def loads(
    joined: Sequence[WorkerHandle], throttle: CallThrottle, told: Callable[[LaneReport | None], None], version: int | None = None
) -> dict[str, WorkerLoad]:
    """Running totals, by name, of the workers that answer within a few seconds.

    Args:
        told: takes what a worker that is asked says that it has done.
        version: workers with a receipt of this version, or a newer one, sent their totals with it, and aren't asked. None: ask all.
    """
    known: dict[str, WorkerLoad] = {}
    if version is not None:
        on_their_way = [w.sync.task for w in joined if w.sync.version < version and w.sync.task is not None]
        if on_their_way:
            await asyncio.wait(on_their_way, timeout=_RECEIPT_S)
        known = {w.name: w.sync.load for w in joined if w.sync.version >= version and w.sync.load is not None}
    return known | await _asked([w for w in joined if w.name not in known], throttle, told)


async def _asked(
    workers: Sequence[WorkerHandle], throttle: CallThrottle, told: Callable[[LaneReport | None], None]
) -> dict[str, WorkerLoad]:
    """The load of each worker that answers in time, by name."""

    async def ask(worker: WorkerHandle) -> WorkerLoad | None:
        await throttle.wait()
        try:
            load: WorkerLoad = await wait_for(worker.actor.load.remote(), f"load <- rollout worker {worker.name}", deadline_s=_LOAD_S)
        except (EvenkeelError, ray.exceptions.RayError):
            return None
        told(load.told)
        return load

    answers = await asyncio.gather(*(ask(w) for w in workers))
    return {worker.name: load for worker, load in zip(workers, answers, strict=True) if load is not None}


async def end(workers: Sequence[WorkerHandle], told: Callable[[LaneReport | None], None]) -> None:
    """End them all, engines first. Args: told: as of loads."""

    async def stop(worker: WorkerHandle) -> None:
        with suppress(EvenkeelError, ray.exceptions.RayError):
            told(await wait_for(worker.actor.stop.remote(), f"end of rollout worker {worker.name}", deadline_s=STOP_S))

    await asyncio.gather(*(stop(worker) for worker in workers if worker.info is not None))
    kill(*(worker.actor for worker in workers))


def first_to_leave(workers: Iterable[WorkerHandle]) -> list[WorkerHandle]:
    """Workers in the order in which a pool that shrinks does without them: those that wait for a node, those that start, then those whose
    node has the fewest others, so that whole nodes become free; of these the ones with the least under way."""
    staying = list(workers)
    on_node = Counter(worker.info.node for worker in staying if worker.info is not None)

    def loss(worker: WorkerHandle) -> tuple[int, ...]:
        if worker.info is None:
            return int(worker.has_node), 0, 0, -int(worker.name)
        return 2, on_node[worker.info.node], len(worker.groups), -int(worker.name)

    return sorted(staying, key=loss)
