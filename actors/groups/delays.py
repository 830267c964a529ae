"""How long groups wait besides sampling and scoring: for a place, on the way to an engine and back, and until the learner has them.

All times are by the driver's clock, seconds. The what-if of pool sizes uses them (lab/simulate).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

from evenkeel.rollout.trajectory import GroupFacts

ADMISSION, CALL, HANDOVER = "time/admission_s", "time/call_s", "wait/handover_s"


class GroupDelays:
    """Collects them from one reading to the next; the times of a group itself are in its entry of the book."""

    def __init__(self) -> None:
        self._freed_at, self._free = 0.0, 0
        """When a step last freed places, and how many of them are still free."""
        self._asked_at: float | None = None
        """When the learner asked for the batch that it waits for."""
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def freed(self, places: int, now: float) -> None:
        """Called at the end of a step, whose groups have left their places."""
        self._freed_at, self._free = now, places

    def admitted(self, groups: int, now: float) -> None:
        """Called when new groups have got places. Those in the places of discarded groups didn't wait for a step and don't count."""
        counted = min(groups, self._free)
        self._free -= counted
        self._seconds[ADMISSION] += [now - self._freed_at] * counted

    def answered(self, group: GroupFacts, now: float, *, called_at: float | None) -> None:
        """Called when a worker has answered. Args: called_at: when it was asked; None: not known."""
        # The times of a group that another worker began include that worker's, so the way of the call can't be told.
        if called_at is not None and (way_s := now - called_at - group.generate_s - group.reward_s) >= 0:
            self._seconds[CALL].append(way_s)

    def asked(self, now: float) -> None:
        """Called when the learner asks for a batch, or asks again for the same one."""
        self._asked_at = now if self._asked_at is None else self._asked_at

    def given(self, finished_at: Iterable[float], now: float) -> None:
        """Called when the learner has the batch: time counts from its call, or from the last group's arrival if that was later."""
        asked_at, self._asked_at = now if self._asked_at is None else self._asked_at, None
        self._seconds[HANDOVER].append(now - max([asked_at, *finished_at]))

    def read(self) -> dict[str, float]:
        """Mean times since the last reading, seconds, by metric name; times that were not measured are absent."""
        seconds, self._seconds = self._seconds, defaultdict(list)
        return {name: statistics.fmean(values) for name, values in seconds.items() if values}
