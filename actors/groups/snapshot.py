"""What a checkpoint holds of the book of groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from evenkeel.actors.carriers import DiscardedGroup, DiscardReason, StoredGroup, Ticket
from evenkeel.rollout.trajectory import Group, UnfinishedGroup


@dataclass(frozen=True, slots=True)
class BookContents:
    """The groups under way at one moment, their tokens still where they lie. Fields as of BookSnapshot, and these."""

    version: int
    admitted: int
    trained: int
    tickets: tuple[Ticket, ...]
    """Tickets of all groups under way, in the order of admission."""
    finished: tuple[StoredGroup, ...]
    """The sampled groups among these."""
    discarded_by_reason: dict[DiscardReason, int]
    unreported: tuple[DiscardedGroup, ...]
    so_far: tuple[UnfinishedGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class BookSnapshot:
    """The book's state in a checkpoint: a restart from it keeps the staleness bound, and neither loses nor repeats a prompt."""

    version: int
    """Version of the learner's weights; after a restart the engines get them, too."""
    admitted: int
    """Number of groups since the run began, as in the next two fields; also the id of the next group."""
    trained: int
    """Groups trained on."""
    discarded: int
    """Groups thrown away."""
    in_flight: tuple[Ticket, ...]
    """Admitted and not finished, or finished with tokens that are lost: sampled after a restart."""
    finished: tuple[Group, ...]
    """Finished and not trained, drawn ones included."""
    discarded_by_reason: dict[DiscardReason, int] = field(default_factory=dict)
    """The same by reason. A checkpoint in which they don't add up to `discarded` is refused (ledger.imbalance_of)."""
    unreported: tuple[DiscardedGroup, ...] = ()
    """Discarded, and not yet in the ledger."""
    so_far: tuple[UnfinishedGroup, ...] = ()
    """What there is of some of those in flight, from which they go on."""

    @classmethod
    def of(cls, contents: BookContents, groups: Sequence[Group], told: Iterable[UnfinishedGroup] = ()) -> Self:
        """
        Args:
            groups: the finished ones whose tokens are at hand; all others are sampled again after a restart.
            told: what workers have said that there is of groups, some of which may be gone by now.
        """
        at_hand = {group.group_id for group in groups}
        in_flight = tuple(ticket for ticket in contents.tickets if ticket.group_id not in at_hand)
        so_far = {one.group_id: one for one in sorted([*contents.so_far, *told], key=lambda one: one.tokens)}
        return cls(
            version=contents.version,
            admitted=contents.admitted,
            trained=contents.trained,
            discarded=sum(contents.discarded_by_reason.values()),
            in_flight=in_flight,
            finished=tuple(groups),
            discarded_by_reason=contents.discarded_by_reason,
            unreported=contents.unreported,
            so_far=tuple(so_far[ticket.group_id] for ticket in in_flight if ticket.group_id in so_far),
        )
