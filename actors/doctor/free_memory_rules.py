"""Rule of the second layer about GPUs of which other processes hold memory: whether ranks and engines fit into what is free."""

from __future__ import annotations

from collections.abc import Iterator

from actors.config import RunConfig
from actors.doctor.facts import Complaint, GpuFact, Nodes
from actors.doctor.memory_rules import gib, rank_options
from actors.plan.engine_memory import least_at_start
from actors.plan.learner_memory import stage_memory
from actors.plan.shape import ModelShape
from actors.settings.devices import engines_beside_a_rank, gpus_asked, held_by
from learner.model_fit import layout_obstacles

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
    """For each GPU that the run begins with, bytes that its rank and engines take of it in any case: what stays of the rank that has least,
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
