"""What the sum of token losses is divided by, as one factor for each token.

Factors of the global batch travel with the tokens, so that losses of micro-batches and ranks add up to the batch's loss
by plain sum. A sequence without any counted token is no sequence here: padding and fully masked answers change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from correction.choices import DenominatorKind
from correction.segments import Segments


def sequence_scale(tokens: Tensor, group_ids: Tensor, *, kind: DenominatorKind, constant: float = 1.0) -> Tensor:
    """[S] float64: one over the denominator of each sequence's tokens; 0 where the sequence counts nothing.

    Args:
        tokens: [S] float64, tokens that count; group_ids: [S], read by prompt_mean only.
        constant: tokens, > 0, read by constant only.
    """
    has_tokens = tokens > 0
    if kind is DenominatorKind.TOKEN_MEAN:
        per_sequence = torch.full_like(tokens, 1.0) / tokens.sum().clamp(min=1)
    elif kind is DenominatorKind.PROMPT_MEAN:
        _, group = torch.unique(group_ids, return_inverse=True)
        group_tokens = tokens.new_zeros(group_ids.numel()).index_add_(0, group, tokens)
        per_sequence = 1 / (group_tokens[group].clamp(min=1) * (group_tokens > 0).sum().clamp(min=1))
    else:
        length = torch.full_like(tokens, constant if kind is DenominatorKind.CONSTANT else 1.0)
        if kind is DenominatorKind.SEQUENCE_MEAN:
            length = tokens.clamp(min=1)
        per_sequence = 1 / (length * has_tokens.sum().clamp(min=1))
    return torch.where(has_tokens, per_sequence, 0)


def kept_local_factor(mask: Tensor, keep: Tensor, sequences: Segments, *, kind: DenominatorKind) -> Tensor | float:
    """[N] factor from original to kept counts, as far as it is local to a sequence: its own mean, in sequence_mean."""
    if kind is not DenominatorKind.SEQUENCE_MEAN:
        return 1.0
    kept = sequences.sum(keep)
    return sequences.spread(torch.where(kept > 0, sequences.sum(mask) / kept.clamp(min=1), 0))


def global_counts(mask: Tensor, keep: Tensor, sequences: Segments, *, kind: DenominatorKind) -> Tensor:
    """[2] float64: original and kept count whose quotient is the rest of that factor, one number for the global batch."""
    if kind is DenominatorKind.TOKEN_MEAN:
        return torch.stack([mask.sum(dtype=torch.float64), keep.sum(dtype=torch.float64)])
    return torch.stack([sequences.any(mask).sum(dtype=torch.float64), sequences.any(keep).sum(dtype=torch.float64)])
