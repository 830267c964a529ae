"""Deltas on two real nodes: what a far node fetches, what it makes of it, and when it takes the whole. The engines are actors that read.

Behaviours locked here: a node fetches a version once, however many of its engines read it; with deltas no whole version but the first
crosses the network, and a node makes a version once; every tensor that an engine reads has the learner's checksum, whichever way it came;
another base, differences that don't pay, and differences that can't be made lead to the whole, and to differences again from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
import torch

from actors.carriers import ExportPlan, WeightChecksums, WeightSnapshot
from actors.config import WeightSyncConfig
from actors.queue.payloads import checksums_of
from actors.weights.weight_sync import SyncCallbacks, SyncTarget, WeightSync
from correction.engines.weight_bucket import WeightBucket
from rollout.engine_settings.engine_config import EngineConfig
from rollout.trajectory import SyncReceipt
from tests.actors.on_two_nodes.reader import FAR_READERS, Nodes
from tests.actors.two_nodes import stored_bytes

SIZE, BUCKETS = 2**20, 2
"""Elements of a tensor, each a bucket of its own; bfloat16."""
WHOLE = 2 * SIZE * BUCKETS


class Learner:
    """Weights in the store of this process's node; each step moves one element in fifty."""

    step_s = 60.0

    def __init__(self) -> None:
        self.version = 0
        self.node = ray.get_runtime_context().get_node_id()
        generator = torch.Generator().manual_seed(0)
        self.weights = {f"w{i}": torch.randn(SIZE, generator=generator).bfloat16() for i in range(BUCKETS)}
        self.references: list[list[Any]] = []

    def step(self, *, everything: bool = False) -> None:
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        for weight in self.weights.values():
            words = weight.view(torch.int16)
            if everything:
                words.copy_(torch.randint(-(2**15), 2**15, (SIZE,), generator=generator))
            else:
                words += (torch.rand(SIZE, generator=generator) < 0.02).to(torch.int16)

    async def export(self, plan: ExportPlan, *, deadline_s: float | None = None) -> WeightSnapshot:
        buckets = [WeightBucket.of({name: weight}) for name, weight in self.weights.items()]
        references = [ray.put(bucket) for bucket in buckets]
        self.references.append(references)
        sums = WeightChecksums(*checksums_of(*buckets))
        return WeightSnapshot(self.version, references, [list(bucket.specs) for bucket in buckets], [], sums, 0.0)

    def nodes_of(self, version: int) -> set[str]:
        """That have some of the whole of it."""
        found = ray.experimental.get_object_locations(self.references[version])
        return {node for places in found.values() for node in places["node_ids"]}


class DeltaScene:
    """Two engines on the far node and one on the learner's; every update is compared by checksums."""

    def __init__(self, nodes: Nodes) -> None:
        self.learner = Learner()
        self.nodes, self.far = nodes, nodes.far
        self.receipts: list[SyncReceipt] = []
        self.dirty: list[str] = []
        (far, far_readers), (home, (reader_at_home,)) = nodes.readers.items()
        handles = [(far, far_readers[0]), (far, far_readers[1]), (home, reader_at_home)]
        named = zip(("a", "b", "home"), handles, strict=True)
        self.targets = {name: SyncTarget(name, reader, node=node) for name, (node, reader) in named}
        self.sync = WeightSync(
            WeightSyncConfig(deltas=True),
            EngineConfig(),
            self.learner,  # type: ignore[arg-type]
            SyncCallbacks(
                receipt=self.receipts.append,
                probe=lambda *_: None,
                dirty=lambda target, reason: self.dirty.append(reason),
                failure=lambda target, reason: self.dirty.append(reason),
                loss=lambda error: self.dirty.append(str(error)),
            ),
            probe_ids=[],
            sync_s=180.0,  # a third of it is for the differences: beside other tests the far node may take 20 s to start their process
        )

    async def start(self) -> None:
        await self.sync.publish()
        for target in self.targets.values():
            self.sync.join(target)
        await self.sync.receipts(0, deadline_s=180.0)
        self.receipts.clear()

    async def step(self, **named: bool) -> list[int | None]:
        """One more version to all engines. Returns: bytes of the differences that each got."""
        self.learner.step(**named)
        for target in self.targets.values():
            target.is_verified = False
        await self.sync.publish()
        await self.sync.receipts(self.learner.version, deadline_s=180.0)
        found = [receipt.delta_bytes for receipt in self.receipts]
        self.receipts.clear()
        return found

    async def close(self) -> None:
        await self.sync.close()
        assert self.dirty == []


def play(nodes: Nodes, scenario: Any) -> None:
    async def whole() -> None:
        scene = DeltaScene(nodes)
        await scene.start()
        await scenario(scene)
        await scene.close()

    asyncio.run(asyncio.wait_for(whole(), 240.0))


def by_deltas(found: Sequence[int | None]) -> list[int]:
    return [size for size in found if size is not None]


