"""Which rank trains which sequences, in which micro-batches: whole sequences, equal cost, a token budget, a shared prefix once."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Sequences that begin with the same tokens, which are computed once. A single sequence is a prefix with one member."""

    members: tuple[int, ...]
    """Indices of the sequences."""
    shared: int
    """Tokens computed for all of them together."""
    rows: tuple[int, ...]
    """Tokens computed for each of them beyond those."""

    @classmethod
    def alone(cls, member: int, length: int) -> SharedPrefix:
        return cls((member,), length, (0,))

    @property
    def tokens(self) -> int:
        """Positions that the model computes."""
        return self.shared + sum(self.rows)

    def cost(self, hidden_size: int) -> float:
        """Estimated work for the shared beginning, and for what each member adds to it."""
        beginning = sequence_cost(self.shared, hidden_size)
        return beginning + sum(sequence_cost(self.shared + rows, hidden_size) - beginning for rows in self.rows)

    def split(self, count: int) -> tuple[SharedPrefix, SharedPrefix]:
        """The first `count` members and the others; the beginning is then computed for both."""
        return (
            SharedPrefix(self.members[:count], self.shared, self.rows[:count]),
            SharedPrefix(self.members[count:], self.shared, self.rows[count:]),
        )


@dataclass(frozen=True, slots=True)
class MicrobatchPlan:
    """The micro-batches of each rank, each a tuple of sequence indices."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """[rank][micro-batch]. Every rank has equally many; some may be empty. Sequences of one prefix are neighbours in a micro-batch."""


def sequence_cost(length: int, hidden_size: int) -> float:
    """Estimated work of one sequence, in units of a token's work outside attention.

    A layer's matrices cost about 24 H^2 operations a token, causal attention 2 H L on average over the sequence: 1 + L / (12 H).
    """
    return length * (1 + length / (12 * hidden_size))


def plan_microbatches(
    prefixes: Iterable[SharedPrefix], ranks: int, tokens_per_microbatch: int, hidden_size: int, *, multiple: int = 1
) -> MicrobatchPlan:
    """Spread sequences over ranks by cost, those that share a prefix together, and pack each rank's into micro-batches.

    Those of a prefix are split where they are too many for a micro-batch, or where ranks would otherwise be unequal.
    Args:
        ranks: data-parallel ranks.
        tokens_per_microbatch: budget of computed positions; a longer sequence is a micro-batch of its own.
        multiple: every rank's number of micro-batches is rounded up to a multiple of this, by empty ones.
    """
    pieces = [piece for prefix in prefixes for piece in _cut(prefix, tokens_per_microbatch)]
    shares = _level(_spread(pieces, ranks, hidden_size), hidden_size)
    packed = [_pack(share, tokens_per_microbatch) for share in shares]
    count = math.ceil(max(map(len, packed), default=0) / multiple) * multiple
    return MicrobatchPlan(tuple(tuple(parts + [()] * (count - len(parts))) for parts in packed))


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


def _cut(prefix: SharedPrefix, budget: int) -> list[SharedPrefix]:
    """Halve a prefix again and again, until each piece fits into the budget or has one member."""
    if prefix.tokens <= budget or len(prefix.members) == 1:
        return [prefix]
    return [piece for half in prefix.split(len(prefix.members) // 2) for piece in _cut(half, budget)]


def _spread(prefixes: Sequence[SharedPrefix], ranks: int, hidden_size: int) -> list[list[SharedPrefix]]:
    """Costliest first, each to the rank with the least work so far."""
    heap = [(0.0, rank) for rank in range(ranks)]
    shares: list[list[SharedPrefix]] = [[] for _ in range(ranks)]
    for prefix in sorted(prefixes, key=lambda prefix: (-prefix.cost(hidden_size), prefix.members)):
        work, rank = heapq.heappop(heap)
        shares[rank].append(prefix)
        heapq.heappush(heap, (work + prefix.cost(hidden_size), rank))
    return shares


def _level(shares: list[list[SharedPrefix]], hidden_size: int) -> list[list[SharedPrefix]]:
    """Move sequences from the busiest rank to the idlest one as long as that lowers the work of the busier of the two."""
    work = [sum(prefix.cost(hidden_size) for prefix in share) for share in shares]
    for _ in shares:
        busy, idle = work.index(max(work)), work.index(min(work))
        options = []
        for i, prefix in enumerate(shares[busy]):
            for count in range(1, len(prefix.members)):
                kept, moved = prefix.split(count)
                after = work[busy] - prefix.cost(hidden_size) + kept.cost(hidden_size), work[idle] + moved.cost(hidden_size)
                options.append((max(after), i, kept, moved, after))
        best = min(options, key=lambda option: option[:2], default=None)
        if best is None or best[0] >= work[busy]:
            break
        _, i, kept, moved, (work[busy], work[idle]) = best
        shares[busy][i] = kept
        shares[idle].append(moved)
    return shares


def _pack(share: Sequence[SharedPrefix], budget: int) -> list[tuple[int, ...]]:
    """A rank's micro-batches: sequences in order of length (attention takes equal lengths in one call), about equally full, within the
    budget."""
    total = sum(prefix.tokens for prefix in share)
    equal_part = total / max(1, math.ceil(total / budget))
    parts: list[tuple[int, ...]] = []
    current: list[int] = []
    tokens = packed = 0
    for prefix in sorted(share, key=lambda prefix: (-prefix.shared, prefix.members)):
        is_full = tokens + prefix.tokens > budget or packed >= equal_part * (len(parts) + 1)
        if current and is_full:
            parts.append(tuple(current))
            current, tokens = [], 0
        current += prefix.members
        tokens += prefix.tokens
        packed += prefix.tokens
    return [*parts, tuple(current)] if current else parts
