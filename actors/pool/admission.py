"""Gets places in the queue for prompts, as places become free. If the queue is late, it waits and asks again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from actors.carriers import DiscardReason, StoredGroup, Ticket
from actors.processes.numbered import NumberedCaller
from actors.processes.supervision import call_until_answered
from actors.settings.deadlines import ANSWER_S
from correction.errors import ActorLost
from rollout.trajectory import Prompt

_POLL_S = 30.0


class QueueClient:
    """Calls of the trajectory queue's actor that may run twice: one without an answer is made again."""

    def __init__(self, queue: Any, late: Callable[[str], None]) -> None:
        """Args: late: called when it hasn't answered for long."""
        self.actor, self._late = queue, late
        self._admissions, self._losses = NumberedCaller(queue, late), NumberedCaller(queue, late)

    async def ask(self, method: str, *arguments: Any, waits_s: float = 0.0) -> Any:
        """Args: waits_s: that the call itself may wait."""
        call = partial(getattr(self.actor, method).remote, *arguments)
        return await call_until_answered(call, late=self._late, **_limits(method, waits_s))

    async def put(self, groups: list[StoredGroup]) -> None:
        """Hand over finished groups. Raises: ActorLost."""
        await self.ask("put", groups)

    async def give_up(self, group_id: int, reason: DiscardReason) -> None:
        """Discard a group that nobody could sample."""
        with suppress(ActorLost):  # `admit` says that the queue is gone, and the run what is done about it
            await self.ask("give_up", group_id, reason)

    def replaced_by(self, queue: Any) -> QueueClient:
        return QueueClient(queue, self._late)

    async def admit(self, prompts: Iterator[Prompt], notice_s: float) -> AsyncIterator[list[Ticket]]:
        """Yields tickets for the next prompts, as many as there are free places; never ends.

        Args: notice_s: longest wait of one call for a free place. Waiting longer is no error: the call is made again.
        """
        held: list[Prompt] = []
        places = 0
        while True:
            waiting = asyncio.ensure_future(self.ask("wait_for_places", notice_s, waits_s=notice_s))
            try:
                while len(held) < places and not waiting.done():  # prepare as many as last time, while the engines work
                    held.append(next(prompts))
                    await asyncio.sleep(0)
                places = await waiting
            finally:
                waiting.cancel()
            while len(held) < places:
                held.append(next(prompts))
            if not places:
                continue
            tickets: list[Ticket] = await self._admissions.ask("admit", held[:places], **_limits("admit"))
            held = held[len(tickets) :]
            yield tickets

    async def sample_again(self, take: Callable[[list[Ticket]], None]) -> None:
        """Never returns: hand over the groups whose tokens were lost, whenever the queue reports some, to be sampled again."""
        while True:
            if tickets := await self._losses.ask("take_lost", _POLL_S, **_limits("take_lost", _POLL_S)):
                take(tickets)


def _limits(method: str, waits_s: float = 0.0) -> dict[str, Any]:
    """Name and limits of a call. Args: waits_s: that the call itself may wait."""
    limit_s = waits_s + ANSWER_S
    return {"what": f"{method} <- trajectory queue", "deadline_s": limit_s, "notice_s": limit_s}
