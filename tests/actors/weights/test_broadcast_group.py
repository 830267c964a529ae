"""A weight group that is rebuilt during training. Engines and learner are fakes here; tests/e2e/test_broadcast_join.py has real ones.

Behaviours locked here: no publish waits for a rendezvous; versions go through the object store until the group is whole, and by broadcast
from then on; who joins is no member before it is verified, and the others' group lasts until then; no group ends in the middle of a
broadcast; a member that doesn't come, or dies in the rendezvous, costs nobody its weights, and the next try has another group.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from evenkeel.actors.weights.broadcast_group import BroadcastGroup
from evenkeel.actors.weights.weight_sync import SyncTarget
from evenkeel.correction.errors import SyncError
from evenkeel.learner.weights.broadcast import WeightBroadcaster
from tests.actors.cases import FakeActor
from tests.actors.simulated_time import simulate
from tests.actors.weights.sync_scene import Engine, Learner, SyncScene, plans


class Joining(Engine):
    """Joins groups as the test's script says, as `Engine` takes weights; notes the names of those that it joined and left."""

    def __init__(self, *joins: Any, script: tuple[Any, ...] = ()) -> None:
        super().__init__(*script)
        self.joins, self.joined, self.left = list(joins), list[str](), list[str]()

    async def join_weight_group(self, *told: Any) -> None:
        self.joined.append(told[-1])
        part = self.joins.pop(0) if self.joins else None
        if isinstance(part, Exception):
            raise part
        if part is not None:
            await part

    async def leave_weight_group(self, name: str) -> None:
        self.left.append(name)


def late(scene: SyncScene, engine: Engine, name: str = "late") -> SyncTarget:
    target = scene.targets[name] = SyncTarget(name, FakeActor(engine))
    scene.sync.join(target)
    return target


async def asked(engine: Joining, groups: int) -> None:
    while len(engine.joined) < groups:
        await asyncio.sleep(0.01)


def test_a_publish_does_not_wait_for_the_rendezvous() -> None:
    come = asyncio.Event()
    engine = Joining(None, come.wait())

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", w=engine)
        await scene.join()
        other = Joining()
        late(scene, other)
        await asked(engine, 2)
        for version in (1, 2):
            await scene.publish(version)
            await scene.sync.receipts(version, deadline_s=5.0)
        assert not come.is_set() and plans(scene)[1:] == [(1, True, False), (2, True, False)]
        come.set()
        await scene.grouped()
        await scene.publish(3)
        assert plans(scene)[3:] == [(3, False, True)]
        assert engine.received == other.received == [3] and [version for version, _ in engine.taken] == [0, 1, 2]
        assert engine.joined == ["weights-0-1", "weights-0-2"] and engine.left == ["weights-0-1"] and other.joined == ["weights-0-2"]
        await scene.sync.close()
        assert engine.left == engine.joined and other.left == other.joined

    simulate(scenario)


def test_who_joins_does_not_end_the_others_group_before_it_is_verified() -> None:
    """It may take minutes over its first weights. Those of a start come one by one, and only the last one's receipt is a reason."""
    verified = asyncio.Event()
    old, slow, quick = Joining(), Joining(script=(verified.wait(),)), Joining()

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", w=old)
        await scene.join()
        late(scene, slow)
        await scene.sync.receipts(0, deadline_s=5.0, is_one_enough=True)
        target = late(scene, quick, "quick")
        while target.version < 0:
            await asyncio.sleep(0.01)
        await scene.publish(1)
        assert plans(scene)[1:] == [(1, True, True)] and old.received == [1] and old.joined == ["weights-0-1"]
        verified.set()
        await scene.grouped()
        await scene.sync.receipts(1, deadline_s=5.0)
        await scene.publish(2)
        assert old.received == [1, 2] and slow.received == quick.received == [2]
        assert slow.joined == quick.joined == ["weights-0-2"]

    simulate(scenario)


def test_no_group_ends_in_the_middle_of_a_broadcast() -> None:
    """One is verified while another receives: what that one gets, it gets whole, and then they meet."""
    arrives = asyncio.Event()
    engine, other = Joining(script=(None, arrives.wait())), Joining()

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", w=engine)
        await scene.join()
        publishing = asyncio.create_task(scene.publish(1))
        await asyncio.sleep(0.01)
        target = late(scene, other)
        while target.version < 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert engine.left == [] and other.joined == [] and engine.received == []
        arrives.set()
        await publishing
        await scene.grouped()
        assert engine.received == [1] and scene.targets["w"].version == 1 and scene.dirty == []

    simulate(scenario)


