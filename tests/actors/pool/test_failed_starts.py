"""Workers whose start fails in a run that works: by their reward, which is waited for, or on their node, which is avoided. In simulated
time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

import pytest

from evenkeel.actors.pool.faults import FEWEST_FAILED, PATIENCE_S
from evenkeel.correction.errors import ConfigError, DeadlineExceeded, EngineError, RequestError
from evenkeel.rollout.rewards.rewards import RewardError
from tests.actors.pool.mortal_workers import START_S, Mortal, World, play
from tests.actors.pool.pool_scene import raised
from tests.actors.pool.test_scoring import Judge, draw_all

NO_SCORE = "rollout.reward (judge:score): the reward raised TimeoutError: the judge is down (tried on held_out/0/0 with its own answer '3')"


class DeadJudge:
    """No start's sample is scored from the first replacement, or from the beginning, until `back_at` (event loop's time)."""

    def __init__(self, world: World, back_at: float, *, on: Callable[[Mortal], bool] = lambda _: True) -> None:
        self.world, self.back_at, self.on = world, back_at, on
        self.tried: list[float] = []
        world.starts = self.starts

    async def starts(self, mortal: Mortal) -> None:
        if self.world.now < self.back_at and self.on(mortal):
            await asyncio.sleep(1.0)
            self.tried.append(self.world.now)
            raise raised(RewardError(NO_SCORE, is_set_up=True))


def pauses(world: World) -> list[str]:
    return [event.rpartition(" in ")[2] for event in world.events if "the next replacement starts in" in event]


def test_a_worker_that_is_replaced_while_the_judge_is_down_costs_the_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of one, and twenty minutes: as losses, eleven of them would have ended the run after ten."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=1, places=30)
        await world.begin()
        judge = DeadJudge(world, world.now + 1200.0)
        world.mortals["0"].dead.set()
        await world.all_done(30)
        assert len(judge.tried) > 11 and len(world.lost) == 1 + len(judge.tried) and sorted(world.finished) == list(range(30))
        assert pauses(world) == [*("2 s", "4 s", "8 s", "16 s", "32 s"), *["60 s"] * (len(judge.tried) - 5)]
        assert sum("the reward of a worker that starts gives no score" in event for event in world.events) == len(judge.tried)
        assert NO_SCORE in world.lost[1]

    play(scenario)


def test_a_judge_that_stays_down_while_no_worker_is_up_ends_the_run_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time for which groups that can't be scored are waited for."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=1, places=30)
        await world.begin()
        DeadJudge(world, 1e9)
        world.mortals["0"].dead.set()
        began = world.now
        with pytest.raises(RequestError) as end:
            await world.all_done(30)
        assert str(end.value) == (
            f"{NO_SCORE}. For 30 minutes no rollout worker could start because of it. Repair it and resume the run, which goes on from its "
            "last checkpoint"
        )
        assert PATIENCE_S <= world.now - began <= PATIENCE_S + 70.0

    play(scenario)


@pytest.mark.parametrize("has_scored", [True, False], ids=["resumed", "new"])
def test_only_a_run_that_has_had_scores_waits_for_its_judge_at_the_first_start(monkeypatch: pytest.MonkeyPatch, has_scored: bool) -> None:
    """In a new one the mistake is in the recipe, until somebody says otherwise."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=8)
        DeadJudge(world, 600.0)
        if not has_scored:
            with pytest.raises(ConfigError, match=r"^rollout.reward \(judge:score\): the reward raised TimeoutError"):
                await world.begin()
            assert world.now < 5.0 and len(world.mortals) == 2
            return
        await world.begin(has_scored=True)
        await world.all_done(8)
        assert world.now < 600.0 + 60.0 + START_S + 60.0 and sorted(world.finished) == list(range(8))

    play(scenario)


def test_what_the_reward_has_failed_is_no_attempt_at_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the judge is back, a first engine that is late twice has its third attempt all the same."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=1, places=4)
        judge, late = DeadJudge(world, 100.0), list[str]()

        async def starts(mortal: Mortal) -> None:
            await judge.starts(mortal)
            if len(late) < 2:
                late.append(mortal.name)
                raise raised(DeadlineExceeded("the engine's start: not done in 150 s"))

        world.starts = starts
        await world.begin(has_scored=True)
        await world.all_done(4)
        assert len(judge.tried) >= 5 and len(late) == 2

    play(scenario)


def test_one_node_that_reaches_no_judge_ends_no_run_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two hours, in which others finish what there is; its starts come once a minute, and it is avoided."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=2000)
        world.node_of = lambda name: "good" if name == "1" else "cut off"
        await world.begin()
        judge = DeadJudge(world, 1e9, on=lambda mortal: mortal.name != "1")
        world.mortals["0"].dead.set()
        await asyncio.sleep(7200.0)
        assert not world.pool.has_failed and 100 < len(judge.tried) < 130
        assert avoided(world)[:5] == [[], [], [], ["cut off"], ["cut off"]], "0 was lost there, and then 2 failed there"
        assert len(world.mortals["1"].finished) > 500

    play(scenario)


