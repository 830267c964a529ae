"""Simulated time: it jumps from one event to the next.

Engines have an event for every answer, millions in a run. asyncio with a clock of its own takes several times as long for each, so this
is a heap and nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class SimulatedClock:
    """Timers in the order of their times; those of one moment in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self._events: list[tuple[float, int, SimulatedTimer]] = []
        self._set = 0

    def timer(self, action: Callable[[], None]) -> SimulatedTimer:
        """A timer that calls `action` whenever it is due."""
        return SimulatedTimer(self, action)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do `action` once."""
        self.timer(action).set(self.now + seconds)

    def run(self, is_over: Callable[[], bool]) -> bool:
        """Let time pass until is_over() is true. Returns: False if nothing is left that could happen."""
        events = self._events
        while not is_over():
            if not events:
                return False
            when, number, timer = heapq.heappop(events)
            if timer.number == number:
                timer.number = -1
                self.now = when
                timer.action()
        return True

    def push(self, when: float, timer: SimulatedTimer) -> int:
        """Returns: number of the event."""
        self._set += 1
        heapq.heappush(self._events, (max(when, self.now), self._set, timer))
        return self._set


class SimulatedTimer:
    """Can be set again and again; the last time counts."""

    __slots__ = ("_clock", "action", "number")

    def __init__(self, clock: SimulatedClock, action: Callable[[], None]) -> None:
        self._clock, self.action = clock, action
        self.number = -1
        """Number of the event that counts; -1: none."""

    def set(self, when: float) -> None:
        self.number = self._clock.push(when, self)

    def stop(self) -> None:
        self.number = -1
