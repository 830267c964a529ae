"""Which rank trains which sequences, in which micro-batches: whole sequences, equal cost, a token budget."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """For each rank its micro-batches, each a tuple of sequence indices."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """[rank][micro-batch]; every rank has the same number, some may be empty."""


def sequence_cost(length: int, hidden_size: int) -> float:
    """Estimated work of one sequence, in units of a token's work outside attention.

    A layer's matrices cost about 24 H^2 operations a token, causal attention 2 H L on average over the sequence: 1 + L / (12 H).
    """
    return length * (1 + length / (12 * hidden_size))


def plan(lengths: Sequence[int], ranks: int, tokens_per_microbatch: int, hidden_size: int) -> Plan:
    """Spread sequences over ranks by cost and pack each rank's into micro-batches.

    Args:
        lengths: tokens of each sequence.
        ranks: data-parallel ranks.
        tokens_per_microbatch: budget; a longer sequence is a micro-batch of its own.
    """
    shares = _spread(lengths, ranks, hidden_size)
    packed = [_pack(share, lengths, tokens_per_microbatch) for share in shares]
    count = max(map(len, packed), default=0)
    return Plan(tuple(tuple(parts + [()] * (count - len(parts))) for parts in packed))


def minibatches(group_ids: Tensor, count: int, *, seed: int) -> list[list[int]]:
    """Split sequences into minibatches of whole groups, as equal in groups as can be.

    Args:
        group_ids: [S] int64.
        count: minibatches; fewer come back if there are fewer groups.
        seed: of the shuffle; a single minibatch is not shuffled.
    Returns: sequence indices, ascending in each minibatch.
    """
    ids, group_of = torch.unique(group_ids, return_inverse=True)
    groups = len(ids)
    count = min(count, groups)
    order = torch.arange(groups)
    if count > 1:
        order = torch.randperm(groups, generator=torch.Generator().manual_seed(seed))
    part_of_group = torch.empty(groups, dtype=torch.int64)
    part_of_group[order] = torch.arange(groups) * count // max(groups, 1)
    part = part_of_group[group_of]
    return [(part == i).nonzero()[:, 0].tolist() for i in range(count)]


def _spread(lengths: Sequence[int], ranks: int, hidden_size: int) -> list[list[int]]:
    """Longest first, each to the rank with the least work so far."""
    heap = [(0.0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        work, rank = heapq.heappop(heap)
        shares[rank].append(i)
        heapq.heappush(heap, (work + sequence_cost(lengths[i], hidden_size), rank))
    return shares


def _pack(share: Sequence[int], lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """In the order of length (attention takes equal lengths in one call), in about equally full micro-batches within the budget."""
    total = sum(lengths[i] for i in share)
    equal_part = total / max(1, math.ceil(total / budget))
    parts: list[tuple[int, ...]] = []
    current: list[int] = []
    tokens = packed = 0
    for i in sorted(share, key=lambda i: (-lengths[i], i)):
        is_full = tokens + lengths[i] > budget or packed >= equal_part * (len(parts) + 1)
        if current and is_full:
            parts.append(tuple(current))
            current, tokens = [], 0
        current.append(i)
        tokens += lengths[i]
        packed += lengths[i]
    return [*parts, tuple(current)] if current else parts
