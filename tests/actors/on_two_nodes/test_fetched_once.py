"""What crosses the network on two real nodes: a node fetches a version of the weights once, however many of its engines read it."""

from __future__ import annotations

import ray
import torch

from evenkeel.engines.weights import WeightBucket
from tests.actors.on_two_nodes.reader import FAR_READERS, Nodes
from tests.actors.two_nodes import stored_bytes


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
