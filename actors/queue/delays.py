"""Measures how long groups wait besides sampling and scoring: for a place, on the way to an engine and back, and until the learner has
them.

All times are by the driver's clock.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from rollout.trajectory import GroupFacts

ADMISSION, CALL, HANDOVER = "time/admission_s", "time/call_s", "wait/handover_s"


class GroupDelays:
    """Records the times of events of groups. One event loop uses it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Args: now: a clock, seconds."""
        self._now = now
        self._freed_at, self._free = 0.0, 0
        """When a step last freed places, and how many of them are still free."""
        self._called: dict[int, float] = {}
        self._finished: dict[int, float] = {}
        """When a worker was asked for a group, and when it had answered; by group id."""
        self._asked_at: float | None = None
        """When the learner asked for the batch that it waits for."""
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def freed(self, places: int) -> None:
        """Called at the end of a step, whose groups have left their places."""
        self._freed_at, self._free = self._now(), places

    def admitted(self, groups: int) -> None:
        """Called when the queue has given places to new groups. Those in the places of discarded groups didn't wait for a step and don't
        count."""
        counted = min(groups, self._free)
        self._free -= counted
        self._seconds[ADMISSION] += [self._now() - self._freed_at] * counted

    def called(self, group_id: int) -> None:
        """Called when a worker is asked for the group."""
        self._called[group_id] = self._now()

    def finished(self, group: GroupFacts) -> None:
        """Called when the worker has answered."""
        now = self._finished.setdefault(group.group_id, self._now())
        called = self._called.pop(group.group_id, None)
        # The times of a group that another worker began include that worker's, so the way of the call can't be told.
        if called is not None and (way_s := now - called - group.generate_s - group.reward_s) >= 0:
            self._seconds[CALL].append(way_s)

    def asked(self) -> None:
        """Called when the learner asks for a batch, or asks again for the same one."""
        self._asked_at = self._now() if self._asked_at is None else self._asked_at

    def given(self, group_ids: Iterable[int]) -> None:
        """Called when the learner has a batch of these groups: time counts from its call, or from the last group's arrival if that was
        later."""
        now = self._now()
        asked_at, self._asked_at = now if self._asked_at is None else self._asked_at, None
        self._seconds[HANDOVER].append(now - max([asked_at, *(self._finished.get(group_id, asked_at) for group_id in group_ids)]))

    def forget(self, group_id: int) -> None:
        """Drop the times of a group that was trained or discarded."""
        self._called.pop(group_id, None)
        self._finished.pop(group_id, None)

    def read(self) -> dict[str, float]:
        """Mean times since the last reading, seconds, by metric name; times that were not measured are absent."""
        seconds, self._seconds = self._seconds, defaultdict(list)
        return {name: statistics.fmean(values) for name, values in seconds.items() if values}
