"""Weights by broadcast: one pass and no further copy, and who comes later has what was broadcast copied."""

from __future__ import annotations

import asyncio

import pytest

from evenkeel.actors.weights.weight_sync import SyncTarget
from tests.actors.cases import FakeActor
from tests.actors.simulated_time import simulate
from tests.actors.weights.sync_scene import Engine, SyncScene, plans


def test_a_probe_is_not_answered_by_newer_weights_while_a_broadcast_reaches_another_engine() -> None:
    """The quick engine would answer the probe of version 1 at version 2 while the slow one still receives that."""

    async def scenario() -> None:
        quick, slow = Engine(), Engine()
        scene = SyncScene(transport="broadcast", quick=quick, slow=slow)
        await scene.join()
        await asyncio.sleep(0.01)
        waits = asyncio.Event()
        quick.probes = [waits.wait()]
        await scene.publish(1)
        slow.script = [0.2]
        publishing = asyncio.create_task(scene.publish(2))
        await asyncio.sleep(0.1)
        waits.set()
        await publishing
        await asyncio.sleep(0.01)
        assert [version for name, version, _ in scene.differences if name == "quick"] == [0, 2]
        await scene.sync.close()

    simulate(scenario)


@pytest.mark.parametrize(("ranks", "told"), [(1, [(0, 3), (1, 3), (2, 3)]), (4, [(0, 9), (1, 9), (5, 9)])])
def test_all_ranks_of_the_engines_are_counted_in_a_broadcast_group(ranks: int, told: list[tuple[int, int]]) -> None:
    """An engine is told its first rank; SGLang adds each one's own number."""

    class CountingEngine(Engine):
        async def join_weight_group(self, host: str, port: int, rank: int, world_size: int, name: str) -> None:
            scene.learner.group.append((rank, world_size))

    scene: SyncScene

    async def scenario() -> None:
        nonlocal scene
        scene = SyncScene(transport="broadcast", ranks=ranks, one=CountingEngine(), other=CountingEngine())
        await scene.join()
        await scene.publish(1)
        assert scene.learner.group == told
        await scene.sync.close()

    simulate(scenario)


def test_a_broadcast_makes_one_pass_and_no_copy_in_the_store() -> None:
    engines = {"a": Engine(), "b": Engine()}

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", **engines)
        await scene.join()
        for version in (1, 2):
            await scene.publish(version)
        assert plans(scene) == [(0, True, False), (1, False, True), (2, False, True)]
        assert [t.version for t in scene.targets.values()] == [2, 2]

    simulate(scenario)
    assert all(e.taken == [(0, True)] and e.received == [1, 2] for e in engines.values())


def test_versions_that_have_to_last_are_also_stored() -> None:
    """An engine that joins while the learner stands at a version that isn't published gets the last one, at once."""

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", every_steps=2, a=Engine())
        await scene.join()
        await scene.publish(2)
        scene.learner.version = 3
        late = SyncTarget("late", FakeActor(engine := Engine()))
        scene.sync.join(late)
        await scene.sync.receipts(2, deadline_s=5.0)
        assert plans(scene) == [(0, True, False), (2, True, True)]
        assert engine.taken == [(2, True)] and late.version == 2

    simulate(scenario)


class LateScene:
    """A version is published every 100 s, the last one broadcast only; 20 s later eight engines come."""

    def __init__(self, **engines: Engine) -> None:
        self.scene = SyncScene(transport="broadcast", **engines)
        self.late = [Engine() for _ in range(8)]

    async def begin(self) -> None:
        await self.scene.join()
        await self.now(100.0)
        await self.scene.publish(1)
        await self.now(120.0)
        for number, engine in enumerate(self.late):
            self.scene.sync.join(SyncTarget(f"late{number}", FakeActor(engine)))

    async def now(self, second: float) -> None:
        await asyncio.sleep(second - asyncio.get_running_loop().time())

    async def taken_at(self, version: int) -> float:
        """Second in which all late ones have it, at most a second late."""
        while not all((version, True) in engine.taken for engine in self.late):
            await asyncio.sleep(0.5)
        return asyncio.get_running_loop().time()


BROADCAST = [(0, True, False), (1, False, True)]


