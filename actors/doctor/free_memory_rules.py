"""Rule of the second layer about GPUs of which other processes hold memory: whether ranks and engines fit into what is free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actors.config import RunConfig
from actors.doctor.facts import Complaint, GpuFact, NodeFacts, Nodes
from actors.doctor.memory_rules import gib, rank_options
from actors.plan.engine_memory import free_at_start
from actors.plan.learner_memory import rank_memory, stage_memory
from actors.plan.shape import ModelShape
from actors.settings.devices import engines_beside_a_rank, gpus_asked, held_by
from correction.errors import counted
from learner.model_fit import layout_obstacles

FREE_SHARE = 0.9
"""Share of a GPU's memory that should be free. The driver keeps some of it: an idle GPU never has all of it free."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the run puts on one GPU."""

    what: str
    least: int
    """Bytes that it takes in any case: what stays of the rank that has least, and what an engine doesn't start without."""
    most: int
    """Bytes that it may take: a rank's activations and reserve, which are estimates or go by the answers' length, and an engine's share."""


def gpus_have_room(nodes: Nodes, config: RunConfig, shape: ModelShape) -> Iterator[Complaint]:
    """A failure where the run has this machine alone, and has to use a GPU on which none of its ranks and engines has room. On a cluster
    it is a warning: Ray gives nobody a GPU that another of its jobs holds. GPUs of which not enough is known count as free."""
    if not gpus_asked(config):
        return
    for node in nodes:
        if not (held := [gpu for gpu in node.gpus if is_held(gpu)]):
            continue
        loads = loads_by_gpu(shape, config, min(gpu.bytes for gpu in node.gpus if gpu.bytes))
        full = [gpu for gpu in held if _is_full(gpu, loads)]
        is_needed = config.ray.address is None and 0 <= len(node.gpus) - len(loads) < len(full)
        for gpu in held:
            which = f"{node.name}: GPU {gpu.number} ({gpu.name}) has {gib(gpu.free or 0)} of {gib(gpu.bytes)} free"
            remedy = "nvidia-smi there says which"
            if surely := _too_large({load.what: load.least for load in loads}, gpu):
                which, remedy = f"{which}, too little for {surely}", _end_it(node, config)
            elif perhaps := _too_large({load.what: load.most for load in loads}, gpu):
                which, remedy = f"{which}, perhaps too little for {perhaps}", _end_it(node, config, or_take_less=True)
            yield Complaint("fail" if is_needed and gpu in full else "warn", f"{which}: another process holds the rest", remedy)


def is_held(gpu: GpuFact) -> bool:
    """Whether another process holds much of its memory, as far as is known."""
    return gpu.free is not None and gpu.free < FREE_SHARE * gpu.bytes


def loads_by_gpu(shape: ModelShape, config: RunConfig, gpu_bytes: int) -> list[Load]:
    """For each GPU that the run begins with: which ranks and engines are on it, and what they take of it. An elastic pool need not grow.

    Args: gpu_bytes: of such a GPU.
    """
    learner, rollout = config.learner, config.rollout
    loads: list[Load] = []
    engines = rollout.workers if rollout.engine.resolved_device == "cuda" else 0
    least, most = free_at_start(shape, rollout, gpu_bytes) if engines else (0, 0)
    if learner.resolved_device == "cuda" and not any(layout_obstacles(learner, shape.sizes)):
        options = rank_options(config)
        stays = min(stage_memory(shape, learner, stage, **options).state for stage in range(learner.pipeline_parallel))
        takes = rank_memory(shape, learner, **options).with_reserve
        for _ in range(learner.world_size):
            beside = min(engines_beside_a_rank(config), engines)
            engines -= beside
            what = "a learner rank" + (f" with {counted(beside, 'engine')}" if beside else "")
            loads.append(Load(what, stays + beside * least, takes + beside * most))
    if rollout.gpus_per_worker == 1:
        return loads + [Load("an engine", least, most)] * engines * rollout.engine.tensor_parallel
    on_each = held_by(1, rollout.gpus_per_worker)
    while engines > 0:
        count = min(on_each, engines)
        engines -= count
        what = "an engine" if count == 1 else f"{count} engines"
        loads.append(Load(what, count * least, count * most))
    return loads


def _is_full(gpu: GpuFact, loads: Sequence[Load]) -> bool:
    """Whether none of the loads has room on it, though some would if nobody else were there."""
    least = min((load.least for load in loads), default=0)
    return (gpu.free or 0) < least <= gpu.bytes


def _too_large(sizes: dict[str, int], gpu: GpuFact) -> str:
    """Those loads, in words, that the GPU would have room for if nobody else were there; empty: none."""
    free = gpu.free or 0
    return " or for ".join(f"{what} ({gib(size)})" for what, size in sizes.items() if free < size <= gpu.bytes)


def _end_it(node: NodeFacts, config: RunConfig, *, or_take_less: bool = False) -> str:
    smaller = ", or lower rollout.gpus_per_worker" if or_take_less and config.rollout.gpus_per_worker < 1 else ""
    others = ", or set CUDA_VISIBLE_DEVICES to other GPUs" if len(node.gpus) > gpus_asked(config) else ""
    return f"End it (nvidia-smi there says which){smaller}{others}{' before ray start' if others and config.ray.address else ''}"
