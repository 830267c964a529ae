"""The book of groups: one entry for each group of a run from its admission to its end. A plain state machine: no Ray, no clock, no threads.

It lives in the driver. Whether a prompt may be admitted, who samples a group, which groups make a batch, what a checkpoint holds and which
lines the ledger gets are questions to it. States of a group, and who moves it:

    WAITING    admit()     by the rollout pool, when a place is free
               waits()     by the rollout pool: a worker was lost, failed, or handed it back; it waits for another one
               lose()      by the driver: the service or the ranks can't read its tokens. Place and admitted version stay
    SAMPLING   begin()     by the rollout pool; a late worker may still answer, too: the first answer counts
    FINISHED   finish()    by the rollout pool. Not worth training (invalid, or uniform where the run samples dynamically), it keeps its
                           place until it is drawn
               take_back() by the driver: the service that had drawn it is gone
    DRAWN      draw()      by the driver, for the batch of one learner version; what isn't worth training is discarded
    (gone)     settle()    by the driver after the step: trained
               give_up()   by the rollout pool: failed, or lost with several engines

A place is free while  admitted - trained - discarded < (max_staleness + 1 - unpublished versions) * groups_per_step.  The counts, not the
contents, are the bound, and they are saved with the checkpoint. Example: groups_per_step 2, max_staleness 1. At version 0 four groups are
admitted (0..3); step 0 trains two of them, so two more (4, 5) are admitted at version 1 or later. Groups 2 and 3 then have to be in step 1:
admitted at version 0, they would be two versions old in step 2.
"""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import StrEnum

from evenkeel.actors.carriers import DiscardedGroup, DiscardReason, GroupTokens, StoredGroup, Ticket
from evenkeel.actors.groups.snapshot import BookContents, BookSnapshot
from evenkeel.correction.errors import LedgerError
from evenkeel.rollout.trajectory import GroupFacts, Prompt, UnfinishedGroup


class GroupState(StrEnum):
    WAITING = "waiting"
    SAMPLING = "sampling"
    FINISHED = "finished"
    DRAWN = "drawn"


_UNDER_SAMPLING = (GroupState.WAITING, GroupState.SAMPLING)
MAX_ENGINE_LOSSES = 3
"""A group with which so many engines were lost is taken for the cause, and discarded."""


@dataclass(slots=True, eq=False)
class Attempts:
    """What went wrong while a group was sampled, since it was admitted or its tokens were lost."""

    failed: int = 0
    """Requests that got no usable answer."""
    unreached: int = 0
    """Calls that could not reach a worker, though it answered its heartbeat."""
    engines_lost: int = 0
    """Engines lost while they sampled it."""
    failed_at: str = ""
    """Worker that could not sample it last: another one takes it, if one has the published weights or will soon have them."""
    is_overdue: bool = False
    """Whether it has waited for another worker as long as new weights may take: only who is ready counts as one."""
    lost_with: str = ""
    """Worker that was lost with it; empty: none, or another one has taken it since."""


_NOTHING = Attempts()


@dataclass(slots=True, eq=False)
class Entry:
    """What the driver knows of a group. It changes; whoever holds one asks the book for each change."""

    ticket: Ticket
    state: GroupState = GroupState.WAITING
    admitted_at: float | None = None
    """By the caller's clock (s); None: before the checkpoint that it comes from."""
    called_at: float | None = None
    """Time at which a worker was last asked for it, by the caller's clock (s); None: not yet. The next one: at which one had answered."""
    finished_at: float | None = None
    group: StoredGroup | None = None
    """Finished: facts, and where its tokens lie."""
    version: int = -1
    """Version of the batch that it is drawn for; -1: none."""
    losses: int = 0
    """Times that its tokens could not be read after it was drawn."""
    attempts: Attempts = field(default_factory=Attempts)
    so_far: UnfinishedGroup | None = None
    """What a worker has handed back of it, or had when it was lost, or a checkpoint has: the next worker goes on from it."""


def _tokens_of(entry: Entry) -> GroupTokens:
    """What becomes of the tokens of a group that is discarded."""
    there = entry.so_far if entry.group is None else entry.group.facts
    if there is None:
        return GroupTokens()
    answers = there.answers if isinstance(there, UnfinishedGroup) else there.trajectories
    tokens, read = (sum(getattr(one, name) for one in answers) for name in ("response_tokens", "later_tokens"))
    return GroupTokens(tokens + there.lost_tokens, discarded=tokens, lost=there.lost_tokens, read=read)


