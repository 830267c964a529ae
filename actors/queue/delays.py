"""What a group's way takes in addition to sampling and scoring, as the driver sees it: to a place, to an engine and back, to the learner.

All by the driver's own clock. A simulation of the run is given these (actors/commands/measured_costs.py).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from rollout.trajectory import GroupFacts

ADMISSION, CALL, HANDOVER = "time/admission_s", "time/call_s", "wait/handover_s"


class GroupDelays:
    """Takes down when things happen to groups. One event loop uses it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Args: now: seconds of a clock."""
        self._now = now
        self._freed_at, self._free = 0.0, 0
        """When a step last gave places back, and how many of them no group has taken."""
        self._called: dict[int, float] = {}
        self._finished: dict[int, float] = {}
        """When a worker was asked for a group, and when it had answered; by group id."""
        self._asked_at: float | None = None
        """When the learner asked for the batch that it waits for."""
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def freed(self, places: int) -> None:
        """A step has ended: its groups have left their places."""
        self._freed_at, self._free = self._now(), places

    def admitted(self, groups: int) -> None:
        """The queue has given places to new ones. Those that come in place of discarded groups have waited for no step, and don't count."""
        counted = min(groups, self._free)
        self._free -= counted
        self._seconds[ADMISSION] += [self._now() - self._freed_at] * counted

    def called(self, group_id: int) -> None:
        """A worker is asked for it."""
        self._called[group_id] = self._now()

    def finished(self, group: GroupFacts) -> None:
        """The worker has answered."""
        now = self._finished.setdefault(group.group_id, self._now())
        called = self._called.pop(group.group_id, None)
        # A group that another worker began brings that one's time as well: of its call nothing is known.
        if called is not None and (way_s := now - called - group.generate_s - group.reward_s) >= 0:
            self._seconds[CALL].append(way_s)

    def asked(self) -> None:
        """The learner asks for a batch, or again for what it still waits for."""
        self._asked_at = self._now() if self._asked_at is None else self._asked_at

    def given(self, group_ids: Iterable[int]) -> None:
        """It has the batch, which consists of these: time counts from its asking, or from the last group's arrival if that was later."""
        now = self._now()
        asked_at, self._asked_at = now if self._asked_at is None else self._asked_at, None
        self._seconds[HANDOVER].append(now - max([asked_at, *(self._finished.get(group_id, asked_at) for group_id in group_ids)]))

    def forget(self, group_id: int) -> None:
        """Drop the times of a group that was trained or discarded."""
        self._called.pop(group_id, None)
        self._finished.pop(group_id, None)

    def read(self) -> dict[str, float]:
        """Means since the last reading, seconds, by name of the catalogue; what did not happen is absent."""
        seconds, self._seconds = self._seconds, defaultdict(list)
        return {name: statistics.fmean(values) for name, values in seconds.items() if values}
