"""Padded [B, T] tensors in and out, for users of other frameworks."""

from __future__ import annotations

import torch
from torch import Tensor

from correction.batch import PackedBatch
from correction.errors import DataError


def from_padded(
    token_ids: Tensor,
    attention_mask: Tensor,
    loss_mask: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    group_ids: Tensor,
    *,
    proximal_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    weight_versions: Tensor | None = None,
    turn_ids: Tensor | None = None,
    learner_version: int = 0,
    temperature: float = 1.0,
) -> PackedBatch:
    """The packed batch of padded tensors; where the padding stands does not matter, nor what is in it.

    Args:
        token_ids, behavior_logprobs, proximal_logprobs, reference_logprobs, weight_versions, turn_ids: [B, T], the value of a token at
            its own place (frameworks that shift logprobs by one must shift them back).
        attention_mask: [B, T], true at real tokens; loss_mask: [B, T], true at trained ones, none outside attention_mask.
        advantages: [B] or [B, T]; group_ids: [B].
        weight_versions: None means that learner_version sampled everything.
    Raises: DataError if shapes differ or the loss mask reaches into the padding.
    """
    real = attention_mask.bool()
    if bool((loss_mask.bool() & ~real).any()):
        raise DataError("from_padded: loss_mask is true at padding. Both masks must have one shape [B, T] and one alignment.")
    rows = [token_ids, loss_mask, behavior_logprobs, proximal_logprobs, reference_logprobs, weight_versions, turn_ids]
    if any(row is not None and row.shape != real.shape for row in rows):
        raise DataError(f"from_padded: every token tensor must be [B, T] = {tuple(real.shape)}")
    by_token = advantages if advantages.dim() == 2 else advantages[:, None].expand(real.shape)
    versions = torch.full_like(token_ids, learner_version) if weight_versions is None else weight_versions
    return PackedBatch(
        token_ids=token_ids[real].long(),
        offsets=torch.cat([real.new_zeros(1, dtype=torch.int64), real.sum(1).cumsum(0)]),
        loss_mask=loss_mask.bool()[real],
        behavior_logprobs=behavior_logprobs[real],
        advantages=by_token[real].to(behavior_logprobs.dtype),
        weight_versions=versions[real].int(),
        group_ids=group_ids.long(),
        learner_version=learner_version,
        temperature=temperature,
        proximal_logprobs=None if proximal_logprobs is None else proximal_logprobs[real],
        reference_logprobs=None if reference_logprobs is None else reference_logprobs[real],
        turn_ids=None if turn_ids is None else turn_ids[real].int(),
    ).validate()


def to_padded(values: Tensor, attention_mask: Tensor, *, padding: float = 0.0) -> Tensor:
    """Per-token values [N] back at their places [B, T]; differentiable.

    Args:
        attention_mask: the one that `from_padded` was given.
    """
    real = attention_mask.bool()
    empty = torch.full(real.shape, padding, dtype=values.dtype, device=values.device)
    return empty.masked_scatter(real, values)
