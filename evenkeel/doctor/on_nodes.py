"""Rules of the second layer: whether the nodes have what the run asks Ray for and what the recipe needs, reach each other, and agree where
they have to.

Each rule is a function of (nodes, config) that yields complaints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from evenkeel.actors.config import HubName, RunConfig
from evenkeel.actors.settings.devices import gpus_asked, held_by, room_for_engines, workers_with_a_unit
from evenkeel.correction.errors import ConfigError, counted
from evenkeel.doctor.facts import COMPILERS, Complaint, NodeFacts, Nodes
from evenkeel.doctor.memory_rules import NodeGpus, could_be_given, gib, gpus_have_room, is_held, on_gpus_of_nodes
from evenkeel.doctor.on_paper import LESS, architecture_of, fewer_gpus, half_precision_has_kernels, weights_stay_as_sent, worst_first
from evenkeel.doctor.surroundings import surroundings_let_it_work
from evenkeel.learner.config import LearnerConfig
from evenkeel.plan.hosts import (
    ANSWERS,
    FETCHED,
    WIDE,
    HostMemory,
    largest_bucket,
    largest_tensor,
    of_driver,
    of_engines,
    of_learner,
    shared_bucket_bytes,
)
from evenkeel.plan.shape import ModelShape
from evenkeel.rollout.engine_settings.engine_capabilities import EngineCapabilities


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
    this machine alone only memory of GPUs can be held by others (memory_rules.py)."""
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
    """What the run asks of Ray of each kind of resource, what the nodes have, and what of that is free. To a Ray of the run's own all
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


def nodes_answer(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    """Nodes should answer. A node that is late may be reading its packages from a slow disk for the first time, and be usable later."""
    for node in nodes:
        if node.silence:
            yield Complaint(
                "fail" if node.has_failed else "warn",
                f"{node.name} doesn't answer a small task ({node.silence}): nothing is known of its packages, folders, memory and ports",
                "Install evenkeel there, with the same Python" if node.has_failed else "Ask again; if it stays silent, start it anew",
            )


def ports_are_open(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    """Rank 0 listens on ports that the system gives it: for the other ranks, and for a weight group."""
    network = _talks_over_the_network(nodes, config)
    for node in nodes:
        if node.why_unreachable:
            needed = network and _may_hold_a_rank_or_an_engine(node, config)
            unless = "It has no room for ranks or engines, which" if network else "A learner on several nodes, or a broadcast,"
            yield Complaint(
                "fail" if needed else "warn",
                f"{node.name} can't reach a free port of a node where the learner's rank 0 may be: {node.why_unreachable}. "
                + ("Ranks and weight groups meet at such ports" if needed else f"{unless} would need it"),
                "Open all TCP ports between the nodes (security group, firewall)",
            )
        elif node.way_not_known:
            yield Complaint(
                "warn",
                f"it isn't known whether {node.name} can reach a free port of a node where learner rank 0 may be: {node.way_not_known}",
                "Ask again; or see that all TCP ports between the nodes are open (security group, firewall)",
            )


def _may_hold_a_rank_or_an_engine(node: NodeFacts, config: RunConfig) -> bool:
    sides = {config.learner.resolved_device, config.rollout.engine.resolved_device}
    return node.offered_gpus > 0 or ("cpu" in sides and node.cpus > 0)


def _talks_over_the_network(nodes: Nodes, config: RunConfig) -> bool:
    """The run has a group of torch.distributed with members on several nodes, or may have."""
    if len(nodes) < 2:
        return False
    learner = config.learner
    on_gpus = learner.resolved_device == "cuda"
    largest = max((node.offered_gpus if on_gpus else node.cpus) for node in nodes)
    return config.weight_sync.transport == "broadcast" or learner.world_size * (learner.gpus_per_rank if on_gpus else 1) > largest


def engines_have_their_sglang(nodes: Sequence[NodeFacts], config: RunConfig) -> Iterator[Complaint]:
    """Every node that may hold an engine must have the SGLang version that evenkeel hooks into, and evenkeel's plugin for it. The engine
    itself refuses the same, but only after the run has begun, once in each attempt to start it. Kernels for GPUs are checked in
    on_paper.py."""
    device = config.rollout.engine.resolved_device
    may_hold_engines = [node for node in nodes if not node.silence and node.rollout_units >= 1 and (device == "cpu" or node.offered_gpus)]
    refused: dict[tuple[str, str], list[str]] = {}
    for node in may_hold_engines:
        versions = {name: node.versions.get(name, "") for name in ("sglang", "torch", "transformers")}
        try:
            EngineCapabilities(device, **versions, has_plugin=node.has_plugin, has_gpu_kernels=True).require()
        except ConfigError as error:
            refused.setdefault((error.reason, error.remedy), []).append(node.name)
    for (reason, remedy), names in refused.items():
        yield Complaint("fail", f"{', '.join(names)}: {reason}", remedy)


NodeRule = Callable[[Nodes, RunConfig], Iterator[Complaint]]

FEWEST_OPEN_FILES = 4096
"""Fewest files that a process should be allowed to open: Ray's processes and sockets need more than the usual 1,024."""


