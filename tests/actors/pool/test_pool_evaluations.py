"""An evaluation's questions go through the pool as groups do. Workers are fakes here, because they have to fail on cue."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest
import ray.exceptions

from evenkeel.actors.pool.dispatch import Questions
from evenkeel.correction.errors import EngineError
from evenkeel.rollout.config import AnswerSampling
from tests.actors.cases import prompt
from tests.actors.pool.pool_scene import PoolScene, hang, play, raised


def engine_dead() -> Exception:
    return raised(EngineError("the scheduler is gone"))


@pytest.mark.parametrize("fault", [ray.exceptions.ActorDiedError, engine_dead], ids=["process dead", "engine dead"])
def test_an_evaluation_outlives_a_worker(monkeypatch: pytest.MonkeyPatch, fault: Callable[[], Exception]) -> None:
    """And leaves nothing behind: a run may make thousands."""

    async def fails() -> None:
        raise fault()  # one that the test kept would keep what its traceback names

    def under_way() -> list[Questions]:
        gc.collect()
        return [one for one in gc.get_objects() if isinstance(one, Questions)]

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, workers=2)
        earlier = len(under_way())  # of a simulated run that was cut off in the middle, by another test
        feeding = await scene.begin()
        await scene.until_finished(8)
        feeding.cancel()
        scene.faults["0"] = fails
        prompts = [prompt(i) for i in range(100)]
        assert await scene.pool.answer(prompts, AnswerSampling()) == [p.prompt_id for p in prompts]  # type: ignore[comparison-overlap]
        while len(under_way()) > earlier:  # until the pool's tasks have ended
            await asyncio.sleep(0.1)

    play(scenario)


def test_an_evaluation_is_spread_over_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = PoolScene(monkeypatch, workers=2)
        feeding = await scene.begin()
        await scene.until_finished(8)
        feeding.cancel()
        await asyncio.wait({feeding})
        while len(scene.joined) < 2:
            await asyncio.sleep(0.01)
        await scene.pool.answer([prompt(i) for i in range(128)], AnswerSampling())
        assert [worker.answered for worker in scene.workers.values()] == [64, 64]

    play(scenario)


def test_a_mistake_in_an_evaluation_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked gets the error; the run, which can do without this evaluation, goes on, and nothing of it waits."""

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, workers=2, places=0, faults=dict.fromkeys("01", raised(KeyError("text"))))
        await scene.begin()
        with pytest.raises(ray.exceptions.RayTaskError, match="KeyError"):
            await scene.pool.answer([prompt(i) for i in range(2000)], AnswerSampling())
        await asyncio.sleep(0.05)
        assert not scene.pool.has_failed and not scene.pool._work and scene.left == []
        assert [worker.questions for worker in scene.pool.workers.values()] == [0, 0]

    play(scenario)


def test_an_evaluation_keeps_to_its_share_while_groups_are_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of 16 slots for groups of 8; how that goes on is in test_dispatch.py."""

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, faults={"0": hang})
        feeding = await scene.begin()
        asking = asyncio.create_task(scene.pool.answer([prompt(i) for i in range(256)], AnswerSampling()))
        await asyncio.sleep(0.05)
        assert [worker.questions for worker in scene.pool.workers.values()] == [16 * 8 // 4]
        for task in (asking, feeding):
            task.cancel()

    play(scenario)
