"""A pool that grows and shrinks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.carriers import ScalingCause
from evenkeel.actors.pool.preemption import watch_nodes
from evenkeel.actors.pool.workers import first_to_leave
from evenkeel.actors.processes.pacing import Stopwatch
from evenkeel.actors.processes.supervision import HALF_OVER, LongWait
from evenkeel.rollout.config import AnswerSampling
from tests.actors.cases import prompt
from tests.actors.pool.elastic_scene import ElasticScene
from tests.actors.simulated_time import simulate

NODE = "a node with the resource 'rollout' for rollout worker"


def test_a_worker_that_leaves_ends_what_it_can_and_gets_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups take 10 s and it has 20: all that it had under way is ended there, and the next step's work goes to the other."""

    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, workers=2)
        feeding = await scene.begin()
        await scene.until(lambda: len(scene.joined()) == 2 and len(scene.engines[1].under_way) == 4)
        scene.pool.resize(1, "the test says so")
        assert scene.joined() == ["0"]
        await scene.step()
        await scene.until(lambda: scene.left == ["1"])
        assert scene.engines[1].ended and scene.killed == ["1"] and scene.handed_back == [0, 0]
        assert sorted(name for _, name, _ in scene.sampled) == ["0"] * 4 + ["1"] * 4
        await scene.step()
        assert {name for _, name, _ in scene.sampled[8:]} == {"0"} and len(scene.engines) == 2, "nobody takes its place"
        scene.assert_balanced()
        feeding.cancel()

    simulate(scenario)


@pytest.mark.parametrize("hand_back_s", [0.0, 18.0])
def test_what_is_not_ended_in_time_goes_on_elsewhere_from_its_tokens(monkeypatch: pytest.MonkeyPatch, hand_back_s: float) -> None:
    """Groups take 100 s, the worker has 20: about 25 tokens of each answer have been sampled, and none of them is sampled again. Long
    answers are long on their way, for which it has as long again."""

    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, workers=2, group_s=100.0)
        scene.hand_back_s = hand_back_s
        feeding = await scene.begin()
        await scene.until(lambda: len(scene.joined()) == 2 and len(scene.engines[1].under_way) == 4)
        await asyncio.sleep(5.0)
        began = scene.now
        scene.pool.resize(1, "the test says so")
        await scene.until(lambda: scene.left == ["1"])
        assert 19.9 < scene.engines[1].ended[0] - began - hand_back_s < 22.0, "it works as long as it may"
        assert scene.handed_back[0] == 4 and 4 * 2 * 24 <= scene.handed_back[1] <= 4 * 2 * 27
        assert [worker.groups for worker in scene.pool.joined()] == [set(range(8))], "they go on at once"
        await scene.step()
        assert sorted(before > 0 for _, _, before in scene.sampled) == [False] * 4 + [True] * 4
        assert any("4 groups go on elsewhere from" in event for event in scene.events)
        scene.assert_balanced()
        feeding.cancel()

    simulate(scenario)


