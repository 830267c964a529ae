"""Calls that begin together are made a few in each iteration of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter

from evenkeel.actors.processes.call_throttle import CALLS_PER_ITERATION, CallThrottle
from tests.actors.processes.iteration_counter import IterationCounter


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
