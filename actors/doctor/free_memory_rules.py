"""Rule of the second layer about GPUs of which other processes hold memory: whether ranks and engines fit into what is free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actors.config import RunConfig
from actors.doctor.facts import Complaint, GpuFact, NodeFacts, Nodes
from actors.doctor.memory_rules import gib, rank_options
from actors.plan.engine_memory import least_free
from actors.plan.learner_memory import RESERVE, rank_memory
from actors.plan.shape import ModelShape
from actors.settings.devices import engines_beside_a_rank, gpus_asked, held_by, workers_asked
from correction.errors import counted
from learner.model_fit import layout_obstacles

FREE_SHARE = 0.9
"""Share of a GPU's memory that should be free."""
Load = tuple[str, int]
"""What the run puts on one GPU, and the bytes that it needs there."""


def gpus_have_room(nodes: Nodes, config: RunConfig, shape: ModelShape) -> Iterator[Complaint]:
    """A failure where the run has this machine alone, and some rank or engine doesn't fit, whichever GPU it is given. On a cluster it is a
    warning: Ray gives nobody a GPU that another of its jobs holds."""
    if not gpus_asked(config):
        return
    for node in nodes:
        if not node.gpus:
            continue
        loads = loads_by_gpu(shape, config, min(gpu.bytes for gpu in node.gpus))
        is_short = not _hold([gpu.free for gpu in node.gpus], loads) and _hold([gpu.bytes for gpu in node.gpus], loads)
        is_certain = is_short and config.ray.address is None and "MIG" not in (node.visible_devices or "")  # a card's parts aren't known
        for gpu in node.gpus:
            too_large = dict(load for load in loads if gpu.free < load[1] <= gpu.bytes)
            if not is_held(gpu) and not (is_short and too_large):
                continue
            needs = "".join(f", and {what} needs {gib(size)}" for what, size in too_large.items())
            which = f"{node.name}: GPU {gpu.number} ({gpu.name})"
            text = f"{which} has {gib(gpu.free)} of {gib(gpu.bytes)} free: another process holds the rest"
            remedy = _end_it(node, config) if too_large else "nvidia-smi there says which"
            yield Complaint("fail" if is_certain and too_large else "warn", text + needs, remedy)


def is_held(gpu: GpuFact) -> bool:
    """Whether another process holds much of its memory."""
    return gpu.free < FREE_SHARE * gpu.bytes


def loads_by_gpu(shape: ModelShape, config: RunConfig, gpu_bytes: int) -> list[Load]:
    """For each GPU that the run asks for: which ranks and engines are on it, and how much of it has to be free for them.

    Args: gpu_bytes: of such a GPU.
    """
    learner, rollout = config.learner, config.rollout
    of_rank = of_engine = 0
    if has_ranks := learner.resolved_device == "cuda" and not any(layout_obstacles(learner, shape.sizes)):
        of_rank = rank_memory(shape, learner, **rank_options(config)).total + RESERVE
    engines = workers_asked(config) if rollout.engine.resolved_device == "cuda" else 0
    if engines:
        of_engine = least_free(shape, rollout, gpu_bytes)
    loads: list[Load] = []
    for _ in range(learner.world_size if has_ranks else 0):
        beside = min(engines_beside_a_rank(config), engines)
        engines -= beside
        what = "a learner rank" + (f" with {counted(beside, 'engine')}" if beside else "")
        loads.append((what, of_rank + beside * of_engine))
    if rollout.gpus_per_worker == 1:
        return loads + [("an engine", of_engine)] * engines * rollout.engine.tensor_parallel
    on_each = held_by(1, rollout.gpus_per_worker)
    while engines > 0:
        together = min(on_each, engines)
        engines -= together
        loads.append(("an engine" if together == 1 else f"{together} engines", together * of_engine))
    return loads


def _hold(room: Sequence[int], loads: Sequence[Load]) -> bool:
    """Whether each load can be put on a GPU of its own that has room for it. Too few GPUs are another rule's. Args: room: bytes of each."""
    largest = sorted((size for _, size in loads), reverse=True)
    return all(there >= size for there, size in zip(sorted(room, reverse=True), largest, strict=False))


def _end_it(node: NodeFacts, config: RunConfig) -> str:
    smaller = ", or lower rollout.gpus_per_worker, the share that an engine takes whole" if config.rollout.gpus_per_worker < 1 else ""
    others = ", or set CUDA_VISIBLE_DEVICES to other GPUs" if len(node.gpus) > gpus_asked(config) else ""
    return f"End it (nvidia-smi there says which){smaller}{others}{' before ray start' if others and config.ray.address else ''}"
