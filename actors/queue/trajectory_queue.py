"""The trajectory queue: admission by staleness, so that nothing can become too old.

`TrajectoryQueue` is a plain state machine (no Ray, no clock); queue_actor.py puts it into an actor and adds the waiting.

States of a group, and who moves it:

    ADMITTED   admit()   by the rollout pool, when a place is free; a worker is sampling it, or will
    FINISHED   put()     by the rollout pool, when a worker has sampled it
    DRAWN      draw()    by the correction service, for the batch of one learner version
    (gone)     settle()  by the controller after the step: trained
               discard() by the correction service: invalid, or uniform where it samples dynamically
               give_up() by the rollout pool: failed, or lost with several engines

A place is free while  admitted - trained - discarded < (max_staleness + 1) * groups_per_step.  The counts, not the
contents, are the bound, and they are saved with the checkpoint. Example: groups_per_step 2, max_staleness 1. At version 0
four groups are admitted (0..3); step 0 trains two of them, so two more (4, 5) are admitted at version 1 or later. Groups 2
and 3 then have to be in step 1: admitted at version 0, they would be two versions old in step 2.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from actors.carriers import DiscardedGroup, DiscardReason, Finished, QueueContents, Ticket, discarded_as
from correction.errors import DataError, LedgerError
from rollout.trajectory import Prompt


class GroupState(StrEnum):
    ADMITTED = "admitted"
    FINISHED = "finished"
    DRAWN = "drawn"


@dataclass(slots=True)
class _Entry:
    ticket: Ticket
    state: GroupState
    group: Any = None


class TrajectoryQueue:
    """Admission, order and counts of the groups of a run."""

    def __init__(self, *, groups_per_step: int, max_staleness: int) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.version = self.published = 0
        """Versions of the learner's weights, and of the published weights: not every version is published (weight_sync.every_steps)."""
        self.admitted = self.trained = 0
        """Groups since the run began; `admitted` is the id of the next one."""
        self.discarded_by_reason: Counter[DiscardReason] = Counter()
        self._unreported: list[DiscardedGroup] = []
        self._entries: dict[int, _Entry] = {}
        # What follows could be computed from the entries, but a run holds thousands of them, and each finished group looks it up.
        self._by_state: Counter[GroupState] = Counter()
        self._undrawn: Counter[int] = Counter()
        """Number of groups not yet in a batch, by the published version at their admission; at most max_staleness + 1 versions."""
        self._finished: list[int] = []
        """A heap of the finished groups' ids; some may have been discarded since."""
        self.lost: list[int] = []
        """Ids of groups to be sampled again that `take_lost` has not returned yet."""

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

    def admit(self, prompts: Sequence[Prompt]) -> list[Ticket]:
        """Give places to the first prompts, as many as are free; the caller keeps the rest."""
        tickets = []
        for prompt in prompts[: max(0, self.free_places)]:
            ticket = Ticket(self.admitted, prompt, self.published)
            self._hold(_Entry(ticket, GroupState.ADMITTED))
            self.admitted += 1
            tickets.append(ticket)
        return tickets

    def expects(self, group_id: int) -> bool:
        """Whether the group is being sampled. False for a repeated delivery by a retried call."""
        entry = self._entries.get(group_id)
        return entry is not None and entry.state is GroupState.ADMITTED

    def put(self, group: Finished) -> bool:
        """Take a finished group. False, and nothing changes, when it is not expected."""
        if not self.expects(group.group_id):
            return False
        entry = self._entries[group.group_id]
        if group.prompt_id != (asked := entry.ticket.prompt.prompt_id):
            raise LedgerError(f"group {group.group_id} came back with prompt {group.prompt_id}, but was admitted with {asked}")
        entry.group = group
        self._move(entry, GroupState.FINISHED)
        heapq.heappush(self._finished, group.group_id)
        return True

    def discard(self, group_ids: Sequence[int], reason: DiscardReason) -> None:
        """Give up groups in any state; their places become free and the count by reason grows."""
        for group_id in group_ids:
            entry = self._entries.get(group_id)
            if entry is None:
                raise LedgerError(f"group {group_id} can't be discarded ({reason}): the queue doesn't hold it")
            self._release(entry)
            self.discarded_by_reason[reason] += 1
            self._unreported.append(DiscardedGroup(entry.ticket.prompt.prompt_id, reason))

    def lose(self, group_ids: Sequence[int]) -> None:
        """Note that the tokens of drawn groups were lost with their node: the groups keep their places and are sampled again."""
        for group_id in group_ids:
            entry = self._entries.get(group_id)
            if entry is None or entry.state is not GroupState.DRAWN:
                raise LedgerError(f"group {group_id} was lost but the queue has it as {entry.state if entry else 'unknown'}")
            self._move(entry, GroupState.ADMITTED)
            entry.group = None
            self._undrawn[entry.ticket.admitted_version] += 1
            self.lost.append(group_id)

    def take_lost(self) -> list[Ticket]:
        """Tickets of groups lost since the last call, to be sampled again."""
        lost, self.lost = self.lost, []
        return [self._entries[group_id].ticket for group_id in lost if self.expects(group_id)]

    def give_up(self, group_id: int, reason: DiscardReason) -> bool:
        """Discard a group that nobody could sample. False, and nothing changes, if it has been finished or given up meanwhile."""
        entry = self._entries.get(group_id)
        if entry is None or entry.state is not GroupState.ADMITTED:
            return False
        self.discard([group_id], reason)
        return True

    def take_discarded(self) -> list[DiscardedGroup]:
        """Groups discarded since the last call, for the ledger."""
        discarded, self._unreported = self._unreported, []
        return discarded

    # -- batches -----------------------------------------------------------------------------------------------------

    def due(self, version: int) -> list[int]:
        """Groups that the step of `version` has to contain, because the next one would find them too old."""
        oldest_allowed_next = version + 1 - self.max_staleness
        return sorted(
            i for i, e in self._entries.items() if e.state is not GroupState.DRAWN and e.ticket.admitted_version < oldest_allowed_next
        )

    def draw(self, version: int, places: int) -> list[Any]:
        """Move finished groups into the batch of `version`, oldest first.

        A place goes to a group only if all older ones, finished or not, still find theirs in time: those of admission a or before need
        their places by version a + max_staleness, and each step until then has groups_per_step. With a straggler places stay empty.
        """
        groups: list[Any] = []
        while (entry := self._oldest_finished()) is not None:
            if places - len(groups) <= self._reserved(version, older_than=entry.ticket.admitted_version):
                break  # younger ones would take the same place
            assert entry.group is not None
            heapq.heappop(self._finished)
            self._move(entry, GroupState.DRAWN)
            groups.append(entry.group)
        return groups

    def _oldest_finished(self) -> _Entry | None:
        """The finished group that was admitted first; the heap loses those that were discarded meanwhile."""
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

    def settle(self, group_ids: Sequence[int]) -> None:
        """Take trained groups out. Those of a skipped step count as trained too."""
        for group_id in group_ids:
            entry = self._entries.get(group_id)
            if entry is None or entry.state is not GroupState.DRAWN:
                raise LedgerError(f"group {group_id} was trained but the queue has it as {entry.state if entry else 'unknown'}")
            self._release(entry)
        self.trained += len(group_ids)

    def publish(self, version: int, published: int | None = None) -> None:
        """Note that the learner has new weights. Args: published: the version that the engines get, if it is an older one."""
        published = version if published is None else published
        if not (self.version <= version and self.published <= published <= version):
            raise LedgerError(
                f"weight version {version}, published {published}, after {self.version}, published {self.published}: versions only grow, "
                "and the learner's is the newest"
            )
        self.version, self.published = version, published

    # -- books -------------------------------------------------------------------------------------------------------

    def _hold(self, entry: _Entry) -> None:
        self._entries[entry.ticket.group_id] = entry
        self._by_state[entry.state] += 1
        self._undrawn[entry.ticket.admitted_version] += 1

    def _move(self, entry: _Entry, state: GroupState) -> None:
        self._by_state[entry.state] -= 1
        self._by_state[state] += 1
        entry.state = state
        if state is GroupState.DRAWN:
            self._forget_undrawn(entry)

    def _release(self, entry: _Entry) -> None:
        """Take an entry out of the queue and its counts."""
        del self._entries[entry.ticket.group_id]
        self._by_state[entry.state] -= 1
        if entry.state is not GroupState.DRAWN:
            self._forget_undrawn(entry)

    def _forget_undrawn(self, entry: _Entry) -> None:
        version = entry.ticket.admitted_version
        self._undrawn[version] -= 1
        if not self._undrawn[version]:
            del self._undrawn[version]  # or a long run would have one for each of its versions

    # -- looking in, saving ------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Groups by state and the totals since the run began, of discarded ones for each reason that there was, too."""
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "discarded": self.discarded,
            "in_flight": self._by_state[GroupState.ADMITTED],
            "finished": self._by_state[GroupState.FINISHED],
            "drawn": self._by_state[GroupState.DRAWN],
            **{discarded_as(reason): groups for reason, groups in self.discarded_by_reason.items()},
        }

    def outstanding(self) -> list[str]:
        """Ids of the prompts that are under way."""
        return [entry.ticket.prompt.prompt_id for entry in self._entries.values()]

    def waiting_for(self, version: int) -> str:
        """A clause that says which groups a batch of `version` still needs, for logs and errors."""
        counts = self.counts()
        stragglers = [i for i in self.due(version) if self._entries[i].state is GroupState.ADMITTED]
        clause = f"{counts['drawn']} of {self.groups_per_step} groups drawn, {counts['in_flight']} being sampled"
        clause += f", due and unfinished: {stragglers[:8]}" if stragglers else ""
        given_up = ", ".join(f"{count} {reason}" for reason, count in self.discarded_by_reason.items())
        return clause + (f"; discarded so far: {given_up}" if given_up else "")

    def contents(self) -> QueueContents:
        """All that is under way, for a checkpoint, of a queue that holds StoredGroups."""
        entries = [self._entries[group_id] for group_id in sorted(self._entries)]
        return QueueContents(
            version=self.version,
            published=self.published,
            admitted=self.admitted,
            trained=self.trained,
            tickets=tuple(entry.ticket for entry in entries),
            finished=tuple(entry.group for entry in entries if entry.group is not None),
            drawn=tuple(entry.ticket.group_id for entry in entries if entry.state is GroupState.DRAWN),
            discarded_by_reason=dict(self.discarded_by_reason),
            unreported=tuple(self._unreported),
        )

    def fill(self, contents: QueueContents) -> None:
        """Take over what is under way. Raises: DataError if the queue holds something already."""
        if self._entries:
            raise DataError("TrajectoryQueue.fill needs an empty queue")
        self.version, self.published = contents.version, contents.published
        self.admitted, self.trained = contents.admitted, contents.trained
        self.discarded_by_reason = Counter(contents.discarded_by_reason)
        self._unreported = list(contents.unreported)
        for ticket in contents.tickets:
            self._hold(_Entry(ticket, GroupState.ADMITTED))
        for group in contents.finished:
            self.put(group)
        for group_id in contents.drawn:
            self._move(self._entries[group_id], GroupState.DRAWN)
