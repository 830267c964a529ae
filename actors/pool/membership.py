"""Which workers a pool has: they are asked for, join, are lost and replaced, leave; their number is fixed, or follows the load.

Who gets what work is the pool's (pool.py), which is told of changes; a worker's life is in workers.py, what losses lead to in faults.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from evenkeel.actors.carriers import WorkerSettings
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.pool import preemption, workers
from evenkeel.actors.pool.draining import WorkerDrainer, first_to_leave
from evenkeel.actors.pool.elastic import Elastic
from evenkeel.actors.pool.faults import WorkerLosses
from evenkeel.actors.pool.pool_tasks import PoolTasks
from evenkeel.actors.pool.scoring import UnscoredStarts
from evenkeel.actors.pool.workers import PoolObserver, WorkerHandle, WorkerState
from evenkeel.actors.processes.call_throttle import CallThrottle
from evenkeel.actors.processes.stopwatch import Phase
from evenkeel.actors.processes.supervision import AGAIN_S, kill, unwrapped, wait_for
from evenkeel.actors.settings.deadlines import group_s
from evenkeel.actors.weights.weight_sync import WeightSync
from evenkeel.correction.errors import ActorLost, ActorUnavailable, DeadlineExceeded, EngineError, EvenkeelError, RequestError, counted
from evenkeel.rollout.rewards.rewards import RewardError
from evenkeel.rollout.trajectory import WorkerLoad

log = logging.getLogger("evenkeel.pool")
_STARTS = 3
"""Attempts to start each worker as long as none is up yet: a process may be killed during its start, or the start be late."""


@dataclass(frozen=True, slots=True)
class MembershipCallbacks:
    """Functions that Membership calls when a worker joins, is lost or leaves."""

    changed: Callable[[], None]
    """Workers may now take work that waits."""
    lost: Callable[[WorkerHandle], None]
    """A worker is given up, with what it had under way."""
    left: Callable[[str], None]
    """A worker, by its name, is gone, however it went. May be called twice."""
    rewards_fail: Callable[[], bool]
    """Asked whether nobody's groups are scored at present."""


