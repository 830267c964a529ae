"""Where the learner's ranks are put: together, before anything else may take their GPUs, and in the order of nodes and GPUs.

Ray places each actor by itself unless a placement group holds its resources. A bundle of the group lies on one node; the ranks of a
tensor-parallel group, which talk in every layer, share one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster.hub import model_folder
from actors.config import DeadlinesConfig, RunConfig
from actors.processes.supervision import USUAL_START, wait_for
from actors.settings.environment import learner_environment
from actors.settings.hub_name import HubName
from learner.config import LearnerConfig

T = TypeVar("T")
_POLL_S = 1.0
_LOOK_S = 60.0


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """What each rank asks of Ray."""

    config: LearnerConfig
    environment: Mapping[str, str]
    group: PlacementGroup | None = None
    """None: each rank wherever there is room."""
    order: Sequence[int] = ()
    """Bundles sorted by node and GPU; the first one holds the ranks of the first tensor-parallel group."""

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


async def reserve(run: RunConfig) -> RankPlaces:
    """Hold the resources of all ranks; an autoscaler has deadlines.start_s to add nodes for them.

    Raises: DeadlineExceeded that says what was asked for and what was there.
    """
    config, deadlines, bundle = run.learner, run.deadlines, _bundle(run.learner)
    group = placement_group([bundle] * (config.world_size // config.tensor_parallel), strategy="PACK")
    what = f"room for {config.world_size} learner ranks: {group.bundle_count} x {bundle}; the cluster {_offer()}"
    usual_s = USUAL_START * deadlines.start_s
    await wait_for(_until_ready(group), what, deadline_s=deadlines.start_s, notice_s=deadlines.notice_s, usual_s=usual_s)
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    first_gpus = await _first_gpus(config, group) if bundle.get("GPU") and group.bundle_count > 1 else {}
    return RankPlaces(config, learner_environment(run), group, in_order(nodes, addresses, first_gpus))


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


async def _until_ready(group: PlacementGroup) -> None:
    while not await asyncio.to_thread(group.wait, _POLL_S):
        pass


async def _first_gpus(config: LearnerConfig, group: PlacementGroup) -> dict[int, int]:
    """By bundle, the place on its node of the first GPU that Ray has given it."""
    look = ray.remote(_given_gpus)
    asked = [
        look.options(
            num_cpus=0,
            num_gpus=config.tensor_parallel * _gpus(config),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote()
        for bundle in range(group.bundle_count)
    ]
    found = await asyncio.gather(*(wait_for(one, f"GPUs of bundle {i} <- Ray", deadline_s=_LOOK_S) for i, one in enumerate(asked)))
    return {bundle: min(places_of(given, visible)) for bundle, (given, visible) in enumerate(found)}


def places_of(given: Sequence[int | str], visible: Sequence[str] | None) -> list[int]:
    """Place of each GPU on its node.

    Args:
        given: as ray.get_gpu_ids() has them: numbers, or words of the CUDA_VISIBLE_DEVICES with which the node was started (also UUIDs).
        visible: those words, in their order; None: the node was started without.
    """
    return [list(visible).index(str(gpu)) if visible else int(gpu) for gpu in given]


def _given_gpus() -> tuple[list[int | str], Sequence[str] | None]:
    """The arguments of `places_of`. To be called in a Ray task, whose own CUDA_VISIBLE_DEVICES has only the GPUs that it was given."""
    return list(ray.get_gpu_ids()), ray._private.worker.global_worker.original_visible_accelerator_ids.get("GPU")
