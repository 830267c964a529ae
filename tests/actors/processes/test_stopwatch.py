"""Seconds of a step by phase, in simulated time."""

from __future__ import annotations

import asyncio
import contextlib

from evenkeel.actors.processes.stopwatch import Stopwatch
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