def test_a_judge_that_is_down_for_all_is_no_fault_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only worker is replaced five times on one node, which is a good one."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=1, places=30)
        world.node_of = lambda name: "first" if name == "0" else "good"
        await world.begin()
        judge = DeadJudge(world, world.now + 60.0)
        world.mortals["0"].dead.set()
        await world.all_done(30)
        assert len(judge.tried) >= 5 and not any(avoided(world))

    play(scenario)


def test_nor_is_it_while_another_worker_is_up_whose_groups_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """That worker's groups have shown that the judge is down for it, too, when the first start on the other node fails."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=2 * FEWEST_FAILED)
        world.node_of = lambda name: "first" if name in ("0", "1") else "good"
        world.sample = Judge(world, back_at=world.now + 600.0).sample
        await world.begin()
        drawing = asyncio.ensure_future(draw_all(world))
        while not any("could not be scored" in event for event in world.events):
            await asyncio.sleep(1.0)
        judge = DeadJudge(world, world.now + 300.0)
        world.mortals["0"].dead.set()
        await asyncio.sleep(600.0)
        assert len(judge.tried) >= 5 and not any(avoided(world)) and not world.pool.has_failed
        drawing.cancel()

    play(scenario)


@pytest.mark.parametrize("change", ["drained", "resized"])
def test_a_replacement_that_waits_keeps_its_place(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """A node that is drained, or a pool that grows, asks for one worker more, not for those that wait out their pause."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=3, places=5000)
        world.node_of = lambda name: name
        await world.begin()
        await asyncio.sleep(1.0)
        failed = fails_on(world, ["bad"], EngineError("CUDA error: no device"))
        world.node_of = lambda name: name if name in "012" else "bad"
        world.mortals["0"].dead.set()
        await asyncio.sleep(40.0)  # in the pause of 32 s
        before = len(world.mortals)
        waits = list(failed)
        if change == "drained":
            world.pool._node_leaves("1", None)
        else:
            world.pool.resize(4, "a test")
        assert len(world.mortals) == before + 1 and world.pool._replacing == 1
        world.node_of = lambda name: "good"
        await asyncio.sleep(120.0)
        assert len(world.mortals) == before + 2 and world.pool._replacing == 0 and failed == waits and not world.pool.has_failed
        assert len(world.pool.versions()) == world.pool.target
        assert f"{len(waits)} starts in a row failed" in pauses_said(world)[-1]

    play(scenario)


def pauses_said(world: World) -> list[str]:
    return [event for event in world.events if "the next replacement starts in" in event]


def avoided(world: World) -> list[list[str]]:
    """By each worker, in the order in which they were asked for."""
    strategies = [options["scheduling_strategy"] for options in world.options]
    return [[] if one is None else list(one.soft[0].operator.values) for one in strategies]


def fails_on(world: World, bad: Sequence[str], error: Exception) -> list[tuple[float, str]]:
    """Engines don't start on these nodes. Returns: takes when each failed, and who."""
    failed: list[tuple[float, str]] = []

    async def starts(mortal: Mortal) -> None:
        if world.node_of(mortal.name) in bad:
            await asyncio.sleep(1.0)
            failed.append((world.now, mortal.name))
            raise raised(error)

    world.starts = starts
    return failed


def test_a_node_on_which_two_starts_failed_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that lost two engines: a start that fails is a loss of its node, which is known before the engine is up."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=40)
        world.node_of = lambda name: "bad" if name in "23" else "good"
        await world.begin()
        failed = fails_on(world, ["bad"], EngineError("CUDA error: no device"))
        world.mortals["0"].dead.set()
        await world.all_done(40)
        assert [name for _, name in failed] == ["2", "3"]
        assert avoided(world) == [[], [], [], [], ["bad"]] and not world.mortals["4"].dead.is_set()

    play(scenario)


def test_starts_that_fail_in_one_place_wait_longer_each_time_though_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only place there is: half an hour of it is fourteen starts, not hundreds. The first that succeeds ends that."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=5000)
        world.node_of = lambda name: "good" if name == "1" else "bad"
        await world.begin()
        bad = ["bad"]
        failed = fails_on(world, bad, EngineError("CUDA error: no device"))
        world.mortals["0"].dead.set()
        await asyncio.sleep(1800.0)
        waited = [later - earlier - 1.0 for (earlier, _), (later, _) in itertools.pairwise(failed)]
        assert waited[:9] == pytest.approx([0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0], abs=0.1)
        assert waited[9:] == pytest.approx([300.0] * len(waited[9:]), abs=0.1) and len(failed) < 16
        assert any(event.startswith("3 starts in a row failed: the next replacement starts in 4 s") for event in world.events)
        assert not world.pool.has_failed and len(world.mortals["1"].finished) > 250
        bad.clear()
        await asyncio.sleep(400.0)
        started = world.pool.versions()
        assert set(started) == {"1", str(len(world.mortals) - 1)}
        bad.append("bad")
        world.mortals[str(len(world.mortals) - 1)].dead.set()
        before = len(failed)
        await asyncio.sleep(60.0)
        again = [at for at, _ in failed[before : before + 3]]
        assert [again[1] - again[0], again[2] - again[1]] == pytest.approx([1.0, 3.0], abs=0.1), "counted anew: at once, then after 2 s"

    play(scenario)
