"""Workers that can't be reached for a moment, and calls that hang though their worker lives: whether one is lost, its heartbeat says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray.exceptions

from evenkeel.actors.carriers import DiscardReason, Ticket
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.settings.deadlines import group_s
from evenkeel.correction.errors import EngineError
from evenkeel.rollout.config import AnswerSampling
from tests.actors.cases import prompt
from tests.actors.pool.mortal_workers import GROUP_S, Mortal, World, play

HICCUP = ray.exceptions.ActorUnavailableError("the connection was lost", b"1" * 16)
HEARTBEAT_S = 30.0


def unreachable(world: World, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Worker 0, from now on: each call at once, whether it is sampling or not; what it has under way it goes on with."""
    until = world.now + seconds
    mortal = world.mortals["0"]
    for name in ("load", "generate_group"):
        method = getattr(mortal, name)

        async def called(*arguments: Any, method: Any = method) -> Any:
            if world.now < until:
                raise HICCUP
            return await method(*arguments)

        monkeypatch.setattr(mortal, name, called)


@pytest.mark.parametrize(("seconds", "is_lost"), [(7.0, False), (25.0, False), (60.0, True)])
def test_a_worker_is_lost_when_it_can_not_be_reached_for_as_long_as_a_heartbeat(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_lost: bool
) -> None:
    """Not by the first probe that finds no connection. No group is charged with it: in the shortest of these each would lose three."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=8)
        await world.begin()
        unreachable(world, monkeypatch, seconds)
        began = world.now
        await world.all_done(8)
        assert sorted(world.finished) == list(range(8)) and dict(world.books.book.discarded_by_reason) == {}
        while is_lost and not world.lost:
            await asyncio.sleep(1.0)
        assert len(world.lost) == world.failures.count("engine_lost") == is_lost
        if is_lost:
            assert "missed its heartbeat" in world.lost[0] and world.now - began == pytest.approx(GROUP_S + HEARTBEAT_S * 7 / 6, abs=2.0)

    play(scenario)


@pytest.mark.parametrize("runs", [False, True], ids=["not delivered", "answer lost"])
def test_calls_that_a_bad_network_swallows_cost_neither_worker_nor_prompt(monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    """Each group's first three calls fail; three lost engines would be its end."""

    async def scenario() -> None:
        world, failed = World(monkeypatch, workers=2, places=8), dict.fromkeys(range(100), 0)

        async def hiccups(mortal: Mortal, ticket: Ticket) -> None:
            if failed[ticket.group_id] < 3:
                failed[ticket.group_id] += 1
                await asyncio.sleep(GROUP_S * runs)
                raise HICCUP

        world.sample = hiccups  # type: ignore[assignment]
        await world.begin()
        await world.all_done(8)
        assert sorted(world.finished) == list(range(8)) and world.lost == [] and list(world.mortals) == ["0", "1"]
        assert dict(world.books.book.discarded_by_reason) == {}

    play(scenario)


def test_a_worker_that_dies_after_a_hiccup_is_lost_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may say at first that a dead one can't be reached. A prompt that kills engines is found all the same."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=4)

        async def deadly(mortal: Mortal, ticket: Ticket) -> None:
            if ticket.group_id == 2:
                asyncio.get_running_loop().call_later(0.5, mortal.dead.set)
                raise HICCUP

        world.sample = deadly  # type: ignore[assignment]
        await world.begin()
        await world.all_done(5)
        assert dict(world.books.book.discarded_by_reason) == {DiscardReason.LOST: 1}
        assert len(world.lost) == world.failures.count("engine_lost") == 3

    play(scenario)


