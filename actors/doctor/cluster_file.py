"""A cluster file of `ray up` against a recipe: whether the nodes that it describes offer what the run asks Ray for.

Nothing is started. deploy/ has three such files: for a cloud, for a cloud's GPUs, and for hosts of one's own.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from actors.config import RunConfig
from actors.doctor.facts import Complaint
from actors.doctor.kernel_rules import half_precision_has_kernels, weights_stay_as_sent
from actors.doctor.memory_rules import NodeGpus, on_gpus_of_nodes
from actors.doctor.paper_rules import worst_first
from actors.doctor.room_rules import engines_and_room, room_for_groups
from actors.plan.gpus import ARCHITECTURES, MEMORY_MIB, gpu_of_instance
from actors.plan.shape import ModelShape
from actors.settings.devices import gpus_asked, held_by, most_workers_setting, workers_with_a_unit
from correction.errors import ConfigError, one_line

_START = re.compile(r"\bray start\b")


@dataclass(frozen=True, slots=True)
class NodeKind:
    """One type of node of a cluster file."""

    name: str
    most: int
    """Largest number of nodes of this type."""
    units: float
    """Units of the rollout resource on each."""
    gpus: float | None
    """GPUs of each node; None: the file doesn't say, and Ray counts them on the node."""
    gpu: str | None = None
    """The GPUs' name in plan/gpus.py, from the instance type or the resource accelerator_type:NAME; None: not known."""

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of one of them; None: not known."""
        return MEMORY_MIB[self.gpu] << 20 if self.gpu else None


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """What the file says of the cluster."""

    path: Path
    kinds: tuple[NodeKind, ...]
    """The head's node first."""
    most_nodes: int | None
    """Largest number of nodes in addition to the head, of all types; None: no bound."""
    starts: tuple[str, ...]
    """The commands that start Ray."""
    is_fixed: bool
    """The hosts are there already: Ray neither starts nor stops them."""

    @property
    def has_gpus(self) -> bool:
        return any(kind.gpus is None or kind.gpus > 0 for kind in self.kinds)

    @classmethod
    def read(cls, path: Path, resource: str) -> ClusterFile:
        """Read a cluster file. Args: resource: the Ray resource that rollout workers ask for. Raises: ConfigError if it is no cluster
        file."""
        try:
            content = yaml.safe_load(path.read_text())
            starts = {role: tuple(c for c in content[f"{role}_start_ray_commands"] if _START.search(c)) for role in ("head", "worker")}
            is_fixed = content["provider"]["type"] == "local"
            kinds = _hosts(content, starts, resource) if is_fixed else _types(content, resource)
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            reason = one_line(error, named=True)
            raise ConfigError(f"{path}: no cluster file of `ray up` ({reason}); deploy/ has three to begin with") from error
        return cls(path, kinds, content.get("max_workers"), starts["head"] + starts["worker"], is_fixed)


def _types(content: Mapping[str, Any], resource: str) -> tuple[NodeKind, ...]:
    """Types of nodes of a cloud's file, with their resources."""
    head, found = content["head_node_type"], []
    for name, kind in content["available_node_types"].items():
        offered = kind.get("resources", {})
        most = 1 if name == head else kind.get("max_workers", content.get("max_workers", 0))
        gpus = offered.get("GPU", None if not offered else 0.0)
        found.append(NodeKind(name, most, offered.get(resource, 0.0), gpus, None if gpus == 0 else _gpu_name(kind, offered)))
    return tuple(sorted(found, key=lambda kind: kind.name != head))


def _gpu_name(kind: Mapping[str, Any], offered: Mapping[str, Any]) -> str | None:
    config = kind.get("node_config") or {}
    if found := gpu_of_instance(str(config.get("InstanceType") or config.get("machineType") or "")):
        return found
    named = (name.partition(":")[2].upper() for name in offered if name.startswith("accelerator_type:"))
    return next((name for name in named if name in MEMORY_MIB and name != "A100"), None)  # Ray's A100 has 40 GB or 80


