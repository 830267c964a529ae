"""Rewards that all fail, in simulated time: prompts are kept, the run goes on when they work again, and it ends when they never do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from evenkeel.actors.carriers import Ticket
from evenkeel.actors.pool.faults import PATIENCE_S, LatestGroups, unscored
from evenkeel.correction.errors import RequestError
from evenkeel.rollout.trajectory import FailureKind, Group, GroupFacts
from tests.actors.cases import group, prompt
from tests.actors.pool.mortal_workers import GROUP_S, START_S, Mortal, World, play

DEAD_JUDGE = "TimeoutError: the judge took longer than 10 s"


def failed(ticket: Ticket, kinds: Sequence[FailureKind | None]) -> Group:
    """None: scored."""
    whole = group(ticket, rewards=[float(i % 2) for i in range(len(kinds))])
    failures = [
        one if kind is None else replace(one, reward=None, error=DEAD_JUDGE, failure=kind)
        for one, kind in zip(whole.trajectories, kinds, strict=True)
    ]
    return replace(whole, trajectories=tuple(failures))


class Judge:
    """Fails until `back_at`, time of the event loop."""

    def __init__(self, world: World, back_at: float) -> None:
        self.world, self.back_at = world, back_at
        self.failed: list[float] = []
        """When."""

    async def sample(self, mortal: Mortal, ticket: Ticket) -> GroupFacts | None:
        if self.world.now >= self.back_at:
            return None
        await asyncio.sleep(1.0)
        self.failed.append(self.world.now)
        return failed(ticket, [FailureKind.REWARD_TIMEOUT] * 2).facts


async def draw_all(world: World) -> None:
    """What can't be trained leaves the book as it is drawn, and makes room for other prompts."""
    while True:
        await world.books.draw(0, 8, 1.0)


def test_a_judge_that_is_down_for_ten_minutes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tens of prompts are lost by it, not thousands; then all workers go on."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=16)
        judge = Judge(world, back_at=START_S + 600.0)
        world.sample = judge.sample  # type: ignore[assignment]
        await world.begin()
        drawing = asyncio.create_task(draw_all(world))
        await asyncio.sleep(300.0)
        assert world.pool.last_progress() > world.now - 3.0, "a batch is not late while work is held back"
        said = [event for event in world.events if event.startswith("rewards: ")]
        assert said[0] == f"rewards: 16 of the last 16 groups could not be scored; the next group in 2 s: {DEAD_JUDGE}"
        assert [event.split("next group in ")[1].split()[0] for event in said[:6]] == ["2", "4", "8", "16", "32", "60"]
        while len(world.finished) < len(judge.failed) + 8:
            await asyncio.sleep(1.0)
        drawing.cancel()
        assert len(judge.failed) < 16 + 32 + 20 and world.now < START_S + 600.0 + 60.0 + 3 * GROUP_S
        assert any("a group was scored, after" in event for event in world.events)
        assert world.lost == [] and not world.pool.has_failed

    play(scenario)


def test_a_judge_that_never_comes_back_ends_the_run_with_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=16)
        judge = Judge(world, back_at=1e9)
        world.sample = judge.sample  # type: ignore[assignment]
        await world.begin()
        drawing = asyncio.create_task(draw_all(world))
        with pytest.raises(RequestError, match=r"reward exact_match: 50 of the last 50 groups .*resume the run.*TimeoutError: the judge"):
            await world.all_done(10**6)
        drawing.cancel()
        assert PATIENCE_S < world.now < START_S + PATIENCE_S + 200.0
        assert len(judge.failed) < 16 + 32 + 50

    play(scenario)


@pytest.mark.parametrize("kind", [FailureKind.ENGINE, None], ids=["given up by the engine", "scored"])
def test_what_is_not_the_rewards_fault_holds_no_work_back(monkeypatch: pytest.MonkeyPatch, kind: FailureKind | None) -> None:
    """Groups whose rewards are all alike are scored, too."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=64)

        async def sample(mortal: Mortal, ticket: Ticket) -> GroupFacts | None:
            await asyncio.sleep(1.0)
            return (failed(ticket, [kind] * 2) if kind else group(ticket, rewards=[1.0, 1.0])).facts

        world.sample = sample  # type: ignore[assignment]
        await world.begin()
        await world.all_done(64)
        assert not any(event.startswith("rewards: ") for event in world.events)

    play(scenario)


@pytest.mark.parametrize(
    ("kinds", "is_unscored"),
    [
        ([FailureKind.REWARD, FailureKind.REWARD_TIMEOUT, None], True),
        ([FailureKind.REWARD, None, None], False),
        ([FailureKind.ENGINE, FailureKind.ENGINE, FailureKind.REWARD], False),
        ([FailureKind.ENGINE, None, FailureKind.REWARD], True),
    ],
)
def test_a_group_is_unscored_if_its_rewards_alone_have_spoilt_it(kinds: list[FailureKind | None], is_unscored: bool) -> None:
    assert unscored(failed(Ticket(0, prompt(0), 0), kinds).facts) == (DEAD_JUDGE if is_unscored else "")


def test_old_failures_do_not_count_hours_later() -> None:
    latest = LatestGroups(3600.0)
    for _ in range(15):
        latest.add(0.0, is_good=False)
    latest.add(3601.0, is_good=False)
    assert not latest.are_mostly_bad
    latest = LatestGroups(3600.0)
    for second in range(16):
        latest.add(second, is_good=False)
    assert latest.are_mostly_bad
    latest.add(3610.0, is_good=True)
    assert str(latest) == "6 of the last 7 groups" and not latest.are_mostly_bad
