"""Ranks get their GPUs together, before anything else, and neighbouring ranks neighbouring ones. Ray counts GPUs that aren't there."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from actors.cluster.placement import RankPlaces, reserve
from actors.commands.recipe import load_config
from actors.config import RunConfig
from actors.doctor.gather import nodes_of_cluster
from actors.settings.devices import check_received
from correction.errors import DeadlineExceeded
from tests.actors.two_nodes import nodes_of_ray

pytestmark = pytest.mark.slow

VISIBLE = ("GPU-d", "GPU-b", "GPU-c", "GPU-a")
"""What CUDA_VISIBLE_DEVICES says on each node, by UUID: their order isn't the alphabet's."""
RECIPE = Path(__file__).parents[2] / "e2e" / "small.yaml"


def config(*overrides: str) -> RunConfig:
    return load_config(RunConfig, RECIPE, ["learner.device=cuda", *overrides])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without a GPU, where the run starts, and two nodes of four."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(VISIBLE))
        with nodes_of_ray({"num_cpus": 1, "num_gpus": 0}, *[{"num_cpus": 5, "num_gpus": 4}] * 2) as own:
            yield own


class Rank:
    """Says what Ray gave it."""

    def where(self) -> tuple[str, list[str], str | None]:
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids(), os.environ.get("NCCL_DEBUG")

    def check(self) -> None:
        check_received("learner rank 0", 1.0, ray.get_gpu_ids())


def start(places: RankPlaces) -> list[Any]:
    return [ray.remote(Rank).options(**places.options(rank)).remote() for rank in range(places.config.world_size)]


def release(places: RankPlaces, *actors: Any) -> None:
    for actor in actors:
        ray.kill(actor)
    ray.util.remove_placement_group(places.group)
    until = time.monotonic() + 120.0
    while ray.available_resources().get("GPU", 0.0) < 8.0 and time.monotonic() < until:  # nodes report what is free again a little later
        time.sleep(0.2)


def test_ranks_fill_nodes_and_tensor_parallel_groups_stay_inside_one(cluster: Cluster) -> None:
    """Three groups of two on two nodes of four: a node holds two whole groups, the other the third."""
    places = asyncio.run(reserve(config("learner.tensor_parallel=2", "learner.data_parallel=3", "ray.env.NCCL_DEBUG=WARN")))
    ranks = start(places)
    found = ray.get([rank.where.remote() for rank in ranks], timeout=240)
    release(places, *ranks)
    nodes = [node for node, _, _ in found]
    assert len(set(nodes)) == 2 and sum(a != b for a, b in itertools.pairwise(nodes)) == 1, "ranks of a node are neighbours"
    assert all(nodes[rank] == nodes[rank + 1] for rank in range(0, 6, 2))
    assert all(len(ids) == 1 for _, ids, _ in found) and len({(node, ids[0]) for node, ids, _ in found}) == 6
    for node in set(nodes):
        groups = [{VISIBLE.index(ids[0]) for one, ids, _ in found[first : first + 2] if one == node} for first in range(0, 6, 2)]
        firsts = [min(group) for group in groups if group]
        assert firsts == sorted(firsts), "in the order of the GPUs"
    assert {variable for _, _, variable in found} == {"WARN"}


def test_who_comes_later_leaves_the_ranks_gpus_alone_and_an_actor_sees_what_it_got(cluster: Cluster) -> None:
    places = asyncio.run(reserve(config("learner.data_parallel=7")))
    others = [ray.remote(Rank).options(num_gpus=1, num_cpus=0).remote() for _ in range(2)]
    waiting = [other.where.remote() for other in others]
    ready, late = ray.wait(waiting, num_returns=1, timeout=240)
    assert (len(ready), len(late)) == (1, 1)
    assert ray.wait(late, timeout=2)[0] == [], "eight GPUs, of which seven are the ranks'"
    rank = ray.remote(Rank).options(**places.options(0)).remote()
    with pytest.raises(Exception, match=r"learner rank 0: Ray gave it GPU GPU-\w, but torch sees 0 there"):
        ray.get(rank.check.remote(), timeout=240)
    release(places, rank, *others)


def test_every_node_tells_what_it_has(cluster: Cluster, tmp_path: Path) -> None:
    found = nodes_of_cluster(config("ray.address=auto"), tmp_path, within_s=240.0)  # all three nodes are on this machine
    assert sorted((node.offered_gpus, node.free_gpus, node.cpus) for node in found) == [(0, 0, 1), (4, 4, 5), (4, 4, 5)]
    assert all(node.reads_run_folder and node.model_obstacle and abs(node.clock_ahead_s) < 60 for node in found)
    assert [node.no_way + node.way_not_known for node in found] == [""] * 3, "the listener is on one with GPUs, the other two reach it"
    assert 0 in [node.offered_gpus for node in found] and all(node.object_store > 0 for node in found) and list(tmp_path.iterdir()) == []


def test_too_large_a_group_is_said_with_what_is_there(cluster: Cluster) -> None:
    """Five ranks of one tensor-parallel group have no node, though there are eight GPUs."""
    wanted = config("learner.tensor_parallel=5", "deadlines.start_s=1.5")
    with pytest.raises(DeadlineExceeded, match=r"room for 5 learner ranks: 1 x .*'GPU': 5.*the cluster has 8 GPUs, 8 of them free"):
        asyncio.run(reserve(wanted))