def discard_reason(group: GroupFacts, *, dynamic_sampling: bool, by_turn: bool = False) -> DiscardReason | None:
    """Why a group is not worth training; None: it is. Args: by_turn: its advantages are."""
    if not group.is_trainable:
        return DiscardReason.INVALID
    return DiscardReason.UNIFORM if dynamic_sampling and group.is_uniform(by_turn=by_turn) else None


class GroupBook:
    """The groups of a run, from its beginning or a checkpoint on."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        dynamic_sampling: bool = False,
        by_turn: bool = False,
        snapshot: BookSnapshot | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            by_turn: advantages are, so that a group whose answers got the same reward may have a gradient.
            snapshot: of a checkpoint; None: a new run. What was being sampled then waits.
            changed: called after each change that somebody may wait for: a place is free, a group is finished, or its tokens are lost.
        """
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.filters = dynamic_sampling
        """Whether groups without a gradient are given up."""
        self._by_turn = by_turn
        self._changed, self.delays = changed, GroupDelays()
        self.version = self.published = snapshot.version if snapshot else 0  # engines get the checkpoint's weights
        """Versions of the learner's weights, and of the published weights: not every version is published (weight_sync.every_steps)."""
        self.admitted = snapshot.admitted if snapshot else 0
        """Groups admitted since the run began; also the id of the next one, and the position of its prompt in the data."""
        self.trained = snapshot.trained if snapshot else 0
        self.discarded_by_reason: Counter[DiscardReason] = Counter(snapshot.discarded_by_reason if snapshot else {})
        self.unreported: list[DiscardedGroup] = list(snapshot.unreported) if snapshot else []
        """Discarded, and not yet in the ledger."""
        self._entries: dict[int, Entry] = {}
        # What follows could be computed from the entries, but a run holds thousands of them, and each finished group looks it up.
        self._by_state: Counter[GroupState] = Counter()
        # Number of groups not yet in a batch, by the published version at their admission; at most max_staleness + 1 versions.
        self._undrawn: Counter[int] = Counter()
        # A heap of the finished groups' ids; some may have been drawn or discarded since.
        self._finished: list[int] = []
        # Ids of groups that `take_lost` has not returned yet.
        self._lost: list[int] = []
        # Groups that the next lost engine makes the cause.
        self._suspects: set[int] = set()
        # Number of groups that nobody has taken since their worker was lost, by its name.
        self._orphans: Counter[str] = Counter()
        if snapshot is not None:
            finished = [Ticket(group.group_id, group.prompt, group.admitted_version) for group in snapshot.finished]
            so_far = {one.group_id: one for one in snapshot.so_far}
            for ticket in sorted([*snapshot.in_flight, *finished], key=lambda ticket: ticket.group_id):
                self._hold(Entry(ticket, so_far=so_far.get(ticket.group_id)))
            for group in snapshot.finished:
                self.finish(StoredGroup(group.facts, group), now=None)

    # -- admission ---------------------------------------------------------------------------------------------------

    @property
    def discarded(self) -> int:
        """Groups thrown away since the run began."""
        return self.discarded_by_reason.total()

    @property
    def free_places(self) -> int:
        """Number of groups that may be admitted now so that none becomes too old: the places left in the steps for which the published
        weights are new enough."""
        steps = self.max_staleness + 1 - (self.version - self.published)
        return steps * self.groups_per_step - (self.admitted - self.trained - self.discarded)

    def admit(self, prompts: Sequence[Prompt], *, now: float) -> list[Ticket]:
        """Give places to the first prompts, as many as are free; the caller keeps the rest. Args: now: seconds."""
        tickets = []
        for prompt in prompts[: max(0, self.free_places)]:
            ticket = Ticket(self.admitted, prompt, self.published)
            self._hold(Entry(ticket, admitted_at=now))
            self.admitted += 1
            tickets.append(ticket)
        self.delays.admitted(len(tickets), now)
        return tickets

    # -- sampling ----------------------------------------------------------------------------------------------------

    def begin(self, group_id: int, *, now: float) -> None:
        """Note that a worker is asked for the group. Nothing changes if it is under way no more."""
        if (entry := self._sampled(group_id)) is not None:
            entry.called_at = now
            self._move(entry, GroupState.SAMPLING)

    def waits(self, group_id: int, *, failed_at: str = "", so_far: UnfinishedGroup | None = None) -> bool:
        """Note that another worker has to sample the group. False: it is finished or gone, and nobody has to.

        Args:
            failed_at: name of the worker that could not sample it.
            so_far: what there is of it now; None: what there was before.
        """
        if (entry := self._sampled(group_id)) is None:
            return False
        if so_far is not None:
            entry.so_far = so_far
        if failed_at:
            entry.attempts.failed_at, entry.attempts.is_overdue = failed_at, False
        self._move(entry, GroupState.WAITING)
        return True

    def so_far(self, group_id: int) -> UnfinishedGroup | None:
        """What the next worker goes on from; None: nothing."""
        entry = self._sampled(group_id)
        return None if entry is None else entry.so_far

    def finish(self, group: StoredGroup, *, now: float | None) -> StoredGroup | None:
        """Take a sampled group. Args: now: seconds; None: it comes from a checkpoint.

        Returns: the group, which says whether it is worth training; None, and nothing changes, if it is finished or gone already.
        Raises: LedgerError for another prompt than that it was admitted with.
        """
        if (entry := self._sampled(group.group_id)) is None:
            return None
        if group.prompt_id != (asked := entry.ticket.prompt.prompt_id):
            raise LedgerError(f"group {group.group_id} came back with prompt {group.prompt_id}, but was admitted with {asked}")
        reason = discard_reason(group.facts, dynamic_sampling=self.filters, by_turn=self._by_turn)
        entry.group = group = replace(group, reason=reason)
        if now is not None:
            entry.finished_at = now
            self.delays.answered(group.facts, now, called_at=entry.called_at)
        self._close(entry)
        self._move(entry, GroupState.FINISHED)
        heapq.heappush(self._finished, group.group_id)
        self._changed()
        return group

    def give_up(self, group_id: int, reason: DiscardReason) -> bool:
        """Discard a group that nobody could sample. False, and nothing changes, if it is finished or gone."""
        if (entry := self._sampled(group_id)) is None:
            return False
        self._discard(entry, reason)
        self._close(entry)
        self._changed()
        return True

    def attempts(self, group_id: int) -> Attempts:
        """What went wrong with a group that is being sampled, or waits to be; nothing with all others. Changed by the book alone."""
        entry = self._sampled(group_id)
        return _NOTHING if entry is None else entry.attempts

    def failed(self, group_id: int) -> int:
        """Count a request that got no usable answer. Returns: how many there were; 0 if the group is finished or gone."""
        if (entry := self._sampled(group_id)) is None:
            return 0
        entry.attempts.failed += 1
        return entry.attempts.failed

    def unreached(self, group_id: int) -> int:
        """Count a call that could not reach a worker. Returns: as `failed`."""
        if (entry := self._sampled(group_id)) is None:
            return 0
        entry.attempts.unreached += 1
        return entry.attempts.unreached

    def engine_lost(self, group_id: int) -> int:
        """Count an engine that was lost while it sampled the group. Returns: as `failed`."""
        if (entry := self._sampled(group_id)) is None:
            return 0
        entry.attempts.engines_lost += 1
        if entry.attempts.engines_lost == MAX_ENGINE_LOSSES - 1:
            self._suspects.add(group_id)
        return entry.attempts.engines_lost

    def is_suspect(self, group_id: int) -> bool:
        """Whether the next lost engine makes this group the cause. A worker is given only one such group at a time."""
        return group_id in self._suspects

    def have_suspect(self, group_ids: AbstractSet[int]) -> bool:
        """Whether one of these is suspect. Takes the same time however many there are."""
        return not self._suspects.isdisjoint(group_ids)

    def overdue(self, group_id: int) -> None:
        """Note that a group that failed has waited for another worker as long as new weights may take."""
        if (entry := self._sampled(group_id)) is not None and entry.attempts.failed_at:
            entry.attempts.is_overdue = True

    def orphaned(self, group_ids: Iterable[int], worker: str) -> None:
        """Note that the worker of these groups was lost."""
        for group_id in group_ids:
            if (entry := self._sampled(group_id)) is not None:
                self._adopt(entry)
                entry.attempts.lost_with = worker
                self._orphans[worker] += 1

    def adopted(self, group_id: int) -> None:
        """Note that a worker has taken the group. If its last worker was lost, it is that one's orphan no longer."""
        if (entry := self._sampled(group_id)) is not None:
            self._adopt(entry)

    def orphans(self, worker: str) -> int:
        """Number of groups that were lost with this worker, and that nobody has taken since."""
        return self._orphans[worker]

    def _adopt(self, entry: Entry) -> None:
        worker, entry.attempts.lost_with = entry.attempts.lost_with, ""
        if worker:
            self._orphans[worker] -= 1
            if not self._orphans[worker]:
                del self._orphans[worker]  # spot workers come and go for weeks

    def _close(self, entry: Entry) -> None:
        """Nobody has to sample the group: forget what went wrong with it, and what there was of it."""
        self._adopt(entry)
        entry.so_far = None
        self._suspects.discard(entry.ticket.group_id)
        entry.attempts = Attempts()

    def take_lost(self) -> list[Ticket]:
        """Tickets of groups that were lost since the last call, to be sampled again."""
        lost, self._lost = self._lost, []
        return [entry.ticket for group_id in lost if (entry := self._sampled(group_id)) is not None]

    @property
    def has_lost(self) -> bool:
        """Whether `take_lost` would return some."""
        return bool(self._lost)

    # -- batches -----------------------------------------------------------------------------------------------------

    def due(self, version: int) -> list[int]:
        """Groups that the step of `version` has to contain, because the next one would find them too old."""
        oldest_allowed_next = version + 1 - self.max_staleness
        return sorted(
            i for i, e in self._entries.items() if e.state is not GroupState.DRAWN and e.ticket.admitted_version < oldest_allowed_next
        )

    def draw(self, version: int, places: int) -> list[StoredGroup]:
        """Move finished groups into the batch of `version`, oldest first; those not worth training are discarded in their turn.

        A younger group gets a place only if enough are left for all older ones, finished or not: those of admission a or before need
        theirs by version a + max_staleness, and each step until then has groups_per_step. So with a straggler some places stay empty.
        """
        groups: list[StoredGroup] = []
        before = self.discarded
        while (entry := self._oldest_finished()) is not None:
            if places - len(groups) <= self._reserved(version, older_than=entry.ticket.admitted_version):
                break  # younger ones would take the same place
            assert entry.group is not None
            heapq.heappop(self._finished)
            if entry.group.reason is not None:
                self._discard(entry, entry.group.reason)
                continue
            entry.version = version
            self._move(entry, GroupState.DRAWN)
            groups.append(entry.group)
        if self.discarded > before:
            self._changed()
        return groups

    def take_back(self, version: int) -> None:
        """Undo all draws for the batches of `version` and later: whoever had the groups is gone, and they are drawn again."""
        for entry in self._entries.values():
            if entry.state is GroupState.DRAWN and entry.version >= version:
                self._undraw(entry, GroupState.FINISHED)
                heapq.heappush(self._finished, entry.ticket.group_id)
        self._changed()

    def lose(self, group_ids: Iterable[int]) -> None:
        """Note that the tokens of drawn groups can't be read: the groups keep their places and are sampled again."""
        for group_id in group_ids:
            entry = self._drawn(group_id, "lost")
            self._undraw(entry, GroupState.WAITING)
            assert entry.group is not None
            facts = entry.group.facts
            entry.so_far = UnfinishedGroup(group_id, (), lost_tokens=facts.response_tokens + facts.lost_tokens)
            entry.group, entry.finished_at = None, None
            entry.losses += 1
            self._lost.append(group_id)
        self._changed()

    def losses(self, group_id: int) -> int:
        """Times that the tokens of a group under way could not be read."""
        return self._entries[group_id].losses

    def settle(self, version: int, published: int, trained: Sequence[int], *, now: float) -> list[DiscardedGroup]:
        """Note that a step is over; its groups are gone. Those of a skipped step count as trained too.

        Args:
            version, published: the learner's version after it, and the one that the engines get, if that is an older one.
            trained: group ids.
        Returns: what was discarded since the last call, for the ledger.
        Raises: LedgerError for a group that was not drawn, or versions that don't grow.
        """
        if not (self.version <= version and self.published <= published <= version):
            raise LedgerError(
                f"weight version {version}, published {published}, after {self.version}, published {self.published}: versions only grow, "
                "and the learner's is the newest"
            )
        for group_id in trained:
            self._release(self._drawn(group_id, "trained"))
        self.version, self.published, self.trained = version, published, self.trained + len(trained)
        self.delays.freed(len(trained), now)
        discarded, self.unreported = self.unreported, []
        self._changed()
        return discarded

    def finished_at(self, group_ids: Iterable[int]) -> dict[int, float]:
        """Times at which groups under way were finished, seconds, by id; those of a checkpoint have none."""
        found = ((group_id, self._entries[group_id].finished_at) for group_id in group_ids)
        return {group_id: at for group_id, at in found if at is not None}

    def waited_for_a_worker(self, group_ids: Iterable[int]) -> dict[int, tuple[float, float]]:
        """Of groups under way, by id: the time of admission, and that at which the worker that sampled it was asked, seconds. Without those
        that a checkpoint had."""
        found = ((group_id, self._entries[group_id]) for group_id in group_ids)
        return {i: (one.admitted_at, one.called_at) for i, one in found if one.admitted_at is not None and one.called_at is not None}

    # -- entries -----------------------------------------------------------------------------------------------------

    def _sampled(self, group_id: int) -> Entry | None:
        """The entry of a group that is being sampled, or waits to be; None: it is finished or gone."""
        entry = self._entries.get(group_id)
        return entry if entry is not None and entry.state in _UNDER_SAMPLING else None

    def _drawn(self, group_id: int, what: str) -> Entry:
        entry = self._entries.get(group_id)
        if entry is None or entry.state is not GroupState.DRAWN:
            raise LedgerError(f"group {group_id} was {what} but the book has it as {entry.state if entry else 'unknown'}")
        return entry

    def _oldest_finished(self) -> Entry | None:
        """The finished group that was admitted first; the heap loses those that were drawn or discarded meanwhile."""
        while self._finished:
            entry = self._entries.get(self._finished[0])
            if entry is not None and entry.state is GroupState.FINISHED:
                return entry
            heapq.heappop(self._finished)
        return None

    def _reserved(self, version: int, *, older_than: int) -> int:
        """Places of the step of `version` that groups admitted before `older_than` can't do without."""
        needed = waiting = 0
        for admitted_version in sorted(v for v in self._undrawn if v < older_than):
            waiting += self._undrawn[admitted_version]
            later_steps = max(0, admitted_version + self.max_staleness - version)
            needed = max(needed, waiting - later_steps * self.groups_per_step)
        return needed

    def _hold(self, entry: Entry) -> None:
        self._entries[entry.ticket.group_id] = entry
        self._by_state[entry.state] += 1
        self._undrawn[entry.ticket.admitted_version] += 1

    def _move(self, entry: Entry, state: GroupState) -> None:
        self._by_state[entry.state] -= 1
        self._by_state[state] += 1
        entry.state = state
        if state is GroupState.DRAWN:
            self._forget_undrawn(entry)

    def _undraw(self, entry: Entry, state: GroupState) -> None:
        self._move(entry, state)
        entry.version = -1
        self._undrawn[entry.ticket.admitted_version] += 1

    def _discard(self, entry: Entry, reason: DiscardReason) -> None:
        self._release(entry)
        self.discarded_by_reason[reason] += 1
        self.unreported.append(DiscardedGroup(entry.ticket.prompt.prompt_id, reason, _tokens_of(entry)))

    def _release(self, entry: Entry) -> None:
        """Take an entry out of the book and its counts."""
        del self._entries[entry.ticket.group_id]
        self._by_state[entry.state] -= 1
        if entry.state is not GroupState.DRAWN:
            self._forget_undrawn(entry)

    def _forget_undrawn(self, entry: Entry) -> None:
        version = entry.ticket.admitted_version
        self._undrawn[version] -= 1
        if not self._undrawn[version]:
            del self._undrawn[version]  # or a long run would have one for each of its versions

    # -- looking in, saving ------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Groups by state, and the totals since the run began."""
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "discarded": self.discarded,
            "in_flight": self._by_state[GroupState.WAITING] + self._by_state[GroupState.SAMPLING],
            "finished": self._by_state[GroupState.FINISHED],
            "drawn": self._by_state[GroupState.DRAWN],
        }

    @property
    def are_all_sampled(self) -> bool:
        """No group is being sampled, or waits to be. Takes the same time however many are under way."""
        return not any(self._by_state[state] for state in _UNDER_SAMPLING)

    @property
    def in_flight(self) -> list[Ticket]:
        """Tickets of groups that are being sampled or wait to be, in the order of admission."""
        return [entry.ticket for entry in self._sorted() if entry.state in _UNDER_SAMPLING]

    def outstanding(self) -> list[str]:
        """Ids of the prompts that are under way."""
        return [entry.ticket.prompt.prompt_id for entry in self._entries.values()]

    def waiting_for(self, version: int) -> str:
        """A clause that says which groups a batch of `version` still needs, for logs and errors."""
        counts = self.counts()
        stragglers = [i for i in self.due(version) if self._sampled(i) is not None]
        drawn = sum(entry.version == version for entry in self._entries.values())
        clause = f"{drawn} of {self.groups_per_step} groups drawn, {counts['in_flight']} being sampled"
        clause += f", due and unfinished: {stragglers[:8]}" if stragglers else ""
        given_up = ", ".join(f"{count} {reason}" for reason, count in self.discarded_by_reason.items())
        return clause + (f"; discarded so far: {given_up}" if given_up else "")

    def contents(self) -> BookContents:
        """All that is under way, for a checkpoint."""
        entries = list(self._sorted())
        return BookContents(
            version=self.version,
            admitted=self.admitted,
            trained=self.trained,
            tickets=tuple(entry.ticket for entry in entries),
            finished=tuple(entry.group for entry in entries if entry.group is not None),
            discarded_by_reason=dict(self.discarded_by_reason),
            unreported=tuple(self.unreported),
            so_far=tuple(entry.so_far for entry in entries if entry.so_far is not None),
        )

    def _sorted(self) -> Iterator[Entry]:
        """Groups in the order of admission."""
        return (self._entries[group_id] for group_id in sorted(self._entries))


