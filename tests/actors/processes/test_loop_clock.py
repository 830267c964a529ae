"""A loop that stands still is late with all that would have been due meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest

from actors.processes import loop_clock
from actors.processes.loop_clock import TICK_S, LoopClock


@pytest.mark.parametrize(("standstill", "expected"), [(0, 0), (9, 0), (50, 40), (100, 90)])
def test_a_standstill_counts_with_its_length(monkeypatch: pytest.MonkeyPatch, standstill: int, expected: int) -> None:
    """1,000 ticks in simulated time, the last of which fall into one standstill: they come that many ticks late, one less, ... 1. Ten of
    the thousand may be later than the 99th percentile says, so it is 10 less than the longest."""
    clock, now = LoopClock(), [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        if len(clock._late) == 1000 - standstill:
            now[0] += standstill * TICK_S
        if len(clock._late) == 1000:
            raise asyncio.CancelledError

    monkeypatch.setattr(loop_clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(loop_clock, "asyncio", SimpleNamespace(sleep=sleep))
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(clock._tick())
    assert len(clock._late) == 1000
    assert clock.read() == pytest.approx(expected * TICK_S, abs=1e-9)
    assert clock.read() == 0.0, "each reading begins anew"


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