def _hosts(content: Mapping[str, Any], starts: Mapping[str, tuple[str, ...]], resource: str) -> tuple[NodeKind, ...]:
    """Hosts of one's own: what they offer is said where Ray is started on them."""
    count = len(content["provider"]["worker_ips"])
    count = min(count, content.get("max_workers", count))
    return tuple(NodeKind(f"{role} host", most, *_offered(starts[role], resource)) for role, most in (("head", 1), ("worker", count)))


def _offered(starts: tuple[str, ...], resource: str) -> tuple[float, float | None]:
    units, gpus = 0.0, None
    words = [word for start in starts for word in shlex.split(start)]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if name == "--resources":
            units = float(json.loads(value).get(resource, 0.0))
        elif name == "--num-gpus":
            gpus = float(value)
    return units, gpus


Rule = Callable[[ClusterFile, RunConfig], Iterator[Complaint]]


def file_offers_units_for_workers(cluster: ClusterFile, config: RunConfig) -> Iterator[Complaint]:
    resource, wanted = config.ray.rollout_resource, config.rollout.most_workers
    offered = [kind.units for kind in cluster.kinds for _ in range(kind.most)]
    placed = workers_with_a_unit(offered, wanted)
    asked = f"{most_workers_setting(config)}, each of which asks for one unit of the Ray resource {resource!r} (ray.rollout_resource)"
    if not placed:
        text = f"{asked}, and no node of {cluster.path} offers a whole one"
        yield Complaint("fail", text, f'Give a kind of node resources: {{"{resource}": N}}')
    elif placed < wanted:
        yield Complaint("warn", f"{asked}, and the nodes of {cluster.path} offer {placed} at most: the others wait", "Add nodes")


def units_have_their_gpus(cluster: ClusterFile, config: RunConfig) -> Iterator[Complaint]:
    if config.rollout.engine.resolved_device != "cuda":
        return
    for kind in cluster.kinds:
        if kind.gpus is not None and held_by(kind.gpus, config.rollout.gpus_of_a_worker) < int(kind.units):
            yield Complaint(
                "warn",
                f"{kind.name} offers {kind.units:g} units of {config.ray.rollout_resource!r} and {kind.gpus:g} GPUs, of which each worker "
                f"asks for {config.rollout.gpus_of_a_worker:g}: not all of these units can be used",
                "Offer as many as have a GPU",
            )


def largest_node_holds_an_engine(cluster: ClusterFile, config: RunConfig) -> Iterator[Complaint]:
    ranks = config.rollout.engine.tensor_parallel
    offering = [kind for kind in cluster.kinds if kind.units >= 1]
    if config.rollout.engine.resolved_device != "cuda" or not offering or any(kind.gpus is None for kind in offering):
        return
    if (most := max(kind.gpus or 0 for kind in offering)) < ranks:
        yield Complaint(
            "fail",
            f"rollout.engine.tensor_parallel = {ranks}, each engine on one node, and the nodes of {cluster.path} that offer "
            f"{config.ray.rollout_resource!r} have {most:g} GPUs at most",
            "Lower it, or take nodes with more GPUs",
        )


