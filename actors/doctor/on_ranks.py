"""Functions that the doctor runs in a learner rank's process: how fast its process groups are, and its logprobs and gradient norm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from actors.doctor.deep_facts import CollectiveFact

REPEATS = 3


def collectives(actor: Any, nbytes: int) -> list[CollectiveFact]:
    """Measure this rank's process groups of several ranks, one of each kind. To be called on every rank at the same time.

    Args:
        actor: a LearnerRankActor that has started.
        nbytes: of the tensors, float32.
    """
    place = actor.learner.placement
    sizes: dict[str, tuple[int, Callable[[], Any]]] = {
        "tensor_parallel": (place.tensor_parallel, lambda: place.tensor_group),
        "data_parallel": (place.data_parallel, lambda: place.data_group),
        "expert_parallel": (place.expert_parallel, lambda: place.expert_group),
    }
    found = [_all_reduce(kind, group(), place, nbytes) for kind, (size, group) in sizes.items() if size > 1]
    if place.pipeline_parallel > 1:
        found.append(_send(place, nbytes))
    return found


def _all_reduce(kind: str, group: Any, place: Any, nbytes: int) -> CollectiveFact:
    """Sums a tensor that holds each rank's number, from 1, in every element."""
    import torch
    import torch.distributed as dist

    ranks, mine = dist.get_world_size(group), dist.get_rank(group) + 1
    tensor = torch.empty(nbytes // 4, device=place.device)
    is_right, seconds = True, []
    for _ in range(REPEATS + 1):  # the first one connects
        tensor.fill_(mine)
        seconds.append(_timed(place, group, lambda: dist.all_reduce(tensor, group=group)))
        is_right = is_right and bool((tensor == ranks * (ranks + 1) / 2).all())
    return CollectiveFact(kind, "all_reduce", ranks, nbytes, min(seconds[1:]), is_right, _is_inside(group))


def _send(place: Any, nbytes: int) -> CollectiveFact:
    """Send a tensor from each pipeline stage to the next, one pair after the other."""
    import torch
    import torch.distributed as dist

    group, stages, mine = place.pipeline_group, place.pipeline_parallel, place.pipeline_rank
    tensor = torch.empty(nbytes // 4, device=place.device)
    is_right, seconds = True, []

    def pass_on(stage: int) -> None:
        if mine == stage:
            dist.send(tensor, group=group, group_dst=stage + 1)
        elif mine == stage + 1:
            dist.recv(tensor, group=group, group_src=stage)

    for _ in range(REPEATS + 1):
        for stage in range(stages - 1):
            tensor.fill_(mine + 1)
            took_s = _timed(place, group, lambda stage=stage: pass_on(stage))
            if mine == stage + 1:
                is_right = is_right and bool((tensor == stage + 1).all())
            if mine in (stage, stage + 1):
                seconds.append(took_s)
    return CollectiveFact("pipeline_parallel", "send", 2, nbytes, min(seconds[1:]), is_right, _is_inside(group))


def _timed(place: Any, group: Any, call: Any) -> float:
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)

    dist.barrier(group=group)
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def _is_inside(group: Any) -> bool:
    """Whether its ranks are on one node, by their addresses."""
    import torch.distributed as dist

    from actors.metrics.exporter import node_address

    addresses: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(addresses, node_address(), group=group)
    return len(set(addresses)) == 1


def backward(actor: Any, sequences: Sequence[Sequence[int]]) -> float:
    """Norm of the gradient of the mean cross-entropy. Changes the weights. To be called on every rank at the same time."""
    import torch

    lengths = torch.tensor([0, *(len(one) for one in sequences)])
    ids = torch.tensor([token for one in sequences for token in one])
    offsets = lengths.cumsum(0)
    mask = torch.ones(len(ids), dtype=torch.bool)
    mask[offsets[:-1]] = False
    _, update = actor.learner.supervised_update(ids, offsets, mask)
    return float(update.norm)