# How long groups wait besides sampling and scoring: for a place, on the way to an engine and back, and until the learner has them.
#
# All times are by the driver's clock, seconds. The what-if of pool sizes uses them (lab/simulate).

ADMISSION, CALL, HANDOVER = "time/admission_s", "time/call_s", "wait/handover_s"


class GroupDelays:
    """Collects them from one reading to the next; the times of a group itself are in its entry of the book."""

    def __init__(self) -> None:
        # When a step last freed places, and how many of them are still free.
        self._freed_at, self._free = 0.0, 0
        # When the learner asked for the batch that it waits for.
        self._asked_at: float | None = None
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def freed(self, places: int, now: float) -> None:
        """Called at the end of a step, whose groups have left their places."""
        self._freed_at, self._free = now, places

    def admitted(self, groups: int, now: float) -> None:
        """Called when new groups have got places. Those in the places of discarded groups didn't wait for a step and don't count."""
        counted = min(groups, self._free)
        self._free -= counted
        self._seconds[ADMISSION] += [now - self._freed_at] * counted

    def answered(self, group: GroupFacts, now: float, *, called_at: float | None) -> None:
        """Called when a worker has answered. Args: called_at: when it was asked; None: not known."""
        # The times of a group that another worker began include that worker's, so the way of the call can't be told.
        if called_at is not None and (way_s := now - called_at - group.generate_s - group.reward_s) >= 0:
            self._seconds[CALL].append(way_s)

    def asked(self, now: float) -> None:
        """Called when the learner asks for a batch, or asks again for the same one."""
        self._asked_at = now if self._asked_at is None else self._asked_at

    def given(self, finished_at: Iterable[float], now: float) -> None:
        """Called when the learner has the batch: time counts from its call, or from the last group's arrival if that was later."""
        asked_at, self._asked_at = now if self._asked_at is None else self._asked_at, None
        self._seconds[HANDOVER].append(now - max([asked_at, *finished_at]))

    def read(self) -> dict[str, float]:
        """Mean times since the last reading, seconds, by metric name; times that were not measured are absent."""
        seconds, self._seconds = self._seconds, defaultdict(list)
        return {name: statistics.fmean(values) for name, values in seconds.items() if values}
