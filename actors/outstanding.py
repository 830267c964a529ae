"""The groups under way, as the driver knows them: what a new trajectory queue is filled with, at a start and in place of one that died.

The pool says what was admitted, finished, lost and given up, and the controller what a step has settled. The tokens stay where they are: an
entry is a ticket, and a reference for a finished group. Which groups the batch ahead had drawn comes about again. What was worthless, and
may have given its place to another group already, is told from the facts of the finished ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from actors.carriers import INVALID, UNIFORM, QueueContents, QueueSnapshot, StoredGroup, Ticket
from correction.errors import LedgerError
from rollout.trajectory import GroupFacts


def worthless(group: GroupFacts, *, dynamic_sampling: bool) -> str:
    """Why a group is not worth training; empty: it is."""
    if len(group.valid) < 2:
        return INVALID
    return UNIFORM if dynamic_sampling and group.is_uniform else ""


class Outstanding:
    """Of one run, from its beginning or a checkpoint on."""

    def __init__(self, snapshot: QueueSnapshot | None = None, *, dynamic_sampling: bool = False) -> None:
        """Args: snapshot: of a checkpoint; None: a new run. dynamic_sampling: of the run."""
        self._dynamic_sampling = dynamic_sampling
        self._version = self._published = snapshot.version if snapshot else 0  # engines get what the learner goes on from
        self._trained = snapshot.trained if snapshot else 0
        self._tickets: dict[str, Ticket] = {}
        """By prompt id, like what follows; in the order of their admission."""
        self._finished: dict[str, StoredGroup] = {}
        """Sampled, and worth training."""
        self._worthless: dict[str, str] = {}
        """Sampled, and why they aren't: nobody needs their tokens."""
        self._unreported: dict[str, str] = dict(snapshot.unreported) if snapshot else {}
        """Prompts that were discarded, and why, without a step that has settled it."""
        self._reported: Counter[str] = Counter(snapshot.discarded_by_reason if snapshot else {})
        """The other discarded ones, by reason."""
        self._reported.subtract(self._unreported.values())
        self.admitted = snapshot.admitted if snapshot else 0
        """Groups since the run began; the next one's number, and its prompt's position."""
        if snapshot is not None:
            finished = [Ticket(group.group_id, group.prompt, group.admitted_version) for group in snapshot.finished]
            for ticket in sorted([*snapshot.in_flight, *finished], key=lambda ticket: ticket.group_id):
                self._tickets[ticket.prompt.prompt_id] = ticket
            for group in snapshot.finished:
                self.finish(StoredGroup(group.facts, group))

    def admit(self, tickets: Iterable[Ticket]) -> None:
        """The queue has given places to these."""
        for ticket in tickets:
            self._tickets[ticket.prompt.prompt_id] = ticket
            self.admitted = ticket.group_id + 1

    def finish(self, group: StoredGroup) -> None:
        """A worker has sampled it; it is on its way to the queue."""
        if group.prompt_id not in self._tickets or group.prompt_id in self._unreported:
            return
        if reason := worthless(group.facts, dynamic_sampling=self._dynamic_sampling):
            self._worthless[group.prompt_id] = reason
        else:
            self._finished.setdefault(group.prompt_id, group)

    def knows(self, prompt_id: str) -> bool:
        """It is under way."""
        return prompt_id in self._tickets

    def lose(self, tickets: Iterable[Ticket]) -> None:
        """Their tokens went with a node: they are sampled again."""
        for ticket in tickets:
            self._finished.pop(ticket.prompt.prompt_id, None)

    def give_up(self, ticket: Ticket, reason: str) -> None:
        """Nobody could sample it."""
        prompt_id = ticket.prompt.prompt_id
        if prompt_id in self._tickets and prompt_id not in self._finished.keys() | self._worthless.keys():
            self._unreported.setdefault(prompt_id, reason)

    def settle(self, version: int, published: int, *, trained: Sequence[str], discarded: Iterable[tuple[str, str]]) -> None:
        """The queue's answer to a step: these prompts have left. Args: discarded: as (prompt id, reason)."""
        self._version, self._published = version, published
        self._trained += len(trained)
        for prompt_id, reason in discarded:
            self._reported[reason] += 1
            self._leave(prompt_id)
        for prompt_id in trained:
            self._leave(prompt_id)

    def _leave(self, prompt_id: str) -> None:
        self._tickets.pop(prompt_id, None)
        self._finished.pop(prompt_id, None)
        self._worthless.pop(prompt_id, None)
        self._unreported.pop(prompt_id, None)

    @property
    def in_flight(self) -> list[Ticket]:
        """To be sampled, or in sampling."""
        others = self._finished.keys() | self._worthless.keys() | self._unreported.keys()
        return [ticket for prompt_id, ticket in self._tickets.items() if prompt_id not in others]

    @property
    def finished(self) -> list[StoredGroup]:
        return list(self._finished.values())

    @property
    def given_up(self) -> list[tuple[int, str]]:
        """Numbers of groups that nobody will train, and that no step has settled as discarded yet, and why."""
        reasons = self._unreported | self._worthless
        return [(self._tickets[prompt_id].group_id, reason) for prompt_id, reason in reasons.items() if prompt_id in self._tickets]

    def contents(self, drawn: Sequence[int] = (), advance: tuple[int, int] | None = None) -> QueueContents:
        """What a queue holds that goes on from here.

        Args: drawn, advance: as in QueueContents.
        Raises: LedgerError if groups have come or gone unnoticed.
        """
        unreported = self._unreported | self._worthless
        held = tuple(ticket for prompt_id, ticket in self._tickets.items() if prompt_id not in unreported)
        by_reason = self._reported + Counter(unreported.values())
        if self.admitted != (known := self._trained + by_reason.total() + len(held)):
            raise LedgerError(f"{self.admitted} groups were admitted, but {known} are known as trained, discarded or under way")
        return QueueContents(
            version=self._version,
            published=self._published,
            trained=self._trained,
            tickets=held,
            finished=tuple(self._finished.values()),
            drawn=tuple(drawn),
            advance=advance,
            discarded_by_reason=dict(by_reason),
            unreported=tuple(unreported.items()),
        )
