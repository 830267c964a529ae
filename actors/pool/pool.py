"""The rollout pool: workers are asked for, join, take work, are lost and replaced, leave; what fails with one goes to others.

A joined worker takes work while it holds a receipt for the published version; how much of it, dispatch.py says. One whose engine says that
it is dirty (a weight update failed half-way) stays joined, and works again after a full sync. The number of workers is fixed, or follows
the load (scaling.py). A worker's life is in workers.py, what failures lead to in faults.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from evenkeel.actors.carriers import BegunTicket, DiscardReason, GroupFailure, PoolFailure, StoredGroup, Ticket, WorkerSettings
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.groups.book import MAX_ENGINE_LOSSES, GroupBook
from evenkeel.actors.groups.changes import Changes
from evenkeel.actors.groups.tokens import disregard, to_hand_on, value_of
from evenkeel.actors.pool import preemption, workers
from evenkeel.actors.pool.dispatch import Questions, WaitingWork
from evenkeel.actors.pool.faults import (
    ATTEMPTS,
    FAILING_AFTER,
    FEWEST_FAILED,
    MAX_UNREACHED,
    WINDOW_S,
    LatestGroups,
    Scoring,
    UnscoredStarts,
    WorkerLosses,
)
from evenkeel.actors.pool.pool_tasks import PoolTasks
from evenkeel.actors.pool.rollout_worker import TURNS_S, GroupOutcome
from evenkeel.actors.pool.scaling import ScalingRule, StepLoad, first_workers, limits_of, unreached_limit
from evenkeel.actors.pool.workers import WorkerHandle, WorkerState
from evenkeel.actors.processes.pacing import CallThrottle, Phase
from evenkeel.actors.processes.supervision import AGAIN_S, call_until_answered, call_with_retries, kill, unless_failed, unwrapped, wait_for
from evenkeel.actors.record.recorder import Recorder
from evenkeel.actors.settings.deadlines import ANSWER_S, LEAST_HAND_BACK_S, group_s
from evenkeel.actors.settings.evaluation_places import evaluation_answers_at_once, questions_of_a_call
from evenkeel.actors.weights.weight_sync import SyncTarget, WeightSync
from evenkeel.correction.errors import (
    ActorLost,
    ActorUnavailable,
    DeadlineExceeded,
    EngineDirty,
    EngineError,
    EngineReplaced,
    EvenkeelError,
    LateError,
    RequestError,
    counted,
)
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.rewards.rewards import RewardError
from evenkeel.rollout.trajectory import GroupFacts, Prompt, Trajectory, UnfinishedGroup, WorkerLoad, workers_wait

log = logging.getLogger("evenkeel.pool")
# Attempts to start each worker as long as none is up yet: a process may be killed during its start, or the start be late.
_STARTS = 3
# Full syncs that a worker gets for an engine that says it is dirty, before it is replaced; counted anew with each finished group.
_MAX_RESYNCS = 3
# Tokens that a worker tells a second of what its rollouts with turns have so far: 12 bytes each, some hundred with routes or top-K.
_TURN_TOKENS_PER_S = 200_000
_CALL = "a worker's call"
# Seconds of waiting for further changes in a large pool, times the number of workers: looking through hundreds takes milliseconds.
_LOOK_S = 2e-5


class RolloutPool:
    """Workers come and go, take groups and questions, and what fails with one goes to others. One event loop uses it."""

    def __init__(
        self,
        settings: WorkerSettings,
        deadlines: DeadlinesConfig,
        book: GroupBook,
        changes: Changes,
        recorder: Recorder,
        places: int = 1,
        on_finished: Callable[[StoredGroup], object] = lambda _: None,
    ) -> None:
        """
        Args:
            changes: of the book.
            places: groups that admission allows outstanding; an elastic pool grows to no more workers than they keep busy.
            on_finished: takes each group that a worker has sampled and scored.
        """
        self._settings, self._config, self._deadlines, self._recorder = settings, settings.rollout, deadlines, recorder
        self._on_finished = on_finished
        self.tasks = PoolTasks()
        self.generation = 0  # of the run, see actors/driver/recovery.py
        self.sync: WeightSync | None = None  # from which workers get their weights; None: there are none to get

        # Workers.
        self.create = workers.create  # asks for a worker's actor: takes its name, the settings, and ids of nodes to avoid
        self.workers: dict[str, WorkerHandle] = {}  # all that aren't gone, by name
        self.target = first_workers(self._config, places)  # workers that are wanted; those that leave don't count
        self._born = 0
        self._replacing = 0  # replacements that are due but not yet asked for
        self._has_begun = False  # a worker has joined
        self._has_scored = False  # one has joined, with a score for its sample; or had, before the run was resumed
        self._losses, self._unscored_starts = WorkerLosses(), UnscoredStarts()
        # Nodes that Ray drains: event-loop time (s) at which each goes; None: nobody says when. Until they are gone.
        self._draining: dict[str, float | None] = {}
        self._progressed = self._attended = self._now()
        self.throttle = CallThrottle()

        # A size that follows the load.
        self._limits = limits_of(self._config, places)
        self._rule = ScalingRule(self._limits, self.target) if self._config.is_elastic else None
        self._wait: Phase | None = None  # the learner's last one for a batch
        self._loads: dict[str, WorkerLoad] = {}  # at the last decision

        # Work.
        self._book, self._changes = book, changes
        # Ray objects that a worker's call for a group returns: facts, tokens, and wide fields if there are any.
        self._results = 3 if settings.has_wide_fields else 2
        self._answers_at_once = evaluation_answers_at_once(self._config.slots_per_worker, self._config.sampling.samples_per_group)
        self._will_look = False
        self._group_s = group_s(self._config, places)
        self._begin_books()

    def _begin_books(self) -> None:
        slots, samples = self._config.slots_per_worker, self._config.sampling.samples_per_group
        played = {entry.name for entry in self._config.entries if entry.environment is not None}
        self._has_turns = any(entry.environment is not None or entry.agent is not None for entry in self._config.entries)
        self._work = WaitingWork(slots, samples, without_slot=played)
        # time.monotonic() when a worker was lost, by its name, until others have its groups.
        self._orphaned_at: dict[str, float] = {}
        window_s = max(WINDOW_S, FEWEST_FAILED * ATTEMPTS * self._group_s)  # enough for one worker with one slot
        self._latest = LatestGroups(window_s)
        self._scoring = Scoring(self._config.entries, window_s, notify=self._recorder.event)

    def start(self, *, has_scored: bool = False) -> None:
        """Ask for all workers; they join as they come. Args: has_scored: the run is resumed, and its reward has scored before."""
        self._has_scored = has_scored
        if self._rule is not None and (note := unreached_limit(self._limits)) is not None:
            self._recorder.event("info", note)
        self._replenish()
        if ray.is_initialized():
            self.tasks.spawn(preemption.watch_nodes(self._node_leaves, self._node_is_gone))
        self.tasks.spawn(self._watch())

    def follow(self, sync: WeightSync) -> None:
        """From now on workers that have joined get their weights through `sync`."""
        self.sync = sync
        for worker in self.joined():
            sync.join(worker.sync)

    async def withdraw(self) -> None:
        """Withdraw all work and weights; workers stay idle until `serve`, `follow` and `feed`. A failure so far is cleared, later ones
        count."""
        self.sync, self._unscored_starts = None, UnscoredStarts()
        await self.tasks.cancel(_CALL)
        self._begin_books()  # the same numbers come again
        self.tasks.renew()

    def serve(self, book: GroupBook, changes: Changes, generation: int) -> None:
        """Groups are those of another book from now on; workers give up what they have under way, and hold no weights of this generation
        yet."""
        self._book, self._changes, self.generation = book, changes, generation
        self.progress()
        for worker in self.workers.values():
            worker.follow(generation)
        self._replenish()  # a loss that failed the pool has asked for nobody

    async def stop(self) -> None:
        """End all workers, engines first."""
        self.tasks.stop()
        await workers.end(list(self.workers.values()), self._recorder.did)
        self.workers.clear()

    @property
    def has_failed(self) -> bool:
        return self.tasks.has_failed

    def fail(self, error: BaseException) -> None:
        """Record an error with which the run can't go on. `raise_on_failure` raises the first one."""
        self.tasks.fail(error)

    async def raise_on_failure(self) -> None:
        """Never returns; raises when the pool can't go on."""
        await self.tasks.raise_on_failure()

    # -- who is there -------------------------------------------------------------------------------------------------

    def joined(self) -> Iterator[WorkerHandle]:
        return (w for w in list(self.workers.values()) if w.state is WorkerState.JOINED)

    def is_current(self, worker: WorkerHandle) -> bool:
        if self.sync is None or worker.state is WorkerState.GONE:
            return False
        return worker.sync.version >= 0 and worker.sync.version == self.sync.version

    def versions(self) -> dict[str, int]:
        """Weight version of each worker that has joined, by its last receipt; -1 before the first, and for one that is dirty."""
        return {worker.name: worker.sync.version for worker in self.joined()}

    def counts(self) -> tuple[int, int]:
        """(workers that have joined, of these with a receipt for the published version)."""
        joined = list(self.joined())
        return len(joined), sum(self.is_current(w) for w in joined)

    def occupancy(self) -> dict[str, float]:
        """Slots, those in use, what takes none, and what waits for a worker, by metric name."""
        joined = list(self.joined())
        return {
            "pool/slots": len(joined) * self._config.slots_per_worker,
            "pool/used_slots": sum(len(worker.in_slots) for worker in joined),
            "pool/groups_without_slot": sum(len(worker.groups) - len(worker.in_slots) for worker in joined),
            "pool/waiting_groups": self._work.groups,
            "pool/waiting_answers": self._work.answers,
        }

    def turns_so_far(self) -> list[Any]:
        """References to what workers have said that there is of groups whose rollouts have turns, by id."""
        return [worker.turns_so_far for worker in self.workers.values() if worker.turns_so_far is not None]

    async def loads(self, version: int | None = None) -> dict[str, WorkerLoad]:
        """Running totals, by name, of the workers that answer within a few seconds.

        Args: version: made by a step that has just ended; if it was published, workers send their loads with its receipts. None: ask all.
        """
        is_published = self.sync is not None and self.sync.version == version
        return await workers.loads(list(self.joined()), self.throttle, self._recorder.did, version if is_published else None)

    async def first_worker(self) -> None:
        """Wait until one engine is up. Raises: the error of its start."""
        await wait_for(
            self.tasks.until(lambda: any(True for _ in self.joined())),
            "the first rollout worker",
            deadline_s=self.no_workers_s,
            notice=log.debug,  # each worker's own start gives notice
            usual_s=self._deadlines.start_s,
        )

    @property
    def no_workers_s(self) -> float:
        """Longest wait for a worker that may work."""
        return self._deadlines.no_workers_s or math.inf

    # -- workers come -------------------------------------------------------------------------------------------------

    def resize(self, target: int, why: str) -> None:
        """Have so many workers: more are asked for, or some leave."""
        self.target = target
        staying = self._staying()
        for worker in workers.first_to_leave(staying)[: max(0, len(staying) - target)]:
            self._leave(worker, why)
        self._replenish()

    def learner_waits(self, version: int, wait: Phase) -> None:
        """Called when the learner begins to wait for a batch, once a step: a step is measured from one such wait to the next.

        Args:
            version: of the learner's weights, made by the step before. Workers that hold it sent their loads with its receipts.
            wait: measured by the driver; it is read when the next one begins.
        """
        before, self._wait = self._wait, wait
        if self._rule is not None and before is not None:
            self.tasks.spawn(self._follow_load(self._rule, version, wait.began - before.began, before.seconds))

    async def _follow_load(self, rule: ScalingRule, version: int, seconds: float, waited_s: float) -> None:
        """Compare what both sides waited for in a step, and change the pool's size as scaling.py decides."""
        loads = await self.loads(version)
        since = [load.since(self._loads.get(name)) for name, load in loads.items()]
        self._loads = loads
        if sum(part.up_s for part in since) <= 0 or seconds <= 0:
            return
        decision = rule.after(StepLoad(seconds, min(1.0, waited_s / seconds), workers_wait(since), len(loads)))
        if decision is not None:
            self._recorder.scaled(decision)
            self.resize(decision.target, decision.reason)

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
        self.tasks.spawn(self._bring_up(worker))

    async def _bring_up(self, worker: WorkerHandle) -> None:
        try:
            info = await workers.started(worker, self._settings, self._deadlines)
        except (EvenkeelError, RayError) as error:
            self.lost(worker, f"did not start: {unwrapped(error)}", unwrapped(error))
            return
        if worker.state is not WorkerState.STARTING:  # it is not wanted any more
            return
        worker.info, worker.sync.node = info, info.node
        if self._leave_if_drained(worker):  # Ray told of its node while the engine was starting
            self._replenish()
            return
        worker.state, self._has_scored = WorkerState.JOINED, True
        self._unscored_starts.ended()
        if not self._has_begun:
            self._has_begun = True
            self._replenish()  # those that were given up before
        self.progress()
        self._recorder.joined(info)
        self.tasks.spawn(self._follow_heartbeat(worker))
        self.tasks.spawn(self._wait_for_end_notice(worker))
        if self._has_turns:
            self.tasks.spawn(self._follow_turns(worker))
        if self.sync is not None:
            self.sync.join(worker.sync)
        self.wake()

    async def _follow_heartbeat(self, worker: WorkerHandle) -> None:
        limit_s = self._config.engine.deadlines.heartbeat_s

        def note(load: WorkerLoad) -> None:
            self._recorder.did(load.told)
            if load.lost_of and self.is_current(worker):  # the engine that takes its place has no weights
                self._recorder.failed(PoolFailure.ENGINE_LOST)
                self._engine_failed(worker, EngineDirty(load.lost_of))

        self.lost(worker, await workers.until_worker_lost(worker, limit_s, lambda: len(self.workers), note))

    async def _follow_turns(self, worker: WorkerHandle) -> None:
        """Have a reference to what there is of its groups after their last turns, in case it is lost. One call a second and worker at most,
        20 a second in a large pool, and so few that a worker writes no more than some megabytes a second."""
        what, tokens = f"turns so far <- rollout worker {worker.name}", 0
        while worker.name in self.workers:
            generation = self.generation
            told, turns = worker.actor.turns_so_far.options(num_returns=2).remote(generation)
            try:
                tokens = await wait_for(told, what, deadline_s=TURNS_S + ANSWER_S, notice=log.debug)
            except (EvenkeelError, RayError):  # what it is worth, its heartbeat says
                disregard(told, turns)
            else:
                if generation == self.generation:
                    worker.turns_so_far = turns
            await asyncio.sleep(max(1.0, len(self.workers) / 20, tokens / _TURN_TOKENS_PER_S))

    # -- workers leave ------------------------------------------------------------------------------------------------

    def _leave(self, worker: WorkerHandle, why: str, left_s: float | None = None) -> None:
        """Have a worker leave: it gets no new work, ends what it has under way within a time, hands back the rest with the tokens sampled
        so far, and is ended, which frees its resource. If it doesn't do so in order, its groups are sampled anew.

        Args:
            left_s: seconds until it is taken away. It goes on with its groups for half of them; the rest is for handing back and for its
            end.
        """
        if self.sync is not None:
            self.sync.leave(worker.name)
        drain_s = self._deadlines.drain_s
        within_s = drain_s if left_s is None else min(drain_s, left_s / 2)
        hand_back_s = max(LEAST_HAND_BACK_S, drain_s if left_s is None else min(drain_s, left_s - within_s))
        worker.state, worker.leaves = WorkerState.LEAVING, True
        under_way = f"with {counted(len(worker.groups), 'group')} under way and {within_s:.0f} s for them"
        self._recorder.event("info", f"rollout worker {worker.name} leaves, {under_way}: {why}")
        self.tasks.spawn(self._left(worker, within_s, hand_back_s))

    async def _left(self, worker: WorkerHandle, within_s: float, hand_back_s: float) -> None:
        try:
            if worker.info is not None:
                await self._finish(worker, within_s, hand_back_s)
        except (EvenkeelError, RayError) as error:
            log.warning("rollout worker %s did not leave in order, its groups are sampled anew: %s", worker.name, unwrapped(error))
        finally:
            kill(worker.actor)
        if self._forget(worker):
            groups, tokens = len(worker.handed_back), sum(group.tokens for group in worker.handed_back)
            self._recorder.handed_back(groups, tokens)
            rest = f"; {counted(groups, 'group')} go on elsewhere from {tokens} tokens" if groups else ""
            self._recorder.event("info", f"rollout worker {worker.name} has left{rest}")

    async def _finish(self, worker: WorkerHandle, within_s: float, hand_back_s: float) -> None:
        def is_idle() -> bool:
            return not worker.groups and not worker.questions

        name = f"rollout worker {worker.name}, which leaves"
        with suppress(DeadlineExceeded):
            await wait_for(self.tasks.until(is_idle), f"groups of {name}", deadline_s=within_s, notice=log.debug)
        if not is_idle():
            await wait_for(worker.actor.hand_back.remote(), f"groups handed back <- {name}", deadline_s=hand_back_s)
            await wait_for(self.tasks.until(is_idle), f"groups handed back <- {name}", deadline_s=hand_back_s, notice=log.debug)
        self._recorder.did(await wait_for(worker.actor.stop.remote(), f"end of {name}", deadline_s=workers.STOP_S))

    async def _wait_for_end_notice(self, worker: WorkerHandle) -> None:
        """Have a worker leave whose process gets a SIGTERM."""
        with suppress(EvenkeelError, RayError):  # the heartbeat deals with a worker that dies
            what = f"end notice <- rollout worker {worker.name}"
            await wait_for(worker.actor.end_notice.remote(), what, deadline_s=math.inf, notice=log.debug, usual_s=math.inf)
            if worker.state is WorkerState.JOINED:
                self._leave(worker, "its process was told to end (SIGTERM)")
                self._replenish()

    def _node_leaves(self, node: str, left_s: float | None) -> None:
        self._draining[node] = None if left_s is None else self._now() + left_s
        for worker in self._staying():
            self._leave_if_drained(worker)
        self._replenish()

    def _node_is_gone(self, node: str) -> None:
        self._draining.pop(node, None)

    def _leave_if_drained(self, worker: WorkerHandle) -> bool:
        """Returns: whether Ray drains its node; not asked while its engine starts."""
        if worker.info is None or worker.info.node not in self._draining:
            return False
        goes_at = self._draining[worker.info.node]
        self._leave(worker, "Ray drains its node", None if goes_at is None else max(0.0, goes_at - self._now()))
        return True

    # -- workers fail -------------------------------------------------------------------------------------------------

    def _engine_failed(self, worker: WorkerHandle, error: EvenkeelError) -> None:
        """A call to a worker failed: a dirty engine is synced again, anything else means that the worker is lost."""
        if isinstance(error, ActorUnavailable):  # whether it is lost, its heartbeat says
            return
        if not isinstance(error, EngineDirty):
            self.lost(worker, str(error))
        elif self.sync is not None and self.is_current(worker):  # if not, the sync has noted it and is at it
            worker.resyncs += 1
            if worker.resyncs > _MAX_RESYNCS:
                self.lost(worker, f"dirty again after {_MAX_RESYNCS} full syncs: {error}")
                return
            self.sync.resync(worker.sync, str(error))

    def weights_lost(self, error: ActorLost) -> None:
        """Called when a rank was lost while the learner copied its weights: the run can't go on. Ignored once the weights are withdrawn."""
        if self.sync is not None:
            self.fail(error)

    def report_unsyncable(self, target: SyncTarget, reason: str) -> None:
        """Called when the weight sync has given an engine up."""
        worker = self.workers.get(target.name)
        if worker is not None:
            self.lost(worker, reason)

    def lost(self, worker: WorkerHandle, reason: str, error: BaseException | None = None) -> None:
        """Give a worker up, and start another in its place unless too many were lost in vain. As long as no worker has ever been up, one
        whose start has failed for good isn't replaced; if that holds for all, the run ends. A reward that has scored before is waited
        for."""
        if worker.state in (WorkerState.GONE, WorkerState.LEAVING) or self.tasks.is_stopping:
            return
        never_worked = worker.state is WorkerState.STARTING
        self._recorder.failed(PoolFailure.START_FAILED if never_worked else PoolFailure.ENGINE_LOST)
        of_reward = never_worked and self._has_scored and isinstance(error, RewardError)
        self._forget(worker)
        kill(worker.actor)
        self._book.orphaned(worker.groups, worker.name)
        if self._book.orphans(worker.name):
            self._orphaned_at[worker.name] = time.monotonic()
        taken = f"others take its {counted(len(worker.groups), 'group')}" if worker.groups else "it had no group under way"
        self._recorder.event("warning", f"rollout worker {worker.name} is gone: {reason}; {taken}")
        self.progress()
        node = "" if of_reward and self._nobody_has_scores() else worker.sync.node
        self._losses.lost(self._now(), node, is_in_vain=not of_reward, was_up=not never_worked)
        if never_worked and not of_reward and not self._has_begun and not self._may_start_again(worker, error):
            if not self.workers and not self._replacing:
                is_known = isinstance(error, EvenkeelError) and not isinstance(error, ActorLost)
                self.tasks.fail(error if error and is_known else EngineError(f"rollout worker {worker.name} {reason}"))
        else:
            try:
                replacement = self._after_unscored(worker, error) if of_reward else self._after_loss(worker, reason, never_worked)
            except (EngineError, RequestError) as hopeless:
                self.tasks.fail(hopeless)
            else:
                self._replacing += 1
                self.tasks.spawn(replacement)
        self.wake()

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
        pause_s = self._unscored_starts.pause_s(error, unscored, self._now(), is_alone=is_alone)
        return self._replace(pause_s, "the reward of a worker that starts gives no score", worker.attempt, unscored)

    def _nobody_has_scores(self) -> bool:
        """Whether a reward that gives no score is no fault of one node."""
        return self._scoring.is_failing or not any(True for _ in self.joined())

    def _may_start_again(self, worker: WorkerHandle, error: BaseException | None) -> bool:
        """Whether another start may succeed: a killed process or a late start may be chance, while wrong settings raise other errors."""
        return isinstance(error, ActorLost | DeadlineExceeded) and worker.attempt < _STARTS

    async def _replace(self, pause_s: float, why: str, attempt: int, unscored: int = 0) -> None:
        try:
            if pause_s:
                self._recorder.event("warning", f"{why}: the next replacement starts in {pause_s:.0f} s")
                await asyncio.sleep(pause_s)
        finally:
            self._replacing -= 1
        if len(self._staying()) < self.target:
            self._start_worker(attempt, unscored)

    def _forget(self, worker: WorkerHandle) -> bool:
        """Remove a worker that is gone. Returns: False if it had been removed already."""
        worker.state = WorkerState.GONE
        if self.workers.pop(worker.name, None) is None:
            return False
        if self.sync is not None:
            self.sync.leave(worker.name)
        self._recorder.left(worker.name)
        self.wake()
        return True

    async def call(self, worker: WorkerHandle, call: Callable[[], Any], what: str) -> Any:
        """The result of a call to a worker, which may run twice. Requests and rewards have deadlines of their own, which come first.

        Who can't be reached just now is asked again once it may work. Whether it is lost, its heartbeat says.
        Raises: ActorUnavailable when it could not be reached for half a minute.
        """
        limit_s = self._group_s
        for pause_s in AGAIN_S:
            try:
                return await wait_for(call(), what, deadline_s=limit_s, notice_s=limit_s)
            except ActorUnavailable as error:
                log.info("%s; asked again in %g s", error, pause_s)
            with suppress(TimeoutError):  # what a lost worker had goes on elsewhere at once
                async with asyncio.timeout(pause_s):
                    await self.tasks.until(lambda: worker.state is not WorkerState.JOINED)
            await self.tasks.until(lambda: self.is_current(worker) or worker.state is not WorkerState.JOINED)
            if worker.state is not WorkerState.JOINED:
                raise ActorLost(f"{what}: the worker could not be reached, and has been lost or is leaving")
        return await wait_for(call(), what, deadline_s=limit_s, notice_s=limit_s)

    # -- groups -------------------------------------------------------------------------------------------------------

    async def feed(
        self,
        prompts: Iterator[Prompt],
        unfinished: Sequence[Ticket],
        hand_out: Callable[[Sequence[str]], None],
        on_admitted: Callable[[list[Ticket]], None],
    ) -> None:
        """Admit prompts as places become free and hand them to workers, until cancelled.

        Args:
            unfinished: tickets of a restored book, sampled first.
            hand_out: called with the ids of prompts before the book hears of them.
            on_admitted: called with tickets before workers get them.
        """
        self._work.is_fed = True
        try:
            self._work.add_groups(unfinished)
            self.wake()
            await unless_failed(self._admit(prompts, hand_out, on_admitted), self._sample_lost())
        finally:
            self._work.is_fed = False

    async def _sample_lost(self) -> None:
        """Never returns: groups whose tokens can't be read are sampled again."""
        while True:
            await self._changes.until(lambda: self._book.has_lost)
            tickets = self._book.take_lost()
            self._recorder.lost(tickets)
            self._work.add_groups(tickets)
            self.wake()

    async def _admit(
        self, prompts: Iterator[Prompt], hand_out: Callable[[Sequence[str]], None], on_admitted: Callable[[list[Ticket]], None]
    ) -> None:
        """Never returns."""
        held: list[Prompt] = []
        places = 0
        while True:
            while len(held) < places and self._book.free_places <= 0:  # prepare as many as last time, while the engines work
                held.append(next(prompts))
                await asyncio.sleep(0)
            await self._changes.until(lambda: self._book.free_places > 0)
            places = self._book.free_places
            while len(held) < places:
                held.append(next(prompts))
            new, held = held[:places], held[places:]
            hand_out([prompt.prompt_id for prompt in new])
            tickets = self._book.admit(new, now=time.monotonic())
            on_admitted(tickets)
            self._work.add_groups(tickets)
            self.wake()

    async def _sample(self, worker: WorkerHandle, ticket: Ticket) -> None:
        """Have a worker sample a group that it took; if that fails it waits again. The book takes the first answer and no later one."""
        group_id, lived = ticket.group_id, False
        outcome = found = payload = None
        wide = list[Any]()
        try:
            if self._book.attempts(group_id).engines_lost:  # on a worker that died together with others, without it
                sign = f"sign of life <- rollout worker {worker.name}"
                self._recorder.did((await call_with_retries(lambda: worker.actor.load.remote(), sign, deadline_s=ANSWER_S)).told)
            await self.throttle.wait()  # a step hands out all of its groups together
            if not self.is_current(worker):  # meanwhile a version was published, or the worker lost
                raise EngineDirty(f"rollout worker {worker.name} no longer holds the published weights")
            lived = True

            def call() -> Any:
                nonlocal found, payload, wide
                if found is not None:
                    disregard(found, payload, *wide)
                self._book.begin(group_id, now=time.monotonic())
                sample = worker.actor.generate_group.options(num_returns=self._results)
                found, payload, *wide = sample.remote(self._asked(ticket), self.generation)
                return found

            outcome = await self.call(worker, call, f"group {group_id} <- rollout worker {worker.name}")
            if isinstance(outcome, GroupFacts):
                payload = await to_hand_on(outcome, payload)
        except (DeadlineExceeded, ActorUnavailable) as error:  # the worker answers its heartbeat, or will be lost by it
            self._recorder.failed(PoolFailure.REQUEST_FAILED if isinstance(error, DeadlineExceeded) else PoolFailure.UNREACHED)
            await self._call_off(worker, group_id)
            is_late = lived and isinstance(error, DeadlineExceeded)
            may_go_on = self._failed(worker, group_id) if is_late else self._book.unreached(group_id) < MAX_UNREACHED
            self._again_or_discard(worker, ticket, str(error), may_go_on=may_go_on)
        except EngineError as error:
            self._engine_failed(worker, error)
            is_lost = lived and not isinstance(error, EngineDirty)
            may_be_why = is_lost or isinstance(error, EngineReplaced)
            if may_be_why and not worker.leaves and self._book.engine_lost(group_id) >= MAX_ENGINE_LOSSES:
                self._discard(ticket, DiscardReason.LOST, f"a third engine was lost while it was sampled: {error}")
            else:
                self._wait_again(ticket, await self._its_turns(worker, group_id) if is_lost else None)
        except LateError as error:  # the worker waits for others
            self._recorder.event("warning", f"others sample group {group_id} again, worker {worker.name} goes on: {error}")
            self._wait_again(ticket)
        else:
            self._take(worker, ticket, outcome, payload, wide[0] if isinstance(outcome, GroupFacts) and outcome.wide_bytes > 0 else None)
        finally:
            worker.groups.discard(group_id)
            worker.in_slots.discard(group_id)
            if found is not None and outcome is None:
                disregard(found, payload, *wide)
        self.wake()

    def _asked(self, ticket: Ticket) -> Ticket:
        so_far = self._book.so_far(ticket.group_id)
        return ticket if so_far is None else BegunTicket(ticket.group_id, ticket.prompt, ticket.admitted_version, so_far)

    async def _its_turns(self, worker: WorkerHandle, group_id: int) -> UnfinishedGroup | None:
        """What a lost worker had said that there was of the group, where that is more than there was before."""
        if worker.turns_so_far is None:
            return None
        if not isinstance(worker.turns_so_far, asyncio.Future):  # read once for all of its groups
            worker.turns_so_far = asyncio.ensure_future(value_of(worker.turns_so_far))
        with suppress(EvenkeelError, RayError):  # gone with its node
            what = f"turns of rollout worker {worker.name}, which is lost <- object store"
            groups = await wait_for(asyncio.shield(worker.turns_so_far), what, deadline_s=ANSWER_S, notice=log.debug)
            there: UnfinishedGroup | None = groups.get(group_id)
            before = self._book.so_far(group_id)
            if there is not None and there.tokens > (before.tokens if before is not None else 0):
                self._goes_on(there, f"rollout worker {worker.name} was lost in the middle of its rollouts")
                return there
        return None

    def _goes_on(self, there: UnfinishedGroup, why: str) -> None:
        self._recorder.handed_back(1, there.tokens)
        self._recorder.event("warning", f"group {there.group_id} goes on from {there.tokens} tokens: {why}")

    def _wait_again(self, ticket: Ticket, so_far: UnfinishedGroup | None = None) -> None:
        """Have another worker sample the group, unless it is finished or gone. Args: so_far: as of the book."""
        if self._book.waits(ticket.group_id, so_far=so_far):
            self._work.add_groups([ticket])

    def _take(self, worker: WorkerHandle, ticket: Ticket, outcome: GroupOutcome, payload: Any, wide: Any) -> None:
        """Record the outcome of a group. Args: payload: a finished group itself, or a reference to it; wide: as in StoredGroup."""
        if isinstance(outcome, UnfinishedGroup):
            if worker.leaves:
                worker.handed_back.append(outcome)
            else:
                why = f": {outcome.failed}" if outcome.failed is not None else ""
                self._goes_on(outcome, f"the engine of rollout worker {worker.name} failed in the middle of its rollouts{why}")
                if outcome.failed is not None:
                    self._engine_failed(worker, outcome.failed)
            self._wait_again(ticket, replace(outcome, failed=None))
        elif not isinstance(outcome, GroupFailure):
            if not worker.has_worked:
                worker.has_worked = True
                self._recorder.event("info", workers.first_work(worker))
            worker.resyncs, worker.worked_at = 0, self._now()
            self.progress()
            self._losses.worked()  # none was lost in vain
            self._latest.add(self._now(), is_good=True)
            worker.failed.clear()
            if (group := self._book.finish(StoredGroup(outcome, payload, wide, worker.source), now=time.monotonic())) is not None:
                self._recorder.group_finished(outcome, worker.name)
                self._on_finished(group)
            if pause_s := self._scoring.finished(outcome, self._now()):
                self.tasks.spawn(self._pause_for_rewards(pause_s))
        else:
            self._recorder.failed(PoolFailure.REQUEST_FAILED)
            may_go_on = not outcome.is_final and self._failed(worker, ticket.group_id)
            self._again_or_discard(worker, ticket, outcome.reason, may_go_on=may_go_on)

    async def _pause_for_rewards(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._scoring.pause_is_over()
        self.progress()
        self.wake()

    def _again_or_discard(self, worker: WorkerHandle, ticket: Ticket, why: str, *, may_go_on: bool) -> None:
        """Called when a worker could not sample a group: have another one sample it, or discard it."""
        if may_go_on:
            self._recorder.event("warning", f"group {ticket.group_id} is sampled again: {why}")
            if self._book.waits(ticket.group_id, failed_at=worker.name):
                self._work.add_groups([ticket])
            self.tasks.spawn(self._prefer_ready(self._book, ticket.group_id))
        else:
            self._discard(ticket, DiscardReason.FAILED, why)
        if len(worker.failed) >= FAILING_AFTER:
            worker.failed.clear()
            self._engine_failed(worker, EngineDirty("its last requests failed for several different groups"))

    def _failed(self, worker: WorkerHandle, group_id: int) -> bool:
        """Count a request that got no usable answer. Returns: whether the group may be tried again."""
        worker.failed.add(group_id)
        return self._book.failed(group_id) < ATTEMPTS

    async def _prefer_ready(self, book: GroupBook, group_id: int) -> None:
        """Let a group that has failed wait so long for new weights of other workers; then it goes to one that has them already."""
        await asyncio.sleep(self._deadlines.sync_s)
        book.overdue(group_id)
        self.wake()

    async def _call_off(self, worker: WorkerHandle, group_id: int) -> None:
        """Have a worker abort a group that nobody waits for any more. Its slot stays taken until then, or until the worker is lost."""
        what = f"abort of group {group_id} -> rollout worker {worker.name}"
        try:
            await call_until_answered(lambda: worker.actor.abort.remote(group_id), what, deadline_s=ANSWER_S, late=log.info)
        except EngineError as error:
            if not isinstance(error, ActorUnavailable):
                self._engine_failed(worker, error)

    def _discard(self, ticket: Ticket, reason: DiscardReason, why: str) -> None:
        self._recorder.event("warning", f"group {ticket.group_id} ({ticket.prompt.prompt_id}) is discarded, {reason}: {why}")
        self._book.give_up(ticket.group_id, reason)
        self._latest.add(self._now(), is_good=False)
        if self._latest.are_mostly_bad:  # the run would use up its prompts without training
            raise RequestError(f"{self._latest} got no usable answer on any worker. The last reason: {why}")

    # -- questions of evaluations -------------------------------------------------------------------------------------

    async def answer(self, prompts: Sequence[Prompt], how: AnswerSampling) -> list[tuple[Trajectory, ...]]:
        """Scored answers to each prompt, spread over the workers. A question's answers are all sampled by one of them."""
        loop = asyncio.get_running_loop()
        size = questions_of_a_call(self._answers_at_once, how.samples)
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
            call = partial(worker.actor.answer.remote, list(part.prompts), part.how)
            answers = await self.call(worker, call, f"evaluation answers <- rollout worker {worker.name}")
            self.progress()
            if not part.answers.done():
                part.answers.set_result(answers)
        except ActorUnavailable:  # the evaluation's deadline is the end of this
            self._work.add_questions([part])
        except EngineError as error:
            self._engine_failed(worker, error)
            part.losses += isinstance(error, EngineReplaced) or not isinstance(error, EngineDirty)
            # So many engines were lost with these questions that the evaluation should end before it costs another one.
            if not worker.leaves and part.losses >= MAX_ENGINE_LOSSES and not part.answers.done():
                part.answers.set_exception(error)
            self._work.add_questions([part])
        except Exception as error:  # is the evaluation's, which need not end the run
            if not part.answers.done():
                part.answers.set_exception(error)
        finally:
            worker.questions -= part.size
        self.wake()

    # -- who takes what -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something has changed that waiting work looks at: a worker, a receipt, or the work itself."""
        self.tasks.changed()
        if self._will_look or self.tasks.is_stopping or not self._work:  # hundreds of workers need not be looked through for nothing
            return
        if len(self.workers) <= workers.FEW:
            self._hand_out()
            return
        self._will_look = True
        self.tasks.spawn(self._hand_out_soon(_LOOK_S * len(self.workers)))

    async def _hand_out_soon(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._will_look = False
        self._hand_out()

    def _hand_out(self) -> None:
        """Workers take what waits."""
        current = [w for w in self.joined() if self.is_current(w)]
        # A new or dirty one is left out: a full sync takes its time.
        candidates = [w for w in self.joined() if w.sync.version >= 0]
        most = self._scoring.places(is_idle=not any(w.groups for w in self.workers.values()))
        for worker, work in self._work.take(self._book, current, candidates, most):
            if isinstance(work, Questions):
                self.tasks.spawn(self._ask(worker, work), name=_CALL)
                continue
            self._book.adopted(work.group_id)
            self.tasks.spawn(self._sample(worker, work), name=_CALL)
        self._tell_adopted()

    def _tell_adopted(self) -> None:
        """Say which lost workers' groups are all under way again."""
        for name in [name for name in self._orphaned_at if not self._book.orphans(name)]:
            took_s = time.monotonic() - self._orphaned_at.pop(name)
            self._recorder.event("info", f"all groups of rollout worker {name} are under way again, {took_s:.2f} s later")

    async def _watch(self) -> None:
        """Say so when work waits and no worker may take it. Raises: DeadlineExceeded when that lasts longer than is configured."""
        while True:
            await self.tasks.until(self._is_stuck)
            await wait_for(
                self.tasks.until(lambda: not self._is_stuck()),
                f"{self._work} <- a rollout worker with weights v{self.sync.version if self.sync else -1}",
                deadline_s=self.no_workers_s,
                notice_s=self._deadlines.notice_s,
                notice=self._recorder.waiting,
                detail=self._missing,
            )

    def _is_stuck(self) -> bool:
        return bool(self._work) and not any(self.is_current(w) for w in self.joined())

    async def _missing(self) -> str:
        joined, current = self.counts()
        return f"{counted(joined, 'worker')} joined, {current} of them with these weights, {len(self.workers) - joined} starting"

    def last_progress(self) -> float:
        """Time at which a group was last finished, or a worker joined or was lost; now if no worker can work, or rewards are waited for.
        Seconds of the event loop's clock."""
        return self._now() if self._scoring.is_pausing else max(self._progressed, self.attended_since())

    def attended_since(self) -> float:
        """Latest event-loop time (s) at which no worker held the published weights."""
        if not any(self.is_current(w) for w in self.joined()):
            self._attended = self._now()
        return self._attended

    def progress(self) -> None:
        """Restart the clock of deadlines.batch_s."""
        self._progressed = self._now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
