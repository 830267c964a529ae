"""Rules of the second layer: whether the nodes have what the recipe asks for, and agree where they have to.

Each rule is a function of (nodes, config) that yields complaints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from actors.config import RunConfig
from actors.doctor.facts import Complaint, NodeFacts
from actors.doctor.kernel_rules import weights_stay_as_sent
from actors.doctor.link_rules import gpus_of_a_group_are_linked, nodes_answer, ports_are_open, rdma_may_lock_memory
from actors.doctor.memory_rules import could_be_given, gib, on_gpus
from actors.doctor.paper_rules import FEWER, LESS, worst_first
from actors.doctor.sglang_rules import engines_have_their_sglang
from actors.plan.host_memory import FETCHED, TRANSFERS, WIDE, HostMemory, of_engines, of_learner
from actors.plan.shape import ModelShape
from actors.plan.traffic import fetched_versions, traffic, versions_text
from actors.settings.devices import gpus_asked, held_by, room_for_engines, workers_with_a_unit
from actors.settings.hub_name import HubName
from correction.errors import counted

Nodes = Sequence[NodeFacts]
NodeRule = Callable[[Nodes, RunConfig], Iterator[Complaint]]

FEWEST_OPEN_FILES = 4096
"""Ray's processes and sockets need more than the usual limit of 1,024."""
MOST_SKEW_S = 5.0
_OF_A_NODE = ("_IFNAME", "_HCA", "_FILE")
"""Endings of NCCL's variables that name a node's own network devices or files."""
FREE_SHARE = 0.9
"""Share of a GPU's memory that should be free."""


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
    """More may come on a cluster that grows by itself, so that only what no GPU of this machine can hold fails."""
    if not _uses_gpus(config):
        return
    row = requests(nodes, config)[0]
    if row.asked > row.there:
        wait = f"; ranks wait for nodes up to deadlines.start_s = {config.deadlines.start_s:g} s, workers as long as the run lasts"
        yield Complaint(
            "warn" if config.ray.address is not None else "fail",
            f"the run asks for {row.asked:g} GPUs, and Ray has {row.there:g}: {row.parts}{wait if config.ray.address is not None else ''}",
            f"{FEWER}; or add nodes",
        )
    elif row.asked > row.free:
        yield Complaint(
            "warn",
            f"the run asks for {row.asked:g} GPUs, of {row.there:g} only {row.free:g} are free: another run has the others",
            "Wait for it, or ask for fewer",
        )


