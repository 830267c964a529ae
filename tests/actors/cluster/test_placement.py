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
from ray.util.placement_group import placement_group_table

from evenkeel.actors.cluster.placement import RankPlaces, reserve, still_there
from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.devices import check_received
from evenkeel.correction.errors import DeadlineExceeded
from evenkeel.doctor.gather import nodes_of_cluster
from evenkeel.recipe import load_config
from tests.actors.two_nodes import nodes_of_ray

pytestmark = pytest.mark.slow

VISIBLE = ("GPU-d", "GPU-b", "GPU-c", "GPU-a")
"""What CUDA_VISIBLE_DEVICES says on each node, by UUID: their order isn't the alphabet's."""
RECIPE = Path(__file__).parents[2] / "e2e" / "small.yaml"


def config(*overrides: str) -> RunConfig:
    return load_config(RunConfig, RECIPE, ["learner.device=cuda", *overrides])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without a GPU, where the run starts, and two nodes of four. The second takes rollout workers, and has more CPUs: by itself
    Ray puts ranks there first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(VISIBLE))
        of_rollouts = {"num_cpus": 16, "num_gpus": 4, "resources": {"rollout": 4}}
        with nodes_of_ray({"num_cpus": 1, "num_gpus": 0}, {"num_cpus": 5, "num_gpus": 4}, of_rollouts) as own:
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


def node_of_rollouts() -> str:
    return next(str(node["NodeID"]) for node in ray.nodes() if node["Alive"] and node["Resources"].get("rollout"))


@pytest.mark.parametrize(("ranks", "there"), [(4, 0), (6, 2)])
def test_ranks_leave_the_nodes_of_rollout_workers_alone_while_others_have_room(cluster: Cluster, ranks: int, there: int) -> None:
    """A worker goes nowhere else: with ranks there, GPUs of the other node would be free, and the run would wait for engines for ever."""
    places = asyncio.run(reserve(config(f"learner.data_parallel={ranks}")))
    actors = start(places)
    found = [node for node, _, _ in ray.get([rank.where.remote() for rank in actors], timeout=240)]
    assert len(actors) == ranks and found.count(node_of_rollouts()) == there
    engines = [ray.remote(Rank).options(num_gpus=1, num_cpus=0, resources={"rollout": 1}).remote() for _ in range(4 - there)]
    taken = ray.get([engine.where.remote() for engine in engines], timeout=240)
    release(places, *actors, *engines)
    assert {node for node, _, _ in taken} == {node_of_rollouts()}


def test_where_only_their_nodes_are_left_ranks_go_there(cluster: Cluster) -> None:
    """Four ranks, and the node without rollout workers has two GPUs free: the others go where they can."""
    first = asyncio.run(reserve(config("learner.data_parallel=2")))
    second = asyncio.run(reserve(config("learner.data_parallel=4")))
    actors = start(second)
    found = [node for node, _, _ in ray.get([rank.where.remote() for rank in actors], timeout=240)]
    ray.util.remove_placement_group(first.group)
    release(second, *actors)
    assert found.count(node_of_rollouts()) == 2


def test_a_rank_s_node_that_is_lost_is_replaced_by_what_there_is(cluster: Cluster) -> None:
    """By a node that comes, without a word of ours; by one of rollout workers, if none does, when the ranks are to start again."""
    run, four = config("learner.data_parallel=4"), {"num_cpus": 5, "num_gpus": 4}
    places = asyncio.run(reserve(run))
    assert asyncio.run(still_there(places, run)) is places
    (learners,) = [node for node in cluster.worker_nodes if node.node_id in nodes_of(places)]
    cluster.remove_node(learners, allow_graceful=False)
    learners = cluster.add_node(**four)
    until = time.monotonic() + 120.0
    while nodes_of(places) != {learners.node_id} and time.monotonic() < until:
        time.sleep(0.5)
    assert nodes_of(places) == {learners.node_id} and asyncio.run(still_there(places, run)) is places
    cluster.remove_node(learners, allow_graceful=False)
    while learners.node_id in {node["NodeID"] for node in ray.nodes() if node["Alive"]} and time.monotonic() < until:
        time.sleep(0.5)
    places = asyncio.run(still_there(places, run))
    found = nodes_of(places)
    cluster.add_node(**four)
    release(places)
    assert found == {node_of_rollouts()}


def nodes_of(places: RankPlaces) -> set[str]:
    """Where the group's bundles are now."""
    return set(placement_group_table(places.group)["bundles_to_node_id"].values())


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
    assert sorted((node.offered_gpus, node.free_gpus, node.cpus) for node in found) == [(0, 0, 1), (4, 4, 5), (4, 4, 16)]
    assert all(node.reads_run_folder and node.model_obstacle and abs(node.clock_ahead_s) < 60 for node in found)
    assert {node.why_unreachable + node.way_not_known for node in found} == {""}, "the listener is on one with GPUs, the other two reach it"
    assert [node.offered_gpus for node in found if node.is_drivers] == [0]
    assert all(node.object_store > 0 for node in found) and list(tmp_path.iterdir()) == []


def test_too_large_a_group_is_said_with_what_is_there(cluster: Cluster) -> None:
    """Five ranks of one tensor-parallel group have no node, though there are eight GPUs."""
    wanted = config("learner.tensor_parallel=5", "deadlines.start_s=1.5")
    with pytest.raises(DeadlineExceeded, match=r"room for 5 learner ranks: 1 x .*'GPU': 5.*the cluster has 8 GPUs, 8 of them free"):
        asyncio.run(reserve(wanted))
