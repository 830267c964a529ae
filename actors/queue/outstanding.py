"""The driver's own record of the groups under way. A new trajectory queue is filled from it, at a start and after the old one has died.

The pool reports groups as admitted, finished, lost or given up, the controller those of a finished step. An entry holds the ticket, and for
a finished group a reference to its tokens. Which groups the service had drawn for the batch ahead is not recorded: a new service draws
again. Groups not worth training, in whose places others may have been admitted already, are recognized by the facts of finished ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from actors.carriers import DiscardedGroup, DiscardReason, QueueContents, StepVersions, StoredGroup, Ticket
from actors.queue.delays import GroupDelays
from actors.state.ledger import listed
from actors.state.queue_snapshot import QueueSnapshot
from correction.errors import LedgerError
from rollout.trajectory import GroupFacts


def discard_reason(group: GroupFacts, *, dynamic_sampling: bool) -> DiscardReason | None:
    """Why a group is not worth training; None: it is."""
    if not group.is_trainable:
        return DiscardReason.INVALID
    return DiscardReason.UNIFORM if dynamic_sampling and group.is_uniform else None


class Outstanding:
    """The groups under way in a run, from its beginning or a checkpoint on."""

    def __init__(self, snapshot: QueueSnapshot | None = None, *, dynamic_sampling: bool = False) -> None:
        """Args: snapshot: of a checkpoint; None: a new run. dynamic_sampling: of the run."""
        self.filters = dynamic_sampling
        """Whether groups without a gradient are given up."""
        self.delays = GroupDelays()
        self._version = self._published = snapshot.version if snapshot else 0  # engines get the checkpoint's weights
        self._trained = snapshot.trained if snapshot else 0
        self._tickets: dict[str, Ticket] = {}
        """Tickets of all groups under way, in the order of admission; keys are prompt ids here and in the next three."""
        self._finished: dict[str, StoredGroup] = {}
        """Sampled groups that are worth training."""
        self._to_discard: dict[str, DiscardReason] = {}
        """Sampled groups that are not, with the reason; their tokens are not needed."""
        self._unreported: dict[str, DiscardReason] = {
            one.prompt_id: one.reason for one in (snapshot.unreported if snapshot else ())
        }
        """Discarded groups that no finished step has recorded yet, with the reason."""
        self._reported: Counter[DiscardReason] = Counter(snapshot.discarded_by_reason if snapshot else {})
        """Number of the other discarded groups, by reason."""
        self._reported.subtract(self._unreported.values())
        self.admitted = snapshot.admitted if snapshot else 0
        """Groups admitted since the run began: the id of the next one, and the position of its prompt in the data."""
        if snapshot is not None:
            finished = [Ticket(group.group_id, group.prompt, group.admitted_version) for group in snapshot.finished]
            for ticket in sorted([*snapshot.in_flight, *finished], key=lambda ticket: ticket.group_id):
                self._tickets[ticket.prompt.prompt_id] = ticket
            for group in snapshot.finished:
                self.finish(StoredGroup(group.facts, group))

    def admit(self, tickets: Iterable[Ticket]) -> None:
        """Note that the queue has admitted these groups."""
        tickets = list(tickets)
        self.delays.admitted(len(tickets))
        for ticket in tickets:
            self._tickets[ticket.prompt.prompt_id] = ticket
            self.admitted = ticket.group_id + 1

    def finish(self, group: StoredGroup) -> StoredGroup:
        """Note that a worker has sampled this group. Returns: the group as the queue gets it: it says whether it is worth training."""
        if reason := discard_reason(group.facts, dynamic_sampling=self.filters):
            group = replace(group, reason=reason)
        if group.prompt_id not in self._tickets or group.prompt_id in self._unreported:
            self.delays.forget(group.facts.group_id)
            return group
        self.delays.finished(group.facts)
        if group.reason is not None:
            self._to_discard[group.prompt_id] = group.reason
        else:
            self._finished.setdefault(group.prompt_id, group)
        return group

    def knows(self, prompt_id: str) -> bool:
        """Whether the prompt's group is under way."""
        return prompt_id in self._tickets

    def lose(self, tickets: Iterable[Ticket]) -> None:
        """Note that the tokens of these groups were lost with a node; the groups are sampled again."""
        for ticket in tickets:
            self._finished.pop(ticket.prompt.prompt_id, None)
            self.delays.forget(ticket.group_id)

    def give_up(self, ticket: Ticket, reason: DiscardReason) -> None:
        """Note that no worker could sample this group."""
        prompt_id = ticket.prompt.prompt_id
        if prompt_id in self._tickets and prompt_id not in self._finished and prompt_id not in self._to_discard:
            self._unreported.setdefault(prompt_id, reason)

    def settle(self, version: int, published: int, *, trained: Sequence[str], discarded: Iterable[DiscardedGroup]) -> None:
        """Note that a step is finished: these prompts are no longer under way.

        Args:
            version, published: the learner's version after the step, and the one that the engines get.
            trained: prompt ids.
        """
        self._version, self._published = version, published
        self._trained += len(trained)
        for group in discarded:
            self._reported[group.reason] += 1
            self._leave(group.prompt_id)
        for prompt_id in trained:
            self._leave(prompt_id)
        self.delays.freed(len(trained))

    def _leave(self, prompt_id: str) -> None:
        if (ticket := self._tickets.pop(prompt_id, None)) is not None:
            self.delays.forget(ticket.group_id)
        self._finished.pop(prompt_id, None)
        self._to_discard.pop(prompt_id, None)
        self._unreported.pop(prompt_id, None)

    @property
    def in_flight(self) -> list[Ticket]:
        """Tickets of groups that are being sampled or wait to be sampled."""
        others = self._finished.keys() | self._to_discard.keys() | self._unreported.keys()
        return [ticket for prompt_id, ticket in self._tickets.items() if prompt_id not in others]

    @property
    def are_all_sampled(self) -> bool:
        """No group is being sampled, or waits to be. Takes the same time however many are under way."""
        return len(self._finished) + len(self._to_discard) + len(self._unreported) >= len(self._tickets)

    @property
    def finished(self) -> list[StoredGroup]:
        return list(self._finished.values())

    @property
    def given_up(self) -> list[tuple[int, DiscardReason]]:
        """(group id, reason) of groups that won't be trained, and that no finished step has recorded as discarded yet."""
        reasons = self._unreported | self._to_discard
        return [(self._tickets[prompt_id].group_id, reason) for prompt_id, reason in reasons.items() if prompt_id in self._tickets]

    def contents(self, drawn: Sequence[int] = (), advance: StepVersions | None = None) -> QueueContents:
        """Contents for a new queue.

        Args: drawn, advance: as in QueueContents.
        Raises: LedgerError naming the prompts that haven't left, if admitted, trained, discarded and present groups don't add up.
        """
        unreported = self._unreported | self._to_discard
        held = tuple(ticket for prompt_id, ticket in self._tickets.items() if prompt_id not in unreported)
        by_reason = self._reported + Counter(unreported.values())
        if self.admitted != (known := self._trained + by_reason.total() + len(held)):
            raise LedgerError(
                f"out of balance: {self.admitted} groups were admitted, but {known} are known: {self._trained} as trained, "
                f"{by_reason.total()} as discarded ({listed(list(unreported))} not in the ledger yet), {len(held)} under way "
                f"({listed([ticket.prompt.prompt_id for ticket in held])})"
            )
        return QueueContents(
            version=self._version,
            published=self._published,
            admitted=self.admitted,
            trained=self._trained,
            tickets=held,
            finished=tuple(self._finished.values()),
            drawn=tuple(drawn),
            advance=advance,
            discarded_by_reason=dict(by_reason),
            unreported=tuple(DiscardedGroup(prompt_id, reason) for prompt_id, reason in unreported.items()),
        )
