"""A node that Ray drains, as at the notice that a spot machine is reclaimed: who watches hears of it, once, with the time that is left."""

from __future__ import annotations

import asyncio

import ray
from click.testing import CliRunner
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from evenkeel.actors.pool.preemption import watch_nodes

LEFT_S = 300


@ray.remote(num_cpus=1)
class Busy:
    """Without work a node ends as soon as it is drained."""


def test_a_node_that_ray_drains_is_told_once_with_its_deadline(cluster: Cluster) -> None:
    own = cluster.add_node(num_cpus=1)
    try:
        busy = Busy.options(scheduling_strategy=NodeAffinitySchedulingStrategy(own.node_id, soft=False)).remote()  # type: ignore[attr-defined]
        ray.get(busy.__ray_ready__.remote(), timeout=60)
        told = asyncio.run(asyncio.wait_for(notices_of(own.node_id, cluster.address), 60.0))
    finally:
        cluster.remove_node(own)
    ((node, left_s),) = told
    assert node == own.node_id
    assert left_s is not None and 0 < left_s <= LEFT_S


async def notices_of(node: str, address: str) -> list[tuple[str, float | None]]:
    """What is told of a node that is drained while somebody watches, until the second look after it."""
    told: list[tuple[str, float | None]] = []
    watching = asyncio.create_task(watch_nodes(lambda node, left_s: told.append((node, left_s))))
    try:
        await asyncio.sleep(0.1)
        assert not told
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "reclaimed"]
        words = ["--address", address, "--node-id", node, *reason, "--deadline-remaining-seconds", str(LEFT_S)]
        from ray.scripts.scripts import drain_node  # it imports for a second, in every process of the suite

        done = await asyncio.to_thread(CliRunner().invoke, drain_node, words)
        assert done.exit_code == 0, done.output
        while not told:
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.5)  # it looks every second
        return told
    finally:
        watching.cancel()
