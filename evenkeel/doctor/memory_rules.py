"""Rules about a GPU's memory, for the GPUs that a run may get: they may differ in size, and the driver's machine may have none; and about
memory that other processes hold.

Each rule is a function of (shape, config, bytes of a GPU) that yields complaints; that of ranks also goes by the GPUs of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.devices import engines_beside_a_rank, gpus_asked, held_by
from evenkeel.doctor.facts import Complaint, GpuFact, Nodes
from evenkeel.engines.machine import CONTEXT, outside_cache
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.model_fit import layout_obstacles
from evenkeel.plan.hosts import receiving_bytes
from evenkeel.plan.layouts import GPUS_PER_NODE, layouts
from evenkeel.plan.memory import RESERVE, engine_memory, least_at_start, pass_tokens, rank_memory, stage_memory
from evenkeel.plan.shape import ModelShape

Rule = Callable[[ModelShape, RunConfig, int], Iterator[Complaint]]
# Share of the memory that an engine is estimated to need outside its cache.
_SURELY_TOO_LITTLE = 0.5


def rank_fits_its_gpu(shape: ModelShape, config: RunConfig, gpu_bytes: int, *, gpus_per_node: int) -> Iterator[Complaint]:
    """Advises a layout whose tensor-parallel groups are inside nodes."""
    learner = config.learner
    if learner.resolved_device != "cuda" or any(layout_obstacles(learner, shape.sizes)):
        return
    share, options = int(gpu_bytes * learner.gpus_per_rank), rank_options(config)
    needed = rank_memory(shape, learner, **options)
    if needed.fits(share):
        return
    others = layouts(shape, learner, learner.world_size, share, **options, gpus_per_node=gpus_per_node)
    advised = others[0].changes(learner) if others and others[0].fits else ""
    remedy = f"Set, under learner: {advised}" if advised else _more_room(learner)
    tokens = pass_tokens(learner, options["longest"])
    if needed.has_peak_with_other_weights:
        passes = f"other weights {gib(needed.other)}, a forward pass of {tokens:,} tokens with them {gib(needed.forward)}"
    else:
        passes = f"activations of {tokens:,} tokens {gib(needed.activations)}, head {gib(needed.head)}"
        passes += f", a layer's backward pass {gib(needed.layer)} more" if needed.layer else ""
    yield Complaint(
        "fail",
        f"a learner rank needs {gib(needed.with_reserve)} of its {gib(share)} (weights {gib(needed.weights)}, gradients "
        f"{gib(needed.gradients)}, optimizer {gib(needed.optimizer)}, {passes}, reserve {gib(RESERVE)})",
        remedy,
    )


def _more_room(learner: LearnerConfig) -> str:
    """What may be set so that a rank takes less, where no other layout of so many ranks is known to fit."""
    layout = "Raise learner.tensor_parallel or pipeline_parallel" if learner.gpus_per_rank == 1 else "Raise learner.gpus_per_rank"
    recomputed = "" if learner.recompute_activations else ", set learner.recompute_activations: true"
    return (
        f"{layout}{recomputed}, lower learner.tokens_per_microbatch (or, where answers are longer than that, rollout.engine.context_length "
        "and rollout.sampling.max_tokens), or learner.logprob_chunk_tokens, or use larger GPUs"
    )


def engine_fits_its_gpu(shape: ModelShape, config: RunConfig, gpu_bytes: int) -> Iterator[Complaint]:
    rollout = config.rollout
    if rollout.engine.resolved_device != "cuda":
        return
    memory, has_share = engine_memory(shape, rollout, gpu_bytes), rollout.gpus_per_worker < 1
    if memory.longest_requests < 1:
        larger = "rollout.gpus_per_worker" if has_share else "rollout.engine.memory_fraction"
        requests = ", or rollout.engine.max_running_requests" if has_share else ""
        cut = "" if has_share else ", or cut it over several of a node: rollout.engine.tensor_parallel"
        yield Complaint(
            "fail",
            f"an engine has {gib(max(0, memory.cache))} for its KV cache in addition to weights of {gib(memory.weights)} and "
            f"{gib(memory.outside_cache)} for context, activations, graphs and sampler: that holds {memory.tokens:,} tokens, and one "
            f"request may have {memory.request_tokens:,}",
            f"Lower rollout.engine.context_length and rollout.sampling.max_tokens{requests}, raise {larger}, use larger GPUs{cut}",
        )


def engine_leaves_room_outside_its_cache(shape: ModelShape, config: RunConfig, gpu_bytes: int) -> Iterator[Complaint]:
    """On whole GPUs; an engine with a share of one keeps the room free by itself."""
    rollout = config.rollout
    if rollout.engine.resolved_device != "cuda" or rollout.gpus_per_worker < 1:
        return
    memory, requests = engine_memory(shape, rollout, gpu_bytes), rollout.engine.max_running_requests
    left = gpu_bytes - memory.weights - max(0, memory.cache)
    needed = outside_cache(requests, shape.vocabulary)
    if needed > left and memory.cache > 0:
        yield Complaint(
            "fail" if left < _SURELY_TOO_LITTLE * needed else "warn",
            f"an engine leaves {gib(left)} outside weights and KV cache, where {requests} requests at the same time take up to "
            f"{gib(needed)} for context, activations, graphs and sampler: it would run out of memory when they all run",
            "Lower rollout.engine.max_running_requests or rollout.engine.memory_fraction",
        )


def buckets_reach_an_engine(shape: ModelShape, config: RunConfig, gpu_bytes: int) -> Iterator[Complaint]:
    """By broadcast, which goes from GPU to GPU: graphs, activations and sampler leave less, but all of it in no case."""
    rollout = config.rollout
    if rollout.engine.resolved_device != "cuda":
        return
    memory, received = engine_memory(shape, rollout, gpu_bytes), receiving_bytes(shape, config)
    room = int(gpu_bytes * rollout.gpus_per_worker) - CONTEXT - memory.weights - max(0, memory.cache)
    if received > max(0, room):
        yield Complaint(
            "fail",
            f"an engine has {gib(max(0, room))} beside its CUDA context, weights and KV cache, and to receive a broadcast in buckets of "
            f"{gib(config.weight_sync.bucket_bytes)} takes {gib(received)} of it",
            "Lower weight_sync.bucket_bytes or rollout.engine.memory_fraction, or set weight_sync.transport: object_store",
        )


def both_sides_fit_one_gpu(shape: ModelShape, config: RunConfig, gpu_bytes: int) -> Iterator[Complaint]:
    """Where a rank and engines share a GPU: whether both fit, with their CUDA contexts and the sampler's memory."""
    learner, rollout = config.learner, config.rollout
    if learner.resolved_device != "cuda" or rollout.engine.resolved_device != "cuda" or rollout.gpus_per_worker == 1:
        return
    beside = engines_beside_a_rank(config)
    if not beside or any(layout_obstacles(learner, shape.sizes)):
        return
    rank, memory = rank_memory(shape, learner, **rank_options(config)).with_reserve, engine_memory(shape, rollout, gpu_bytes)
    engine = memory.weights + memory.outside_cache + memory.request_tokens * memory.token_bytes
    if rank + engine > gpu_bytes:
        yield Complaint(
            "fail",
            f"a learner rank of {gib(rank)} and an engine of {gib(engine)} (with a KV cache for one request), their CUDA contexts and the "
            f"sampler included, are {gib(rank + engine)}, more than the {gib(gpu_bytes)} of the GPU that they share",
            "Use a larger GPU or two, a smaller model, or shorter answers",
        )


