"""Devices and types, before anything starts: enough GPUs for whoever asks for one, and the same type of weights on both sides."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from evenkeel.actors.config import RunConfig
from evenkeel.correction.errors import ConfigError, counted
from evenkeel.engines.machine import gpus_without_torch

# By which shares may exceed a GPU: those written as 0.7 and 0.3 fill one, whatever their sum is in floating point.
_ROUNDING = 1e-9

SETS_NVLS = ("enable_nccl_nvls", "enable_symm_mem")
"""Arguments of SGLang that make it set NCCL_NVLS_ENABLE itself, whatever its value was."""
SETS_TREES = ("enable_deterministic_inference", "rl_on_policy_target")
"""Those by which an engine of several ranks sets NCCL_ALGO and the number of channels, so that its sums have one order."""


def check_devices(config: RunConfig) -> None:
    """Refuse a run on this machine that has too few GPUs for it; on a cluster that is joined, what counts is known there. A rank or an
    engine that gets none would wait until its deadline.

    Raises: ConfigError.
    """
    for error in unfit_shares(config):
        raise error
    if config.ray.address is not None:
        return
    shares, parts = _wanted(config, workers_asked(config))
    there = visible_gpus()
    if whole_gpus(shares) > there:
        seen = f"torch sees {there}" if there else "torch sees none here (no GPU, no driver for it, or a torch without CUDA)"
        raise ConfigError(
            f"{parts}: {_gpus(shares)}, but {seen}. Set device: cpu, ask for fewer, have them share one (learner.gpus_per_rank, "
            f"rollout.gpus_per_worker), or name a cluster that has them (ray.address)"
        )


def unfit_shares(config: RunConfig) -> Iterator[ConfigError]:
    """Each reason against the shares of GPUs: two ranks on one, which NCCL can't connect, and devices and shares that don't go with the
    transport of the weights."""
    learner, rollout = config.learner, config.rollout
    if rollout.engine.resolved_device == "cuda" and rollout.gpus_per_worker < 1 and rollout.engine.tensor_parallel > 1:
        yield ConfigError(
            f"rollout.gpus_per_worker = {rollout.gpus_per_worker:g} with engine.tensor_parallel = {rollout.engine.tensor_parallel}: an "
            "engine's ranks are on whole GPUs of one node",
            remedy="Set rollout.gpus_per_worker to 1, or tensor_parallel to 1",
        )
    elif rollout.engine.resolved_device == "cuda" and rollout.engine.gpu_share < 1 and rollout.engine.tensor_parallel > 1:
        yield ConfigError(
            f"rollout.engine.gpu_share = {rollout.engine.gpu_share:g} with tensor_parallel = {rollout.engine.tensor_parallel}: an "
            "engine of several ranks has its GPUs for itself",
            remedy="Set rollout.engine.gpu_share to null, or tensor_parallel to 1",
        )
    if rollout.engine.resolved_device == "cuda" and rollout.engine.gpu_share > rollout.gpus_per_worker:
        yield ConfigError(
            f"rollout.engine.gpu_share = {rollout.engine.gpu_share:g} with rollout.gpus_per_worker = {rollout.gpus_per_worker:g}: the "
            "engine would take memory of whoever else has a share of its GPU",
            remedy="Lower rollout.engine.gpu_share, or set it to null",
        )
    yield from _unlike_in_the_weight_group(config)
    yield from _unlike_options_of_nccl(config)
    if learner.resolved_device != "cuda":
        return
    if learner.gpus_per_rank <= 0.5 and learner.world_size > 1:
        yield ConfigError(
            f"learner.gpus_per_rank = {learner.gpus_per_rank:g} with {learner.world_size} ranks: two of them would fit on one GPU, where "
            "NCCL makes no group of them",
            remedy="Set it above 0.5, or have one rank",
        )
    if learner.gpus_per_rank < 1 and learner.tensor_parallel > 1:
        yield ConfigError(
            f"learner.gpus_per_rank = {learner.gpus_per_rank:g} with tensor_parallel = {learner.tensor_parallel}: the ranks of a group are "
            "asked for together, as whole GPUs of one node",
            remedy="Set it to 1",
        )
    is_shared = learner.gpus_per_rank < 1 or rollout.gpus_per_worker < 1
    if is_shared and config.weight_sync.transport == "broadcast":
        yield ConfigError(
            "weight_sync.transport = broadcast where a rank or a worker has a share of a GPU: an engine may be on the learner's own, and "
            "NCCL makes no group of two processes on one",
            remedy="Set weight_sync.transport: object_store, or learner.gpus_per_rank and rollout.gpus_per_worker to 1",
        )


def _unlike_in_the_weight_group(config: RunConfig) -> Iterator[ConfigError]:
    """Against a broadcast from the learner (learner/weights/broadcast.py) to engines that would join otherwise."""
    engine, learner = config.rollout.engine, config.learner
    own = "nccl" if learner.resolved_device == "cuda" else "gloo"
    is_alike = engine.resolved_device == learner.resolved_device
    if config.weight_sync.transport != "broadcast" or (is_alike and engine.resolved_group_backend == own):
        return
    or_auto = "rollout.engine.weight_group_backend: auto, or " if is_alike else ""
    yield ConfigError(
        f"weight_sync.transport = broadcast: the learner, on {learner.resolved_device}, joins the weight group by {own}, and engines, on "
        f"{engine.resolved_device}, by {engine.resolved_group_backend}: a group has one backend, and one kind of device",
        remedy=f"Set {or_auto}weight_sync.transport: object_store",
    )


def _unlike_options_of_nccl(config: RunConfig) -> Iterator[ConfigError]:
    """Against options by which SGLang's NCCL would differ from the learner's, in one group (settings/environment.py)."""
    engine = config.rollout.engine
    if engine.resolved_device != "cuda" or config.weight_sync.transport != "broadcast":
        return
    sets = dict.fromkeys(SETS_NVLS, "NCCL_NVLS_ENABLE: 1")
    if engine.tensor_parallel > 1:
        sets |= dict.fromkeys(SETS_TREES, "NCCL_ALGO, NCCL_MIN_NCHANNELS and NCCL_MAX_NCHANNELS")
    for name, variables in sets.items():
        if engine.engine_args.get(name):
            yield ConfigError(
                f"rollout.engine.engine_args.{name} = {engine.engine_args[name]!r} with weight_sync.transport = broadcast: SGLang sets "
                f"{variables} for it, which the learner's ranks don't have, and NCCL wants that alike in one group",
                remedy="Set weight_sync.transport: object_store, or leave this argument out",
            )


def check_types(config: RunConfig) -> None:
    """Refuse engines that hold weights in another type than the learner sends.

    Args: config: with devices and types (resolve.py), which refuses types that a device can't compute in.
    Raises: ConfigError.
    """
    held, sent = config.rollout.engine.dtype, config.learner.dtype
    if held != sent:
        raise ConfigError(
            f"rollout.engine.dtype = {held} with learner.dtype = {sent}: an engine takes new weights in the type that it holds them in, "
            "and the learner sends its own",
            remedy=f"Set learner.dtype to {held}, or rollout.engine.dtype to null",
        )


def check_engine_device(config: RunConfig) -> None:
    """The same for one engine without Ray. Raises: ConfigError."""
    engine, seen = config.rollout.engine, visible_gpus()
    if engine.resolved_device == "cuda" and 0 < seen < engine.tensor_parallel:
        raise ConfigError(f"rollout.engine.tensor_parallel = {engine.tensor_parallel}, but torch sees {seen} GPUs here. Set it to {seen}")
    if engine.device == "cuda" and not seen:
        raise ConfigError(
            "rollout.engine.device = cuda, but torch sees no GPU here (none, no driver for it, or a torch without CUDA). Set it to cpu"
        )


def check_received(role: str, share: float, ids: Sequence[Any]) -> None:
    """Check, in the process of an actor on a GPU, that it got from Ray what it asked for, and that its torch sees exactly that.

    Args:
        role: who asks, such as "learner rank 3".
        share: of a GPU, that was asked for, or the number of GPUs.
        ids: as ray.get_gpu_ids() has them.
    Raises: ConfigError.
    """
    wanted = max(1, round(share))
    if len(ids) != wanted:
        asked = f"{share:g} of a GPU" if share <= 1 else f"{wanted} GPUs"
        raise ConfigError(
            f"{role}: asked Ray for {asked} and got {list(ids) or 'none'}: it would compute on a GPU that belongs to another. "
            "Start the nodes with the GPUs that they have (ray start --num-gpus)"
        )
    if (seen := _gpus_of_torch()) != wanted:
        raise ConfigError(
            f"{role}: Ray gave it GPU {', '.join(map(str, ids))}, but torch sees {seen} there (CUDA_VISIBLE_DEVICES = "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). A node must offer the GPUs that it has, Ray's "
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES must not be set, and torch must be a build with CUDA"
        )


def check_rollout_resource(config: RunConfig, offered: float, possible: float | None) -> str | None:
    """Whether a joined cluster can ever place the rollout workers.

    Args:
        offered: units of the rollout resource on the nodes that are there.
        possible: on all nodes that its autoscaler may start; None: there is no autoscaler, or it has not said so yet.
    Returns: what to say if there will never be enough for all.
    Raises: ConfigError if an autoscaler is there, and no node, nor any type of node that it may start, offers a whole unit.
    """
    wanted, resource = config.rollout.most_workers, config.ray.rollout_resource
    if possible is None:
        return None
    placed = max(workers_with_a_unit([offered], wanted), workers_with_a_unit([possible], wanted))
    if placed == wanted:
        return None
    setting = most_workers_setting(config)
    if not placed:
        raise ConfigError(
            f"{setting} with ray.rollout_resource = {resource!r}: no node of the cluster at {config.ray.address} offers a whole unit of "
            f"it, nor does any type of node that its autoscaler may start. Give a node type resources: {{{resource}: 1}} "
            "(`evenkeel deploy`)"
        )
    return (
        f"{setting}: the cluster at {config.ray.address} offers {counted(placed, 'whole unit')} of the resource {resource!r} "
        "at most, with all nodes that its autoscaler may start; the other workers wait"
    )


def workers_with_a_unit(units: Iterable[float], wanted: int) -> int:
    """How many of `wanted` rollout workers can be placed: each takes one unit of the rollout resource, on one node.

    A run that joins a cluster (check_rollout_resource) passes the sum over present nodes, or over all that the
    autoscaler may start, and the largest number of workers; it refuses a cluster that can place none. The doctor (doctor/on_nodes.py)
    passes the present nodes and the workers that the run begins with; it only warns, as more nodes may come.

    Args: units: offered by each node; or only their sum, if no more is known.
    """
    return min(wanted, sum(map(int, units)))


def check_gpus_to_come(config: RunConfig, offered: float, possible: float | None) -> None:
    """Whether a joined cluster can ever place the learner's ranks; workers without GPUs wait, and those that have some sample.

    Args: offered, possible: GPUs, as check_rollout_resource.
    Raises: ConfigError.
    """
    learner = config.learner
    ranks = whole_gpus([learner.gpus_per_rank] * learner.world_size) if learner.device == "cuda" else 0
    if possible is not None and max(offered, possible) < ranks:
        raise ConfigError(
            f"learner.device = cuda with {learner.world_size} ranks: {ranks} GPUs are needed, and the cluster at {config.ray.address} has "
            f"{max(offered, possible):g} at most, with all nodes that its autoscaler may start",
            remedy="Use fewer ranks, or give it more nodes",
        )


def most_workers_setting(config: RunConfig) -> str:
    """The setting that says how many workers there may be, with its value, for sentences."""
    return f"rollout.{'max_workers' if config.rollout.is_elastic else 'workers'} = {config.rollout.most_workers}"


def whole_gpus(shares: Sequence[float]) -> int:
    """Number of GPUs needed for these shares, each of which must fit on one GPU. They are filled one by one, the largest shares first."""
    left: list[float] = []
    for share in sorted(shares, reverse=True):
        place = next((i for i, room in enumerate(left) if share <= room + _ROUNDING), None)
        if place is None:
            left.append(1.0 - share)
        else:
            left[place] -= share
    return len(left)


def room_for_engines(nodes: Sequence[tuple[int, float]], config: RunConfig) -> int:
    """Number of engines, each on one node, for which there is room besides the learner.

    Args: nodes: of each node its GPUs, and how many workers it takes (math.inf: any number). The learner fills nodes that take few first
        (cluster/placement.py).
    """
    learner, share = config.learner, config.rollout.gpus_of_a_worker
    nodes = sorted(nodes, key=lambda node: node[1])
    left, beside, beside_a_rank = [gpus for gpus, _ in nodes], [0] * len(nodes), engines_beside_a_rank(config)
    for _ in range(gpus_asked(config, workers=0) // learner.tensor_parallel):
        place = next((i for i, room in enumerate(left) if room >= learner.tensor_parallel), None)
        if place is not None:  # a learner without room is reported by a rule of its own
            left[place] -= learner.tensor_parallel
            beside[place] += beside_a_rank
    return int(sum(min(held_by(room, share) + more, takes) for room, more, (_, takes) in zip(left, beside, nodes, strict=True)))


def engines_beside_a_rank(config: RunConfig) -> int:
    """Number of engines for which there is room on the GPU of a learner rank; 0 where either side has whole GPUs."""
    of_rank, of_engine = config.learner.gpus_per_rank, config.rollout.gpus_of_a_worker
    return int((1 - of_rank) / of_engine + _ROUNDING) if max(of_rank, of_engine) < 1 else 0


def held_by(gpus: float, share: float) -> int:
    """Number of ranks or engines that a node's GPUs hold, each with `share` of one GPU or with several whole ones: 2 GPUs hold 2 of 0.6."""
    return int(gpus) * int(1 / share) if share < 1 else int(gpus // share)


def workers_asked(config: RunConfig) -> int:
    """Number of workers for which there must be room at the start: on a private Ray all that the pool may grow to."""
    return config.rollout.most_workers if config.ray.address is None else config.rollout.workers


def gpus_asked(config: RunConfig, *, workers: int | None = None) -> int:
    """GPUs needed for all ranks and so many workers; None: as many as have to be there from the start (workers_asked)."""
    return whole_gpus(_wanted(config, workers_asked(config) if workers is None else workers)[0])


def _wanted(config: RunConfig, workers: int) -> tuple[list[float], str]:
    """Share of a GPU that each rank and each worker asks for, and which settings do."""
    engine, rollout, learner = config.rollout.engine, config.rollout, config.learner
    ranks = learner.world_size
    shares: list[float] = []
    asking = []
    if engine.resolved_device == "cuda":
        shares += [rollout.gpus_per_worker] * workers * engine.tensor_parallel
        of = _of(rollout.gpus_per_worker) if engine.tensor_parallel == 1 else f" of {engine.tensor_parallel} GPUs"
        asking.append(f"rollout.engine.device = {engine.device} with {counted(workers, 'worker')}{of}")
    if learner.resolved_device == "cuda":
        shares += [learner.gpus_per_rank] * ranks
        asking.append(f"learner.device = {learner.device} with {counted(ranks, 'rank')}{_of(learner.gpus_per_rank)}")
    return shares, " and ".join(asking)


def _of(share: float) -> str:
    return "" if share == 1 else f" of {share:g} GPU"


def _gpus(shares: Sequence[float]) -> str:
    count = whole_gpus(shares)
    each = ", one for each" if all(share == 1 for share in shares) else ""
    return f"1 GPU is needed{each}" if count == 1 else f"{count} GPUs are needed{each}"


def visible_gpus() -> int:
    """GPUs that this process' torch sees. It is imported only if nothing else can tell."""
    found = gpus_without_torch()
    return _gpus_of_torch() if found is None else found


def _gpus_of_torch() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
