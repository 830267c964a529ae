"""A loop that stands still is late with all that would have been due meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from evenkeel.actors.processes.loop_clock import TICK_S, LoopClock
from tests.actors.simulated_time import simulate


class Loop:
    """In simulated time, with one timer."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self._when, self._run = when, lambda: call(*arguments)

    def run(self, standstill_s: float) -> None:
        """What is due next, after a standstill that may have made it late."""
        self.now = max(self.now, self._when) + standstill_s
        self._run()


@pytest.mark.parametrize(("standstill", "expected"), [(0, 0), (9, 0), (50, 40), (100, 90)])
def test_a_standstill_counts_with_its_length(standstill: int, expected: int) -> None:
    """1,000 ticks in simulated time, the last of which fall into one standstill: they come that many ticks late, one less, ... 1. Ten of
    the thousand may be later than the 99th percentile says, so it is 10 less than the longest."""
    clock, loop = LoopClock(), Loop()
    clock._wait_until(TICK_S, loop)  # type: ignore[arg-type]
    for tick in range(1000):
        loop.run(standstill * TICK_S if tick == 1000 - standstill else 0.0)
    assert len(clock._late) == 1000
    assert clock.read() == pytest.approx(expected * TICK_S, abs=1e-9)
    assert clock.read() == 0.0, "each reading begins anew"


def test_ticks_wake_no_task() -> None:
    """Twenty times a second in each of three processes, a task's wake-up would be a part of what they cost."""

    async def scenario() -> None:
        clock, before = LoopClock(), asyncio.all_tasks()
        clock.start()
        clock.start()
        assert asyncio.all_tasks() == before
        await asyncio.sleep(3.5 * TICK_S)
        clock.stop()
        assert len(clock._late) == 3, "or it was started twice"
        await asyncio.sleep(2 * TICK_S)
        assert len(clock._late) == 3, "it goes on after its end"

    simulate(scenario)


def test_a_blocked_loop_is_seen() -> None:
    async def scenario() -> float:
        clock = LoopClock()
        clock.start()
        await asyncio.sleep(2 * TICK_S)
        time.sleep(10 * TICK_S)
        while len(clock._late) < 12:
            await asyncio.sleep(TICK_S)
        clock.stop()
        return clock.read()

    assert asyncio.run(scenario()) >= 8 * TICK_S