def on_gpus(
    shape: ModelShape, config: RunConfig, *, of_ranks: Collection[int], of_engines: Collection[int], gpus_per_node: int
) -> Iterator[Complaint]:
    """Complaints for the smallest GPU that the run may get; they are failures only if the largest is too small as well.

    Args:
        of_ranks, of_engines: bytes of each GPU that a rank, or an engine, may get; none: not known.
        gpus_per_node: of the largest node.
    """
    of_rank: Rule = partial(rank_fits_its_gpu, gpus_per_node=gpus_per_node)
    of_engine: tuple[Rule, ...] = (
        engine_fits_its_gpu,
        engine_leaves_room_outside_its_cache,
        buckets_reach_an_engine,
        both_sides_fit_one_gpu,
    )
    for rule, sizes in ((of_rank, of_ranks), *((one, of_engines) for one in of_engine)):
        if not sizes:
            continue
        always = any(one.severity == "fail" for one in rule(shape, config, max(sizes)))
        for found in rule(shape, config, min(sizes)):
            if found.severity == "fail" and not always:
                found = replace(found, severity="warn", sentence=f"on the smallest GPUs there are, of {gib(min(sizes))}: {found.sentence}")
            yield found


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """GPUs of a node that the run may get."""

    sizes: tuple[int, ...]
    """Bytes of those whose memory is known."""
    count: float
    """Number that Ray offers."""
    units: float
    """Units of the rollout resource there."""


