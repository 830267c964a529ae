"""What a rollout worker does with weights up to its engine, as an actor on a node of choice; it imports little, so that it starts soon."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from evenkeel.actors.groups.tokens import checksums_of
from evenkeel.rollout.trajectory import SyncReceipt

FAR_READERS = 2
"""On the node of engines; there is one next to the learner."""


@dataclass(frozen=True)
class Nodes:
    """The learner's, to which this process belongs, and another one; the actors on each are started once for all tests."""

    far: Any
    readers: dict[str, list[Any]]
    """By node, the far one first."""


@ray.remote(num_cpus=0)
class Reader:
    """Fetches as a rollout worker fetches."""

    async def update_weights(self, version: int, buckets: Sequence[Any], checksums: Any, _: int = 0) -> SyncReceipt:
        fetched = await asyncio.gather(*buckets)
        size = sum(bucket.nbytes for bucket in fetched)
        return SyncReceipt(version, size, 0.0, 0.0, checksums_of(*fetched)[1] if checksums else "")

    async def read(self, buckets: Sequence[Any]) -> tuple[int, int]:
        """Returns: (bytes, process)."""
        fetched = await asyncio.gather(*buckets)
        return sum(part.nbytes for bucket in fetched for part in bucket.parts), os.getpid()


def reader_on(node: str) -> Any:
    return Reader.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()  # type: ignore[attr-defined]
