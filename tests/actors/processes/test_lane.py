"""The spans of one process, in simulated time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.carriers import LaneReport, Span
from evenkeel.actors.processes import lane as lane_module
from evenkeel.actors.processes.lane import Lane
from tests.actors.simulated_time import simulate


def told(report: LaneReport, lane: Lane) -> list[tuple[Any, ...]]:
    """Spans with seconds since the lane was made."""
    origin = 1e9 + lane.made_at
    return [(one.what, round(one.begin - origin), round(one.end - origin), one.version, one.group, one.why) for one in report.spans]


@pytest.fixture(autouse=True)
def one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes have the simulated loop's clock, and unix time is that plus 1e9 s."""
    monotonic, unix = lambda: asyncio.get_running_loop().time(), lambda: 1e9 + asyncio.get_running_loop().time()
    monkeypatch.setattr(lane_module, "time", SimpleNamespace(monotonic=monotonic, time=unix))


def test_what_is_under_way_and_what_is_waited_for_add_up_to_all_of_the_time() -> None:
    """3 s of nothing, two spans that overlap (4 to 9 s), nothing again, of which a report cuts a piece off at 15 s."""

    async def scenario() -> None:
        lane = Lane("worker-0", waits_for="work")
        await asyncio.sleep(3.0)

        async def work(seconds: float, group: int) -> None:
            with lane.span("sample", version=2, group=group):
                await asyncio.sleep(seconds)

        first = asyncio.create_task(work(4.0, 7))
        await asyncio.sleep(1.0)
        await asyncio.gather(first, work(5.0, 8))
        await asyncio.sleep(6.0)
        report = lane.report()
        assert told(report, lane) == [
            ("wait", 0, 3, None, None, "work"),
            ("sample", 3, 7, 2, 7, None),
            ("sample", 4, 9, 2, 8, None),
            ("wait", 9, 15, None, None, "work"),
        ]
        await asyncio.sleep(2.0)
        with lane.span("update", version=3):
            assert told(lane.report(), lane) == [("wait", 15, 17, None, None, "work")], "nothing is told twice"
            await asyncio.sleep(1.0)
            assert told(lane.report(), lane) == [], "what is under way is told when it is over"
        assert told(lane.report(), lane) == [("update", 17, 18, 3, None, None)]

    simulate(scenario)


def test_a_lane_that_does_not_know_what_it_waits_for_leaves_a_gap_and_an_error_says_its_class() -> None:
    async def scenario() -> None:
        lane = Lane("driver")
        await asyncio.sleep(3.0)
        with pytest.raises(ValueError, match="torn"), lane.span("step", why="first"):
            await asyncio.sleep(1.0)
            raise ValueError("torn")
        await asyncio.sleep(1.0)
        assert told(lane.report(), lane) == [("step", 3, 4, None, None, "ValueError")]

    simulate(scenario)


def test_a_lane_that_nobody_asks_keeps_the_newest_spans_alone() -> None:
    """However long a network is away, the memory is bounded: 4,096 spans."""

    async def scenario() -> None:
        lane = Lane("worker-0")
        for number in range(5000):
            lane.add("sample", 0.0, 1.0, group=number)
        spans: tuple[Span, ...] = lane.report().spans
        assert [one.group for one in spans] == list(range(904, 5000))

    simulate(scenario)