def test_rollouts_that_an_engine_leaves_go_on_from_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stays hands back all four of its groups: who takes them samples none of their tokens again."""

    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, workers=2, group_s=100.0)
        feeding = await scene.begin()
        await scene.until(lambda: len(scene.joined()) == 2 and len(scene.engines[1].under_way) == 4)
        await asyncio.sleep(25.0)
        scene.engines[1].leaves.set()
        scene.engines[1].leaves.clear()  # it fails once
        await scene.until(lambda: scene.handed_back[0] == 4)
        assert 4 * 2 * 24 <= scene.handed_back[1] <= 4 * 2 * 27 and len(scene.joined()) == 2
        await scene.step()
        assert sorted(before > 0 for _, _, before in scene.sampled) == [False] * 4 + [True] * 4
        assert sum("goes on from" in event for event in scene.events) == 4
        scene.assert_balanced()
        feeding.cancel()

    simulate(scenario)


def test_a_worker_that_dies_while_it_leaves_loses_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, workers=2, group_s=100.0)
        feeding = await scene.begin()
        await scene.until(lambda: len(scene.joined()) == 2 and len(scene.engines[1].under_way) == 4)
        scene.engines[1].dies = True
        scene.pool.resize(1, "the test says so")
        await scene.until(lambda: scene.left == ["1"])
        await scene.step()
        assert scene.handed_back == [0, 0] and len(scene.engines) == 2, "it leaves anyway, and nobody takes its place"
        assert [(name, before) for _, name, before in scene.sampled] == [("0", 0)] * 8
        scene.assert_balanced()
        feeding.cancel()

    simulate(scenario)


def test_waiting_for_a_node_is_no_failure_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has 50 s to start; the second node comes after an hour, and its worker joins as if nothing had been."""

    async def scenario() -> None:
        HALF_OVER.set(stacks.append)
        scene = ElasticScene(monkeypatch, workers=2, nodes=1)
        feeding = await scene.begin()
        for _ in range(300):
            await scene.step()
        assert scene.now > 3000 and scene.joined() == ["0"] and len(scene.engines) == 2 and not scene.pool.has_failed
        scene.bring_nodes(1)
        await scene.step()
        await scene.until(lambda: scene.joined() == ["0", "1"])
        feeding.cancel()

    stacks: list[LongWait] = []
    simulate(scenario)
    once = "and not for a SIGTERM to a worker that is up, which is waited for as long as it is"
    assert stacks == [LongWait(f"{NODE} 1", has_deadline=False)], once


def test_the_first_node_may_be_long_in_coming_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        HALF_OVER.set(stacks.append)
        scene = ElasticScene(monkeypatch, nodes=0)
        asyncio.get_running_loop().call_later(3600.0, lambda: scene.bring_nodes(1))
        feeding = await scene.begin()
        await scene.step()
        assert scene.now > 3600 and scene.killed == []
        feeding.cancel()

    stacks: list[LongWait] = []
    simulate(scenario)
    assert stacks == [LongWait("the first rollout worker", has_deadline=False), LongWait(f"{NODE} 0", has_deadline=False)]


def test_an_engine_that_does_not_start_on_its_node_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, workers=1)
        scene.engine_s = 51.0
        scene.pool.start()
        with pytest.raises(Exception, match="start of rollout worker 2: not done in 50 s"):
            await scene.pool.first_worker()
        assert scene.now > 3 * 50.0, "the first worker has three attempts"

    simulate(scenario)


def test_a_worker_without_a_node_is_the_first_to_go_and_needs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, workers=3, nodes=2)
        feeding = await scene.begin()
        await scene.until(lambda: len(scene.joined()) == 2)
        scene.pool.resize(2, "the test says so")
        await asyncio.sleep(0.6)
        assert scene.left == ["2"] and scene.killed == ["2"] and scene.joined() == ["0", "1"] and not scene.pool.has_failed
        feeding.cancel()

    simulate(scenario)


def test_whole_nodes_become_free() -> None:
    """Three workers on node a, one on b: b's goes first, though it has the most to do."""

    def one(name: str, node: str, groups: int) -> Any:
        return SimpleNamespace(name=name, info=SimpleNamespace(node=node), has_node=True, groups=set(range(groups)))

    workers = [one("0", "a", 1), one("1", "a", 0), one("2", "b", 9), one("3", "a", 4)]
    assert [worker.name for worker in first_to_leave(workers)] == ["2", "1", "0", "3"]


def test_a_process_that_is_told_to_end_hands_back_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, workers=2, group_s=100.0)
        feeding = await scene.begin()
        await scene.until(lambda: len(scene.joined()) == 2 and len(scene.engines[1].under_way) == 4)
        scene.engines[1].told.set()
        await scene.until(lambda: scene.left == ["1"])
        assert scene.handed_back[0] == 4 and [engine.name for engine in scene.engines] == ["0", "1", "2"]
        assert any("rollout worker 1 leaves" in event and "SIGTERM" in event for event in scene.events)
        for _ in range(2):
            await scene.step()
        assert scene.joined() == ["0", "2"]
        scene.assert_balanced()
        feeding.cancel()

    simulate(scenario)