def test_engines_that_come_while_others_work_wait_for_the_next_version_and_the_learner_does_nothing_for_them() -> None:
    async def scenario() -> None:
        late = LateScene(w=Engine())
        await late.begin()
        await late.now(210.0)
        assert plans(late.scene) == BROADCAST and all(engine.taken == [] for engine in late.late)
        await late.scene.publish(2)
        assert await late.taken_at(2) < 212.0
        assert plans(late.scene) == [*BROADCAST, (2, True, True)], "the version for the others is stored in the same pass"
        assert [plan.checksums for _, plan in late.scene.learner.exported] == [True, False, False]
        assert late.scene.learner.hashed == [["v2"]], "by a task, once for all"
        await late.scene.sync.close()

    simulate(scenario)


def test_an_engine_that_needs_what_was_broadcast_has_it_copied_once_for_all_when_the_run_stands() -> None:
    """The next version is overdue when twice the usual time has passed since the last one."""

    async def scenario() -> None:
        late = LateScene(w=Engine())
        await late.begin()
        assert await late.taken_at(1) == pytest.approx(300.0, abs=1.0)
        assert plans(late.scene) == [*BROADCAST, (1, True, False)] and late.scene.learner.hashed == []
        await late.scene.sync.close()

    simulate(scenario)


@pytest.mark.parametrize("is_dirty", [True, False], ids=["is dirty", "is gone"])
def test_who_comes_waits_no_longer_when_nobody_else_works(is_dirty: bool) -> None:
    """The run would stand until the next version is overdue."""

    async def scenario() -> None:
        late = LateScene(w=Engine())
        await late.begin()
        await late.now(130.0)
        if is_dirty:
            late.scene.sync.resync(late.scene.targets["w"], "the test says so")
        else:
            late.scene.sync.leave("w")
        assert await late.taken_at(1) == pytest.approx(130.0, abs=2.0)
        assert plans(late.scene) == [*BROADCAST, (1, True, False)]
        await late.scene.sync.close()

    simulate(scenario)


def test_every_pass_over_the_weights_is_in_the_engines_numbers() -> None:
    """Also the copy for those who come late: an engine in float8 takes nothing else."""

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", float8=True, w=Engine())
        await scene.join()
        await scene.publish(1)
        scene.sync.join(SyncTarget("late", FakeActor(Engine())))
        await scene.sync.receipts(1, deadline_s=5.0)
        assert plans(scene) == [(0, True, False), (1, False, True), (1, True, False)]
        assert all(plan.float8 for _, plan in scene.learner.exported)

    simulate(scenario)


def test_when_the_learner_has_trained_on_the_next_version_is_also_stored() -> None:
    """What was broadcast is no more; the learner's weights of now are nobody's before they are published."""
    late = Engine()

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", w=Engine())
        await scene.join()
        await scene.publish(1)
        scene.learner.version = 2
        scene.sync.join(SyncTarget("late", FakeActor(late)))
        await asyncio.sleep(0.05)
        assert late.taken == []
        await scene.publish(2)
        await scene.sync.receipts(2, deadline_s=5.0)
        assert plans(scene) == [(0, True, False), (1, False, True), (2, True, True)]

    simulate(scenario)
    assert late.taken == [(2, True)]


def test_a_wait_for_weights_that_are_never_published_has_a_name_and_an_end(caplog: pytest.LogCaptureFixture) -> None:
    """Who joins while the learner trains on waits for what comes after that; the learner's own deadlines come long before this one."""

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", w=Engine())
        await scene.join()
        await scene.publish(1)
        scene.learner.version = 2
        scene.sync.join(SyncTarget("late", FakeActor(Engine())))
        began = asyncio.get_running_loop().time()
        while "weights newer than v1, which were broadcast only <- learner: not done in 220 s" not in caplog.text:
            await asyncio.sleep(1.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(2 * 100.0 + 4 * 5.0, abs=2.0), "two passes and four syncs"
        assert scene.failures == scene.dirty == []

    with caplog.at_level("INFO", logger="evenkeel"):
        simulate(scenario)
    assert "waiting 30 s for weights newer than v1" in caplog.text


def test_who_comes_waits_no_longer_when_the_run_waits_for_all_receipts() -> None:
    """As before the last evaluation: nothing newer comes."""

    async def scenario() -> None:
        late = LateScene(w=Engine())
        await late.begin()
        await late.now(130.0)
        await late.scene.sync.receipts(1, deadline_s=10.0)
        assert await late.taken_at(1) == pytest.approx(130.0, abs=2.0)
        assert plans(late.scene) == [*BROADCAST, (1, True, False)]
        await late.scene.sync.close()

    simulate(scenario)