def file_offers_gpus_for_everybody(cluster: ClusterFile, config: RunConfig) -> Iterator[Complaint]:
    """Ranks get theirs first, on nodes with few units; a worker's GPUs are on a node that offers it a unit as well."""
    learner, rollout = config.learner, config.rollout
    if any(kind.gpus is None for kind in cluster.kinds):
        return
    ranks = learner.world_size if learner.resolved_device == "cuda" else 0
    workers = rollout.most_workers if rollout.engine.resolved_device == "cuda" else 0
    nodes = [(int(kind.gpus or 0), int(kind.units)) for kind in cluster.kinds for _ in range(kind.most)]
    groups = room_for_groups((gpus for gpus, _ in nodes), learner)
    if ranks and groups * learner.tensor_parallel < ranks:
        yield Complaint(
            "fail",
            f"the learner has {learner.world_size} ranks in tensor-parallel groups of {learner.tensor_parallel}, each on one node, and "
            f"{cluster.path} has room for {groups} groups",
            "Add nodes, or lower learner.tensor_parallel",
        )
    elif (wanted := gpus_asked(config, workers=workers)) > (there := sum(gpus for gpus, _ in nodes)):
        yield Complaint(
            "warn",
            f"{ranks} ranks and {workers} workers ask for {wanted} GPUs, and {cluster.path} has "
            f"{there} at most: workers wait",
            "Add nodes",
        )
    elif workers:
        ranks_each = rollout.engine.tensor_parallel
        several = f" of {ranks_each} GPUs" if ranks_each > 1 else ""
        asked, room = engines_and_room(nodes, workers, config)
        if room < asked:
            yield Complaint(
                "warn",
                f"{asked} workers have an engine{several}, each on one node; in addition "
                f"to the learner {cluster.path} has room for {room} of them: workers wait",
                "Add nodes, or lower rollout.engine.tensor_parallel" if several else "Add nodes",
            )


def bounds_of_all_nodes(cluster: ClusterFile, config: RunConfig) -> Iterator[Complaint]:
    together = sum(kind.most for kind in cluster.kinds[1:])
    if (most := cluster.most_nodes) is not None and most < together:
        yield Complaint(
            "warn",
            f"{cluster.path}: max_workers = {most} for all nodes but the head, and their kinds may have {together} together",
            f"Set max_workers: {together}",
        )


def hosts_stay(cluster: ClusterFile, config: RunConfig) -> Iterator[Complaint]:
    if cluster.is_fixed and config.rollout.is_elastic:
        yield Complaint(
            "note",
            f"{cluster.path} has hosts of your own, all of them from the beginning: a pool that grows or shrinks starts and frees none",
            f"rollout.workers: {config.rollout.most_workers} says the same",
        )


def token_on_all_nodes(cluster: ClusterFile, config: RunConfig) -> Iterator[Complaint]:
    open_ones = [start for start in cluster.starts if "RAY_AUTH_MODE=token" not in start]
    if open_ones and not config.ray.allow_unauthenticated:
        yield Complaint(
            "fail",
            f"{cluster.path}: Ray is started without a token by {open_ones[0]!r}, and a run refuses a cluster that lets everybody in",
            "Say RAY_AUTH_MODE=token before each `ray start`",
        )


RULES: tuple[Rule, ...] = (
    file_offers_units_for_workers,
    units_have_their_gpus,
    largest_node_holds_an_engine,
    file_offers_gpus_for_everybody,
    bounds_of_all_nodes,
    hosts_stay,
    token_on_all_nodes,
)


def cluster_complaints(cluster: ClusterFile, config: RunConfig, shape: ModelShape | None = None) -> list[Complaint]:
    """What a recipe asks for and the cluster doesn't have, the worst first; both names of resources and sizes.

    Args: shape: of the recipe's model, to judge the memory of GPUs that are known.
    """
    found = [complaint for rule in RULES for complaint in rule(cluster, config)]
    if shape is not None:
        known = [NodeGpus((kind.gpu_bytes,), kind.gpus, kind.units) for kind in cluster.kinds if kind.gpu_bytes is not None]
        found += on_gpus_of_nodes(shape, config, known)
        kinds = {kind: ARCHITECTURES[kind.gpu] for kind in cluster.kinds if kind.gpu}
        of_engines = {architecture for kind, architecture in kinds.items() if kind.units >= 1}
        found += half_precision_has_kernels(config, of_ranks=set(kinds.values()), of_engines=of_engines)
        found += weights_stay_as_sent(shape, config, of_engines)
    return worst_first(found)
