"""Rule of the second layer about GPUs of which other processes hold memory: whether ranks and engines fit into what is free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actors.config import RunConfig
from actors.doctor.facts import Complaint, GpuFact, NodeFacts, Nodes
from actors.doctor.memory_rules import gib, rank_options
from actors.plan.engine_memory import free_at_start
from actors.plan.learner_memory import RESERVE, rank_memory
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
    """Bytes that it takes in any case: what stays of a rank, and what an engine doesn't start without."""
    most: int
    """Bytes that it may take: a rank's activations and reserve, which are estimates or go by the answers' length, and an engine's share."""


def gpus_have_room(nodes: Nodes, config: RunConfig, shape: ModelShape) -> Iterator[Complaint]:
    """A failure where the run has this machine alone, and some rank or engine certainly doesn't fit, whichever GPU it is given. On a
    cluster it is a warning: Ray gives nobody a GPU that another of its jobs holds. GPUs of which not enough is known count as free."""
    if not gpus_asked(config):
        return
    for node in nodes:
        if not (held := [gpu for gpu in node.gpus if is_held(gpu)]):
            continue
        loads = loads_by_gpu(shape, config, min(gpu.bytes for gpu in node.gpus if gpu.bytes))
        is_certain = config.ray.address is None and _is_short(node.gpus, [load.least for load in loads])
        for gpu in held:
            which = f"{node.name}: GPU {gpu.number} ({gpu.name}) has {gib(gpu.free or 0)} of {gib(gpu.bytes)} free"
            remedy = "nvidia-smi there says which"
            if surely := _too_large({load.what: load.least for load in loads}, gpu):
                which, remedy = f"{which}, too little for {surely}", _end_it(node, config)
            elif perhaps := _too_large({load.what: load.most for load in loads}, gpu):
                which, remedy = f"{which}, perhaps too little for {perhaps}", _end_it(node, config, or_take_less=True)
            yield Complaint("fail" if surely and is_certain else "warn", f"{which}: another process holds the rest", remedy)


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
        rank = rank_memory(shape, learner, **rank_options(config))
        for _ in range(learner.world_size):
            beside = min(engines_beside_a_rank(config), engines)
            engines -= beside
            what = "a learner rank" + (f" with {counted(beside, 'engine')}" if beside else "")
            loads.append(Load(what, rank.state + _together(beside, least, most), rank.total + RESERVE + beside * most))
    if rollout.gpus_per_worker == 1:
        return loads + [Load("an engine", least, most)] * engines * rollout.engine.tensor_parallel
    on_each = held_by(1, rollout.gpus_per_worker)
    while engines > 0:
        count = min(on_each, engines)
        engines -= count
        what = "an engine" if count == 1 else f"{count} engines"
        loads.append(Load(what, _together(count, least, most), count * most))
    return loads


def _together(engines: int, least: int, most: int) -> int:
    """Bytes without which one of the engines on a GPU doesn't start: those before it have taken their shares."""
    return (engines - 1) * most + least if engines else 0


def _is_short(gpus: Sequence[GpuFact], sizes: Sequence[int]) -> bool:
    """Whether the loads would fit the GPUs if nobody else were there, and don't now."""
    free = [math.inf if gpu.free is None or not is_held(gpu) else gpu.free for gpu in gpus]
    return _hold([gpu.bytes or math.inf for gpu in gpus], sizes) and not _hold(free, sizes)


def _hold(room: Sequence[float], sizes: Sequence[int]) -> bool:
    """Whether each load can be put on a GPU of its own that has room for it. Too few GPUs are another rule's. Args: room: bytes of each."""
    largest_first = zip(sorted(room, reverse=True), sorted(sizes, reverse=True), strict=False)
    return all(there >= size for there, size in largest_first)


def _too_large(sizes: dict[str, int], gpu: GpuFact) -> str:
    """Those loads, in words, that the GPU would have room for if nobody else were there; empty: none."""
    free = gpu.free or 0
    return " and ".join(f"{what} ({gib(size)})" for what, size in sizes.items() if free < size <= gpu.bytes)


def _end_it(node: NodeFacts, config: RunConfig, *, or_take_less: bool = False) -> str:
    smaller = ", or lower rollout.gpus_per_worker" if or_take_less and config.rollout.gpus_per_worker < 1 else ""
    others = ", or set CUDA_VISIBLE_DEVICES to other GPUs" if len(node.gpus) > gpus_asked(config) else ""
    return f"End it (nvidia-smi there says which){smaller}{others}{' before ray start' if others and config.ray.address else ''}"
