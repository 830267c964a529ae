"""Finished groups on their way from the pool to the trajectory queue: many by one call.

A call costs both processes about as much for one group as for a hundred. So there is one at a time, and what finishes meanwhile goes with
the next. While the learner is at work nobody waits for a group, and each call waits for others to come along, if others are being sampled;
once the learner waits for its batch, none does.

If a process dies and the run goes on, no group that waits here is lost: a new queue is filled from the driver's record, and so is a
checkpoint (actors.queue.outstanding).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from actors.carriers import StoredGroup
from actors.pool.admission import QueueClient
from correction.errors import ActorLost

_SHORTEST_S, _LONGEST_S = 0.25, 1.0
_SHARE = 0.25
"""Of a step: how long a call waits for further groups, between the shortest and the longest time. Nearly each call here lets the queue
answer a call of the correction service, so it costs three processes. But a group that isn't worth training gives its place back when the
service has seen it: in a short step that can't wait for a second."""
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
        self._goes_now = asyncio.Event()
        self._is_urgent = self._has_last = False
        self._gather_s, self._urgent_at = _SHORTEST_S, math.inf
        self._is_under_way = self._is_closed = False

    def add(self, *groups: StoredGroup, are_last: bool = False) -> None:
        """Hand finished groups over. Args: are_last: no other one is being sampled. A batch that would wait for these is corrected before
        the learner asks for it."""
        self._waiting += groups
        if are_last:
            self._has_last = True
            self._goes_now.set()
        if self._waiting and not self._is_under_way:
            self._is_under_way = True
            self._spawn(self._deliver())

    def close(self) -> None:
        """Stop delivering; groups that still wait are dropped."""
        self._is_closed = True

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Within the block, once a step, the learner waits for groups: no call waits for further ones."""
        last_step, self._urgent_at = (now := asyncio.get_running_loop().time()) - self._urgent_at, now
        self._gather_s = min(max(_SHARE * last_step, _SHORTEST_S), _LONGEST_S)
        self._is_urgent = True
        self._goes_now.set()
        try:
            yield
        finally:
            self._is_urgent = False
            if not self._has_last:
                self._goes_now.clear()

    async def _deliver(self) -> None:
        failures = 0
        try:
            while self._waiting and not self._is_closed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._gather_s):
                        await self._goes_now.wait()
                sent, self._waiting, self._has_last = self._waiting, [], False
                if not self._is_urgent:
                    self._goes_now.clear()
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
