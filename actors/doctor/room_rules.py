"""Rules of the second layer about what the run asks Ray for: whether the nodes have it, and where.

Each rule is a function of (nodes, config) that yields complaints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from actors.config import RunConfig
from actors.doctor.facts import Complaint, Nodes
from actors.doctor.free_memory_rules import is_held
from actors.doctor.paper_rules import fewer_gpus
from actors.settings.devices import gpus_asked, held_by, room_for_engines, workers_with_a_unit
from correction.errors import counted
from learner.config import LearnerConfig


@dataclass(frozen=True, slots=True)
class Request:
    """One kind of resource: how much the run asks for, how much there is, how much of it is free."""

    kind: str
    asked: float
    there: float
    free: float
    parts: str
    """Which parts of the run ask for it."""

    def __str__(self) -> str:
        return f"{self.kind}s: {self.asked:g} asked ({self.parts}), {self.there:g} there, {self.free:g} free"


def gpus_for_everybody(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    if not gpus_asked(config):
        return
    fewer, is_joined = fewer_gpus(config), config.ray.address is not None
    if not is_joined and not sum(node.offered_gpus for node in nodes):
        remedy = "Start it on a machine with GPUs that torch sees, or set rollout.engine.device and learner.device to cpu"
    else:
        more = "add nodes" if is_joined else "take a machine with more"
        remedy = f"{fewer}; or {more}" if fewer else more.capitalize()
    yield from _for_everybody("GPU", nodes, config, remedy)


def cpus_for_everybody(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    """Ray must have the CPUs that actors ask it for: a rank one, a worker one for each rank of its engine, whatever they compute with.
    Without ray.num_cpus a private Ray has as many as the run asks for."""
    remedy = "Lower rollout.workers, add nodes, or start them with more (ray start --num-cpus)"
    if config.ray.address is None:
        remedy = "Raise ray.num_cpus, or set it to null"
    yield from _for_everybody("CPU", nodes, config, remedy)


def _for_everybody(kind: str, nodes: Nodes, config: RunConfig, remedy: str) -> Iterator[Complaint]:
    """Ray must have, and have free, what the run asks for of this resource. On a joined cluster, which may grow, a lack is a warning. On
    this machine alone only memory of GPUs can be held by others (free_memory_rules.py)."""
    (row,) = [one for one in requests(nodes, config) if one.kind == kind]
    may_grow = config.ray.address is not None
    if row.asked > row.there:
        wait = f"; ranks wait for nodes up to deadlines.start_s = {config.deadlines.start_s:g} s, workers as long as the run lasts"
        yield Complaint(
            "warn" if may_grow else "fail",
            f"the run asks for {counted(int(row.asked), kind)}, and Ray has {row.there:g}: {row.parts}{wait if may_grow else ''}",
            remedy,
        )
    elif row.asked > row.free and may_grow:
        yield Complaint(
            "warn",
            f"the run asks for {counted(int(row.asked), kind)}, of {row.there:g} only {row.free:g} are free: others have the rest",
            f"Wait for it. {remedy}",
        )


def tensor_parallel_groups_inside_nodes(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    learner = config.learner
    if learner.resolved_device != "cuda" or learner.tensor_parallel == 1:
        return
    wanted = learner.world_size // learner.tensor_parallel
    what = f"the learner has {wanted} tensor-parallel groups of {learner.tensor_parallel} ranks, each on one node"
    room = room_for_groups((node.offered_gpus for node in nodes), learner)
    yield from _inside_nodes(nodes, config, wanted, room, what, "Lower learner.tensor_parallel, or add nodes")


def engines_inside_nodes(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    """The nodes must have room for the engines beside the learner. Where GPUs are too few in all, gpus_for_everybody says so
    instead."""
    ranks = config.rollout.engine.tensor_parallel
    is_short = gpus_asked(config) > sum(node.offered_gpus for node in nodes)
    if config.rollout.engine.resolved_device != "cuda" or is_short:
        return
    wanted, room = engines_and_room([(int(node.offered_gpus), int(node.rollout_units)) for node in nodes], config.rollout.workers, config)
    if ranks == 1:
        what = f"{counted(wanted, 'engine')} in addition to the learner, each on a node with a unit of {config.ray.rollout_resource!r}"
        remedy = "Lower rollout.workers, or add nodes, or let nodes with more GPUs offer it"
    else:
        what = f"{counted(wanted, 'engine')} of {ranks} GPUs each (rollout.engine.tensor_parallel) in addition to the learner"
        what += ", each on one node"
        remedy = "Lower rollout.engine.tensor_parallel or rollout.workers, or add nodes"
    yield from _inside_nodes(nodes, config, wanted, room, what, remedy)


def _inside_nodes(nodes: Nodes, config: RunConfig, wanted: int, room: int, what: str, remedy: str) -> Iterator[Complaint]:
    """Args: wanted: number of groups or engines, each on one node. room: for so many."""
    if room < wanted:
        yield Complaint(
            "warn" if config.ray.address is not None else "fail",
            f"{what}, and there is room for {room}: GPUs by node are {[int(node.offered_gpus) for node in nodes]}",
            remedy,
        )


def room_for_groups(gpus: Iterable[float], learner: LearnerConfig) -> int:
    """Number of the learner's tensor-parallel groups, each on one node, for which nodes with so many GPUs have room."""
    return sum(held_by(count, learner.gpus_per_rank * learner.tensor_parallel) for count in gpus)


