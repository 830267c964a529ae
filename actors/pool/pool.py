"""The rollout pool: workers take work, and what fails goes to others; it works with as many as are there. (Who is there: membership.py. A
worker's life: workers.py. What became of it and of groups: faults.py.)

A joined worker takes work while it holds a receipt for the published version; how much of it, dispatch.py says. One whose engine says that
it is dirty (a weight update failed half-way) stays joined, and works again after a full sync.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from evenkeel.actors.carriers import DiscardReason, GroupFailure, StoredGroup, Ticket, WorkerSettings
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.groups.changes import Changes
from evenkeel.actors.groups.tokens import disregard, to_hand_on
from evenkeel.actors.pool import workers
from evenkeel.actors.pool.dispatch import Questions, WaitingWork, continuing
from evenkeel.actors.pool.evaluation_answers import EvaluationAnswers
from evenkeel.actors.pool.faults import ATTEMPTS, FEWEST_FAILED, WINDOW_S, GroupOutcomes
from evenkeel.actors.pool.membership import Membership, MembershipCallbacks
from evenkeel.actors.pool.pool_tasks import PoolTasks
from evenkeel.actors.pool.rollout_worker import GroupOutcome
from evenkeel.actors.pool.scoring import Scoring
from evenkeel.actors.pool.workers import PoolObserver, WorkerHandle
from evenkeel.actors.processes.stopwatch import Phase
from evenkeel.actors.processes.supervision import call_until_answered, call_with_retries, unless_failed, wait_for
from evenkeel.actors.settings.deadlines import ANSWER_S, group_s
from evenkeel.actors.settings.evaluation_places import evaluation_answers_at_once
from evenkeel.actors.weights.weight_sync import SyncTarget, WeightSync
from evenkeel.correction.errors import (
    ActorLost,
    ActorUnavailable,
    DeadlineExceeded,
    EngineDirty,
    EngineError,
    EvenkeelError,
    LateError,
    counted,
)
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.trajectory import GroupFacts, Prompt, Trajectory, UnfinishedGroup

log = logging.getLogger("evenkeel.pool")
_MAX_RESYNCS = 3
"""Full syncs that a worker gets for an engine that says it is dirty, before it is replaced; counted anew with each finished group."""
_CALL = "a worker's call"
_LOOK_S = 2e-5
"""Seconds of waiting for further changes in a large pool, times the number of workers: looking through hundreds takes milliseconds."""


class RolloutPool:
    """Gives groups to workers, and what fails to others. One event loop uses it."""

    def __init__(
        self,
        settings: WorkerSettings,
        deadlines: DeadlinesConfig,
        book: GroupBook,
        changes: Changes,
        observer: PoolObserver,
        places: int = 1,
        on_finished: Callable[[StoredGroup], object] = lambda _: None,
    ) -> None:
        """
        Args:
            changes: of the book.
            places: groups that admission allows outstanding.
            on_finished: takes each group that a worker has sampled and scored.
        """
        self._config, self._deadlines, self._observer, self.tasks = settings.rollout, deadlines, observer, PoolTasks()
        self._book, self._changes, self._on_finished = book, changes, on_finished
        self._results = 3 if settings.has_wide_fields else 2
        """Ray objects that a worker's call for a group returns: facts, tokens, and wide fields if there are any."""
        self._begin_books()
        self._will_look = False
        told = MembershipCallbacks(
            changed=self.wake,
            lost=lambda worker: self._lost_groups.add(worker),
            left=lambda name: self._groups.left(name),
            rewards_fail=lambda: self._scoring.is_failing,
        )
        self.members = members = Membership(settings, deadlines, observer, self.tasks, told, places)
        add: Callable[[Sequence[Questions]], None] = lambda parts: self._work.add_questions(parts)  # noqa: E731
        at_once = evaluation_answers_at_once(self._config.slots_per_worker, self._config.sampling.samples_per_group)
        self._evaluations = EvaluationAnswers(members, add=add, failed=self._engine_failed, wake=self.wake, at_once=at_once)

    def _begin_books(self) -> None:
        self._work = WaitingWork(self._config.slots_per_worker, self._config.sampling.samples_per_group)
        self._lost_groups = workers.LostGroups(lambda text: self._observer.event("info", text))
        window_s = max(WINDOW_S, FEWEST_FAILED * ATTEMPTS * group_s(self._config))  # enough for one worker with one slot
        self._groups = GroupOutcomes(window_s)
        self._scoring = Scoring(self._config.reward, window_s, notify=self._observer.event, spawn=self.tasks.spawn, on_end=self._goes_on)

    def start(self, *, has_scored: bool = False) -> None:
        """Ask for all workers; they join as they come. Args: has_scored: the run is resumed, and its reward has scored before."""
        self.members.start(has_scored=has_scored)
        self.tasks.spawn(self._watch())

    def follow(self, sync: WeightSync) -> None:
        """From now on workers get their weights through `sync`."""
        self.members.follow(sync)

    async def withdraw(self) -> None:
        """Withdraw all work and weights; workers stay idle until `serve`, `follow` and `feed`. A failure so far is cleared, later ones
        count."""
        self.members.withdraw()
        await self.tasks.cancel(_CALL)
        self._begin_books()  # the same numbers come again
        self.tasks.renew()

    def serve(self, book: GroupBook, changes: Changes, generation: int) -> None:
        """Groups are those of another book from now on; what the workers have under way is given up."""
        self._book, self._changes = book, changes
        self.members.begin(generation)

    async def stop(self) -> None:
        """End all workers, engines first."""
        self.tasks.stop()
        await self.members.stop()

    @property
    def has_failed(self) -> bool:
        return self.tasks.has_failed

    def fail(self, error: BaseException) -> None:
        """Record an error with which the run can't go on. `raise_on_failure` raises the first one."""
        self.tasks.fail(error)

    async def raise_on_failure(self) -> None:
        """Never returns; raises when the pool can't go on."""
        await self.tasks.raise_on_failure()

    # -- workers that fail -------------------------------------------------------------------------------------------

    def _engine_failed(self, worker: WorkerHandle, error: EvenkeelError) -> None:
        """A call to a worker failed: a dirty engine is synced again, anything else means that the worker is lost."""
        if isinstance(error, ActorUnavailable):  # whether it is lost, its heartbeat says
            return
        if not isinstance(error, EngineDirty):
            self.members.lost(worker, str(error))
        elif self.members.sync is not None and self.members.is_current(worker):  # if not, the sync has noted it and is at it
            worker.resyncs += 1
            if worker.resyncs > _MAX_RESYNCS:
                self.members.lost(worker, f"dirty again after {_MAX_RESYNCS} full syncs: {error}")
                return
            self.members.sync.resync(worker.sync, str(error))

    def weights_lost(self, error: ActorLost) -> None:
        """Called when a rank was lost while the learner copied its weights: the run can't go on. Ignored once the weights are withdrawn."""
        if self.members.sync is not None:
            self.fail(error)

    def report_unsyncable(self, target: SyncTarget, reason: str) -> None:
        """Called when the weight sync has given an engine up."""
        worker = self.members.workers.get(target.name)
        if worker is not None:
            self.members.lost(worker, reason)

    # -- work --------------------------------------------------------------------------------------------------------

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
            self._observer.lost(tickets)
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
        """Have a worker sample a group that it took; if it fails the group waits again, and the queue takes it once."""
        group_id, lived = ticket.group_id, False
        outcome = found = payload = None
        wide = list[Any]()
        try:
            if self._groups.were_lost([group_id]):  # on a worker that died together with others, without it
                sign = f"sign of life <- rollout worker {worker.name}"
                await call_with_retries(lambda: worker.actor.load.remote(), sign, deadline_s=ANSWER_S)
            await self.members.throttle.wait()  # a step hands out all of its groups together
            if not self.members.is_current(worker):  # meanwhile a version was published, or the worker lost
                raise EngineDirty(f"rollout worker {worker.name} no longer holds the published weights")
            lived = True

            def call() -> Any:
                nonlocal found, payload, wide
                if found is not None:
                    disregard(found, payload, *wide)
                self._book.hand_out(group_id, worker.name, now=time.monotonic())
                sample = worker.actor.generate_group.options(num_returns=self._results)
                found, payload, *wide = sample.remote(ticket, self.members.generation)
                return found

            outcome = await self.members.call(worker, call, f"group {group_id} <- rollout worker {worker.name}")
            if isinstance(outcome, GroupFacts):
                payload = await to_hand_on(outcome, payload)
        except (DeadlineExceeded, ActorUnavailable) as error:  # the worker answers its heartbeat, or will be lost by it
            await self._call_off(worker, group_id)
            is_late = lived and isinstance(error, DeadlineExceeded)
            may_go_on = self._groups.failed(group_id, worker.name) if is_late else self._groups.unreached(group_id)
            self._again_or_discard(worker, ticket, str(error), may_go_on=may_go_on)
        except EngineError as error:
            self._engine_failed(worker, error)
            is_loss = lived and not worker.leaves and not isinstance(error, EngineDirty)
            if is_loss and self._groups.lost([group_id], worker.name):
                self._discard(ticket, DiscardReason.LOST, f"a third engine was lost while it was sampled: {error}")
            else:
                if self._groups.is_suspect(group_id):
                    self._work.suspect(group_id)
                self._wait_again(ticket)
        except LateError as error:  # the worker waits for others
            self._observer.event("warning", f"others sample group {group_id} again, worker {worker.name} goes on: {error}")
            self._wait_again(ticket)
        else:
            self._take(worker, ticket, outcome, payload, wide[0] if isinstance(outcome, GroupFacts) and outcome.wide_bytes > 0 else None)
        finally:
            worker.groups.discard(group_id)
            if found is not None and outcome is None:
                disregard(found, payload, *wide)
        self.wake()

    def _wait_again(self, ticket: Ticket) -> None:
        """Have another worker sample the group, unless it is finished or gone."""
        if self._book.waits(ticket.group_id):
            self._work.add_groups([ticket])

    def _take(self, worker: WorkerHandle, ticket: Ticket, outcome: GroupOutcome, payload: Any, wide: Any) -> None:
        """Record the outcome of a group. Args: payload: a finished group itself, or a reference to it; wide: as in StoredGroup."""
        if isinstance(outcome, UnfinishedGroup):
            worker.handed_back.append(outcome)
            self._wait_again(continuing(ticket, outcome))
        elif not isinstance(outcome, GroupFailure):
            if not worker.has_worked:
                worker.has_worked = True
                self._observer.event("info", workers.first_work(worker))
            worker.resyncs, worker.worked_at = 0, self._now()
            self.members.finished_group()
            self._groups.finished(ticket.group_id, worker.name, self._now())
            self._work.forget(ticket.group_id)
            if (group := self._book.finish(StoredGroup(outcome, payload, wide, worker.source), now=time.monotonic())) is not None:
                self._observer.group_finished(outcome, worker.name)
                self._on_finished(group)
            self._scoring.finished(outcome)
        else:
            may_go_on = not outcome.is_final and self._groups.failed(ticket.group_id, worker.name)
            self._again_or_discard(worker, ticket, outcome.reason, may_go_on=may_go_on)

    def _again_or_discard(self, worker: WorkerHandle, ticket: Ticket, why: str, *, may_go_on: bool) -> None:
        """Called when a worker could not sample a group: have another one sample it, or discard it."""
        if may_go_on:
            self._observer.event("warning", f"group {ticket.group_id} is sampled again: {why}")
            if self._book.waits(ticket.group_id):
                self._work.add_failed(ticket, worker)
            self.tasks.spawn(self._prefer_ready(self._work, ticket.group_id))
        else:
            self._discard(ticket, DiscardReason.FAILED, why)
        if self._groups.is_failing(worker.name):
            self._engine_failed(worker, EngineDirty("its last requests failed for several different groups"))

    async def _prefer_ready(self, work: WaitingWork, group_id: int) -> None:
        """Let a group that has failed wait so long for new weights of other workers; then it goes to one that has them already."""
        await asyncio.sleep(self._deadlines.sync_s)
        work.prefer_ready(group_id)
        self.wake()

    async def _call_off(self, worker: WorkerHandle, group_id: int) -> None:
        """Have a worker abort a group that nobody waits for any more. Its slot stays taken until then, or until the worker is lost."""
        what = f"abort of group {group_id} -> rollout worker {worker.name}"
        try:
            await call_until_answered(lambda: worker.actor.abort.remote(group_id), what, deadline_s=ANSWER_S, late=log.info)
        except EngineError as error:
            if not isinstance(error, ActorUnavailable):
                self._engine_failed(worker, error)

    def learner_waits(self, version: int, wait: Phase) -> None:
        """To be called when the learner begins to wait for a batch, once a step.

        Args:
            version: of the learner's weights.
            wait: measured by the driver.
        """
        self.members.learner_waits(version, wait)

    def _discard(self, ticket: Ticket, reason: DiscardReason, why: str) -> None:
        self._observer.event("warning", f"group {ticket.group_id} ({ticket.prompt.prompt_id}) is discarded, {reason}: {why}")
        self._work.forget(ticket.group_id)
        self._lost_groups.discarded(ticket.group_id)
        self._book.give_up(ticket.group_id, reason)
        self._groups.discarded(ticket.group_id, why, self._now())

    async def answer(self, prompts: Sequence[Prompt], how: AnswerSampling) -> list[tuple[Trajectory, ...]]:
        """Scored answers to each prompt, spread over the workers."""
        return await self._evaluations.answer(prompts, how)

    async def _watch(self) -> None:
        """Say so when work waits and no worker may take it. Raises: DeadlineExceeded when that lasts longer than is configured."""
        while True:
            await self.tasks.until(self._is_stuck)
            await wait_for(
                self.tasks.until(lambda: not self._is_stuck()),
                f"{self._work} <- a rollout worker with weights v{self.members.sync.version if self.members.sync else -1}",
                deadline_s=self.members.no_workers_s,
                notice_s=self._deadlines.notice_s,
                notice=self._observer.waiting,
                detail=self._missing,
            )

    def _is_stuck(self) -> bool:
        return bool(self._work) and not any(self.members.is_current(w) for w in self.members.joined())

    async def _missing(self) -> str:
        joined, current = self.members.counts()
        return f"{counted(joined, 'worker')} joined, {current} of them with these weights, {len(self.members.workers) - joined} starting"

    def last_progress(self) -> float:
        """When a group was last finished, or a worker joined or was lost; now if no worker can work, or rewards are waited for. Seconds of
        the event loop's clock."""
        return self._now() if self._scoring.is_pausing else self.members.last_progress()

    def _goes_on(self) -> None:
        """Called at the end of a pause that failing rewards have caused."""
        self.members.progress()
        self.wake()

    def wake(self) -> None:
        """Something has changed that waiting work looks at: a worker, a receipt, or the work itself."""
        self.tasks.changed()
        if self._will_look or self.tasks.is_stopping or not self._work:  # hundreds of workers need not be looked through for nothing
            return
        if len(self.members.workers) <= workers.FEW:
            self._hand_out()
            return
        self._will_look = True
        self.tasks.spawn(self._hand_out_soon(_LOOK_S * len(self.members.workers)))

    async def _hand_out_soon(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._will_look = False
        self._hand_out()

    def _hand_out(self) -> None:
        """Workers take what waits."""
        current = [w for w in self.members.joined() if self.members.is_current(w)]
        # A new or dirty one is left out: a full sync takes its time.
        candidates = [w for w in self.members.joined() if w.sync.version >= 0]
        most = self._scoring.places(is_idle=not any(w.groups for w in self.members.workers.values()))
        for worker, work in self._work.take(current, candidates, most):
            if isinstance(work, Questions):
                self.tasks.spawn(self._evaluations.ask(worker, work), name=_CALL)
                continue
            self._lost_groups.taken([work.group_id])
            self.tasks.spawn(self._sample(worker, work), name=_CALL)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
