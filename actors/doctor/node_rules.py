"""Rules of the second layer: whether the nodes have what the recipe asks for, and agree where they have to.

Each rule is a function of (nodes, config) that yields complaints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from actors.config import RunConfig
from actors.doctor.facts import COMPILERS, Complaint, NodeFacts, Nodes
from actors.doctor.free_memory_rules import gpus_have_room
from actors.doctor.kernel_rules import architecture_of, half_precision_has_kernels, weights_stay_as_sent
from actors.doctor.link_rules import gpus_of_a_group_are_linked, nodes_answer, ports_are_open, rdma_may_lock_memory
from actors.doctor.memory_rules import NodeGpus, could_be_given, gib, on_gpus_of_nodes
from actors.doctor.paper_rules import LESS, worst_first
from actors.doctor.room_rules import (
    cpus_for_everybody,
    engines_inside_nodes,
    gpus_for_everybody,
    tensor_parallel_groups_inside_nodes,
    units_for_all_workers,
)
from actors.doctor.sglang_rules import engines_have_their_sglang
from actors.doctor.surroundings import surroundings_let_it_work
from actors.hub_name import HubName
from actors.plan.host_memory import (
    ANSWERS,
    BATCHES,
    FETCHED,
    FOR_CHECKPOINTS,
    WIDE,
    HostMemory,
    of_driver,
    of_engines,
    of_learner,
    shared_bucket_bytes,
)
from actors.plan.shape import ModelShape
from actors.plan.traffic import fetched_versions, largest_bucket, largest_tensor, stores_versions, traffic
from actors.settings.devices import gpus_asked, held_by, workers_with_a_unit
from correction.errors import counted

NodeRule = Callable[[Nodes, RunConfig], Iterator[Complaint]]

FEWEST_OPEN_FILES = 4096
"""Fewest files that a process should be allowed to open: Ray's processes and sockets need more than the usual 1,024."""
MOST_SKEW_S = 5.0
_OF_A_NODE = ("_IFNAME", "_HCA", "_FILE")
"""Suffixes of NCCL's variables that name a node's own network devices or files."""


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


def nccl_is_told_the_same(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    """On nodes with GPUs; names of a node's own devices may differ, and ray.env says the same to all."""
    with_gpus = [node for node in _known(nodes) if node.offered_gpus]
    for name in sorted({name for node in with_gpus for name in node.nccl} - config.ray.env.keys()):
        found = {node.nccl.get(name, "") for node in with_gpus}
        if len(found) > 1 and not name.endswith(_OF_A_NODE):
            where = "; ".join(
                f"{value or 'not set'} on {', '.join(node.name for node in with_gpus if node.nccl.get(name, '') == value)}"
                for value in sorted(found)
            )
            text = f"{name} isn't the same on all nodes with GPUs: {where}. Ranks that are told different things may wait for each other"
            yield Complaint("warn", text, f"Set ray.env.{name}")


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


def clocks_agree(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    for node in nodes:
        if abs(node.clock_ahead_s) > MOST_SKEW_S:
            text = f"{node.name}: its clock is {node.clock_ahead_s:+.0f} s from this one's: times in logs don't agree"
            yield Complaint("warn", text, "Have both set by NTP")


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
    nccl_is_told_the_same,
    folders_are_seen_everywhere,
    processes_may_open_files,
    clocks_agree,
    compilers_for_kernels,
    gpus_of_a_group_are_linked,
    rdma_may_lock_memory,
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
        found += stores_hold_the_weights(nodes, config, shape)
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


def stores_hold_the_weights(nodes: Nodes, config: RunConfig, shape: ModelShape) -> Iterator[Complaint]:
    """Object stores should have room for what they hold. A node where rank 0 may be holds versions of the weights and two batches; a node
    with engines holds the versions that they fetch before they pause. Wide fields are on the nodes of the engines that sampled them and of
    the ranks. The driver's node holds two batches, and for a checkpoint it fetches all answers that wait, with their wide fields: of the
    longest length, as everywhere."""
    is_fetched = config.weight_sync.transport == "object_store"
    moved, driver = traffic(shape, config), of_driver(shape, config)
    for node in nodes:
        may_hold_a_rank = stores_versions(config) and (node.offered_gpus > 0 or config.learner.resolved_device == "cpu")
        engines = workers_with_a_unit([node.rollout_units], config.rollout.workers) if is_fetched else 0
        held = moved.version * fetched_versions(engines)
        wide = of_learner(shape, config, 1)[FETCHED] if may_hold_a_rank else of_engines(shape, config, engines)[WIDE]
        needed = moved.store if may_hold_a_rank else held * (engines > 0) + driver[BATCHES] * node.is_drivers
        needed += driver[FOR_CHECKPOINTS] if node.is_drivers else wide
        if needed > node.object_store:
            on_the_way = "two versions of the weights" if held > moved.version else "a version of the weights"
            parts = ["two versions of the weights"] * may_hold_a_rank or [on_the_way] * (engines > 0)
            what = " and ".join(parts + ["two batches"] * (may_hold_a_rank or node.is_drivers))
            what += ", and all answers for a checkpoint," if node.is_drivers else ", and wide fields," * (wide > 0)
            yield Complaint(
                "warn",
                f"{node.name}: {what} take {gib(needed)}, and Ray's object store there has {gib(node.object_store)}: it writes to disk",
                "Start the node with a larger one (ray start --object-store-memory), or use machines with more memory",
            )


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
    own = "driver, queue and correction service"
    if role is None:
        return HostMemory(own, driver)
    others = {what: size for what, size in role.parts.items() if what not in (WIDE, FETCHED, ANSWERS)}
    return HostMemory(f"{role.node}, {own}", driver | others)
