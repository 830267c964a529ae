"""Finished groups on their way from the pool to the trajectory queue: many by one call.

A call costs both processes about as much for one group as for a hundred. So there is one at a time, and what finishes meanwhile goes with
the next. While the learner is at work nobody waits for a group, and each call waits a moment for others to come along; once the learner
waits for its batch, none does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from actors.admission import PatientQueue
from actors.carriers import StoredGroup, Ticket
from correction.errors import ActorLost

_GATHER_S = 0.1


class Delivery:
    """To one queue."""

    def __init__(
        self,
        queue: PatientQueue,
        on_lost: Callable[[Sequence[Ticket], ActorLost], None],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """Args: on_lost: is given back what did not reach the queue, all groups of a call, and why. spawn: has a task for its calls."""
        self._queue, self._on_lost, self._spawn = queue, on_lost, spawn
        self._waiting: list[tuple[Ticket, StoredGroup]] = []
        self._hurry = asyncio.Event()
        self._is_under_way = False

    def add(self, ticket: Ticket, group: StoredGroup) -> None:
        """Hand a finished group over."""
        self._waiting.append((ticket, group))
        if not self._is_under_way:
            self._is_under_way = True
            self._spawn(self._deliver())

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """While this lasts somebody waits for groups: no call waits for others."""
        self._hurry.set()
        try:
            yield
        finally:
            self._hurry.clear()

    async def _deliver(self) -> None:
        try:
            while self._waiting:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_GATHER_S):
                        await self._hurry.wait()
                sent, self._waiting = self._waiting, []
                try:
                    await self._queue.put([group for _, group in sent])
                except ActorLost as error:
                    self._on_lost([ticket for ticket, _ in sent], error)
        finally:
            self._is_under_way = False
