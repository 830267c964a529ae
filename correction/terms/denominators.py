"""What the sum of token losses is divided by, as one factor for each token.

Factors of the global batch travel with the tokens, so that losses of micro-batches and ranks add up to the batch's loss
by plain sum. A sequence without a counted token is not counted as a sequence: padding and fully masked answers change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..settings.choices import DenominatorKind
from .segments import Segments


def batch_counts(tokens: Tensor, prompts: Tensor, num_prompts: int, rollouts: Tensor | None = None) -> Tensor:
    """[2 + P] float64: counted tokens, rollouts with at least one, and counted tokens of each of P prompts. Adds up over shards.

    Args:
        tokens: [S] float64, tokens that count; prompts: [S] int64, 0 to P - 1, not read if P is 0.
        rollouts: [S] int64, that of each sequence; None: each is one of its own.
    """
    counts = tokens.new_zeros(2 + num_prompts)
    counts[0] = tokens.sum()
    counts[1] = (tokens > 0).sum() if rollouts is None else torch.unique(rollouts[tokens > 0]).numel()
    if num_prompts > 0:
        counts[2:].index_add_(0, prompts, tokens)
    return counts


def tokens_of_rollouts(tokens: Tensor, rollouts: Tensor) -> Tensor:
    """[S] float64: tokens that count of each sequence's rollout. Args: as for batch_counts."""
    found, index = torch.unique(rollouts, return_inverse=True)
    return tokens.new_zeros(found.numel()).index_add_(0, index, tokens)[index]


def sequence_scale(
    tokens: Tensor, prompts: Tensor, whole: Tensor, *, kind: DenominatorKind, constant: float = 1.0, rollouts: Tensor | None = None
) -> Tensor:
    """[S] float64: one over the denominator of each sequence's tokens; 0 for a sequence without a counted token.

    Args:
        tokens: [S] float64, tokens that count; prompts: [S] int64, read by prompt_mean only.
        whole: `batch_counts` of the whole batch, of which these sequences may be a shard.
        constant: tokens, > 0, read by constant only.
        rollouts: as for batch_counts, which gave `whole`; read by rollout_mean only.
    """
    has_tokens = tokens > 0
    if kind is DenominatorKind.TOKEN_MEAN:
        per_sequence = torch.ones_like(tokens) / whole[0].clamp(min=1)
    elif kind is DenominatorKind.PROMPT_MEAN:
        by_prompt = whole[2:]
        per_sequence = 1 / (by_prompt[prompts].clamp(min=1) * (by_prompt > 0).sum().clamp(min=1))
    else:
        length = torch.full_like(tokens, constant if kind is DenominatorKind.CONSTANT else 1.0)
        if kind in (DenominatorKind.SEQUENCE_MEAN, DenominatorKind.ROLLOUT_MEAN):
            length = (tokens if rollouts is None else tokens_of_rollouts(tokens, rollouts)).clamp(min=1)
        per_sequence = 1 / (length * whole[1].clamp(min=1))
    return torch.where(has_tokens, per_sequence, 0)


def kept_local_factor(mask: Tensor, keep: Tensor, sequences: Segments, *, kind: DenominatorKind) -> Tensor | float:
    """[N] the part of the factor original count / kept count that a sequence knows by itself: that of its own mean under
    sequence_mean, 1 otherwise."""
    if kind is not DenominatorKind.SEQUENCE_MEAN:
        return 1.0
    kept = sequences.sum(keep)
    return sequences.spread(torch.where(kept > 0, sequences.sum(mask) / kept.clamp(min=1), 0))


def global_counts(mask: Tensor, keep: Tensor, sequences: Segments, *, kind: DenominatorKind) -> Tensor:
    """[2] float64: original and kept count of this share; summed over the global batch, their quotient is the rest of that factor."""
    if kind is DenominatorKind.TOKEN_MEAN:
        return torch.stack([mask.sum(dtype=torch.float64), keep.sum(dtype=torch.float64)])
    return torch.stack([sequences.any(mask).sum(dtype=torch.float64), sequences.any(keep).sum(dtype=torch.float64)])
