"""What `reserve` asks Ray for, and the ranks' places on nodes that are made up; with Ray's own nodes: test_placement.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.cluster import placement
from evenkeel.actors.cluster.placement import RankPlaces, kept_away, reserve, still_there
from evenkeel.actors.config import RunConfig
from evenkeel.correction.errors import ActorLost, DeadlineExceeded
from evenkeel.recipe import load_config

RECIPE = Path(__file__).parents[2] / "e2e" / "small.yaml"
NODE_OF_BUNDLE = {0: "node b", 1: "node a", 2: "node b", 3: "node a"}
ADDRESSES = {"node a": "10.0.0.2", "node b": "10.0.0.1"}
VISIBLE = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
GPUS_OF_BUNDLE = {0: ["GPU-c", "GPU-d"], 1: ["GPU-a", "GPU-b"], 2: ["GPU-b", "GPU-a"], 3: ["GPU-d", "GPU-c"]}


class RecordedGroup:
    """A placement group that is there at once, or never."""

    def __init__(self, bundles: list[dict[str, float]], how: dict[str, Any], is_ready: bool) -> None:
        self.bundles, self.how, self.bundle_count, self.is_ready = bundles, how, len(bundles), is_ready
        self.lost: set[int] = set()
        """Bundles that have lost their node, and wait for another one."""
        self.is_removed = False

    def wait(self, seconds: float) -> bool:
        if self.is_removed:
            raise Exception("Placement group PlacementGroupID(1) does not exist.")
        return self.is_ready


class RecordedLook:
    """A task that would look at the GPUs of the bundle in which it is put."""

    def __init__(self, asked: list[dict[str, Any]], bundle: int = -1) -> None:
        self._asked, self._bundle = asked, bundle

    def options(self, **options: Any) -> RecordedLook:
        self._asked.append(options)
        return RecordedLook(self._asked, options["scheduling_strategy"].placement_group_bundle_index)

    async def remote(self) -> list[int]:
        return placement.places_of(GPUS_OF_BUNDLE[self._bundle], VISIBLE)


class TwoNodes:
    """Ray's answers about two nodes of four GPUs, and what it was asked for."""

    def __init__(self) -> None:
        self.groups: list[RecordedGroup] = []
        self.removed: list[RecordedGroup] = []
        self.asked_before_removal: list[int] = []
        """Number of groups that had been asked for when one was removed."""
        self.dead: set[str] = set()
        self.is_unknown = False
        """Ray raises when it is asked for a group's bundles."""
        self.looks: list[dict[str, Any]] = []
        self.units = dict.fromkeys(ADDRESSES, 0.0)
        self.free_gpus = dict.fromkeys(ADDRESSES, 4.0)
        self.keeps_away = self.has_room = True
        """A group that is kept away from a node gets its places, and one that is not."""
        self.slept = 0
        self._private = SimpleNamespace(state=SimpleNamespace(available_resources_per_node=self.free))

    def free(self) -> dict[str, dict[str, float]]:
        return {node: {"GPU": gpus, "CPU": 5.0} for node, gpus in self.free_gpus.items()}

    async def sleep(self, seconds: float) -> None:
        """What a run that has ended had is free after a moment."""
        self.slept += 1
        self.free_gpus = dict.fromkeys(ADDRESSES, 4.0)

    def placement_group(self, bundles: list[dict[str, float]], **how: Any) -> RecordedGroup:
        self.groups.append(RecordedGroup(bundles, how, self.keeps_away if "bundle_label_selector" in how else self.has_room))
        return self.groups[-1]

    def remove_placement_group(self, group: RecordedGroup) -> None:
        if group.is_removed:
            raise Exception("Placement group PlacementGroupID(1) does not exist.")
        group.is_removed = True
        self.removed.append(group)
        self.asked_before_removal.append(len(self.groups))

    def placement_group_table(self, group: RecordedGroup) -> dict[str, Any]:
        if self.is_unknown:
            raise Exception("no such group")
        state = "REMOVED" if group.is_removed else "RESCHEDULING" if group.lost else "CREATED"
        nodes = {bundle: "" if bundle in group.lost else NODE_OF_BUNDLE[bundle] for bundle in range(group.bundle_count)}
        return {"state": state, "bundles_to_node_id": nodes}

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "NodeManagerAddress": address, "Alive": node not in self.dead,
             "Resources": {"GPU": 4.0, "CPU": 5.0, "rollout": self.units[node]}}
            for node, address in ADDRESSES.items()
        ]  # fmt: skip

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": 8.0, "CPU": 10.0}

    available_resources = cluster_resources

    def remote(self, function: Any) -> RecordedLook:
        return RecordedLook(self.looks)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> TwoNodes:
    found = TwoNodes()
    monkeypatch.setattr(placement, "ray", found)
    monkeypatch.setattr(placement, "placement_group", found.placement_group)
    monkeypatch.setattr(placement, "remove_placement_group", found.remove_placement_group)
    monkeypatch.setattr(placement, "placement_group_table", found.placement_group_table)
    monkeypatch.setattr(placement, "_SETTLE_S", 0.2)
    monkeypatch.setattr(placement, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": found.sleep}))
    return found


def reserved(*overrides: str) -> RankPlaces:
    return asyncio.run(reserve(load_config(RunConfig, RECIPE, ["learner.device=cuda", *overrides])))


def bundles_of_ranks(places: RankPlaces) -> list[int]:
    return [places.options(rank)["scheduling_strategy"].placement_group_bundle_index for rank in range(places.config.world_size)]


def test_a_tensor_parallel_group_is_one_bundle_and_all_are_one_group(cluster: TwoNodes) -> None:
    """A bundle lies on one node, whole, and its GPUs are the group's from then on: who asks later gets none of them."""
    places = reserved("learner.tensor_parallel=2", "learner.data_parallel=4")
    (group,) = cluster.groups
    assert group.bundles == [{"CPU": 2.0, "GPU": 2.0}] * 4 and group.how == {"strategy": "PACK"}
    for rank in range(8):
        options = places.options(rank)
        assert (options["num_cpus"], options["num_gpus"], options["max_restarts"]) == (1, 1, 0)
        assert options["scheduling_strategy"].placement_group is group
    assert [look["num_gpus"] for look in cluster.looks] == [2.0] * 4, "all GPUs of the bundle"


def test_ranks_are_in_the_order_of_nodes_and_gpus(cluster: TwoNodes) -> None:
    """Nodes by address, bundles of a node by the place of their first GPU there: node b comes first, and its bundle 2 has GPUs 0 and 1."""
    places = reserved("learner.tensor_parallel=2", "learner.data_parallel=4")
    assert bundles_of_ranks(places) == [2, 2, 0, 0, 1, 1, 3, 3]


def test_without_tensor_parallelism_each_rank_is_a_bundle(cluster: TwoNodes) -> None:
    places = reserved("learner.pipeline_parallel=2", "learner.data_parallel=2")
    assert cluster.groups[0].bundles == [{"CPU": 1.0, "GPU": 1.0}] * 4
    assert bundles_of_ranks(places) == [2, 0, 1, 3]


def test_a_share_of_a_gpu_and_a_rank_on_a_cpu(cluster: TwoNodes) -> None:
    """One bundle has no neighbours, and on a CPU there is no order of GPUs: nobody looks."""
    reserved("learner.gpus_per_rank=0.7")
    reserved("learner.device=cpu", "learner.data_parallel=2")
    assert [group.bundles for group in cluster.groups] == [[{"CPU": 1.0, "GPU": 0.7}], [{"CPU": 1.0}] * 2]
    assert cluster.looks == []


@pytest.mark.parametrize(
    ("nodes", "bundles", "away"),
    [
        ({"a": (8, 0), "b": (8, 8)}, 8, [("b",)] * 8),
        ({"a": (8, 8), "b": (8, 8)}, 8, [()] * 8),
        ({"head": (0, 0), "a": (4, 0), "b": (4, 0), "c": (8, 8)}, 8, [("c",)] * 8),
        ({"a": (4, 0), "b": (8, 8), "c": (8, 8)}, 6, [("b", "c")] * 4 + [("a",)] * 2),
        ({"a": (2, 0), "b": (2, 2), "c": (8, 8)}, 3, [("b", "c")] * 2 + [("a", "c")]),
        ({"a": (4, 0), "b": (4, 8)}, 9, None),
        ({}, 1, None),
    ],
)
def test_bundles_are_kept_away_from_nodes_with_more_rollout_workers(
    nodes: dict[str, tuple[int, int]], bundles: int, away: list[tuple[str, ...]] | None
) -> None:
    """Those for which nodes with fewer have room; the rest goes to the next nodes and leaves that room alone."""
    assert kept_away(nodes, bundles) == away


FOUR = ("learner.device=cuda", "learner.data_parallel=4")


def test_ray_is_told_where_bundles_should_not_be(cluster: TwoNodes) -> None:
    cluster.units["node b"] = 4.0
    reserved(*FOUR)
    (group,) = cluster.groups
    assert group.how == {"strategy": "PACK", "bundle_label_selector": [{"ray.io/node-id": "!in(node b)"}] * 4}


def kept_away_places(cluster: TwoNodes) -> tuple[RankPlaces, RecordedGroup, RunConfig]:
    cluster.units["node b"] = 4.0
    run = load_config(RunConfig, RECIPE, [*FOUR])
    places = asyncio.run(reserve(run))
    assert places.is_kept_away and asyncio.run(still_there(places, run)) is places
    return places, cluster.groups[0], run


def test_places_on_living_nodes_are_kept_however_slow_ray_is(cluster: TwoNodes) -> None:
    """A head that hangs answers no wait in time, and the group is as it was."""
    places, group, run = kept_away_places(cluster)
    group.is_ready = False
    assert asyncio.run(still_there(places, run)) is places and cluster.removed == [] and cluster.slept == 0


def test_bundles_for_which_ray_finds_another_node_keep_their_group(cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    places, group, run = kept_away_places(cluster)
    group.lost = {0, 2}

    async def found(seconds: float) -> None:
        group.lost = set()

    monkeypatch.setattr(placement.asyncio, "sleep", found)
    assert asyncio.run(still_there(places, run)) is places and cluster.removed == []


def test_a_new_group_is_asked_for_before_the_broken_one_leaves_its_gpus(cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or pending workers would take them. And what it still holds counts as room: two bundles on node a, where two GPUs are free."""
    places, group, run = kept_away_places(cluster)
    group.lost, free = {0, 2}, {"node a": {"GPU": 2.0, "CPU": 3.0}, "node b": {"GPU": 4.0, "CPU": 5.0}}
    monkeypatch.setattr(cluster._private.state, "available_resources_per_node", lambda: free)
    again = asyncio.run(still_there(places, run))
    assert cluster.removed == [group] and cluster.asked_before_removal == [2]
    assert again.group is cluster.groups[1] and again.is_kept_away
    assert cluster.groups[1].how["bundle_label_selector"] == [{"ray.io/node-id": "!in(node b)"}] * 4


@pytest.mark.parametrize("how", ["node is dead", "group is unknown"])
def test_places_that_are_gone_for_good_are_replaced(cluster: TwoNodes, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places, group, run = kept_away_places(cluster)
    cluster.dead, cluster.is_unknown = ({"node b"}, False) if how == "node is dead" else (set(), True)
    ask = cluster.placement_group

    def known_again(bundles: list[dict[str, float]], **how: Any) -> RecordedGroup:
        cluster.is_unknown = False
        return ask(bundles, **how)

    monkeypatch.setattr(placement, "placement_group", known_again)
    again = asyncio.run(still_there(places, run))
    assert cluster.removed == [group] and again.group is cluster.groups[1]


def test_a_cancelled_reservation_holds_nothing_and_can_be_repeated(cluster: TwoNodes) -> None:
    """The caller still has the old places then, whose group is removed: it is asked, and removed, a second time."""
    places, group, run = kept_away_places(cluster)
    group.lost, cluster.keeps_away, cluster.has_room = {0, 2}, False, False

    async def cancelled() -> None:
        working = asyncio.ensure_future(still_there(places, run))
        while len(cluster.groups) < 3:
            await asyncio.sleep(0.01)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

    asyncio.run(cancelled())
    assert len(cluster.groups) == 3 and set(cluster.removed) == set(cluster.groups)
    cluster.keeps_away = True
    again = asyncio.run(still_there(places, run))
    assert again.group is cluster.groups[3] and not cluster.groups[3].is_removed


def test_a_group_is_given_up_when_it_comes_too_late_or_its_gpus_cannot_be_asked_for(
    cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.has_room = False
    with pytest.raises(DeadlineExceeded, match="room for 4 learner ranks"):
        reserved(*FOUR, "deadlines.start_s=0.2")
    cluster.has_room = True

    async def no_answer(*_: Any) -> dict[int, int]:
        raise ActorLost("GPUs of bundle 0 <- Ray")

    monkeypatch.setattr(placement, "_first_gpus", no_answer)
    with pytest.raises(ActorLost):
        reserved(*FOUR)
    assert len(cluster.groups) == 2 and cluster.removed == cluster.groups


def test_what_waits_there_all_the_same_is_left_to_ray(cluster: TwoNodes) -> None:
    """Another run was quicker, or the node leaves: a place next to rollout workers is better than none."""
    cluster.units["node b"], cluster.keeps_away = 4.0, False
    places = reserved("learner.data_parallel=4")
    first, second = cluster.groups
    assert cluster.removed == [first] and second.how == {"strategy": "PACK"} and places.group is second
    run = load_config(RunConfig, RECIPE, ["learner.device=cuda"])
    second.is_ready = False
    assert asyncio.run(still_there(places, run)) is places, "Ray looks for another place by itself"


def test_what_is_free_in_a_moment_is_waited_for(cluster: TwoNodes) -> None:
    cluster.units["node b"], cluster.free_gpus = 4.0, {"node a": 0.0, "node b": 1.0}
    reserved("learner.data_parallel=4")
    assert cluster.slept == 1 and "bundle_label_selector" in cluster.groups[0].how
    cluster.slept = 0
    reserved("learner.tensor_parallel=5")
    assert cluster.slept == 0 and cluster.groups[1].how == {"strategy": "PACK"}, "nodes that are to come may have room"