class Membership:
    """The workers of a pool. One event loop uses it."""

    def __init__(
        self,
        settings: WorkerSettings,
        deadlines: DeadlinesConfig,
        observer: PoolObserver,
        tasks: PoolTasks,
        callbacks: MembershipCallbacks,
        places: int = 1,
    ) -> None:
        """Args: places: groups that admission allows outstanding; an elastic pool grows to no more workers than they keep busy."""
        self._settings, self._config, self._deadlines = settings, settings.rollout, deadlines
        self._observer, self._tasks, self._callbacks = observer, tasks, callbacks
        self.create = workers.create
        """Asks for a worker's actor: takes its name, the settings, and ids of nodes to avoid."""
        self.sync: WeightSync | None = None
        """From which members get their weights; None: there are none to get."""
        self.workers: dict[str, WorkerHandle] = {}
        """All that aren't gone, by name."""
        self._born = 0
        self._elastic = Elastic(self, self._config, places, lambda decision: observer.scaled(decision))
        self.target = self._elastic.first
        """Workers that are wanted; those that leave don't count."""
        self._losses, self._unscored_starts = WorkerLosses(), UnscoredStarts()
        self._has_begun = False
        """A worker has joined."""
        self._has_scored = False
        """A worker has joined, with a score for its sample; or one had, before the run was resumed."""
        self._replacing = 0
        """Number of replacements that are due but not yet asked for."""
        self._progressed = self._attended = self._now()
        self._drainer = WorkerDrainer(tasks, self.forget, observer, deadlines.drain_s)
        self._draining: dict[str, float | None] = {}
        """Nodes that Ray drains: event-loop time (s) at which each goes; None: nobody says when. Until they are gone."""
        self.generation = 0
        """Of the run, see actors/driver/recovery.py."""
        self.throttle = CallThrottle()

    # -- workers -----------------------------------------------------------------------------------------------------

    def start(self, *, has_scored: bool = False) -> None:
        """Ask for all workers; they join as they come. Args: has_scored: the run is resumed, and its reward has scored before."""
        self._has_scored = has_scored
        if (note := self._elastic.note) is not None:
            self._observer.event("info", note)
        self._replenish()
        if ray.is_initialized():
            self._tasks.spawn(preemption.watch_nodes(self._node_leaves, self._node_is_gone))

    def follow(self, sync: WeightSync) -> None:
        """From now on joined workers get their weights through `sync`."""
        self.sync = sync
        for worker in self.joined():
            sync.join(worker.sync)

    def withdraw(self) -> None:
        """Nobody gets weights, or counts as one who holds the published ones, until `follow`."""
        self.sync, self._unscored_starts = None, UnscoredStarts()

    def begin(self, generation: int) -> None:
        """Members give up what they have under way, and hold no weights of this generation yet."""
        self.generation = generation
        self.progress()
        for worker in self.workers.values():
            worker.follow(generation)
        self._replenish()  # a loss that failed the pool has asked for nobody

    async def first_worker(self) -> None:
        """Wait until one engine is up. Raises: the error of its start."""
        await wait_for(
            self._tasks.until(lambda: any(True for _ in self.joined())),
            "the first rollout worker",
            deadline_s=self.no_workers_s,
            notice=log.debug,  # each worker's own start gives notice
            usual_s=self._deadlines.start_s,
        )

    def versions(self) -> dict[str, int]:
        """Weight version of each worker that has joined, by its last receipt; -1 before the first, and for one that is dirty."""
        return {worker.name: worker.sync.version for worker in self.joined()}

    def counts(self) -> tuple[int, int]:
        """(workers that have joined, of these with a receipt for the published version)."""
        joined = list(self.joined())
        return len(joined), sum(self.is_current(w) for w in joined)

    def attended_since(self) -> float:
        """Latest event-loop time (s) at which no worker held the published weights."""
        if not any(self.is_current(w) for w in self.joined()):
            self._attended = self._now()
        return self._attended

    def last_progress(self) -> float:
        """When a group was last finished, or a worker joined or was lost; now if no worker can work. Seconds of the event loop's clock."""
        return max(self._progressed, self.attended_since())

    def progress(self) -> None:
        """Restart the clock of deadlines.batch_s."""
        self._progressed = self._now()

    def finished_group(self) -> None:
        """A member has finished a group: none was lost in vain."""
        self.progress()
        self._losses.worked()

    @property
    def no_workers_s(self) -> float:
        """Longest wait for a worker that may work."""
        return self._deadlines.no_workers_s or math.inf

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def learner_waits(self, version: int, wait: Phase) -> None:
        """To be called when the learner begins to wait for a batch, once a step. Args: see RolloutPool.learner_waits."""
        self._elastic.learner_waits(version, wait, self._tasks.spawn)

    # -- size --------------------------------------------------------------------------------------------------------

    def resize(self, target: int, why: str) -> None:
        """Have so many workers: more are asked for, or some leave."""
        self.target = target
        staying = self._staying()
        for worker in first_to_leave(staying)[: max(0, len(staying) - target)]:
            self._let_go(worker, why)
        self._replenish()

    def _node_leaves(self, node: str, left_s: float | None) -> None:
        self._draining[node] = None if left_s is None else self._now() + left_s
        for worker in self._staying():
            self._let_go_if_drained(worker)
        self._replenish()

    def _node_is_gone(self, node: str) -> None:
        self._draining.pop(node, None)

    def _let_go_if_drained(self, worker: WorkerHandle) -> bool:
        """Returns: whether Ray drains its node; not asked while its engine starts."""
        if worker.info is None or worker.info.node not in self._draining:
            return False
        goes_at = self._draining[worker.info.node]
        self._let_go(worker, "Ray drains its node", None if goes_at is None else max(0.0, goes_at - self._now()))
        return True

    def _got_sigterm(self, worker: WorkerHandle) -> None:
        if worker.state is WorkerState.JOINED:
            self._let_go(worker, "its process was told to end (SIGTERM)")
            self._replenish()

    def _let_go(self, worker: WorkerHandle, why: str, left_s: float | None = None) -> None:
        if self.sync is not None:
            self.sync.leave(worker.name)
        self._drainer.begin(worker, why, left_s)

    def _staying(self) -> list[WorkerHandle]:
        return [w for w in self.workers.values() if w.state is not WorkerState.LEAVING]

    def _replenish(self) -> None:
        """Ask for the workers that are missing. A replacement that is due keeps its place, its pause and its count of failed starts."""
        for _ in range(self.target - len(self._staying()) - self._replacing):
            self._start_worker()

    def _start_worker(self, attempt: int = 1, unscored: int = 0) -> None:
        """Args: see WorkerHandle."""
        name = str(self._born)
        self._born += 1
        worker = self.create(name, self._settings, self._losses.avoided(self._now()))
        worker.attempt, worker.unscored = attempt, unscored
        worker.follow(self.generation)
        self.workers[name] = worker
        self._tasks.spawn(self._bring_up(worker))

    async def _replace(self, pause_s: float, why: str, attempt: int, unscored: int = 0) -> None:
        try:
            if pause_s:
                self._observer.event("warning", f"{why}: the next replacement starts in {pause_s:.0f} s")
                await asyncio.sleep(pause_s)
        finally:
            self._replacing -= 1
        if len(self._staying()) < self.target:
            self._start_worker(attempt, unscored)

    async def _bring_up(self, worker: WorkerHandle) -> None:
        try:
            info = await workers.started(worker, self._settings, self._deadlines)
        except (EvenkeelError, RayError) as error:
            self.lost(worker, f"did not start: {unwrapped(error)}", unwrapped(error))
            return
        if worker.state is not WorkerState.STARTING:  # it is not wanted any more
            return
        worker.info, worker.sync.node = info, info.node
        if self._let_go_if_drained(worker):  # Ray told of its node while the engine was starting
            self._replenish()
            return
        worker.state, self._has_scored = WorkerState.JOINED, True
        self._unscored_starts.ended()
        if not self._has_begun:
            self._has_begun = True
            self._replenish()  # those that were given up before
        self.progress()
        self._observer.joined(info)
        self._tasks.spawn(self._follow_heartbeat(worker))
        self._tasks.spawn(self._drainer.wait_for_end_notice(worker, self._got_sigterm))
        if self.sync is not None:
            self.sync.join(worker.sync)
        self._callbacks.changed()

    def lost(self, worker: WorkerHandle, reason: str, error: BaseException | None = None) -> None:
        """Give a worker up, and start another in its place unless too many were lost in vain. As long as no worker has ever been up, one
        whose start has failed for good isn't replaced; if that holds for all, the run ends. A reward that has scored before is waited
        for."""
        if worker.state in (WorkerState.GONE, WorkerState.LEAVING) or self._tasks.is_stopping:
            return
        never_worked = worker.state is WorkerState.STARTING
        of_reward = never_worked and self._has_scored and isinstance(error, RewardError)
        self.forget(worker)
        kill(worker.actor)
        self._callbacks.lost(worker)
        taken = f"others take its {counted(len(worker.groups), 'group')}" if worker.groups else "it had no group under way"
        self._observer.event("warning", f"rollout worker {worker.name} is gone: {reason}; {taken}")
        self.progress()
        node = "" if of_reward and self._nobody_has_scores() else worker.sync.node
        self._losses.lost(self._now(), node, is_in_vain=not of_reward, was_up=not never_worked)
        if never_worked and not of_reward and not self._has_begun and not self._may_start_again(worker, error):
            if not self.workers and not self._replacing:
                is_known = isinstance(error, EvenkeelError) and not isinstance(error, ActorLost)
                self._tasks.fail(error if error and is_known else EngineError(f"rollout worker {worker.name} {reason}"))
        else:
            try:
                replacement = self._after_unscored(worker, error) if of_reward else self._after_loss(worker, reason, never_worked)
            except (EngineError, RequestError) as hopeless:
                self._tasks.fail(hopeless)
            else:
                self._replacing += 1
                self._tasks.spawn(replacement)
        self._callbacks.changed()

    def _after_loss(self, worker: WorkerHandle, reason: str, never_worked: bool) -> Coroutine[Any, Any, None]:
        """Start another one in its place. Raises: EngineError if too many were lost in vain."""
        self._losses.check(self.target, f"rollout worker {worker.name}: {reason}")
        failed_starts = worker.attempt if never_worked else 0
        is_alone = not any(True for _ in self.joined())
        pause_s = self._losses.pause_s(self.target, failed_starts, is_alone=is_alone)
        return self._replace(pause_s, self._losses.why_pause(self.target, failed_starts, is_alone=is_alone), failed_starts + 1)

    def _after_unscored(self, worker: WorkerHandle, error: BaseException | None) -> Coroutine[Any, Any, None]:
        """Replace a worker whose start has failed by its reward alone. Raises: RequestError if that has been so for too long."""
        is_alone, unscored = not any(True for _ in self.joined()), worker.unscored + 1
        pause_s = self._unscored_starts.pause_s(error, unscored, is_alone=is_alone)
        return self._replace(pause_s, "the reward of a worker that starts gives no score", worker.attempt, unscored)

    def _nobody_has_scores(self) -> bool:
        """Whether a reward that gives no score is no fault of one node."""
        return self._callbacks.rewards_fail() or not any(True for _ in self.joined())

    def _may_start_again(self, worker: WorkerHandle, error: BaseException | None) -> bool:
        """Whether another start may succeed: a killed process or a late start may be chance, while wrong settings raise other errors."""
        return isinstance(error, ActorLost | DeadlineExceeded) and worker.attempt < _STARTS

    def forget(self, worker: WorkerHandle) -> bool:
        """Remove a worker that is gone. Returns: False if it had been removed already."""
        self._callbacks.left(worker.name)
        worker.state = WorkerState.GONE
        if self.workers.pop(worker.name, None) is None:
            return False
        if self.sync is not None:
            self.sync.leave(worker.name)
        self._observer.left(worker.name)
        self._callbacks.changed()
        return True

    async def _follow_heartbeat(self, worker: WorkerHandle) -> None:
        self.lost(worker, await workers.until_worker_lost(worker, self._config.engine.deadlines.heartbeat_s, lambda: len(self.workers)))

    async def loads(self, version: int | None = None) -> dict[str, WorkerLoad]:
        """Running totals, by name, of the workers that answer within a few seconds.

        Args: version: made by a step that has just ended; if it was published, workers send their loads with its receipts. None: ask all.
        """
        is_published = self.sync is not None and self.sync.version == version
        return await workers.loads(list(self.joined()), self.throttle, version if is_published else None)

    async def call(self, worker: WorkerHandle, call: Callable[[], Any], what: str) -> Any:
        """The result of a call to a worker, which may run twice. Requests and rewards have deadlines of their own, which come first.

        Who can't be reached just now is asked again once it may work. Whether it is lost, its heartbeat says.
        Raises: ActorUnavailable when it could not be reached for half a minute.
        """
        limit_s = group_s(self._config)
        for pause_s in AGAIN_S:
            try:
                return await wait_for(call(), what, deadline_s=limit_s, notice_s=limit_s)
            except ActorUnavailable as error:
                log.info("%s; asked again in %g s", error, pause_s)
            with suppress(TimeoutError):  # what a lost worker had goes on elsewhere at once
                async with asyncio.timeout(pause_s):
                    await self._tasks.until(lambda: worker.state is not WorkerState.JOINED)
            await self._tasks.until(lambda: self.is_current(worker) or worker.state is not WorkerState.JOINED)
            if worker.state is not WorkerState.JOINED:
                raise ActorLost(f"{what}: the worker could not be reached, and has been lost or is leaving")
        return await wait_for(call(), what, deadline_s=limit_s, notice_s=limit_s)

    # -- end ---------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End all workers, engines first."""
        await workers.end(list(self.workers.values()))
        self.workers.clear()

    # -- who may work ------------------------------------------------------------------------------------------------

    def joined(self) -> Iterator[WorkerHandle]:
        return (w for w in list(self.workers.values()) if w.state is WorkerState.JOINED)

    def is_current(self, worker: WorkerHandle) -> bool:
        if self.sync is None or worker.state is WorkerState.GONE:
            return False
        return worker.sync.version >= 0 and worker.sync.version == self.sync.version
