"""The kill that Ray's memory monitor deals: on a real Ray whose monitor takes any use of memory for too much."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest
import ray
import ray.exceptions
from ray.cluster_utils import Cluster

from evenkeel.actors.driver.recovery import Lost, lost_among
from evenkeel.actors.processes.supervision import wait_for
from evenkeel.correction.errors import ActorLost
from tests.ray_sessions import leave_ray

pytestmark = pytest.mark.slow

_MONITOR = {"RAY_memory_usage_threshold": "0", "RAY_memory_monitor_refresh_ms": "100"}


class Part:
    """Of a run."""

    def pid(self) -> int:
        return os.getpid()

    def works(self) -> None:
        time.sleep(120.0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A node that is in order, and one where the monitor kills."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"plenty": 1.0}, "include_dashboard": False})
    ray.init(found.address, logging_level="ERROR", log_to_driver=False)
    for name, value in _MONITOR.items():
        monkeypatch.setenv(name, value)
    found.add_node(num_cpus=1, resources={"scarce": 1.0})
    yield found
    leave_ray()
    found.shutdown()


def test_who_is_killed_for_memory_is_a_lost_part(cluster: Cluster) -> None:
    """Ray raises an error of its own for it, which is no actor's error: it must be taken for a death all the same, and name the reason."""
    calm = ray.remote(Part).options(num_cpus=0, resources={"plenty": 1.0}).remote()
    ray.get(calm.pid.remote(), timeout=60)

    async def scenario() -> tuple[ActorLost, Lost]:
        part = ray.remote(Part).options(num_cpus=0, resources={"scarce": 1.0}).remote()
        with pytest.raises(ActorLost) as caught:
            await wait_for(part.works.remote(), "learner step 3 <- rank 0", deadline_s=90.0)
        return caught.value, await lost_among({"queue": calm, "learner rank 0": part}, caught.value)

    error, lost = asyncio.run(scenario())
    assert str(error).startswith("learner step 3 <- rank 0: the actor's process has died, or its answer was lost (")
    assert isinstance(error.__cause__, ray.exceptions.OutOfMemoryError | ray.exceptions.ActorDiedError)
    assert "memory" in str(error.__cause__).lower()
    assert lost == Lost(("learner rank 0",))