@pytest.mark.parametrize(("left_s", "worked_s"), [(30.0, 15.0), (4.0, 2.0), (None, 20.0)])
def test_a_node_that_is_drained_gets_back_what_its_grace_allows(
    monkeypatch: pytest.MonkeyPatch, left_s: float | None, worked_s: float
) -> None:
    """Half of what is left is for work, at most drain_s = 20; the workers of other nodes stay. A new one is asked for at once."""

    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, workers=2, group_s=100.0)
        feeding = await scene.begin()
        await scene.until(lambda: len(scene.joined()) == 2 and len(scene.engines[0].under_way) == 4)
        began = scene.now
        scene.pool._node_leaves("node0", left_s)
        assert len(scene.engines) == 3
        await scene.until(lambda: scene.left == ["0"])
        assert worked_s - 0.1 < scene.engines[0].ended[0] - began < worked_s + 2.0
        assert scene.handed_back[0] == 4 and "1" in scene.joined()
        feeding.cancel()

    simulate(scenario)


def test_a_worker_whose_engine_starts_on_a_node_that_is_drained_never_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray tells of a node once, while the engine of its worker takes 5 s to start: another worker comes in its place."""

    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, workers=2)
        feeding = await scene.begin()
        await scene.until(lambda: len(scene.joined()) == 2)
        scene.pool.resize(3, "the test says so")
        await asyncio.sleep(1.0)
        scene.pool._node_leaves("node2", 60.0)
        assert scene.left == [], "which worker is on that node is not known yet"
        await scene.until(lambda: scene.left == ["2"])
        assert [engine.name for engine in scene.engines] == ["0", "1", "2", "3"] and scene.engines[2].ended and scene.killed == ["2"]
        assert any("rollout worker 2 leaves" in event and "Ray drains its node" in event for event in scene.events)
        await scene.until(lambda: scene.joined() == ["0", "1", "3"])
        await scene.step()
        assert {name for _, name, _ in scene.sampled} <= {"0", "1", "3"}
        scene.assert_balanced()
        feeding.cancel()

    simulate(scenario)


async def while_ray_drains(monkeypatch: pytest.MonkeyPatch, answers: list[Any], watch: Coroutine[Any, Any, None]) -> None:
    """Have Ray answer so, one after the other, and the last one again, while somebody watches."""
    asked: list[Any] = []

    def draining() -> Any:
        asked.append(answers[min(len(asked), len(answers) - 1)])
        if isinstance(asked[-1], Exception):
            raise asked[-1]
        return asked[-1]

    monkeypatch.setattr("evenkeel.actors.pool.preemption._draining_nodes", draining)
    monkeypatch.setattr("evenkeel.actors.pool.preemption._POLL_S", 0.01)
    watching = asyncio.create_task(watch)
    while len(asked) < len(answers) + 2:
        await asyncio.sleep(0.01)
    watching.cancel()


def test_each_node_that_ray_drains_is_told_of_once_and_forgotten_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that doesn't come says nothing of it."""
    told: list[tuple[str, float | None]] = []
    gone: list[str] = []
    busy = ConnectionError("the head is busy")
    answers = [{}, {"a": 0}, busy, {"a": 0, "b": 1}, busy, {"b": 1}, {"b": 1}, busy, {}]

    watch = watch_nodes(lambda node, left_s: told.append((node, left_s)), gone.append)
    asyncio.run(while_ray_drains(monkeypatch, answers, watch))
    assert told == [("a", None), ("b", 0.0)], "a: nobody says when; b: long ago"
    assert gone == ["a", "b"]


