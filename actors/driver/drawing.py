"""Draws the groups of a batch from the trajectory queue. Groups not worth training are discarded, lost ones are sampled again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from actors.carriers import DiscardReason, StoredGroup
from actors.processes.numbered import NumberedCaller
from actors.settings.deadlines import ANSWER_S
from correction.errors import ActorLost

_POLL_S = 30.0
_MOST_LOSSES = 3
"""When one group has been lost this many times, the run goes back to its last checkpoint, with a new queue and service; two losses may be
lost nodes. Tokens that always come late would otherwise be sampled again for ever; with this the run ends at the fourth rollback
(rollback.py), with the remedy. Late groups are not discarded: they are those with the longest answers, and a run without them would learn
something else."""


class Drawing:
    """The driver's side of the queue."""

    def __init__(self, books: NumberedCaller) -> None:
        self._books = books
        self._losses = Counter[int]()
        """Number of losses by group id, of groups that are in no batch yet."""

    async def draw(self, version: int, places: int) -> list[StoredGroup]:
        """Up to `places` groups worth training; waits for the first. Others are discarded, which frees their places for new prompts."""
        while True:
            # This deadline is for a queue that doesn't answer; that no group is finished is for the batch's deadline.
            what, limit_s = f"groups of version {version} <- trajectory queue", _POLL_S + ANSWER_S
            drawn = await self._books.ask("draw", version, places, _POLL_S, what=what, deadline_s=limit_s, notice_s=ANSWER_S)
            kept, given_up = list[StoredGroup](), dict[DiscardReason, list[int]]()
            for group in drawn:
                if group.reason is not None:
                    given_up.setdefault(group.reason, []).append(group.group_id)
                else:
                    kept.append(group)
            for reason, group_ids in given_up.items():
                self.forget(group_ids)
                await self._books.ask("discard", group_ids, reason, what="discard of groups <- trajectory queue", deadline_s=ANSWER_S)
            if kept:
                return kept

    async def lose(self, why: Mapping[int, str]) -> None:
        """Have drawn groups that can't be read sampled again.

        Args: why: reasons by group id.
        Raises: ActorLost for a group that was lost _MOST_LOSSES times: lost nodes hardly explain that. The run goes back for it.
        """
        for group_id, reason in why.items():
            self._losses[group_id] += 1
            if self._losses[group_id] >= _MOST_LOSSES:
                raise ActorLost(
                    f"group {group_id} was sampled {_MOST_LOSSES} times, and each time its tokens could not be read, at last because they "
                    f"were {reason}: look at the nodes and the network between them; where they are late, lower deadlines.bytes_per_s"
                )
        what = f"loss of {len(why)} groups -> trajectory queue"
        await self._books.ask("lose", sorted(why), what=what, deadline_s=ANSWER_S)

    def forget(self, group_ids: Iterable[int]) -> None:
        """Called for groups that don't come again: those of a batch that is complete, and discarded ones."""
        for group_id in group_ids:
            self._losses.pop(group_id, None)
