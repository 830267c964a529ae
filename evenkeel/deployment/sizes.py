"""What every form of a deployment takes from a recipe: sizes as `evenkeel plan` counts them, ports, deadlines, and the words of a run."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath

from evenkeel.actors.config import HubName, RunConfig
from evenkeel.actors.settings.deadlines import LEAST_HAND_BACK_S
from evenkeel.actors.settings.devices import gpus_asked, held_by, room_for_engines
from evenkeel.correction.errors import ConfigError, counted
from evenkeel.plan.hosts import HostMemory, of_driver, of_engines, of_learner
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.shape import ModelShape

GCS, DASHBOARD, DISCOVERY = 6379, 8265, 9400
JOINED = f"ray.address=auto metrics.bind=node metrics.discovery_port={DISCOVERY}"
"""Settings of a run on a cluster."""
NOTICES_LOSS = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
"""Variables of Ray by which a node that is gone is known after 3 s instead of 15."""
# CPUs for each GPU of a node, and for each rank or engine that computes on CPUs: scoring, data, and what Ray's daemons take.
_CPUS_PER_GPU, _CPUS_PER_PART, CPUS_OF_HEAD = 8, 2, 8
# Of the memory that plan counts, in addition: page cache, fragments, Ray's daemons. Of the object store: what Ray itself puts there.
_MEMORY, _STORE = 1.25, 1.1
# What Ray does not give to its object store of the shared memory.
_BESIDE_STORE = 1 << 30
_GIB = 1 << 30


def name_of(config: RunConfig) -> str:
    """The run's, as Kubernetes and Ray take it: 40 characters at most, the first a letter, the last no dash."""
    name = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-")
    return (name if name[:1].isalpha() else f"run-{name}")[:40].strip("-")


def stop_wait_s(config: RunConfig) -> int:
    """Longest time that a run needs to end with a checkpoint, seconds."""
    return math.ceil(config.deadlines.step_s + config.deadlines.checkpoint_s)


def hand_back_s(config: RunConfig) -> int:
    """Time that a node which goes leaves its workers, seconds: to finish groups, and as long again to hand back the rest."""
    return math.ceil(config.deadlines.drain_s + max(LEAST_HAND_BACK_S, config.deadlines.drain_s))


def drain_variable(seconds: int) -> dict[str, str]:
    """By which Ray leaves a node's workers so much time."""
    return {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(seconds)}


def cpus(parts: int, gpus: int) -> int:
    """Args: parts: ranks and engines of a node, which compute on CPUs where it has no GPUs."""
    return _CPUS_PER_GPU * gpus if gpus else 1 + _CPUS_PER_PART * parts


def store_bytes(memory: HostMemory) -> int:
    """For Ray's object store, which would take 30 % of the node's memory by itself, whatever the run has to keep there."""
    return max(_GIB, math.ceil(_STORE * sum(size for what, size in memory.parts.items() if "object store" in what)))


def shared_gib(memory: HostMemory) -> int:
    """Shared memory of a container, GiB: object store and buckets."""
    return math.ceil((store_bytes(memory) + memory.parts.get("buckets in shared memory", 0) + _BESIDE_STORE) / _GIB)


def memory_gib(memory: HostMemory) -> int:
    """Memory of a container, GiB. Shared memory counts as its own: what plan counts has the object store in it, if not what Ray takes of it
    beyond that."""
    return max(math.ceil(_MEMORY * memory.total / _GIB), math.ceil(memory.total / _GIB) + shared_gib(memory))


def node_memory(shape: ModelShape, config: RunConfig, gpus: Gpus, *, ranks: int = 0, engines: int = 0, is_head: bool = False) -> HostMemory:
    """Of a node with so many learner ranks, rank 0 among them, and engines; the head has the driver and the correction service, too."""
    parts: Counter[str] = Counter()
    if is_head:
        parts.update(of_driver(shape, config))
    if ranks:
        parts.update(of_learner(shape, config, ranks))
    if engines := min(engines, config.rollout.most_workers):
        parts.update(of_engines(shape, config, engines, gpu_bytes=gpus.memory, has_the_store=ranks > 0))
    return HostMemory("head" if is_head else "node", dict(parts))


def engines_of_node(config: RunConfig, gpus: Gpus, nodes: int) -> int:
    """Engines that a node has room for: units of the rollout resource that it offers. On CPUs the workers are spread over all nodes."""
    rollout = config.rollout
    if rollout.engine.resolved_device != "cuda":
        return math.ceil(rollout.most_workers / nodes)
    return held_by(gpus.per_node, rollout.gpus_of_a_worker)


def ranks_of_node(config: RunConfig, gpus: Gpus) -> int:
    """The most learner ranks that a node has."""
    learner = config.learner
    if learner.resolved_device != "cuda":
        return learner.world_size
    return min(learner.world_size, max(1, gpus.per_node // learner.tensor_parallel) * learner.tensor_parallel)


def shared_nodes(config: RunConfig, gpus: Gpus) -> int:
    """The fewest equal nodes with room for all ranks and for as many engines as the pool may have, side by side. Raises: ConfigError."""
    refuse_narrow(config, gpus)
    nodes = max(1, math.ceil(gpus_asked(config, workers=config.rollout.most_workers) / gpus.per_node))
    if config.rollout.engine.resolved_device == "cuda":
        while room_for_engines([(gpus.per_node, engines_of_node(config, gpus, nodes))] * nodes, config) < config.rollout.most_workers:
            nodes += 1
    return nodes


def refuse_narrow(config: RunConfig, gpus: Gpus) -> None:
    """Raises: ConfigError where a group of GPUs that have to be on one node exceeds a node."""
    widest = max(config.learner.tensor_parallel, config.rollout.engine.tensor_parallel)
    if widest > gpus.per_node:
        raise ConfigError(
            f"--gpus {gpus.name}x{gpus.per_node}: a tensor-parallel group of {widest} has to fit into a node. Give nodes more"
        )


def refuse_few_hosts(config: RunConfig, gpus: Gpus, hosts: int) -> None:
    """Raises: ConfigError where so many hosts have no room for the run."""
    if hosts < (wanted := shared_nodes(config, gpus)):
        raise ConfigError(
            f"--host names {counted(hosts, 'host')}, and the run needs {wanted} with {gpus.per_node} x {gpus.name}. Name more"
        )


def as_assignments(variables: Mapping[str, str]) -> str:
    """As they stand before a command of the shell."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def refuse_shared_gpus(config: RunConfig) -> None:
    """Raises: ConfigError where ranks and engines would share GPUs, which those of nodes of their own can't."""
    learner, rollout = config.learner, config.rollout
    on_gpus = {learner.resolved_device, rollout.engine.resolved_device} == {"cuda"}
    if on_gpus and min(learner.gpus_per_rank, rollout.gpus_per_worker) < 1:
        raise ConfigError(
            f"learner.gpus_per_rank = {learner.gpus_per_rank:g}, rollout.gpus_per_worker = {rollout.gpus_per_worker:g}: ranks and engines "
            "have nodes of their own here, which share no GPU. Set both to 1"
        )


def refuse_elsewhere(config: RunConfig, mount: str) -> None:
    """Raises: ConfigError for a folder that not all nodes see."""
    folders = {"run_dir": config.run_dir} | ({} if HubName.of(config.model) else {"model": config.model})
    for key, folder in folders.items():
        if folder is None or not PurePosixPath(folder).is_relative_to(mount):
            raise ConfigError(
                f"{key} = {folder}: not on the volume that all nodes see at {mount}. Set {key} to a folder below it, or --mount to what "
                "it is below"
            )
