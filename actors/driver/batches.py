"""The book of groups with its ledger, and the correction service: where the driver's batches come from, and what they leave.

A service that dies is replaced: the draw that it had is taken back, and the new one packs again; learner, engines and objects in the store
are not touched. What is lost are the diagnostics of batches that the old one held.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import ray

from evenkeel.actors.carriers import DiscardedGroup, PackedGroups, PreparedBatch, StoredGroup, Ticket
from evenkeel.actors.checkpoints.state import open_ledger
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.parts import SERVICE, StartingPoint, start_service
from evenkeel.actors.driver.recovery import lost_among, while_they_answer
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.groups.changes import Changes
from evenkeel.actors.groups.ledger import Ledger
from evenkeel.actors.groups.snapshot import BookSnapshot
from evenkeel.actors.groups.tokens import whole_snapshot
from evenkeel.actors.pool.pool import RolloutPool
from evenkeel.actors.processes.lane import Lane
from evenkeel.actors.processes.supervision import abandon, has_failed, kill, lost_if_late, unless_set, wait_for
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.record.disk_waits import ByDisk
from evenkeel.actors.record.recorder import Recorder
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.settings.deadlines import new_parts_s
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.errors import ActorLost, EvenkeelError, counted
from evenkeel.correction.settings.schedule import needs_logprobs_at_sampling, needs_reference_logprobs

if TYPE_CHECKING:
    from evenkeel.engines.agreement import Agreement
    from evenkeel.learner.results import StepResult


_LOOK_S = 0.1
_SHORTEST_S, _LONGEST_S = 0.25, 1.0
# Of a step: how long a drawn group waits for others, between the shortest and the longest time, while the learner is at work.
_SHARE = 0.25
# For the tokens of finished groups after SIGTERM. A preemption leaves half a minute, in which the learner's copy and the disk have to come,
# too. Its nodes go together: tokens on one that is gone would be waited for until the kill. From one that lives they come at once.
_LAST_TOKENS_S = 5.0


class BatchSource:
    """Book and service of a run from one starting point on. The book exists from the beginning, the service after `start`."""

    def __init__(self, config: RunConfig, point: StartingPoint, ledger: Ledger, recorder: Recorder, *, filters: bool | None = None) -> None:
        """Args: filters: as of the book, whose finished groups of a checkpoint it is for, too; None: as configured."""
        self._config, self._recorder, self.ledger = config, recorder, ledger
        self.changes = Changes()
        self.book = GroupBook(
            groups_per_step=config.groups_per_step,
            max_staleness=config.max_staleness,
            dynamic_sampling=config.dynamic_sampling if filters is None else filters,
            by_turn=config.correction.advantage.is_by_turn,
            snapshot=point.state.book if point.state else None,
            changed=self.changes.tell,
        )
        self.monitor: Mapping[str, Any] | None = point.state.monitor if point.state else None
        """State of the early warning after the last batch that was diagnosed."""
        self.correction = config.correction
        """Correction of the next batch that is begun."""
        self._unfinished = self.book.in_flight
        self._ahead: BatchAhead | None = None
        self._ranks_keep_weights = False  # for the correction of the last batch
        self._asked_at, self._gather_s = time.monotonic(), _SHORTEST_S
        self._lane = Lane("book")  # what groups wait for: before their workers, and between these and the learner
        self.service: Any = None

    @classmethod
    async def opened(
        cls, config: RunConfig, point: StartingPoint, folder: RunFolder, recorder: Recorder, by_disk: ByDisk, *, filters: bool | None = None
    ) -> BatchSource:
        """A source with the ledger of the run folder. Its file is read, and cut to the checkpoint, once all earlier lines are written.

        Args: filters: as above.
        Raises: LedgerError; DeadlineExceeded if the disk hangs.
        """
        opening = partial(open_ledger, folder.path / "ledger.jsonl", point.state, recorder.event, recorder.disk.do)
        source = cls(config, point, await by_disk(recorder.disk.result(opening), "the ledger's checksum"), recorder, filters=filters)
        source.ledger.compare(contents := source.book.contents())
        if begun := [one.tokens for one in contents.so_far if one.tokens]:
            recorder.event("info", f"{counted(len(begun), 'group')} under way go on from {sum(begun)} tokens of the checkpoint")
        return source

    @property
    def parts(self) -> dict[str, Any]:
        """The service, once it is started, by its name in messages."""
        return {SERVICE: self.service} if self.service is not None else {}

    def start(self, correction: CorrectionConfig) -> None:
        """Start the service. Args: correction: the run's, or the one that an alarm has put in its place."""
        self.correction = correction
        self.service = start_service(self._config, self.monitor)

    def replace(self, correction: CorrectionConfig, version: int) -> None:
        """Kill the service, take back what was drawn for the batches of `version` and later, and start a new one."""
        self.stop()
        kill(self.service)
        self.book.take_back(version)
        self.start(correction)

    def take_unfinished(self) -> list[Ticket]:
        """Groups of the starting point that the pool has to sample; empty at a second call."""
        tickets, self._unfinished = self._unfinished, []
        return tickets

    async def switch(self, correction: CorrectionConfig) -> None:
        """Use this correction from the next batch on whose preparation begins."""
        self.monitor = None  # of a service that dies meanwhile: what it followed means something else now
        before, self.correction = self.correction, correction
        self.monitor = await self.ask(self.service.switch, before, correction)

    async def keep_scatter(self) -> None:
        """Hand the service's picture of tokens to the report."""
        try:
            self._recorder.keep_scatter(await self.ask(self.service.scatter))
        except (EvenkeelError, ray.exceptions.RayError) as error:
            self._recorder.event("warning", f"the report goes without its picture of tokens: {error}")

    def stop(self) -> None:
        """Prepare no further batch; what is prepared is dropped."""
        if self._ahead is not None:
            self._ahead.drop()
        self._ahead = None

    async def saved(self, pool: RolloutPool, is_hurried: asyncio.Event) -> tuple[BookSnapshot, Mapping[str, Any] | None]:
        """What a checkpoint has of both: the book's contents, and the early warning's state, which is None if it is to begin anew.

        Args:
            pool: knows what there is of groups that have turns.
            is_hurried: set, now or meanwhile, when the process may be killed in seconds. Then finished groups whose tokens are not here
                in _LAST_TOKENS_S are among those in flight.
        Raises: LedgerError if the book has lost or doubled a prompt.
        """
        contents = self.book.contents()
        self.ledger.compare(contents)
        take = partial(whole_snapshot, contents, pool.turns_so_far(), tell=partial(self._recorder.event, "info"))
        whole = await unless_set(is_hurried, take(tokens_s=self._config.deadlines.checkpoint_s))
        return whole or await take(tokens_s=_LAST_TOKENS_S), self.monitor

    async def ask(self, method: Any, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Make a call of the service that may be repeated. Args: deadline_s: None: it is a short one."""
        what, limit_s = f"{method._method_name} <- correction service", deadline_s or self._config.deadlines.sync_s
        call, notify = partial(method.remote, *arguments), self._recorder.event
        return await while_they_answer(self.parts, call, what, deadline_s=limit_s, notify=notify)

    async def compared(self, version: int, result: StepResult) -> Agreement | None:
        """Ask the correction service to compare the batch. If it dies meanwhile, its replacement is asked, which lacks the batch.

        Raises: as `ask`, if it is there; ActorLost if the next one is late.
        """
        while True:
            asked, parts = self.service, self.parts
            try:
                found: Agreement | None = await self.ask(asked.compared, version, result)
                return found
            except ActorLost as error:
                lost = [parts[name] for name in (await lost_among(parts, error)).parts]
                if not lost and self.service is asked:
                    raise
            kill(*lost)  # so that one that was only out of reach is replaced, too
            await lost_if_late(self._until_replaced(asked, f"comparison of the batch of version {version} <- a new correction service"))

    async def _until_replaced(self, service: Any, what: str) -> None:
        """Wait for another one. Args: what: the wait's name. Raises: DeadlineExceeded."""

        async def is_replaced() -> None:
            while self.service is service:
                await asyncio.sleep(_LOOK_S)

        deadlines = self._config.deadlines
        limit_s, notice_s = new_parts_s(deadlines.start_s), deadlines.notice_s
        await wait_for(is_replaced(), what, deadline_s=limit_s, notice_s=notice_s, notice=self._recorder.waiting)

    async def next(self, version: int, learner: LearnerGroup, pool: RolloutPool, *, step: int) -> PreparedBatch:
        """The batch of a version, complete; the next one is begun before this returns.

        Args:
            learner: stands at this version, and is idle until this returns.
            pool: its last progress starts the deadline for groups.
            step: number of the step that will train it.
        """
        deadlines, delays, now = self._config.deadlines, self.book.delays, time.monotonic()
        delays.asked(now)

        async def waiting_for() -> str:
            return self.book.waiting_for(version)

        in_time = partial(
            wait_for,
            what=f"batch of version {version} <- rollout workers",
            deadline_s=deadlines.batch_s,
            counts_from=pool.last_progress,
            notice_s=deadlines.notice_s,
            notice=self._recorder.waiting,
            detail=waiting_for,
        )
        ahead = self._ahead if self._ahead is not None and self._ahead.version == version else self._begin(version)
        batch = await ahead.completed(learner, step=step, in_time=in_time)
        if self._ranks_keep_weights and not ahead.wants_at_sampling:  # an alarm has put a correction without these ratios in place
            await learner.forget_weights(before=first_split_version(self._config, version))
        self._ranks_keep_weights = ahead.wants_at_sampling
        self._gather_s = min(max(_SHARE * (now - self._asked_at), _SHORTEST_S), _LONGEST_S)
        self._asked_at = now
        self._begin(version + 1)
        finished_at, now = self.book.finished_at(batch.group_ids), time.monotonic()
        delays.given(finished_at.values(), now)
        for group_id, at in finished_at.items():
            self._lane.add("queue", at, now, version=version, group=group_id)
        for group_id, (admitted_at, called_at) in self.book.waited_for_a_worker(batch.group_ids).items():
            self._lane.add("slot", admitted_at, called_at, version=version, group=group_id)
        self._recorder.did(self._lane.report())
        return batch

    def _begin(self, version: int) -> BatchAhead:
        async def ask_service(method: str, *arguments: Any, deadline_s: float) -> Any:
            return await self.ask(getattr(service, method), *arguments, deadline_s=deadline_s)

        service = self.service
        self._ahead = BatchAhead(version, self.correction, self._config, self.book, self.changes, ask_service, gather_s=self._gather_s)
        return self._ahead

    def settle(self, step: int, batch: PreparedBatch, *, version: int, published: int) -> tuple[dict[str, int], list[DiscardedGroup]]:
        """Record a finished step in the book and in the ledger.

        Args:
            version: of the learner after it.
            published: version that the engines get.
        Returns: the book's counts, and what was discarded since the step before.
        Raises: LedgerError if the book has lost or doubled a prompt.
        """
        discarded = self.book.settle(version, published, batch.group_ids, now=time.monotonic())
        tokens = dict(zip(batch.prompt_ids, batch.group_tokens, strict=True))
        self.ledger.settle(step, trained=batch.prompt_ids, discarded=discarded, contents=self.book.contents(), tokens=tokens)
        self._recorder.note(self.book.delays.read())
        return self.book.counts(), discarded


# The batch of one version on its way to the learner. The driver asks service and learner for it; they answer, and ask nobody.
#
# Groups are drawn as they finish, while the learner trains the batch before, and the service pulls and unpacks them then. If the correction
# needs logprobs of the learner's own, for proximal or reference policy or of the weights that sampled, they are asked for in chunks of half
# a batch or the rest, but only while the learner stands at the batch's version and has nothing else to do: earlier those would be the
# logprobs of older weights. While rollouts are the bottleneck these forwards are free. Otherwise the whole batch is corrected before the
# learner comes for it.
#
# No tensor comes here: references go from service to learner and back.

# When the tokens of one group have been lost this many times, the run goes back to its last checkpoint; two losses may be lost nodes.
# Tokens that always come late would otherwise be sampled again for ever; with this the run ends at the fourth rollback (recovery.py), with
# the remedy. Late groups are not discarded: they are those with the longest answers, and a run without them would learn something else.
_MOST_LOSSES = 3
# Seconds for which a drawn group waits, while the learner does, so that others can join it in one call of the service.
_JOIN_S = 0.05


class GroupsLost(EvenkeelError):
    """Groups of the batch can't be read; the learner has not begun to train on it."""

    def __init__(self, why: Mapping[int, str]) -> None:
        """Args: why: by group id."""
        super().__init__(f"groups {sorted(why)} are lost")
        self.why = dict(why)


class BatchAhead:
    """Draws at once, in the background; `completed` needs the learner. One event loop uses it."""

    def __init__(
        self,
        version: int,
        correction: CorrectionConfig,
        config: RunConfig,
        book: GroupBook,
        changes: Changes,
        ask: Callable[..., Awaitable[Any]],
        *,
        gather_s: float,
    ) -> None:
        """
        Args:
            version: of the learner's weights from which the update will start.
            correction: of all of the batch, whatever the run's becomes meanwhile.
            changes: of the book.
            ask: calls a method of the service by its name, with arguments and `deadline_s`, until it answers.
            gather_s: seconds for which a drawn group waits for others while the learner is busy.
        """
        self.version, self._correction, self._config, self._ask_service = version, correction, config, ask
        self._book, self._changes, self._gather_s = book, changes, gather_s
        # The learner is there.
        self._is_awaited = False
        # Of the calls of the service for this batch.
        self._numbers = count()
        # Drawn, and pulled by the service.
        self._groups: dict[int, StoredGroup] = {}
        # Groups that the service has and is to forget; the next `pull` says so.
        self._lost: list[int] = []
        # Groups that no forward has been packed for, if forwards are wanted.
        self._unpacked: list[int] = []
        self._chunks: list[tuple[list[int], asyncio.Task[PackedGroups]]] = []
        # A chunk has been added, or the batch has all of its groups.
        self._changed = asyncio.Event()
        # Seconds that the learner took to keep a copy of its weights; None: it has not been asked to.
        self._keeping_s: float | None = None
        learner, every = config.learner, config.learner.report_kl_every
        self._wants_proximal = learner.needs_proximal_forward(correction)
        self._wants_reference = needs_reference_logprobs(correction) or (every > 0 and version % every == 0)
        self.wants_at_sampling = needs_logprobs_at_sampling(correction) and config.max_staleness > 0
        self._splits_sample = splits_gap(config, version) and not self.wants_at_sampling
        self._begin()

    def _begin(self) -> None:
        self._gathering = asyncio.create_task(self._gather())
        self._gathering.add_done_callback(self._gathered)

    def _gathered(self, task: asyncio.Task[PreparedBatch | None]) -> None:
        has_failed(task)  # whoever asks for the batch gets the error
        self._changed.set()

    def drop(self) -> None:
        """Nobody wants it any more."""
        abandon(self._gathering)
        self._drop_chunks()

    async def completed(self, learner: LearnerGroup, *, step: int, in_time: Callable[[Awaitable[Any]], Awaitable[Any]]) -> PreparedBatch:
        """The whole batch, corrected. Until it is there the learner, which stands at its version, is asked for nothing else.

        Args:
            step: number of the step that will train it.
            in_time: puts the deadline on a wait for groups.
        Raises: ActorLost; what `in_time` raises.
        """
        self._is_awaited = True
        self._changes.tell()
        while True:
            try:
                batch = await self._completed(learner, step, in_time)
            except GroupsLost as error:  # before the learner has begun with them: they are sampled again
                self._drop_chunks()
                self._lost += error.why
                self._groups = {group_id: group for group_id, group in self._groups.items() if group_id not in error.why}
                self._unpacked = list(self._groups)
                self._lose(error.why)
                if self._gathering.done():
                    self._begin()
                continue
            return replace(batch, groups=tuple(self._groups[group_id].facts for group_id in self._group_ids))

    async def _completed(self, learner: LearnerGroup, step: int, in_time: Callable[[Awaitable[Any]], Awaitable[Any]]) -> PreparedBatch:
        oldest = self.version - self._config.max_staleness
        if self._keeping_s is None and keeps_weights(self._config, self.version) and not self.wants_at_sampling:
            self._keeping_s = await _seconds(learner.keep_weights(self.version, oldest=oldest))
        scored: list[Any] = []
        scored_s = split_s = 0.0
        while (chunk := await in_time(self._next_chunk(len(scored) // 3))) is not None:
            began = time.monotonic()
            scored += await self._scored(learner, chunk, step)
            between = time.monotonic()
            scored.append(await self._at_sampling(learner, chunk, step))
            scored_s += between - began if self._wants_proximal or self._wants_reference else 0.0
            split_s += time.monotonic() - between if self.wants_at_sampling else 0.0
        if (batch := self._gathering.result()) is None:
            split = None
            if self._splits_sample:
                split, split_s = await self._split(learner, step)
            batch = await self._correct([group_ids for group_ids, _ in self._chunks], split, *scored)
        if batch.fetch_s:
            limit_s, correction = batch.fetch_s, self._correction
            _refuse_lost(await learner.fetch(batch.corrected, correction, step=step, limit_s=limit_s, everything=False))
        if self.wants_at_sampling:  # when no token of this batch needs the oldest copy any more
            self._keeping_s = await _seconds(learner.keep_weights(self.version, oldest=oldest + 1))
        return replace(batch, proximal_s=scored_s, split_s=split_s + (self._keeping_s or 0.0))

    # -- groups ------------------------------------------------------------------------------------------------------

    async def _gather(self) -> PreparedBatch | None:
        """Draw the groups as they finish. Returns: the batch, if the learner is needed for nothing before its step."""
        places = self._config.groups_per_step
        while len(self._groups) < places:
            drawn = await self._draw(places - len(self._groups))
            lost, self._lost = self._lost, []
            why: dict[int, str] = await self._ask("pull", drawn, lost)
            self._lose(why)
            here = {one.group_id: one for one in drawn if one.group_id not in why}
            self._groups |= here
            self._unpacked += here
            # A few large forwards beat many small ones: one is packed when half a batch or the rest of it is there.
            is_enough = len(self._unpacked) * 2 >= places or len(self._groups) == places
            if is_enough and self._wants_forward:
                chunk, self._unpacked = self._unpacked, []
                packing = asyncio.create_task(self._ask("pack", chunk, self._correction))
                packing.add_done_callback(has_failed)
                self._chunks.append((chunk, packing))
                self._changed.set()
        if self._wants_forward or self._splits_sample:
            return None
        return await self._correct([], None)

    @property
    def _wants_forward(self) -> bool:
        """Whether the learner has to score the batch before it is corrected."""
        return self._wants_proximal or self._wants_reference or self.wants_at_sampling

    async def _draw(self, places: int) -> list[StoredGroup]:
        """Up to so many groups; waits for the first, and a moment for others: a call of the service costs as much for one as for many."""
        drawn: list[StoredGroup] = []

        def take() -> bool:
            drawn.extend(self._book.draw(self.version, places - len(drawn)))
            return bool(drawn)

        def is_enough() -> bool:
            return (take() and len(drawn) == places) or self._book.are_all_sampled

        await self._changes.until(take)
        await self._changes.until(lambda: is_enough() or self._is_awaited, within_s=self._gather_s)
        await self._changes.until(is_enough, within_s=_JOIN_S)
        return drawn

    def _lose(self, why: Mapping[int, str]) -> None:
        """Have drawn groups that can't be read sampled again.

        Raises: ActorLost for a group that was lost _MOST_LOSSES times: lost nodes hardly explain that. The run goes back for it.
        """
        if why:
            self._book.lose(why)
        for group_id, reason in why.items():
            if self._book.losses(group_id) >= _MOST_LOSSES:
                raise ActorLost(
                    f"group {group_id} was sampled {_MOST_LOSSES} times, and each time its tokens could not be read, at last because they "
                    f"were {reason}: look at the nodes and the network between them; where they are late, lower deadlines.bytes_per_s"
                )

    async def _next_chunk(self, number: int) -> PackedGroups | None:
        """The chunk of this number; None: there are no more. Raises: the error of what goes on in the background."""
        while len(self._chunks) <= number:
            if self._gathering.done():
                self._gathering.result()
                return None
            self._changed.clear()
            await self._changed.wait()
        return await self._chunks[number][1]

    def _drop_chunks(self) -> None:
        for _, packing in self._chunks:
            abandon(packing)
        self._chunks = []

    @property
    def _group_ids(self) -> list[int]:
        """Group ids in the order of the batch, which doesn't depend on who was finished first."""
        return sorted(self._groups)

    # -- service and learner -----------------------------------------------------------------------------------------

    async def _ask(self, method: str, *arguments: Any) -> Any:
        limit_s = self._config.deadlines.batch_s  # longer than the tokens of a batch may take
        return await self._ask_service(method, self.version, next(self._numbers), *arguments, deadline_s=limit_s)

    async def _correct(self, chunks: Sequence[Sequence[int]], split: Any, *scored: Any) -> PreparedBatch:
        batch: PreparedBatch = await self._ask("correct", self._group_ids, self._correction, chunks, split, *scored)
        return batch

    async def _scored(self, learner: LearnerGroup, chunk: PackedGroups, step: int) -> tuple[Any, Any]:
        """References to what the learner says of a chunk, proximal and reference policy; None: not wanted, or it has no token."""
        proximal = reference = None
        if chunk.batch is None:
            return None, None
        if chunk.fetch_s and (self._wants_proximal or self._wants_reference):
            _refuse_lost(await learner.fetch(chunk.batch, None, step=step, limit_s=chunk.fetch_s, everything=False))
        if self._wants_proximal:
            proximal = await learner.proximal(chunk.batch, version=self.version)
        if self._wants_reference:
            reference = await learner.reference_logprobs(chunk.batch, version=self.version)
        return proximal, reference

    async def _at_sampling(self, learner: LearnerGroup, chunk: PackedGroups, step: int) -> Any:
        """Reference to what earlier weights say of a chunk's own tokens; None: not wanted, or it has no token."""
        if chunk.batch is None or not self.wants_at_sampling:
            return None
        if chunk.fetch_s:
            _refuse_lost(await learner.fetch(chunk.batch, None, step=step, limit_s=chunk.fetch_s, everything=True))
        oldest = self.version - self._config.max_staleness
        return await learner.at_sampling(chunk.batch, version=self.version, oldest=oldest, with_now=False)

    async def _split(self, learner: LearnerGroup, step: int) -> tuple[Any, float]:
        """Reference to what the learner says of a sample of stale tokens, None if there are none; and the seconds that it took."""
        config = self._config
        sample: PackedGroups = await self._ask("sample_stale", self._group_ids, self._correction)
        if sample.batch is None:
            return None, 0.0
        began = time.monotonic()
        if sample.fetch_s:
            _refuse_lost(await learner.fetch(sample.batch, None, step=step, limit_s=sample.fetch_s, everything=True))
        oldest = self.version + config.monitor.split_every - config.max_staleness
        found = await learner.at_sampling(sample.batch, version=self.version, oldest=oldest, with_now=True)
        return found, time.monotonic() - began


def keeps_weights(config: RunConfig, version: int) -> bool:
    """Whether a batch whose gap will be split may have tokens of these weights, so that the ranks keep a copy."""
    every = config.monitor.split_every
    return every > 0 and every - version % every <= config.max_staleness


def first_split_version(config: RunConfig, version: int) -> int:
    """The oldest weights of which a batch of `version` or a later one may have tokens when its gap is split; if none is, version + 1."""
    every = config.monitor.split_every
    return version + -version % every - config.max_staleness if every > 0 else version + 1


def splits_gap(config: RunConfig, version: int) -> bool:
    """Whether the gap of the batch of this version is split."""
    every = config.monitor.split_every
    return every > 0 and config.max_staleness > 0 and version % every == 0


def _refuse_lost(why: Mapping[int, str]) -> None:
    """Raises: GroupsLost if there are any."""
    if why:
        raise GroupsLost(why)


async def _seconds(work: Awaitable[Any]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began
