"""Places of the learner's ranks: together, before anything else may take their GPUs, and in the order of nodes and GPUs.

Ray places each actor by itself unless a placement group holds its resources. A bundle of the group lies on one node; the ranks of a
tensor-parallel group, which talk in every layer, share one. Ray packs bundles into the emptiest nodes, whatever else these offer, and a
rollout worker can't go anywhere but to a node with a unit of the rollout resource: bundles are kept away from those nodes where others have
room for them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import ray
from ray.util.placement_group import NODE_ID_LABEL_KEY, PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from evenkeel.actors.cluster.hub import model_folder
from evenkeel.actors.config import DeadlinesConfig, HubName, RunConfig
from evenkeel.actors.processes.supervision import USUAL_START, wait_for
from evenkeel.actors.settings.devices import held_by
from evenkeel.actors.settings.environment import learner_environment
from evenkeel.learner.config import LearnerConfig

log = logging.getLogger("evenkeel")
T = TypeVar("T")
_POLL_S = 1.0
_LOOK_S = 60.0
# Seconds that each of three waits may take: until Ray reports the GPUs of a run that has just ended as free; until a group that is kept
# away from nodes counts as without places, though there seemed to be room; and until Ray has found another node for bundles of a lost one.
_SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """What each rank asks of Ray."""

    config: LearnerConfig
    environment: Mapping[str, str]
    group: PlacementGroup | None = None
    """None: each rank wherever there is room."""
    order: Sequence[int] = ()
    """Bundles sorted by node and GPU; the first one holds the ranks of the first tensor-parallel group."""
    is_kept_away: bool = False
    """Whether the group's bundles are kept away from some nodes."""

    def options(self, rank: int) -> dict[str, Any]:
        """Ray options of the rank's actor."""
        asked: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": _gpus(self.config),
            "max_restarts": 0,
            "runtime_env": {"env_vars": dict(self.environment)},
        }
        if self.group is not None:
            bundle = self.order[rank // self.config.tensor_parallel]
            asked["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        return asked


async def reserve(run: RunConfig, *, instead_of: PlacementGroup | None = None) -> RankPlaces:
    """Hold the resources of all ranks; an autoscaler has deadlines.start_s to add nodes for them.

    Args: instead_of: a group that is removed as soon as the new one is asked for. What it holds counts as free.
    Raises: DeadlineExceeded that says what was asked for and what was there. After an error, or if cancelled, nothing new is held.
    """
    config, deadlines, bundle = run.learner, run.deadlines, _bundle(run.learner)
    bundles = [bundle] * (config.world_size // config.tensor_parallel)
    offer = await asyncio.to_thread(_offer)
    what = f"room for {config.world_size} learner ranks: {len(bundles)} x {bundle}; the cluster {offer}"
    usual_s = USUAL_START * deadlines.start_s
    asked: list[PlacementGroup] = []
    try:
        making = _made(bundles, run, asked, instead_of)
        group, is_kept_away = await wait_for(making, what, deadline_s=deadlines.start_s, notice_s=deadlines.notice_s, usual_s=usual_s)
        nodes: dict[int, str] = (await asyncio.to_thread(placement_group_table, group))["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in await asyncio.to_thread(ray.nodes)}
        first_gpus = await _first_gpus(config, group) if bundle.get("GPU") and len(bundles) > 1 else {}
    except BaseException:
        for one in asked:  # not awaited: the control service may hang, and this error has to go on
            asyncio.get_running_loop().run_in_executor(None, _remove, one)
        raise
    return RankPlaces(config, learner_environment(run), group, in_order(nodes, addresses, first_gpus), is_kept_away)


async def still_there(places: RankPlaces, run: RunConfig) -> RankPlaces:
    """The same places, or new ones if a node of theirs is gone whose bundles Ray may not put where there is room now.

    Waits while Ray's control service does not answer: the places are most likely there.
    Raises: as `reserve`.
    """
    if places.group is None or not places.is_kept_away:
        return places
    deadlines, what = run.deadlines, "places of the learner ranks <- Ray"
    if not await wait_for(_is_broken(places), what, deadline_s=deadlines.start_s, notice_s=deadlines.notice_s):
        return places
    return await reserve(run, instead_of=places.group)


async def on_their_nodes(
    places: RankPlaces, function: Callable[..., T], *arguments: Any, what: str, limits: DeadlinesConfig, bundles: int | None = None
) -> list[T]:
    """Call a function once for each bundle, on its node, while the ranks run. Returns: what it returned, by bundle.

    Args:
        what: that the nodes do, for messages.
        bundles: only the first so many of them.
    Raises: what it raises; DeadlineExceeded past deadlines.start_s.
    """
    assert places.group is not None
    task: Any = ray.remote(function)
    asked = [
        task.options(
            num_cpus=0,
            max_retries=0,
            runtime_env={"env_vars": dict(places.environment)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(places.group, placement_group_bundle_index=bundle),
        ).remote(*arguments)
        for bundle in range(bundles or places.group.bundle_count)
    ]
    limit_s, notice_s = limits.start_s, limits.notice_s
    waits = [
        wait_for(one, f"{what} -> the node of bundle {i}", deadline_s=limit_s, notice_s=notice_s, usual_s=USUAL_START * limit_s)
        for i, one in enumerate(asked)
    ]
    return list(await asyncio.gather(*waits))


async def fetch_where_ranks_are(model: Path, places: RankPlaces, limits: DeadlinesConfig) -> None:
    """Download a model of the hub on every node that has a learner rank, before the ranks start: a late rank would let the others wait.

    Does nothing for a folder. A node that has the model in its cache downloads nothing; of several tasks on one node only one downloads.
    Raises: DataError as model_folder; DeadlineExceeded past deadlines.start_s.
    """
    if HubName.of(model) is not None and places.group is not None:
        await on_their_nodes(places, model_folder, model, what=str(model), limits=limits)


def in_order(nodes: Mapping[int, str], addresses: Mapping[str, str], first_gpus: Mapping[int, int]) -> tuple[int, ...]:
    """Bundles in an order in which neighbours are on one node, and there on neighbouring GPUs.

    Args:
        nodes: by bundle, the node's id.
        addresses: by id.
        first_gpus: by bundle, the place of the first of its GPUs on their node.
    """
    return tuple(sorted(nodes, key=lambda bundle: (addresses.get(nodes[bundle], ""), nodes[bundle], first_gpus.get(bundle, 0), bundle)))


def _bundle(config: LearnerConfig) -> dict[str, float]:
    """Resources of a tensor-parallel group."""
    gpus = config.tensor_parallel * _gpus(config)
    return {"CPU": float(config.tensor_parallel)} | ({"GPU": gpus} if gpus else {})


def _gpus(config: LearnerConfig) -> float:
    return config.gpus_per_rank if config.resolved_device == "cuda" else 0


def _offer() -> str:
    there, free = ray.cluster_resources(), ray.available_resources()  # type: ignore[no-untyped-call]
    resources = [f"{there.get(kind, 0):g} {kind}s, {free.get(kind, 0):g} of them free" for kind in ("GPU", "CPU")]
    return "has " + ", and ".join(resources)


async def _is_broken(places: RankPlaces) -> bool:
    """Whether bundles have no node, and still have none after a while in which Ray could have found another one."""
    until = math.inf
    while sum((await asyncio.to_thread(_held, places.group)).values()) < len(places.order):
        if time.monotonic() >= until:
            return True
        until = min(until, time.monotonic() + _SETTLE_S)
        await asyncio.sleep(_POLL_S)
    return False


def _held(group: PlacementGroup | None) -> Counter[str]:
    """Number of the group's bundles on each node that is alive. Empty if the group is removed, or if Ray doesn't know it."""
    try:
        told = placement_group_table(group) if group is not None else {}
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    except Exception as error:  # Ray raises the builtin one
        log.debug("placement group: %s", error)
        return Counter()
    nodes = told["bundles_to_node_id"].values() if told.get("state", "REMOVED") != "REMOVED" else ()
    return Counter(node for node in nodes if node in alive)


async def _made(
    bundles: list[dict[str, float]], run: RunConfig, asked: list[PlacementGroup], instead_of: PlacementGroup | None
) -> tuple[PlacementGroup, bool]:
    """The group, when all of its bundles have their places, and whether they are kept away from nodes.

    They are not kept away if there is room only on nodes that are to come. Nor are they if such a group gets no places in time: somebody
    else was quicker, or a node is leaving.
    Args:
        asked: takes each group that is asked for, at once.
        instead_of: as for `reserve`.
    """
    until = time.monotonic() + _SETTLE_S
    look = partial(_kept_away, run, len(bundles), held=await asyncio.to_thread(_held, instead_of))
    away = await asyncio.to_thread(look, "free")
    while away is None and time.monotonic() < until and await asyncio.to_thread(look, "there") is not None:
        await asyncio.sleep(_POLL_S)
        away = await asyncio.to_thread(look, "free")
    before = instead_of
    if away is not None and any(away):
        before = await _ask(bundles, asked, before, bundle_label_selector=[_not_on(nodes) for nodes in away])
        if await _is_ready(before, within_s=_SETTLE_S):
            return before, True
    group = await _ask(bundles, asked, before)
    await _is_ready(group)
    return group, False


async def _ask(bundles: list[dict[str, float]], asked: list[PlacementGroup], before: PlacementGroup | None, **how: Any) -> PlacementGroup:
    """A new group, which waits for its places. `before` is removed only then: it finds the new group in line for what it has held."""
    # Not in a thread: if this is cancelled, nobody would know the group that it makes.
    group: PlacementGroup = placement_group(bundles, strategy="PACK", **how)
    asked.append(group)
    if before is not None:
        await asyncio.to_thread(_remove, before)
    return group


def _remove(group: PlacementGroup) -> None:
    """Give up a group, which may be removed already."""
    try:
        remove_placement_group(group)
    except Exception as error:  # none is what was wanted
        log.debug("placement group: %s", error)


async def _is_ready(group: PlacementGroup, *, within_s: float = math.inf) -> bool:
    until = time.monotonic() + within_s
    while not (ready := await asyncio.to_thread(group.wait, _POLL_S)) and time.monotonic() < until:
        pass
    return bool(ready)


def _kept_away(run: RunConfig, bundles: int, of: Literal["free", "there"], held: Mapping[str, int]) -> list[tuple[str, ...]] | None:
    """Nodes as of `kept_away`, by what is free on them now, or by all that is there.

    Args: held: by node, bundles of the group that is to be removed. They count as free.
    """
    found: dict[str, tuple[int, int]] = {}
    free: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            name, offered = node["NodeID"], node["Resources"]
            room = _room(run.learner, free.get(name, {})) + held.get(name, 0) if of == "free" else _room(run.learner, offered)
            found[name] = room, int(offered.get(run.ray.rollout_resource, 0.0))
    return kept_away(found, bundles)


def kept_away(nodes: Mapping[str, tuple[int, int]], bundles: int) -> list[tuple[str, ...]] | None:
    """Nodes where each bundle should not be, so that all bundles are on nodes with the fewest rollout workers.

    A node that comes later is open to all of them: also when one of these is lost.
    Args: nodes: by id, how many of the bundles it has room for, and how many rollout workers it takes.
    Returns: None: the nodes have no room for all.
    """
    for most in sorted({takes for _, takes in nodes.values()}):
        before = sum(room for room, takes in nodes.values() if takes < most)
        here = sum(room for room, takes in nodes.values() if takes == most)
        if before + here >= bundles:
            # Two sets of nodes that don't overlap: Ray fills one node after the other, and would give room of the first to any bundle.
            first = tuple(sorted(node for node, (_, takes) in nodes.items() if takes >= most))
            others = tuple(sorted(node for node, (_, takes) in nodes.items() if takes != most))
            return [first] * before + [others] * (bundles - before)
    return None


def _room(config: LearnerConfig, resources: Mapping[str, float]) -> int:
    """Bundles that a node with these resources has room for."""
    ranks = int(resources.get("CPU", 0.0))
    if _gpus(config):
        ranks = min(ranks, held_by(resources.get("GPU", 0.0), _gpus(config)))
    return ranks // config.tensor_parallel


def _not_on(nodes: Sequence[str]) -> dict[str, str]:
    """Ray's label selector."""
    return {NODE_ID_LABEL_KEY: f"!in({','.join(nodes)})"} if nodes else {}


async def _first_gpus(config: LearnerConfig, group: PlacementGroup) -> dict[int, int]:
    """The place on its node of the first GPU that Ray has given a bundle, by bundle."""
    look = ray.remote(_given_places)
    asked = [
        look.options(
            num_cpus=0,
            num_gpus=config.tensor_parallel * _gpus(config),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote()
        for bundle in range(group.bundle_count)
    ]
    found = await asyncio.gather(*(wait_for(one, f"GPUs of bundle {i} <- Ray", deadline_s=_LOOK_S) for i, one in enumerate(asked)))
    return {bundle: min(places) for bundle, places in enumerate(found)}


def places_of(given: Sequence[int | str], visible: Sequence[str] | None) -> list[int]:
    """Place of each GPU on its node.

    Args:
        given: as ray.get_gpu_ids() has them: numbers, or words of the CUDA_VISIBLE_DEVICES with which the node was started (also UUIDs).
        visible: those words, in their order; None: the node was started without.
    """
    return [list(visible).index(str(gpu)) if visible else int(gpu) for gpu in given]


def _given_places() -> list[int]:
    """Place on its node of each GPU that Ray gave this task, whose own CUDA_VISIBLE_DEVICES has no others."""
    return places_of(list(ray.get_gpu_ids()), ray._private.worker.global_worker.original_visible_accelerator_ids.get("GPU"))