def test_a_pool_keeps_of_drained_nodes_those_that_are_not_gone_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spot nodes come and go for weeks."""

    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, workers=2)
        monkeypatch.setattr("evenkeel.actors.pool.pool.ray.is_initialized", lambda: True)
        kept: list[set[str]] = []

        async def look() -> None:
            while True:
                kept.append(set(scene.pool._draining))
                await asyncio.sleep(0.005)

        scene.pool.start()
        await while_ray_drains(monkeypatch, [{f"n{number}": 0, f"n{number + 1}": 0} for number in range(9)], look())
        assert max(map(len, kept)) == 2 and kept[-1] == {"n8", "n9"}
        await scene.pool.stop()

    asyncio.run(scenario())


def test_an_evaluation_outlives_a_worker_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, workers=2, group_s=100.0)
        await scene.begin()
        await scene.until(lambda: len(scene.joined()) == 2)
        asked = [prompt(i) for i in range(64)]
        asking = asyncio.create_task(scene.pool.answer(asked, AnswerSampling()))
        await asyncio.sleep(1.0)
        assert all(worker.questions for worker in scene.pool.joined())
        scene.pool.resize(1, "the test says so")
        assert await asking == [p.prompt_id for p in asked]  # type: ignore[comparison-overlap]

    simulate(scenario)


def test_the_pool_follows_a_learner_that_becomes_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has 8 groups under way for 10 s, a step takes 8. A learner of 3 s waits for one worker and not for three or more at
    max_staleness 3; at 60 s a step one is enough. Each change once, with its cause, and nothing is lost on the way."""

    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, min_workers=1, max_workers=3, max_staleness=3, groups_per_step=8)
        scene.learner_s = 3.0
        feeding = await scene.begin()
        for _ in range(40):
            await scene.step()
        assert scene.pool.target == 3 and scene.joined() == ["0", "1", "2"]
        assert [(d.target, d.cause) for d in scene.decisions] == [(3, ScalingCause.LEARNER_WAITS)]
        for _ in range(20):
            await scene.step()
        assert len(scene.decisions) == 1, "at constant load it stays"
        scene.learner_s = 60.0
        for _ in range(20):
            await scene.step()
        assert scene.pool.target == 1 and len(scene.joined()) == 1 and len(scene.left) == 2
        assert {d.cause for d in scene.decisions[1:]} == {ScalingCause.WORKERS_WAIT}
        scene.assert_balanced()
        feeding.cancel()

    simulate(scenario)


@pytest.mark.parametrize(("tells_loads", "calls"), [(True, 0), (False, 9)])
def test_a_pool_that_follows_asks_no_worker_whose_receipt_told_its_load(
    monkeypatch: pytest.MonkeyPatch, tells_loads: bool, calls: int
) -> None:
    """Two workers and ten steps, which are measured from the second on: nine calls for each worker where receipts don't tell, else none."""

    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, min_workers=2, max_workers=3, max_staleness=3)
        monkeypatch.setattr(scene.pool, "resize", lambda *_: None)
        feeding = await scene.begin()
        await scene.until(lambda: len(scene.joined()) == 2)
        for _ in range(10):
            await scene.step(tells_loads=tells_loads)
        assert sorted(scene.asked) == ["0"] * calls + ["1"] * calls
        feeding.cancel()

    simulate(scenario)


def test_after_a_step_that_published_nothing_a_pool_that_follows_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """weight_sync.every_steps = 2: what the receipts of version 1 told is a step old when the step to version 2 has ended."""

    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, min_workers=1, max_workers=2)
        feeding = await scene.begin()
        await scene.step()
        for version, asked in ((1, []), (2, ["0"])):
            with Stopwatch().phase("wait") as wait:
                scene.pool.learner_waits(version, wait)
                await asyncio.sleep(3.0)
            assert scene.asked == asked
        feeding.cancel()

    simulate(scenario)


def test_a_fixed_pool_does_not_follow_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = ElasticScene(monkeypatch, workers=1, max_staleness=3)
        feeding = await scene.begin()
        for _ in range(20):
            await scene.step()
        assert scene.decisions == [] and scene.pool.target == 1
        feeding.cancel()

    simulate(scenario)