def test_a_member_that_does_not_come_is_tried_again_with_the_next_version() -> None:
    """Nobody is dirty for it. Rank 0 waits in its thread until its time is over."""
    engine = Joining()

    class Lonely(Learner):
        async def open_broadcast(self, *told: Any) -> None:
            tries.append(told[3])
            if len(tries) == 1:
                await asyncio.sleep(told[4])
                raise SyncError("weight group: group was not built in 5 s; a member may be gone")

    tries: list[str] = []

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", w=engine)
        scene.learner.rank_zero = FakeActor(Lonely())
        await scene.sync.publish()
        scene.sync.join(scene.targets["w"])
        await scene.sync.receipts(0, deadline_s=5.0)
        await asyncio.sleep(30.0)
        assert tries == ["weights-0-1"] and engine.left == tries, "one try, which all have left"
        await scene.publish(1)
        await scene.grouped()
        await scene.publish(2)
        assert tries == engine.joined == ["weights-0-1", "weights-0-2"] and scene.dirty == []
        assert plans(scene) == [(0, True, False), (1, True, False), (2, False, True)]

    simulate(scenario)


def test_a_member_that_dies_in_the_rendezvous_is_left_out_of_the_next() -> None:
    """The others meet without it as soon as it is known to be gone."""
    dies = asyncio.Event()

    class Dying(Joining):
        async def join_weight_group(self, *told: Any) -> None:
            await super().join_weight_group(*told)
            await dies.wait()
            raise SyncError("the worker's process is gone")

    engine, dying = Joining(), Dying()

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", w=engine)
        await scene.join()
        late(scene, dying)
        await asked(dying, 1)
        scene.sync.leave("late")
        await scene.publish(1)
        assert plans(scene)[-1] == (1, True, False), "the group isn't whole"
        dies.set()
        await scene.grouped()
        await scene.sync.receipts(1, deadline_s=5.0)
        await scene.publish(2)
        assert engine.received == [2] and engine.joined == ["weights-0-1", "weights-0-2", "weights-0-3"]
        assert engine.left == engine.joined[:2] and scene.dirty == []

    simulate(scenario)


def test_a_member_that_is_mended_stays_in_its_group() -> None:
    """Until then a broadcast would wait for it: all take that version from the store."""
    mended = asyncio.Event()
    engine, other = Joining(script=(None, mended.wait())), Joining()

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", w=engine, other=other)
        await scene.join()
        scene.sync.resync(scene.targets["w"], "the update to v0 failed")
        await asyncio.sleep(0.01)
        await scene.publish(1)
        assert plans(scene)[-1] == (1, True, False)
        mended.set()
        await scene.sync.receipts(1, deadline_s=5.0)
        await scene.publish(2)
        assert engine.received == other.received == [2] and engine.joined == ["weights-0-1"]

    simulate(scenario)


def test_no_engine_is_asked_to_join_before_the_group_s_store_is_there() -> None:
    """So that one that finds nobody there knows within seconds that the group is over."""
    served = asyncio.Event()

    class Serving(Learner):
        async def serve_broadcast(self, *asked: Any) -> tuple[str, int]:
            told.append(asked)
            await served.wait()
            return "10.0.0.1", 77

        async def open_broadcast(self, *asked: Any) -> None:
            told.append(asked[:4])

    told: list[tuple[Any, ...]] = []
    engine = Joining()

    async def scenario() -> None:
        learner = Learner()
        learner.rank_zero = FakeActor(Serving())
        building = asyncio.create_task(BroadcastGroup(learner, 5.0, 0, 1).build([SyncTarget("w", FakeActor(engine))]))
        await asyncio.sleep(0.1)
        assert told == [(2, "weights-0-1", 5.0)] and engine.joined == []
        served.set()
        await building
        assert told[1:] == [("10.0.0.1", 77, 2, "weights-0-1")] and engine.joined == ["weights-0-1"]

    simulate(scenario)


def test_joining_and_sending_a_bucket_have_limits_of_their_own() -> None:
    """A whole model's time for members to come, a bucket's for what is sent to them."""
    told: list[tuple[float, float]] = []

    class Noting(Learner):
        async def open_broadcast(self, *asked: Any) -> None:
            told.append(asked[4:])

    async def scenario() -> None:
        learner = Learner()
        learner.rank_zero = FakeActor(Noting())
        for given in ({}, {"bucket_s": 0.5}):
            group = BroadcastGroup(learner, 5.0, 0, 1, **given)  # type: ignore[arg-type]
            await group.build([SyncTarget("w", FakeActor(Joining()))])
        assert told == [(5.0, 5.0), (5.0, 0.5)]

    simulate(scenario)


def test_the_end_of_a_run_ends_the_building() -> None:
    engine = Joining(asyncio.Event().wait())

    async def scenario() -> None:
        scene = SyncScene(transport="broadcast", w=engine)
        await scene.sync.publish()
        scene.sync.join(scene.targets["w"])
        await asked(engine, 1)
        await scene.sync.close()
        assert engine.left == engine.joined == ["weights-0-1"]

    simulate(scenario)


def test_who_has_left_its_group_sends_nothing() -> None:
    """torch takes no group for the default one: the ranks of the learner would wait for each other there."""
    sender = WeightBroadcaster.__new__(WeightBroadcaster)
    sender._join = lambda *_: None  # type: ignore[method-assign]
    sender.__init__("", 0, 2, "weights-1", 1.0, torch.device("cpu"))  # type: ignore[misc]
    sender._group = object()  # type: ignore[assignment]
    sender.close()
    with pytest.raises(SyncError, match="weight group weights-1: the learner has left it"):
        sender.send({"a": torch.zeros(2)})
