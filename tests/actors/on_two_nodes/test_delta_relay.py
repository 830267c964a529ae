"""A delta on its way over real nodes: this process's, the learner's, and two with engines.

Behaviours locked here: a node waits for its turn before it fetches anything; what the first node has fetched is enough for the second one,
when the learner's node is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.carriers import WeightChecksums, WeightSnapshot
from actors.queue.payloads import checksums_of
from actors.weights.weight_deltas import _RELAYED, WeightDeltas
from correction.engines.weight_bucket import WeightBucket
from tests.actors.on_two_nodes.reader import reader_on
from tests.actors.two_nodes import stored_bytes

SIZE, BUCKETS = 2**21, 2
"""Elements of a tensor, each a bucket of its own; bfloat16."""
WHOLE = 2 * SIZE * BUCKETS


@pytest.fixture
def three(cluster: Cluster) -> Iterator[list[Any]]:
    """Nodes beside those of all tests: the learner's, and two for engines."""
    added = [cluster.add_node(num_cpus=2, object_store_memory=200 << 20, wait=False) for _ in range(3)]
    cluster.wait_for_nodes()
    yield added
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


def version_on(node: Any, version: int) -> WeightSnapshot:
    """Weights that lie in this node's store alone; from one version to the next half of the elements change."""

    def buckets() -> list[WeightBucket]:
        found = []
        for number in range(BUCKETS):
            generator = torch.Generator().manual_seed(number)
            words = torch.randn(SIZE, generator=generator).bfloat16().view(torch.int16)
            for _ in range(version):
                moved = torch.rand(SIZE, generator=generator) < 0.5
                words += moved * torch.randint(200, (SIZE,), generator=generator, dtype=torch.int16)
            found.append(WeightBucket.of({f"w{number}": words.view(torch.bfloat16)}))
        return found

    place = NodeAffinitySchedulingStrategy(node.node_id, soft=False)  # type: ignore[attr-defined]
    make = ray.remote(buckets).options(num_cpus=0, num_returns=BUCKETS, max_retries=0, scheduling_strategy=place)
    references, own = make.remote(), buckets()
    ray.wait(references, num_returns=BUCKETS, fetch_local=False)
    return WeightSnapshot(version, references, [list(one.specs) for one in own], [], WeightChecksums(*checksums_of(*own)), 0.0)


class HeldRelay(WeightDeltas):
    """The first node keeps its turn, with the delta fetched, until the test opens the gate."""

    def __init__(self, learner_node: str, first: str) -> None:
        super().__init__(learner_node, 120.0)
        self.first, self.has_fetched, self.gate = first, asyncio.Event(), asyncio.Event()
        self._patience_s = 120.0

    async def _fetch(self, references: list[Any], node: str, version: int) -> None:
        await super()._fetch(references, node, version)
        if node == self.first:
            self.has_fetched.set()
            await self.gate.wait()


@pytest.mark.slow
def test_the_second_node_makes_its_weights_from_what_the_first_has_fetched(cluster: Cluster, three: list[Any]) -> None:
    """The learner's node is taken away in between: only the first node's copy is left."""
    learner, first, second = three
    old, new = (version_on(learner, version) for version in range(2))
    readers = {node.node_id: reader_on(node.node_id) for node in (first, second)}
    ray.get([reader.read.remote(old.buckets) for reader in readers.values()])

    async def scenario() -> None:
        deltas = HeldRelay(learner.node_id, first.node_id)
        nodes = [node.node_id for node in three]
        deltas.published(old, nodes)
        for node in readers:
            deltas.taken(node, old)
        before = {node.node_id: stored_bytes(node) for node in (first, second)}
        deltas.published(new, nodes)
        _, delta_bytes = await deltas._steps[-1].making
        assert _RELAYED < delta_bytes < WHOLE / 2
        await deltas.has_fetched.wait()
        assert delta_bytes <= stored_bytes(first) - before[first.node_id] < 1.1 * delta_bytes
        assert stored_bytes(second) == before[second.node_id], "it is not its turn"
        await asyncio.to_thread(cluster.remove_node, learner, allow_graceful=False)
        while any(node["Alive"] and node["NodeID"] == learner.node_id for node in ray.nodes()):
            await asyncio.sleep(0.1)
        deltas.gate.set()
        for node, reader in readers.items():
            buckets, made_from = await asyncio.wait_for(deltas.of_node(node, new), 150.0)
            assert made_from == delta_bytes
            receipt = await reader.update_weights.remote(1, buckets, new.checksums)
            assert new.checksums is not None and receipt.digest == new.checksums.digest
        deltas.close()

    asyncio.run(asyncio.wait_for(scenario(), 240.0))
