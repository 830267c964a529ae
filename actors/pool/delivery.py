"""Finished groups on their way from the pool to the trajectory queue: many by one call.

A call costs both processes about as much for one group as for a hundred. So there is one at a time, and what finishes meanwhile goes with
the next. While the learner is at work nobody waits for a group, and each call waits a moment for others to come along; once the learner
waits for its batch, none does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from actors.carriers import StoredGroup
from actors.pool.admission import QueueClient
from correction.errors import ActorLost

_GATHER_S = 0.25
"""Seconds that a call waits for further groups. Nearly each call here lets the queue answer a call of the correction service, so it costs
three processes."""
_AGAIN_S = 2.0
"""Seconds from a call that didn't reach the queue to the next one."""


class Delivery:
    """Hands finished groups to one queue, many by a call."""

    def __init__(
        self,
        queue: QueueClient,
        notify: Callable[[str], None],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """Args: notify: called when the queue can't be reached. spawn: starts a task for the calls."""
        self._queue, self._notify, self._spawn = queue, notify, spawn
        self._waiting: list[StoredGroup] = []
        self._is_urgent = asyncio.Event()
        self._is_under_way = self._is_closed = False

    def add(self, *groups: StoredGroup) -> None:
        """Hand finished groups over."""
        self._waiting += groups
        if self._waiting and not self._is_under_way:
            self._is_under_way = True
            self._spawn(self._deliver())

    def close(self) -> None:
        """Stop delivering; groups that still wait are dropped."""
        self._is_closed = True

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Within the block the learner waits for groups: no call waits for further ones."""
        self._is_urgent.set()
        try:
            yield
        finally:
            self._is_urgent.clear()

    async def _deliver(self) -> None:
        failures = 0
        try:
            while self._waiting and not self._is_closed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_GATHER_S):
                        await self._is_urgent.wait()
                sent, self._waiting = self._waiting, []
                try:
                    await self._queue.put(sent)
                except ActorLost as error:  # another queue gets them from who knows all that is under way, if this one is gone
                    failures += 1
                    if failures % 10 == 1:
                        self._notify(f"groups {[group.group_id for group in sent]} wait: {error}")
                    self._waiting = [*sent, *self._waiting]
                    await asyncio.sleep(_AGAIN_S)
        finally:
            self._is_under_way = False