def test_a_node_fetches_a_version_once_for_all_of_its_engines(nodes: Nodes) -> None:
    """Two readers on the other node: its store takes one copy, and each reader sees all bytes."""
    readers, size = nodes.readers[nodes.far.node_id], 8 << 20
    buckets = [ray.put(WeightBucket.of({f"w{i}": random_bytes(size, i)})) for i in range(2)]
    ray.get([reader.read.remote([]) for reader in readers])  # their processes are up
    before = stored_bytes(nodes.far)
    read = ray.get([reader.read.remote(buckets) for reader in readers])
    assert [count for count, _ in read] == [2 * size] * FAR_READERS and len({process for _, process in read}) == FAR_READERS
    fetched = stored_bytes(nodes.far) - before
    assert 2 * size <= fetched < 2.1 * size


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_only_the_differences_cross_the_network_and_a_node_makes_a_version_once(nodes: Nodes) -> None:
    async def scenario(scene: DeltaScene) -> None:
        for _ in range(4):
            before = stored_bytes(scene.far)
            found = await scene.step()
            assert found.count(None) == 1 and len(found) == 3, "the engine on the learner's node reads what lies there"
            first, second = by_deltas(found)
            assert first == second and 0.007 * WHOLE < first < 0.012 * WHOLE
            assert stored_bytes(scene.far) - before < 1.1 * WHOLE, "what was made is there once for two engines"
            assert scene.learner.nodes_of(scene.learner.version) == {scene.learner.node}
        assert scene.far.node_id in scene.learner.nodes_of(0), "of the first it took the whole"

    play(nodes, scenario)


def test_who_was_busy_meanwhile_and_who_comes_read_what_the_node_has_made(nodes: Nodes) -> None:
    """The busy engine skips versions 1 and 2, the other does not exist yet."""

    async def scenario(scene: DeltaScene) -> None:
        slow = scene.targets.pop("b")
        scene.sync.leave("b")
        for _ in range(2):
            await scene.step()
        scene.targets |= {"b": slow, "new": SyncTarget("new", slow.actor, node=slow.node)}
        for name in ("b", "new"):
            scene.targets[name].is_verified = False
            scene.sync.join(scene.targets[name])
        await scene.sync.receipts(2, deadline_s=180.0)
        assert all(receipt.delta_bytes is not None for receipt in scene.receipts) and len(scene.receipts) == 2
        assert scene.learner.nodes_of(2) == {scene.learner.node}

    play(nodes, scenario)


def test_a_node_that_is_behind_takes_several_steps_in_one(nodes: Nodes) -> None:
    """Its first whole version took so long that three newer ones were out."""

    async def scenario(scene: DeltaScene) -> None:
        assert scene.sync._deltas is not None
        first = scene.sync._deltas._copies.pop(scene.far.node_id)
        snapshot = scene.sync._versions.newest.snapshot  # type: ignore[union-attr]
        for name in ("a", "b"):
            scene.sync.leave(name)
        late = scene.targets.pop("a"), scene.targets.pop("b")
        scene.sync._targets["busy"] = SyncTarget("busy", None, task=asyncio.create_task(asyncio.sleep(200)), node=scene.far.node_id)
        for _ in range(3):
            scene.learner.step()
            await scene.sync.publish()
            await scene.sync._deltas._steps[-1].making
        scene.sync.leave("busy")
        assert first.version == 0 and first.delta_bytes is None
        scene.sync._deltas.taken(scene.far.node_id, snapshot)
        for target in late:
            target.is_verified = False
            scene.sync.join(target)
        await scene.sync.receipts(3, deadline_s=180.0)
        one, other = by_deltas([receipt.delta_bytes for receipt in scene.receipts])
        assert one == other and 0.021 * WHOLE < one < 0.036 * WHOLE

    play(nodes, scenario)


def test_what_does_not_lead_to_the_learners_bytes_leads_to_the_whole_and_then_to_differences_again(nodes: Nodes) -> None:
    async def scenario(scene: DeltaScene) -> None:
        assert scene.sync._deltas is not None
        copy = scene.sync._deltas._copies[scene.far.node_id]
        copy.buckets = [ray.put(WeightBucket.of({name: one + 1})) for name, one in scene.learner.weights.items()]
        assert await scene.step() == [None] * 3, "another base"
        assert len(by_deltas(await scene.step())) == 2
        assert await scene.step(everything=True) == [None] * 3, "differences of all bits are no smaller"
        assert len(by_deltas(await scene.step())) == 2
        whole = scene.sync._versions.newest
        assert whole is not None and scene.sync._deltas._newest is not None
        whole.snapshot.specs.pop()
        assert await scene.step() == [None] * 3, "other buckets"
        assert len(by_deltas(await scene.step())) == 2

    play(nodes, scenario)


def test_a_node_on_which_nothing_can_be_made_fetches_the_whole(nodes: Nodes) -> None:
    """Ray knows of no such node, as of one that has just gone; the engine of it is there all the same."""

    async def scenario(scene: DeltaScene) -> None:
        scene.targets["a"].node = "f" * 56
        for _ in range(2):
            found = await scene.step()
            assert len(found) == 3 and len(by_deltas(found)) == 1

    play(nodes, scenario)


def test_a_node_without_engines_is_forgotten(nodes: Nodes) -> None:
    async def scenario(scene: DeltaScene) -> None:
        assert scene.sync._deltas is not None and set(scene.sync._deltas._copies) == {scene.far.node_id}
        for name in ("a", "b"):
            scene.sync.leave(name)
            del scene.targets[name]
        assert await scene.step() == [None]
        assert scene.sync._deltas._copies == {} and scene.sync._deltas._steps == [], "nobody would read them"

    play(nodes, scenario)
