"""The trajectory queue as a Ray actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.carriers import DiscardReason, QueueContents, QueueSettlement, StoredGroup, Ticket
from actors.processes.numbered import NumberedCalls
from actors.processes.part_heartbeat import HeartbeatActor
from actors.queue.trajectory_queue import TrajectoryQueue
from rollout.stacks import register_stack_dump
from rollout.trajectory import Prompt

_JOIN_S = 0.05
"""Seconds for which a drawn group waits, so that others can join it in one call."""


class TrajectoryQueueActor(HeartbeatActor):
    """The queue as a Ray actor (async): its methods, publish and settle as one call, and waiting with a deadline.

    Args of its methods: number: of the call, see NumberedCalls; the pool numbers its calls of each method, the correction service all. The
    driver fills a queue once, and numbers `advance` by the version.
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int) -> None:
        super().__init__()
        register_stack_dump()
        self._queue = TrajectoryQueue(groups_per_step=groups_per_step, max_staleness=max_staleness)
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        """For each waiting caller its condition, and the future that wakes it."""
        self._admissions, self._losses, self._of_service = NumberedCalls(), NumberedCalls(), NumberedCalls()
        self._advances, self._filling = NumberedCalls(), NumberedCalls()

    def _notify(self) -> None:
        """Called after a change: wake the callers whose condition holds, and no others, because a run has thousands of changes."""
        for ready, woken in list(self._waiting):
            if not woken.done() and ready():
                woken.set_result(None)

    async def _wait_until(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait for a change that makes ready() true; False at the deadline (seconds of the event loop)."""
        if ready():
            return True
        waiting = ready, asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout_at(deadline):
                await waiting[1]
        except TimeoutError:
            return False
        finally:
            self._waiting.remove(waiting)
        return True

    async def wait_for_places(self, timeout_s: float) -> int:
        """Number of free places. Waits up to timeout_s seconds while there are none."""
        await self._wait_until(lambda: self._queue.free_places > 0, asyncio.get_running_loop().time() + timeout_s)
        return max(0, self._queue.free_places)

    async def admit(self, prompts: list[Prompt], number: int = 0) -> list[Ticket]:
        """Give places to the first prompts, as many as are free."""

        async def admit() -> list[Ticket]:
            return self._queue.admit(prompts)

        tickets: list[Ticket] = await self._admissions.once(number, admit)
        return tickets

    async def put(self, groups: list[StoredGroup]) -> None:
        """Take finished groups; a repeated delivery changes nothing."""
        for group in groups:
            self._queue.put(group)
        self._notify()

    async def lose(self, group_ids: list[int], number: int = 0) -> None:
        async def lose() -> None:
            self._queue.lose(group_ids)
            self._notify()

        await self._of_service.once(number, lose)

    async def take_lost(self, timeout_s: float, number: int = 0) -> list[Ticket]:
        """Groups to be sampled again, after waiting up to timeout_s for the first."""

        async def take() -> list[Ticket]:
            await self._wait_until(lambda: bool(self._queue.lost), asyncio.get_running_loop().time() + timeout_s)
            return self._queue.take_lost()

        lost: list[Ticket] = await self._losses.once(number, take)
        return lost

    async def discard(self, group_ids: list[int], reason: DiscardReason, number: int = 0) -> None:
        async def discard() -> None:
            self._queue.discard(group_ids, reason)
            self._notify()

        await self._of_service.once(number, discard)

    async def give_up(self, group_id: int, reason: DiscardReason) -> bool:
        is_new = self._queue.give_up(group_id, reason)
        self._notify()
        return is_new

    async def draw(self, version: int, places: int, timeout_s: float, number: int = 0) -> list[StoredGroup]:
        """Groups for the batch of `version`; none if there is none after timeout_s.

        After the first group it waits a moment (_JOIN_S) for further ones: a call for each group would take longer.
        """
        groups: list[StoredGroup] = await self._of_service.once(number, lambda: self._draw(version, places, timeout_s))
        return groups

    async def _draw(self, version: int, places: int, timeout_s: float) -> list[StoredGroup]:
        drawn: list[StoredGroup] = []

        def take() -> bool:
            drawn.extend(self._queue.draw(version, places - len(drawn)))
            return bool(drawn)

        if await self._wait_until(take, asyncio.get_running_loop().time() + timeout_s):
            await self._wait_until(lambda: take() and len(drawn) == places, asyncio.get_running_loop().time() + _JOIN_S)
        return drawn

    async def advance(self, version: int, trained: list[int], published: int | None = None) -> QueueSettlement:
        """Note that the learner has new weights, trained on these groups, which leave the queue.

        Args: published: version that the engines get; None: this one.
        Returns: asked again for the same version, the same.
        """

        async def advance() -> QueueSettlement:
            self._queue.publish(version, published)
            self._queue.settle(trained)
            self._notify()
            return QueueSettlement(self._queue.take_discarded(), self._queue.counts(), self._queue.outstanding())

        settlement: QueueSettlement = await self._advances.once(version, advance)
        return settlement

    async def waiting_for(self, version: int) -> str:
        return self._queue.waiting_for(version)

    async def contents(self) -> QueueContents:
        """All that is under way, for a checkpoint."""
        return self._queue.contents()

    async def fill(self, contents: QueueContents) -> None:
        """Fill an empty queue. Only the first call does it; repeated ones change nothing."""

        async def fill() -> None:
            self._queue.fill(contents)
            if contents.advance is not None:  # at once: groups may have come into the places of those that it has trained
                await self.advance(contents.advance.learner, list(contents.drawn), contents.advance.published)

        await self._filling.once(1, fill)
