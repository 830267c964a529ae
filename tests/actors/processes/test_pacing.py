"""Times and pauses of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.actors.processes.pacing import CALLS_PER_ITERATION, TICK_S, CallThrottle, LoopClock, Stopwatch, doubled_pause_s
from tests.actors.processes.iteration_counter import IterationCounter
from tests.actors.simulated_time import simulate


def test_a_phase_is_measured_once_for_all_who_read_it() -> None:
    """A wait that fails counts as well: the learner's, when the queue dies meanwhile, goes on with a new one."""

    async def scenario() -> None:
        watch = Stopwatch()
        with contextlib.suppress(TimeoutError), watch.phase("wait") as cut:
            await asyncio.sleep(2.0)
            raise TimeoutError
        await asyncio.sleep(5.0)
        with watch.phase("wait") as second:
            assert second.seconds == 0.0
            await asyncio.sleep(3.0)
        with watch.phase("train"):
            await asyncio.sleep(4.0)
        assert (cut.seconds, second.seconds, second.began - cut.began) == (2.0, 3.0, 7.0)
        assert watch.read() == {"wait": 5.0, "train": 4.0} and watch.read() == {}

    simulate(scenario)


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


def test_a_few_go_on_in_each_iteration_in_the_order_in_which_they_came() -> None:
    async def scenario() -> None:
        throttle, counter, came = CallThrottle(), IterationCounter(), list[tuple[int, int]]()

        async def one(number: int) -> None:
            await throttle.wait()
            came.append((counter.iteration, number))

        dropped = [asyncio.create_task(one(number)) for number in range(50)]
        await asyncio.sleep(0)
        dropped[20].cancel()
        await asyncio.wait(dropped)
        assert [number for _, number in came] == [number for number in range(50) if number != 20]
        calls = Counter(iteration for iteration, _ in came)
        assert max(calls.values()) == CALLS_PER_ITERATION and len(calls) == -(-49 // CALLS_PER_ITERATION)

    asyncio.run(scenario())


@settings(deadline=None)
@given(number=st.integers(-5, 10**9), first_s=st.floats(1e-3, 1e3), beyond_s=st.floats(0.0, 1e6))
def test_a_pause_doubles_from_the_first_to_the_longest_and_stays_there(number: int, first_s: float, beyond_s: float) -> None:
    """No number of failures is too large for it: a run of weeks may count thousands."""
    most_s = first_s + beyond_s
    now_s, next_s = (doubled_pause_s(number + more, first_s, most_s) for more in (0, 1))
    assert 0.0 <= now_s <= next_s <= most_s
    if number < 1:
        assert now_s == 0.0 and next_s == (first_s if number == 0 else 0.0)
    elif number > 30:
        assert now_s == most_s, "2 ** 30 ms are longer than any longest one here"
    else:
        assert next_s == min(2 * now_s, most_s)


def test_the_pauses_of_a_pool() -> None:
    assert [doubled_pause_s(number, 2.0, 60.0) for number in range(8)] == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