def torch_sees_the_gpus(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    for node in nodes:
        if node.driver_gpus and not node.has_cuda:
            yield Complaint(
                "fail" if _uses_gpus(config) else "warn",
                f"{node.name} has {counted(node.driver_gpus, 'GPU')}, but its torch is a build without CUDA",
                "To use them, install what constraints-gpu.txt has (docs/gpu.md); for the CPU alone nothing is wrong",
            )
        elif _uses_gpus(config) and node.offered_gpus > len(node.gpus) > 0:
            yield Complaint(
                "fail",
                f"{node.name} offers Ray {node.offered_gpus:g} GPUs, but torch sees {len(node.gpus)} there",
                "Start Ray there without --num-gpus",
            )
        elif node.driver_gpus and not node.gpus:
            yield from _unseen(node, config)


def _unseen(node: NodeFacts, config: RunConfig) -> Iterator[Complaint]:
    """A build of torch with CUDA sees none of the GPUs that the driver knows."""
    there = f"{node.name} has {counted(node.driver_gpus, 'GPU')}"
    if node.visible_devices is not None and node.visible_devices.strip() in ("", "-1"):
        if not node.offered_gpus:  # else a Ray with RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1 may hide them from tasks that ask for none
            text = f"{there}, but CUDA_VISIBLE_DEVICES = {node.visible_devices!r} hides them: the run is on the CPU"
            yield Complaint("fail" if _uses_gpus(config) else "note", text, "Unset it to use them")
        return
    yield Complaint(
        "fail" if _uses_gpus(config) else "warn",
        f"{there}, but torch, a build with CUDA, sees none: most often the driver is too old for the CUDA that torch brings",
        "Update the driver: the CUDA that nvidia-smi reports has to be as new as torch.version.cuda. Or install a torch for it",
    )


def engines_have_their_kernels(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    if config.rollout.engine.resolved_device != "cuda":
        return
    if bare := [node.name for node in _known(nodes) if node.offered_gpus and not node.versions.get("sglang-kernel")]:
        yield Complaint(
            "fail",
            f"SGLang's GPU kernels (sglang-kernel) aren't installed on {', '.join(bare)}: that is an installation for CPUs",
            "Install the extra gpu there (make gpu, docs/gpu.md), or hide the GPUs (CUDA_VISIBLE_DEVICES=) and compute on the CPU",
        )


def kernels_for_these_gpus(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    for node in nodes:
        for kind in sorted({gpu.architecture for gpu in node.gpus}):
            if node.architectures and not _runs(kind, node.architectures):
                text = f"{node.name}: torch has no kernels for {kind}, only for {', '.join(node.architectures)}"
                yield Complaint("fail", text, "Install another torch")


def packages_are_alike(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    """Where ranks or engines may be. Another node, such as a head without GPUs, may lack packages, and have builds for a CPU (2.13.0+cpu)
    of the same releases."""
    on_gpus = {config.learner.resolved_device, config.rollout.engine.resolved_device} == {"cuda"}
    known = _known(nodes)
    with_parts = [node for node in known if node.offered_gpus or not on_gpus]
    without = [node for node in known if node not in with_parts]
    for package in sorted({name for node in with_parts for name in node.versions}):
        found = {node.versions.get(package, "") for node in with_parts}
        released = {_released(version) for version in found}
        at_odds = [node for node in without if "" not in found and _released(node.versions.get(package, "")) not in {"", *released}]
        found |= {node.versions[package] for node in at_odds}
        if len(found) > 1:
            where = "; ".join(f"{version or 'none'} on {_names([*with_parts, *at_odds], package, version)}" for version in sorted(found))
            yield Complaint("fail", f"the nodes have different versions of {package}: {where}", "Install the same everywhere")


def folders_are_seen_everywhere(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    """Ranks write checkpoints into the run folder, from which engines read config and tokenizer; ranks alone read the model folder."""
    if blind := [node.name for node in nodes if not node.reads_run_folder]:
        yield Complaint(
            "fail",
            f"the run folder isn't the same on {', '.join(blind)}: what this process writes into it can't be read there, and the first "
            "checkpoint would fail",
            "Set run_dir to a folder on a file system that all nodes mount",
        )
    may_hold_ranks = [node for node in _known(nodes) if node.offered_gpus or config.learner.resolved_device == "cpu"]
    obstacles = {node.name: node.model_obstacle for node in may_hold_ranks if node.model_obstacle}
    remedy = "Put it on a file system that all nodes mount"
    if HubName.of(config.model):
        remedy = (
            "Let these nodes reach the hub with a token that may read the model, make room, or set HF_HOME to a folder on a file system "
            "that all nodes mount"
        )
    for obstacle in sorted(set(obstacles.values())):
        where = ", ".join(name for name, its in obstacles.items() if its == obstacle)
        text = f"model = {config.model}: {obstacle} on {where}, where a learner rank could be put"
        yield Complaint("fail" if len(obstacles) == len(may_hold_ranks) else "warn", text, remedy)


def processes_may_open_files(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    for node in nodes:
        if node.open_files < FEWEST_OPEN_FILES and config.ray.address is not None:
            yield Complaint("warn", f"{node.name}: a process may open {node.open_files} files", "ulimit -n 65536 before ray start")


def compilers_for_kernels(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    wanted = COMPILERS if config.rollout.engine.resolved_device == "cuda" else ()
    for node in nodes:
        if missing := [name for name in wanted if name not in node.compilers and node.gpus]:
            yield Complaint(
                "warn",
                f"{node.name}: {', '.join(missing)} not found: kernels that SGLang compiles when it needs them would fail",
                "Install the CUDA toolkit and a C++ compiler, or use the container image",
            )


NODE_RULES: tuple[NodeRule, ...] = (
    gpus_for_everybody,
    cpus_for_everybody,
    tensor_parallel_groups_inside_nodes,
    engines_inside_nodes,
    units_for_all_workers,
    torch_sees_the_gpus,
    engines_have_their_kernels,
    engines_have_their_sglang,
    kernels_for_these_gpus,
    packages_are_alike,
    folders_are_seen_everywhere,
    processes_may_open_files,
    compilers_for_kernels,
    ports_are_open,
    nodes_answer,
    surroundings_let_it_work,
)


def _architectures(node: NodeFacts) -> set[str]:
    """CUDA architectures of the GPUs that Ray may give to a rank or an engine there."""
    seen = {gpu.architecture for gpu in node.gpus} or set(node.driver_architectures)
    return seen if node.offered_gpus else set()


def _engines(node: NodeFacts, config: RunConfig) -> int:
    """Most engines that the node may get of those that the run begins with, by its units and its GPUs."""
    engines = workers_with_a_unit([node.rollout_units], config.rollout.workers)
    if config.rollout.engine.resolved_device != "cuda":
        return engines
    return min(engines, held_by(node.offered_gpus, config.rollout.gpus_of_a_worker))


def _known(nodes: Nodes) -> Nodes:
    """The nodes that have answered."""
    return [node for node in nodes if not node.silence]


def _uses_gpus(config: RunConfig) -> bool:
    return gpus_asked(config) > 0


def _runs(kind: str, built: Sequence[str]) -> bool:
    """Whether kernels built for these architectures run on a GPU of this one: those of a minor version run on later ones of the same
    major."""
    if (ours := architecture_of(kind)) is None:
        return False
    return any(of is not None and ours.major == of.major and ours.minor >= of.minor for of in map(architecture_of, built))


def _released(version: str) -> str:
    """The version without the name of a build, which comes after a +."""
    return version.partition("+")[0]


def _names(nodes: Nodes, package: str, version: str) -> str:
    return ", ".join(node.name for node in nodes if node.versions.get(package, "") == version)


def on_nodes(nodes: Nodes, config: RunConfig, shape: ModelShape) -> list[Complaint]:
    """All complaints of the second layer, the worst first."""
    found = [complaint for rule in NODE_RULES for complaint in rule(nodes, config)]
    of_engines = {kind for node in nodes if node.rollout_units for kind in _architectures(node)}
    found += half_precision_has_kernels(config, of_ranks={kind for node in nodes for kind in _architectures(node)}, of_engines=of_engines)
    found += weights_stay_as_sent(shape, config, of_engines)
    found += gpus_have_room(nodes, config, shape)
    found += shared_memory_holds_the_buckets(nodes, config, shape)
    if config.ray.address is not None:  # for this machine the first layer has these rules
        found += gpus_hold_their_roles(nodes, config, shape)
        found += hosts_hold_their_roles(nodes, config, shape)
    return worst_first(found)


def shared_memory_holds_the_buckets(nodes: Nodes, config: RunConfig, shape: ModelShape) -> Iterator[Complaint]:
    """Where engines may be: a write to /dev/shm that finds no room ends the process by a signal. A bucket has one tensor at least.

    With broadcast, too: an engine gets its first version from the object store, and so does one that joins or is mended
    (actors/weights/weight_sync.py). It copies these into shared memory in the same buckets."""
    bucket = largest_bucket(shape, config)
    remedy = "Give the container more (docker run --shm-size)"
    if bucket > largest_tensor(shape, config):
        remedy += ", or lower weight_sync.bucket_bytes"
    for node in nodes:
        if not (engines := _engines(node, config)):
            continue
        needed, free = shared_bucket_bytes(shape, config, engines), gib(node.shared_memory)
        if node.shared_memory < bucket:
            text = f"{node.name}: /dev/shm has {free} free, less than the largest bucket of weights, {gib(bucket)}"
            yield Complaint("fail", text, remedy)
        elif node.shared_memory < needed:
            text = f"{node.name}: /dev/shm has {free} free, and {counted(engines, 'engine')} may want {gib(needed)} of it for new weights"
            yield Complaint("warn", text, remedy)


def gpus_hold_their_roles(nodes: Nodes, config: RunConfig, shape: ModelShape) -> Iterator[Complaint]:
    """GPUs should have enough memory for ranks and engines."""
    offering = [node for node in nodes if node.offered_gpus]
    known = [NodeGpus(could_be_given(node.gpu_bytes, node.offered_gpus), node.offered_gpus, node.rollout_units) for node in offering]
    yield from on_gpus_of_nodes(shape, config, known)


def hosts_hold_their_roles(nodes: Nodes, config: RunConfig, shape: ModelShape) -> Iterator[Complaint]:
    """Nodes should have enough main memory when they are full of ranks, or full of engines; a mixture takes less than both together. The
    driver's own memory is added on its node.

    Of sides that compute on CPUs nothing is said: how many of them Ray puts on a node isn't known.
    """
    on_gpus = {config.learner.resolved_device, config.rollout.engine.resolved_device} == {"cuda"}
    for node in nodes:
        ranks = min(config.learner.world_size, held_by(node.offered_gpus, config.learner.gpus_per_rank)) if on_gpus else 0
        engines = _engines(node, config) if on_gpus else 0
        roles = [HostMemory(counted(ranks, "rank"), of_learner(shape, config, ranks))] if ranks else []
        held = of_engines(shape, config, engines, gpu_bytes=max(node.gpu_bytes, default=0))
        roles += [HostMemory(counted(engines, "engine"), held)] if engines else []
        fullest = max(roles, key=lambda role: role.total, default=None)
        if node.is_drivers:
            fullest = _with_driver(fullest, of_driver(shape, config))
        if fullest is not None and fullest.total > node.memory:
            text = f"{node.name}: {fullest.node} would take up to {gib(fullest.total)} of its {gib(node.memory)} of memory: {fullest}"
            yield Complaint("warn", text, LESS)


def _with_driver(role: HostMemory | None, driver: dict[str, int]) -> HostMemory:
    """The memory of a node that holds the driver in addition to a role. Answers and wide fields of the role are not counted twice: the
    driver and service fetch all answers anyway."""
    own = "driver and correction service"
    if role is None:
        return HostMemory(own, driver)
    others = {what: size for what, size in role.parts.items() if what not in (WIDE, FETCHED, ANSWERS)}
    return HostMemory(f"{role.node}, {own}", driver | others)