def tensor_parallel_groups_inside_nodes(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    learner = config.learner
    if learner.resolved_device != "cuda" or learner.tensor_parallel == 1:
        return
    wanted = learner.world_size // learner.tensor_parallel
    what = f"the learner has {wanted} tensor-parallel groups of {learner.tensor_parallel} ranks"
    room = sum(int(node.offered_gpus) // learner.tensor_parallel for node in nodes)
    yield from _inside_nodes(nodes, config, wanted, room, what, "Lower learner.tensor_parallel, or add nodes")


def engines_inside_nodes(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    """What the learner leaves. Of too few GPUs in all another rule speaks."""
    ranks, wanted = config.rollout.engine.tensor_parallel, config.rollout.first_workers
    is_short = gpus_asked(config) > sum(node.offered_gpus for node in nodes)
    if config.rollout.engine.resolved_device != "cuda" or ranks == 1 or is_short:
        return
    room = room_for_engines([(int(node.offered_gpus), node.rollout_units) for node in nodes], config)
    what = f"{counted(wanted, 'engine')} of {ranks} GPUs each (rollout.engine.tensor_parallel)"
    what += " in addition to the learner"
    yield from _inside_nodes(nodes, config, wanted, room, what, "Lower rollout.engine.tensor_parallel or rollout.workers, or add nodes")


def _inside_nodes(nodes: Nodes, config: RunConfig, wanted: int, room: int, what: str, remedy: str) -> Iterator[Complaint]:
    """Args: wanted: number of groups, each on one node. room: for so many."""
    if room < wanted:
        yield Complaint(
            "warn" if config.ray.address is not None else "fail",
            f"{what}, each on one node, and there is room for {room}: GPUs by node are {[int(node.offered_gpus) for node in nodes]}",
            remedy,
        )


def units_for_all_workers(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    if config.ray.address is None:
        return
    wanted = config.rollout.first_workers
    placed = workers_with_a_unit([node.rollout_units for node in nodes], wanted)
    if placed < wanted:
        there = f"the nodes offer {counted(placed, 'whole unit')}" if placed else "no node offers a whole unit"
        yield Complaint(
            "warn",
            f"{counted(wanted, 'rollout worker')}, each of which asks for one unit of the Ray resource {config.ray.rollout_resource!r}, "
            f"and {there} by now: the {'others' if placed else 'workers'} wait for nodes that do",
            f"Start nodes with --resources='{{\"{config.ray.rollout_resource}\": N}}'",
        )


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
        if not node.offered_gpus:  # else Ray hides them from tasks that ask for none
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


def gpus_are_empty(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    if not _uses_gpus(config):
        return
    for node in nodes:
        for gpu in node.gpus:
            if gpu.free < FREE_SHARE * gpu.bytes:
                text = f"{node.name}: GPU {gpu.number} ({gpu.name}) has {gib(gpu.free)} of {gib(gpu.bytes)} free: another process holds the"
                yield Complaint("warn", f"{text} rest", "nvidia-smi there says which")


def packages_are_alike(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    nodes = _known(nodes)
    for package in sorted({name for node in nodes for name in node.versions}):
        found = {node.versions.get(package, "") for node in nodes}
        if len(found) > 1:
            where = "; ".join(f"{version or 'none'} on {_names(nodes, package, version)}" for version in sorted(found))
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
        remedy = "Let these nodes reach the hub, make room, or set HF_HOME to a folder on a file system that all nodes mount"
    for obstacle in sorted(set(obstacles.values())):
        where = ", ".join(name for name, its in obstacles.items() if its == obstacle)
        text = f"model = {config.model}: {obstacle} on {where}, where a learner rank could be put"
        yield Complaint("fail" if len(obstacles) == len(may_hold_ranks) else "warn", text, remedy)


def room_for_files_and_buckets(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    for node in nodes:
        engines = max(1, _engines(node, config))
        bucket, free = config.weight_sync.bucket_bytes, gib(node.shared_memory)
        needed = TRANSFERS * bucket * engines
        if node.shared_memory < bucket:
            yield Complaint(
                "fail",
                f"{node.name}: /dev/shm has {free} free, less than one bucket of weights, {gib(bucket)}",
                "Give the container more (docker run --shm-size), or lower weight_sync.bucket_bytes",
            )
        elif node.shared_memory < needed:
            text = f"{node.name}: /dev/shm has {free} free, and {engines} engines may want {gib(needed)} of it for new weights"
            yield Complaint("warn", text, "Give the container more (docker run --shm-size), or lower weight_sync.bucket_bytes")
        if node.open_files < FEWEST_OPEN_FILES and config.ray.address is not None:
            yield Complaint("warn", f"{node.name}: a process may open {node.open_files} files", "ulimit -n 65536 before ray start")


def clocks_agree(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    for node in nodes:
        if abs(node.clock_ahead_s) > MOST_SKEW_S:
            yield Complaint("warn", f"{node.name}: its clock is {node.clock_ahead_s:+.0f} s from this one's: times in logs don't agree")


def compilers_for_kernels(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    wanted = ("gcc", "nvcc", "ninja") if config.rollout.engine.resolved_device == "cuda" else ()
    for node in nodes:
        if missing := [name for name in wanted if name not in node.compilers and node.gpus]:
            yield Complaint(
                "warn",
                f"{node.name}: {', '.join(missing)} not found: kernels that SGLang compiles when it needs them would fail",
                "Install the CUDA toolkit and a C++ compiler, or use the container image",
            )


NODE_RULES: tuple[NodeRule, ...] = (
    gpus_for_everybody,
    tensor_parallel_groups_inside_nodes,
    engines_inside_nodes,
    units_for_all_workers,
    torch_sees_the_gpus,
    engines_have_their_kernels,
    engines_have_their_sglang,
    kernels_for_these_gpus,
    gpus_are_empty,
    packages_are_alike,
    nccl_is_told_the_same,
    folders_are_seen_everywhere,
    room_for_files_and_buckets,
    clocks_agree,
    compilers_for_kernels,
    gpus_of_a_group_are_linked,
    rdma_may_lock_memory,
    ports_are_open,
    nodes_answer,
)


def requests(nodes: Nodes, config: RunConfig) -> list[Request]:
    """What the run asks of Ray, what the nodes have, what of it nobody holds."""
    rollout, learner = config.rollout, config.learner
    ranks, workers = counted(learner.world_size, "rank"), counted(rollout.first_workers, "worker")
    of_ranks = [f"{ranks} x {learner.gpus_per_rank:g}"] if learner.resolved_device == "cuda" else []
    of_workers = [f"{workers} x {rollout.gpus_of_a_worker:g}"] if rollout.engine.resolved_device == "cuda" else []
    cpus, free = sum(node.cpus for node in nodes), sum(node.free_cpus for node in nodes)
    processes = learner.world_size + rollout.first_workers * rollout.engine.tensor_parallel
    rows = [Request("CPU", processes, cpus, free, f"{ranks}, {workers}")]
    gpus, free = sum(node.offered_gpus for node in nodes), sum(node.free_gpus for node in nodes)
    if of_ranks or of_workers or gpus:
        rows.insert(0, Request("GPU", gpus_asked(config), gpus, free, ", ".join(of_ranks + of_workers) or "nobody"))
    if config.ray.address is not None:
        units = sum(node.rollout_units for node in nodes)
        rows.append(Request(config.ray.rollout_resource, rollout.first_workers, units, units, workers))
    return rows


def _architectures(node: NodeFacts) -> set[str]:
    """CUDA architectures of the GPUs that an engine may get on the node."""
    seen = {gpu.architecture for gpu in node.gpus} or set(node.driver_architectures)
    return seen if node.offered_gpus and node.rollout_units else set()


def _engines(node: NodeFacts, config: RunConfig) -> int:
    """Most engines that the node may get of those that the run begins with, by its units and its GPUs."""
    engines = workers_with_a_unit([node.rollout_units], config.rollout.first_workers)
    if config.rollout.engine.resolved_device != "cuda":
        return engines
    return min(engines, held_by(node.offered_gpus, config.rollout.gpus_of_a_worker))


def _known(nodes: Nodes) -> Nodes:
    """Those that have told what is there."""
    return [node for node in nodes if not node.silence]


def _uses_gpus(config: RunConfig) -> bool:
    return gpus_asked(config) > 0


def _runs(kind: str, built: Sequence[str]) -> bool:
    """Kernels of a minor architecture run on later ones of the same major one."""

    def numbers(name: str) -> tuple[int, int]:
        digits = "".join(character for character in name if character.isdigit())
        return int(digits[:-1]), int(digits[-1])

    major, minor = numbers(kind)
    return any(major == other and minor >= lowest for other, lowest in map(numbers, built))


def _names(nodes: Nodes, package: str, version: str) -> str:
    return ", ".join(node.name for node in nodes if node.versions.get(package, "") == version)


def on_nodes(nodes: Nodes, config: RunConfig, shape: ModelShape) -> list[Complaint]:
    """All complaints of the second layer, the worst first."""
    found = [complaint for rule in NODE_RULES for complaint in rule(nodes, config)]
    found += weights_stay_as_sent(shape, config, {kind for node in nodes for kind in _architectures(node)})
    if config.ray.address is not None:  # for this machine the first layer has these rules
        found += gpus_hold_their_roles(nodes, config, shape)
        found += stores_hold_the_weights(nodes, config, shape)
        found += hosts_hold_their_roles(nodes, config, shape)
    return worst_first(found)


def gpus_hold_their_roles(nodes: Nodes, config: RunConfig, shape: ModelShape) -> Iterator[Complaint]:
    """Nodes with fewer GPUs than a tensor-parallel group, or an engine, has ranks are left out: no such group is placed there."""
    known = [(size, node) for node in nodes if node.offered_gpus for size in could_be_given(node.gpu_bytes, node.offered_gpus)]
    ranks = [size for size, node in known if node.offered_gpus >= config.learner.tensor_parallel]
    wanted = config.rollout.engine.tensor_parallel
    engines = [size for size, node in known if node.rollout_units >= 1 and node.offered_gpus >= wanted]
    yield from on_gpus(shape, config, of_ranks=ranks, of_engines=engines)


def stores_hold_the_weights(nodes: Nodes, config: RunConfig, shape: ModelShape) -> Iterator[Complaint]:
    """A node where rank 0 may be holds versions of the weights and two batches; a node with engines those that they fetch before they
    pause. Wide fields are on the nodes of the engines that sampled them and of ranks."""
    if config.weight_sync.transport != "object_store":
        return
    moved = traffic(shape, config)
    for node in nodes:
        may_hold_a_rank = node.offered_gpus > 0 or config.learner.resolved_device == "cpu"
        engines = workers_with_a_unit([node.rollout_units], config.rollout.first_workers)
        held = moved.version * fetched_versions(config, engines)
        wide = of_learner(shape, config, 1)[FETCHED] if may_hold_a_rank else of_engines(shape, config, engines)[WIDE]
        needed = wide + (moved.store if may_hold_a_rank else held if engines else 0)
        if needed > node.object_store:
            on_the_way = "two versions of the weights" if held > moved.version else "a version of the weights"
            what = f"{versions_text(config)} of the weights and two batches" if may_hold_a_rank else on_the_way
            what += ", and wide fields," * (wide > 0)
            yield Complaint(
                "warn",
                f"{node.name}: {what} take {gib(needed)}, and Ray's object store there has {gib(node.object_store)}: it writes to disk",
                "Start the node with a larger one (ray start --object-store-memory), or use machines with more memory",
            )


def hosts_hold_their_roles(nodes: Nodes, config: RunConfig, shape: ModelShape) -> Iterator[Complaint]:
    """For a node full of ranks, and for one full of engines; a mixture takes less than the sum of both."""
    if {config.learner.resolved_device, config.rollout.engine.resolved_device} != {"cuda"}:
        return
    for node in nodes:
        ranks = min(config.learner.world_size, int(node.offered_gpus / config.learner.gpus_per_rank))
        engines = _engines(node, config)
        roles = [HostMemory(counted(ranks, "rank"), of_learner(shape, config, ranks))] if ranks else []
        held = of_engines(shape, config, engines, gpu_bytes=max(node.gpu_bytes, default=0))
        roles += [HostMemory(counted(engines, "engine"), held)] if engines else []
        fullest = max(roles, key=lambda role: role.total, default=None)
        if fullest is not None and fullest.total > node.memory:
            text = f"{node.name}: {fullest.node} would take up to {gib(fullest.total)} of its {gib(node.memory)} of memory: {fullest}"
            yield Complaint("warn", text, LESS)