def engines_and_room(nodes: Sequence[tuple[int, int]], workers: int, config: RunConfig) -> tuple[int, int]:
    """Number of engines that need room, and for how many there is room in addition to the learner.

    Engines of one GPU are counted up to the units that there are: missing units have a rule of their own.
    Args: nodes: GPUs and units of the rollout resource of each. workers: that the run wants.
    """
    if config.rollout.engine.tensor_parallel == 1:
        workers = workers_with_a_unit([units for _, units in nodes], workers)
    return workers, room_for_engines(nodes, config)


def units_for_all_workers(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    if config.ray.address is None:
        return
    wanted = config.rollout.workers
    placed = workers_with_a_unit([node.rollout_units for node in nodes], wanted)
    if placed < wanted:
        there = f"the nodes offer {counted(placed, 'whole unit')}" if placed else "no node offers a whole unit"
        yield Complaint(
            "warn",
            f"{counted(wanted, 'rollout worker')}, each of which asks for one unit of the Ray resource {config.ray.rollout_resource!r}, "
            f"and {there} by now: the {'others' if placed else 'workers'} wait for nodes that do",
            f"Start nodes with --resources='{{\"{config.ray.rollout_resource}\": N}}'",
        )
    elif (free := workers_with_a_unit([node.rollout_units - node.held_units for node in nodes], wanted)) < wanted:
        yield Complaint(
            "warn",
            f"{counted(wanted, 'rollout worker')}, each of which asks for one unit of the Ray resource {config.ray.rollout_resource!r}, "
            f"and {free} are free: another run has the others",
            "Wait for it, or lower rollout.workers (rollout.min_workers)",
        )


def requests(nodes: Nodes, config: RunConfig) -> list[Request]:
    """For each kind of resource: what the run asks of Ray, what the nodes have, and what of that is free. To a Ray of the run's own all
    GPUs are free; those of which other processes hold much aren't."""
    rollout, learner = config.rollout, config.learner
    ranks, workers = counted(learner.world_size, "rank"), counted(rollout.workers, "worker")
    of_ranks = [f"{ranks} x {learner.gpus_per_rank:g}"] if learner.resolved_device == "cuda" else []
    of_workers = [f"{workers} x {rollout.gpus_of_a_worker:g}"] if rollout.engine.resolved_device == "cuda" else []
    cpus, free = sum(node.cpus for node in nodes), sum(node.free_cpus for node in nodes)
    processes = learner.world_size + rollout.workers * rollout.engine.tensor_parallel
    parts = f"{ranks}, {workers}" + (" (as Ray counts, not cores)" if config.ray.address is None else "")
    rows = [Request("CPU", processes, cpus, free, parts)]
    gpus, free = sum(node.offered_gpus for node in nodes), sum(node.free_gpus for node in nodes)
    if config.ray.address is None:
        free = max(0.0, free - sum(is_held(gpu) for node in nodes for gpu in node.gpus))
    if of_ranks or of_workers or gpus:
        rows.insert(0, Request("GPU", gpus_asked(config), gpus, free, ", ".join(of_ranks + of_workers) or "nobody"))
    if config.ray.address is not None:
        units = sum(node.rollout_units for node in nodes)
        rows.append(Request(config.ray.rollout_resource, rollout.workers, units, units - sum(n.held_units for n in nodes), workers))
    return rows