def on_gpus_of_nodes(shape: ModelShape, config: RunConfig, nodes: Sequence[NodeGpus]) -> Iterator[Complaint]:
    """The rule of on_gpus, on the GPUs of nodes. Nodes with fewer GPUs than a tensor-parallel group or an engine needs are left out: no
    such group is placed there."""
    learner, engine = config.learner.tensor_parallel, config.rollout.engine.tensor_parallel
    largest = max((int(node.count) for node in nodes if node.sizes), default=GPUS_PER_NODE)
    yield from on_gpus(
        shape,
        config,
        of_ranks=[size for node in nodes if node.count >= learner for size in node.sizes],
        of_engines=[size for node in nodes if node.units >= 1 and node.count >= engine for size in node.sizes],
        gpus_per_node=largest,
    )


def could_be_given(sizes: Collection[int], offered: float) -> tuple[int, ...]:
    """Memory of the GPUs that a machine may give to the run: of the largest ones, as many as it offers, or of all.

    Which ones it offers isn't known; a small one is usually the display's.
    Args: sizes: bytes of each GPU that the driver lists. offered: number that Ray offers, or torch sees; 0: not known.
    """
    return tuple(sorted(sizes, reverse=True)[: int(offered) or None])


def rank_options(config: RunConfig) -> dict[str, Any]:
    """Arguments of rank_memory that a run's other settings decide."""
    return {
        "longest": config.rollout.engine.resolved_context,
        "loads_other": config.loads_other_weights,
        "has_entropy_loss": config.correction.entropy_coefficient > 0,
    }


def gib(count: float) -> str:
    """Bytes in words: GiB, or MiB below 0.1 GiB."""
    return f"{count / 2**30:.3g} GiB" if count >= 0.1 * 2**30 else f"{count / 2**20:.3g} MiB"


FREE_SHARE = 0.9
"""Share of a GPU's memory that should be free. The driver keeps some of it: an idle GPU never has all of it free."""


def gpus_have_room(nodes: Nodes, config: RunConfig, shape: ModelShape) -> Iterator[Complaint]:
    """A failure where the run has this machine alone, and has to use a GPU on which none of its ranks and engines has room. On a cluster
    it is a warning: Ray gives nobody a GPU that another of its jobs holds. GPUs of which not enough is known count as free."""
    if not gpus_asked(config):
        return
    for node in nodes:
        if not (held := [gpu for gpu in node.gpus if is_held(gpu)]):
            continue
        loads = loads_by_gpu(shape, config, min(gpu.bytes for gpu in node.gpus if gpu.bytes))
        least = min(loads, default=0)
        full = [gpu for gpu in held if (gpu.free or 0) < least <= gpu.bytes]
        is_needed = config.ray.address is None and 0 <= len(node.gpus) - len(loads) < len(full)
        others = ", or set CUDA_VISIBLE_DEVICES to other GPUs" if len(node.gpus) > gpus_asked(config) else ""
        for gpu in held:
            too_little = f", too little for any rank or engine (at least {gib(least)})" if gpu in full else ""
            yield Complaint(
                "fail" if is_needed and gpu in full else "warn",
                f"{node.name}: GPU {gpu.number} ({gpu.name}) has {gib(gpu.free or 0)} of {gib(gpu.bytes)} free{too_little}: another "
                "process holds the rest",
                f"End it (nvidia-smi there says which){others}",
            )


def is_held(gpu: GpuFact) -> bool:
    """Whether another process holds much of its memory, as far as is known."""
    return gpu.free is not None and gpu.free < FREE_SHARE * gpu.bytes


def loads_by_gpu(shape: ModelShape, config: RunConfig, gpu_bytes: int) -> list[int]:
    """Bytes that rank and engines take in any case of each GPU that the run begins with: what stays of the rank that has least,
    and what an engine doesn't start without. An elastic pool need not grow.

    Args: gpu_bytes: of such a GPU.
    """
    learner, rollout = config.learner, config.rollout
    loads: list[int] = []
    engines = rollout.workers if rollout.engine.resolved_device == "cuda" else 0
    of_engine = least_at_start(shape, rollout, gpu_bytes) if engines else 0
    if learner.resolved_device == "cuda" and not any(layout_obstacles(learner, shape.sizes)):
        stages = range(learner.pipeline_parallel)
        stays = min(stage_memory(shape, learner, stage, **rank_options(config)).state for stage in stages)
        for _ in range(learner.world_size):
            beside = min(engines_beside_a_rank(config), engines)
            engines -= beside
            loads.append(stays + beside * of_engine)
    if rollout.gpus_per_worker == 1:
        return loads + [of_engine] * engines * rollout.engine.tensor_parallel
    on_each = held_by(1, rollout.gpus_per_worker)
    while engines > 0:
        loads.append(min(on_each, engines) * of_engine)
        engines -= on_each
    return loads