def test_what_a_worker_had_that_could_not_be_reached_goes_on_as_soon_as_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the pause before the next attempt, which grows to 15 s: Ray may hear of the end of a node that late."""

    async def scenario() -> None:
        world, calls = World(monkeypatch, workers=2, places=4), list[tuple[str, float]]()

        async def dies_unheard(mortal: Mortal, ticket: Ticket) -> None:
            if ticket.group_id == 2:
                calls.append((mortal.name, world.now))
                if len(calls) == 1:
                    asyncio.get_running_loop().call_later(16.0, mortal.dead.set)
                if mortal.name == calls[0][0]:
                    raise HICCUP

        world.sample = dies_unheard  # type: ignore[assignment]
        await world.begin()
        await world.all_done(4)
        (lost, began), *_, (other, again) = calls
        assert other != lost and len(world.lost) == 1 and again - began < 16.0 + HEARTBEAT_S / 5, "its next sign of life is missing"

    play(scenario)


def test_a_group_that_never_reaches_a_worker_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time for half a minute, while the worker answers its heartbeat: five times."""

    async def scenario() -> None:
        world, calls = World(monkeypatch, workers=2, places=4), list[str]()

        async def swallowed(mortal: Mortal, ticket: Ticket) -> None:
            if ticket.group_id == 2:
                calls.append(mortal.name)
                raise HICCUP

        world.sample = swallowed  # type: ignore[assignment]
        await world.begin()
        await world.all_done(5)
        assert dict(world.books.book.discarded_by_reason) == {DiscardReason.FAILED: 1} and world.lost == []
        assert len(calls) == 5 * 6 and set(calls) == {"0", "1"}

    play(scenario)


def test_an_evaluation_outlives_a_hiccup(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world, calls = World(monkeypatch, workers=1, places=0), list[int]()

        async def hiccups(mortal: Mortal, ticket: Ticket) -> None:
            calls.append(1)
            if len(calls) < 9:
                raise HICCUP

        world.sample = hiccups  # type: ignore[assignment]
        await world.begin()
        assert await world.pool.answer([prompt(0)], AnswerSampling()) == ["train/0/0"]  # type: ignore[comparison-overlap]
        assert world.lost == [] and len(calls) == 9

    play(scenario)


def test_a_call_that_hangs_in_a_worker_that_lives_keeps_its_slot_until_it_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts: the second time the group is discarded. Before, it went to a worker again and again, and its slot was free at once."""

    async def scenario() -> None:
        world, hung, aborted = World(monkeypatch, workers=2, places=8), list[str](), list[tuple[str, float]]()
        slots: list[bool] = []
        slots_when_it_waits = noting(GroupBook.waits, lambda: slots.append(True))
        monkeypatch.setattr(GroupBook, "waits", slots_when_it_waits)

        async def hangs(mortal: Mortal, ticket: Ticket) -> None:
            if ticket.group_id == 5:
                hung.append(mortal.name)
                await asyncio.sleep(1e6)

        async def abort(mortal: Mortal, group_id: int) -> None:
            aborted.append((mortal.name, world.now))
            handle = world.pool.workers[mortal.name]
            await asyncio.sleep(7.0)
            slots.append(group_id in handle.groups)

        world.sample = hangs  # type: ignore[assignment]
        monkeypatch.setattr(Mortal, "abort", abort, raising=False)
        await world.begin()
        began = world.now
        await world.all_done(9)
        limit_s = group_s(world.pool._config, 1)
        assert sorted(hung) == ["0", "1"] == sorted(name for name, _ in aborted) and world.lost == []
        assert [at - began for _, at in aborted] == pytest.approx([limit_s, 2 * limit_s + 7.0], abs=30.0)
        assert slots == [True, True, True], "taken while it is aborted; then others have the group; and again"
        assert dict(world.books.book.discarded_by_reason) == {DiscardReason.FAILED: 1}

    play(scenario)


def noting(method: Any, note: Any) -> Any:
    def noted(*arguments: Any, **named: Any) -> Any:
        note()
        return method(*arguments, **named)

    return noted


def test_a_worker_whose_call_does_not_end_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=8)

        async def hangs(mortal: Mortal, ticket: Ticket) -> None:
            if mortal.name == "0":
                await asyncio.sleep(1e6)

        async def abort(mortal: Mortal, group_id: int) -> None:
            error = EngineError(f"group {group_id} was given up, and doesn't end")
            raise ray.exceptions.RayTaskError("abort", "a traceback", error)

        world.sample = hangs  # type: ignore[assignment]
        monkeypatch.setattr(Mortal, "abort", abort, raising=False)
        await world.begin()
        await world.all_done(8)
        assert sorted(world.finished) == list(range(8)) and len(world.lost) == 1 and "doesn't end" in world.lost[0]

    play(scenario)
