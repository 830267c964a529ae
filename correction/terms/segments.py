"""Reductions over ragged runs of tokens: one token, one model turn, one sequence or one group at a time.

Every part of the correction works at a level. `Segments` gives all levels the same verbs (sum, running, mean, maximum,
spread), so that no caller asks which level it has. Sums run in float64: a sequence of 65,536 float32 terms added one by
one would lose three digits. Nothing here loops over sequences in Python, and nothing carries a gradient.

Masks select without multiplication, so that an infinity outside the mask can't poison a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..batch import PackedBatch
from ..settings.choices import Level

# On a CPU torch.where runs one element at a time (2 ns each, where an addition takes 0.1), and `masked` and `where_finite` are most of
# what the correction does to a token. For tensors without a gradient they select on the bits instead: same values, an eighth of the time.
_BITS = {torch.float32: torch.int32, torch.int32: torch.int32, torch.float64: torch.int64, torch.int64: torch.int64}


@dataclass(frozen=True, slots=True)
class Segments:
    """N tokens cut into U consecutive runs, the units of a level."""

    offsets: Tensor | None
    """[U + 1] int64; None: each token is its own unit, and the verbs do nothing."""
    count: int
    """U."""
    num_tokens: int
    """N."""

    def sum(self, values: Tensor) -> Tensor:
        """[U] float64 sums of values [N], or counts of a mask; 0 for an empty unit."""
        if self.offsets is None:
            return values.double()
        if values.dtype == torch.bool:
            return running_counts(values, self.offsets).double()
        if values.numel() == 0:
            return values.new_zeros(self.count, dtype=torch.float64)
        return torch.segment_reduce(values.double(), "sum", offsets=self.offsets, initial=0)

    def running(self, values: Tensor) -> Tensor:
        """[N] float64: sums of values [N] from the first token of each token's unit up to itself, or counts of a mask."""
        if self.offsets is None:
            return values.double()
        total = values.new_zeros(self.num_tokens + 1, dtype=torch.float64)
        torch.cumsum(values, 0, dtype=torch.float64, out=total[1:])
        return total[1:] - self.spread(total[self.offsets[:-1]])

    def maximum(self, values: Tensor) -> Tensor:
        """[U] largest value of each unit; -inf for an empty unit."""
        if self.offsets is None:
            return values
        if values.numel() == 0:
            return values.new_full((self.count,), -torch.inf)
        return torch.segment_reduce(values, "max", offsets=self.offsets, initial=-torch.inf)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """[U] float64 means over the tokens in mask of values [N] that are 0 outside of it; 0 where a unit has none."""
        return self.sum(values) / self.sum(mask).clamp(min=1)

    def any(self, mask: Tensor) -> Tensor:
        """[U] bool: some token of the unit is in the mask."""
        return mask if self.offsets is None else running_counts(mask, self.offsets) > 0

    def spread(self, units: Tensor) -> Tensor:
        """[N] the value of each token's unit."""
        return units if self.offsets is None else torch.repeat_interleave(units, self.offsets.diff(), output_size=self.num_tokens)


def running_counts(mask: Tensor, offsets: Tensor) -> Tensor:
    """[U] int32: tokens of the mask [N] in each unit. Running counts are exact, and their differences cost less than a reduction."""
    running = torch.zeros(mask.shape[0] + 1, dtype=torch.int32, device=mask.device)
    torch.cumsum(mask.to(torch.int32), 0, dtype=torch.int32, out=running[1:])
    return running.index_select(0, offsets).diff()


def segments_from_offsets(offsets: Tensor, num_tokens: int) -> Segments:
    """Units given by offsets [U + 1]."""
    return Segments(offsets=offsets, count=int(offsets.shape[0]) - 1, num_tokens=num_tokens)


def token_segments(num_tokens: int) -> Segments:
    """Each token by itself."""
    return Segments(offsets=None, count=num_tokens, num_tokens=num_tokens)


def sequence_segments(batch: PackedBatch) -> Segments:
    """One unit for each of the batch's S sequences."""
    return segments_from_offsets(batch.offsets, batch.num_tokens)


def turn_segments(batch: PackedBatch, sequences: Segments) -> Segments:
    """One unit for each run of equal turn_ids inside a sequence; whole sequences if the batch has no turns."""
    if batch.turn_ids is None or batch.num_tokens == 0:
        return sequences
    starts = torch.ones_like(batch.loss_mask)
    starts[1:] = batch.turn_ids.diff() != 0
    starts[batch.offsets[batch.offsets < batch.num_tokens]] = True
    first = starts.nonzero().squeeze(1)
    return segments_from_offsets(torch.cat([first, first.new_tensor([batch.num_tokens])]), batch.num_tokens)


@dataclass(frozen=True)
class Levels:
    """The segments of one batch, each made when first asked for."""

    batch: PackedBatch

    @cached_property
    def sequences(self) -> Segments:
        return sequence_segments(self.batch)

    @cached_property
    def turns(self) -> Segments:
        return turn_segments(self.batch, self.sequences)

    def at(self, level: Level) -> Segments:
        """Segments of a level; sequence and geometric share theirs."""
        if level is Level.TOKEN:
            return token_segments(self.batch.num_tokens)
        return self.turns if level is Level.TURN else self.sequences


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """[N] values where the mask is True, 0 elsewhere, whatever stands there; carries a gradient if values do.

    Args:
        mask: [N] bool.
    """
    bits = _BITS.get(values.dtype)
    if bits is None or values.requires_grad or values.device.type != "cpu":
        return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
    all_or_none = mask.to(bits).neg_()  # -1 has every bit set
    return all_or_none.bitwise_and_(values.view(bits)).view(values.dtype)


def all_finite(*values: Tensor) -> bool:
    """True if all values are surely finite; False is no answer. On a CPU a finite sum says that they are, for a quarter of the time of
    looking at each; elsewhere the answer would have to be waited for, and is False."""
    return values[0].device.type == "cpu" and all(math.isfinite(float(v.sum())) for v in values)


def where_finite(mask: Tensor, *values: Tensor) -> Tensor:
    """[N] bool: the mask without tokens of which one of the values [N] is not a finite number; the mask itself where `all_finite`."""
    if all_finite(*values):
        return mask
    zero = values[0] - values[0]  # not a number, which is true, where the value is not finite
    for more in values[1:]:
        zero = zero + (more - more)
    return mask & ~zero.bool()  # a cast costs a sixth of a comparison on a CPU
