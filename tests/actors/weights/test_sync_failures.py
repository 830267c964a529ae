"""Weight updates that fail: whose fault it is, how often they are tried again, and what is said.

An engine that fails is tried again, whole and with checksums; after three failures it is given up; a broadcast that fails goes through
the object store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import ray.exceptions

from evenkeel.actors.carriers import ExportPlan, WeightChecksums, WeightSnapshot
from evenkeel.actors.weights.weight_sync import SyncTarget
from evenkeel.correction.errors import (
    ActorLost,
    ActorUnavailable,
    DeadlineExceeded,
    EngineDirty,
    EngineError,
    LateError,
    SyncError,
    counted,
)
from evenkeel.rollout.trajectory import SyncReceipt
from tests.actors.cases import FakeActor
from tests.actors.simulated_time import simulate
from tests.actors.weights.sync_scene import Engine, SyncScene


def test_an_engine_that_fails_twice_is_tried_again_with_checksums() -> None:
    engine = Engine(None, SyncError("bucket 2 of 3"), ray.exceptions.RayTaskError("f", "traceback", EngineDirty("no answer")))

    async def scenario() -> None:
        scene = SyncScene(w=engine)
        await scene.join()
        await scene.publish(1)
        with pytest.raises(DeadlineExceeded):
            await scene.sync.receipts(1, deadline_s=0.1)
        assert scene.targets["w"].version == -1, "dirty: it must not be given work"
        await scene.sync.receipts(1, deadline_s=10.0)
        assert scene.failures == []
        assert scene.dirty == [
            ("w", "weight sync v1, attempt 1 of 3: bucket 2 of 3"),
            ("w", "weight sync v1, attempt 2 of 3: no answer"),
        ]

    simulate(scenario)
    assert engine.taken == [(0, True), (1, False), (1, True), (1, True)]


@pytest.mark.parametrize(
    ("error", "attempts", "calls"),
    [
        (ray.exceptions.RayTaskError("f", "traceback", EngineError("its scheduler ended")), 1, 1),
        (ray.exceptions.ActorDiedError(), 1, 1),
        (ray.exceptions.ActorUnavailableError("for now", None), 3, 18),
        (ray.exceptions.RayTaskError("f", "traceback", EngineDirty("half an update")), 3, 3),
    ],
    ids=["engine gone", "worker gone", "not reached just now", "dirty"],
)
def test_an_engine_that_is_gone_is_given_up_at_once(error: Exception, attempts: int, calls: int) -> None:
    """Each attempt more would be seconds in which nobody starts the next one. Of one that can't be reached each lasts half a minute: by
    then its heartbeat has said whether it is lost."""
    engine = Engine(*[error] * calls)

    async def scenario() -> None:
        scene = SyncScene(w=engine)
        await scene.sync.publish()
        scene.sync.join(scene.targets["w"])
        while not scene.failures:
            await asyncio.sleep(0.05)
        assert f"took no weights in {counted(attempts, 'attempt')}: " in scene.failures[0][1]

    simulate(scenario)
    assert len(engine.taken) == calls


def test_an_engine_that_can_not_be_reached_for_a_moment_takes_its_weights_then() -> None:
    """Three calls in vain would have been its end, after three seconds."""
    engine = Engine(*[ray.exceptions.ActorUnavailableError("for now", None)] * 4)

    async def scenario() -> None:
        scene = SyncScene(w=engine)
        await scene.sync.publish()
        scene.sync.join(scene.targets["w"])
        await scene.sync.receipts(0, deadline_s=60.0)
        assert scene.failures == scene.dirty == [] and len(scene.receipts) == 1 and len(engine.taken) == 5

    simulate(scenario)


@pytest.mark.parametrize(
    ("error", "tries", "why"),
    [
        (ray.exceptions.RayTaskError("f", "AttributeError: no _generation", AttributeError()), 3, "attempt 3 of 3: .*: no _generation"),
        (ray.exceptions.RayTaskError("f", "traceback", LateError("bucket 2 of 3 is on its way")), 9, "bucket 2 of 3 is on its way$"),
        (KeyError("bug"), 1, r"its weight sync failed: KeyError\('bug'\)$"),
    ],
    ids=["an error in the worker", "late", "an error in the sync"],
)
def test_a_wait_for_receipts_says_what_the_attempts_failed_of(error: Exception, tries: int, why: str) -> None:
    """An engine that was given up looked like one that is slow, where nobody had asked the callbacks yet."""
    engine = Engine(*[error] * tries)

    async def scenario() -> None:
        scene = SyncScene(w=engine)
        await scene.sync.publish()
        scene.sync.join(scene.targets["w"])
        with pytest.raises(DeadlineExceeded, match=f"(?s)^weight sync v0 -> workers w: no receipt in 30 s; w: .*{why}"):
            await scene.sync.receipts(0, deadline_s=30.0)
        assert not isinstance(error, KeyError) or scene.failures == [("w", "its weight sync failed: KeyError('bug')")]
        engine.script.clear()
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=60.0)
        assert scene.targets["w"].trouble == ""
        await scene.sync.close()

    simulate(scenario)


def test_weights_that_do_not_come_are_no_engines_fault(caplog: pytest.LogCaptureFixture) -> None:
    """Three attempts would have been its end. It is asked again after pauses that grow, stays verified, and takes them when they come. As
    nobody else has them, their copy is made anew after three and after six: it may be lost for good."""
    late = ray.exceptions.RayTaskError("f", "traceback", LateError("not all of 3 buckets came in 60 s"))
    engine = Engine(None, *[late] * 8)

    async def scenario() -> None:
        scene = SyncScene(w=engine)
        await scene.join()
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=60.0)
        assert scene.failures == scene.dirty == [] and len(scene.receipts) == 2
        assert asyncio.get_running_loop().time() == pytest.approx(sum(range(1, 9)), abs=2.0)

    simulate(scenario)
    assert engine.taken == [(0, True), *[(1, False)] * 9], "it was not touched: no checksums are compared anew"
    told = [record.message for record in caplog.records if "did not come" in record.message]
    assert told == ["weights v1 did not come to rollout worker w, tried 1x: not all of 3 buckets came in 60 s"], "then each tenth time"


@pytest.mark.parametrize("others_have_them", [True, False])
def test_weights_that_nobody_can_read_are_exported_once_more_for_all(others_have_them: bool) -> None:
    """A slow way to one node costs the learner nothing; a copy that is lost with its store would be asked for without end."""
    late = ray.exceptions.RayTaskError("f", "traceback", LateError("could not be read from the object store (ObjectLostError)"))
    slow = [Engine(None, *[late] * 5) for _ in range(4)]

    async def scenario() -> None:
        scene = SyncScene(**{f"slow{i}": engine for i, engine in enumerate(slow)}, **({"quick": Engine()} if others_have_them else {}))
        await scene.join()
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=60.0)
        assert [version for version, _ in scene.learner.exported] == ([0, 1] if others_have_them else [0, 1, 1])
        assert scene.failures == scene.dirty == scene.losses == []

    simulate(scenario)


def test_weights_that_nobody_can_read_and_the_learner_no_longer_has_take_the_run_back() -> None:
    late = ray.exceptions.RayTaskError("f", "traceback", LateError("could not be read from the object store (ObjectLostError)"))

    async def scenario() -> None:
        scene = SyncScene(every_steps=2, w=Engine(None, *[late] * 3))
        await scene.join()
        await scene.publish(1)
        scene.learner.version = 2
        await asyncio.sleep(30.0)
        assert scene.losses == ["weights v1: no rollout worker can read them, and the learner has newer ones"]
        assert scene.failures == scene.dirty == []

    simulate(scenario)


@pytest.mark.parametrize("error", [EngineError("learner rank 0: no memory"), ActorLost("checksums of the weights: its process is gone")])
def test_checksums_that_fail_are_made_again_and_cost_no_engine(error: EngineError) -> None:
    """Who joins needs those of what is published. Made by a task of Ray's: its loss is not the learner's."""

    async def scenario() -> None:
        scene = SyncScene(w=Engine())
        whole, asked = scene.learner.checksums, list[int]()

        async def checksums(buckets: Sequence[Any], *, deadline_s: float) -> WeightChecksums:
            asked.append(len(buckets))
            if len(asked) <= 2:
                raise error
            return await whole(buckets, deadline_s=deadline_s)

        await scene.join()
        await scene.publish(1)
        scene.learner.checksums = checksums  # type: ignore[method-assign]
        scene.sync.join(late := SyncTarget("late", FakeActor(Engine())))
        await asyncio.sleep(30.0)
        assert late.version == 1 and len(asked) == 3 and scene.losses == scene.failures == []

    simulate(scenario)


@pytest.mark.parametrize("error", [ActorLost("rank 1: its process is gone"), ActorUnavailable("rank 1: it may have missed the call")])
def test_a_learner_that_is_lost_in_a_copy_takes_the_run_back_and_costs_no_engine(error: ActorLost) -> None:
    """One who joins needs a version that was broadcast only; a rank that has missed a call is called no more before a restore."""

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", a=Engine(), b=Engine())
        await scene.join()
        await scene.publish(1)
        asked: list[ExportPlan] = []

        async def export(plan: ExportPlan, **_: Any) -> WeightSnapshot:
            asked.append(plan)
            raise error

        scene.learner.export = export  # type: ignore[method-assign]
        scene.sync.join(SyncTarget("late", FakeActor(Engine())))
        await asyncio.sleep(60.0)
        assert scene.losses == [str(error)] and len(asked) == 1
        assert scene.failures == scene.dirty == []

    simulate(scenario)


def test_a_copy_that_fails_costs_no_engine_however_often(caplog: pytest.LogCaptureFixture) -> None:
    """The learner is slow, or the object store full: the engine that waits is not the one to replace."""

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", a=Engine(), b=Engine())
        await scene.join()
        await scene.publish(1)
        whole, asked = scene.learner.export, list[float]()

        async def export(plan: ExportPlan, **_: Any) -> WeightSnapshot:
            asked.append(asyncio.get_running_loop().time())
            if len(asked) <= 5:
                raise DeadlineExceeded("weights v1 <- learner: nothing in 60 s")
            return await whole(plan)

        scene.learner.export = export  # type: ignore[method-assign]
        late = SyncTarget("late", FakeActor(Engine()))
        scene.sync.join(late)
        await asyncio.sleep(60.0)
        assert late.version == 1 and scene.failures == scene.losses == scene.dirty == []
        assert [record.getMessage() for record in caplog.records if "late" in record.getMessage()] == [
            f"weights v1 are not at hand for rollout worker late, tried {n}x: weights v1 <- learner: nothing in 60 s" for n in range(1, 6)
        ]
        assert [round(b - a) for a, b in pairwise(asked)] == [1, 2, 3, 4, 5], "seconds between them"

    simulate(scenario)


def test_a_receipt_of_withdrawn_weights_does_not_count() -> None:
    """An update of the generation before, v0 as well, is the one that the engine confirms."""

    class Late(Engine):
        async def update_weights(self, version: int, buckets: list[Any], checksums: Any, generation: int = 0) -> SyncReceipt:
            generations.append(generation)
            return replace(await super().update_weights(version, buckets, checksums), generation=generation - (len(generations) == 1))

    generations: list[int] = []

    async def scenario() -> None:
        scene = SyncScene(w=Late(), generation=2)
        await scene.join()
        assert scene.dirty == [
            ("w", "weight sync v0, attempt 1 of 3: rollout worker w: a receipt for v0 of generation 1, not 2: those weights were withdrawn")
        ]
        assert scene.receipts == [0]

    simulate(scenario)
    assert generations == [2, 2]


def test_an_engine_marked_dirty_during_an_update_is_clean_only_after_the_next() -> None:
    """The update under way is without checksums: what it leaves is not known to be right."""
    gate = asyncio.Event()
    engine = Engine(None, gate.wait())

    async def scenario() -> None:
        scene = SyncScene(w=engine)
        await scene.join()
        await scene.publish(1)
        await asyncio.sleep(0.01)
        scene.sync.resync(scene.targets["w"], "the update to v1 failed")
        gate.set()
        await scene.sync.receipts(1, deadline_s=5.0)
        assert scene.targets["w"].is_verified and scene.receipts == [0, 1]

    simulate(scenario)
    assert engine.taken == [(0, True), (1, False), (1, True)]


def test_an_engine_that_hangs_is_tried_again_at_the_deadline() -> None:
    engine = Engine(None, 60.0)

    async def scenario() -> None:
        scene = SyncScene(w=engine)
        await scene.join()
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=10.0)

    simulate(scenario)
    assert [version for version, _ in engine.taken] == [0, 1, 1]


def test_a_broadcast_that_fails_goes_through_the_object_store_and_the_next_one_works() -> None:
    good, bad = Engine(), Engine(None, ray.exceptions.RayTaskError("f", "traceback", SyncError("member gone")))

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", good=good, bad=bad)
        await scene.join()
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=5.0)
        await scene.grouped()
        await scene.publish(2)
        assert [t.version for t in scene.targets.values()] == [2, 2]
        assert [name for name, _ in scene.dirty] == ["good", "bad"] and "broadcast of v1 failed" in scene.dirty[0][1]

    simulate(scenario)
    assert good.taken == bad.taken == [(0, True), (1, True)], "whole and verified after the failure"
    assert good.received == [1, 2] and bad.received == [2]
