"""An object store that is full, on a node whose disk has no room either: a real Ray that takes any disk for a full one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from actors.going_back import lost_among, lost_answer
from actors.supervision import wait_for
from tests.failures.measured import REAL, Measured

pytestmark = pytest.mark.slow

STORE = 80 << 20
"""Bytes; the least that Ray takes is 75 MiB."""


class Learner:
    """Hands out weights that stay where they are."""

    def export(self, size: int) -> list[Any]:
        return [ray.put(np.ones(size, dtype=np.uint8))]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    settings = {"local_fs_capacity_threshold": 0.001, "automatic_object_spilling_enabled": False}
    head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False, "_system_config": settings}
    found = Cluster(initialize_head=True, head_node_args=head)
    ray.init(found.address, logging_level="ERROR", log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


def test_weights_without_room_take_the_run_back_and_the_reason_is_said(cluster: Cluster) -> None:
    """The learner lives, but nobody has what it made: an answer that is lost. Before, Ray's own error ended the run."""
    learner = ray.remote(Learner).options(num_cpus=0).remote()

    async def scenario() -> tuple[list[Any], Exception, list[str]]:
        kept = [await wait_for(learner.export.remote(STORE // 2), "copy of the weights v1 <- rank 0", deadline_s=60.0)]
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            while len(kept) < 4:
                kept.append(await wait_for(learner.export.remote(STORE), "copy of the weights v2 <- rank 0", deadline_s=120.0))
        return kept, caught.value, await lost_among({"learner rank 0": learner}, caught.value)

    kept, error, lost = asyncio.run(scenario())
    assert 1 <= len(kept) < 4 and lost == ["an answer"]
    assert lost_answer(error).startswith("no room in Ray's object store (") and "ray.temp_dir" in lost_answer(error)
    follows = "an answer is lost with it: the run goes back to its last checkpoint, and says what is missing"
    Measured("object store full, and the disk under it", follows, None, "as for a kill", REAL).write()
