"""Values of tokens between padded tensors [B, T] and the packed form [N]: what stands in the padding plays no part."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import DataError


def to_padded(values: Tensor, attention_mask: Tensor, *, padding: float = 0.0) -> Tensor:
    """Per-token values [N] or [N, K] back at their places, [B, T] or [B, T, K]; differentiable.

    Args:
        attention_mask: [B, T], the one that `from_padded` or `pack_like` was given, true at N places.
    Raises: DataError if the mask has another number of tokens.
    """
    real = attention_mask.bool()
    tokens = int(real.count_nonzero())
    if values.shape[0] != tokens:
        raise DataError(
            f"to_padded: {values.shape[0]} values for the {tokens} tokens of attention_mask. Give the mask that they were packed with."
        )
    shape = (*real.shape, *values.shape[1:])
    empty = torch.full(shape, padding, dtype=values.dtype, device=values.device)
    where = real.reshape(*real.shape, *(1,) * (values.dim() - 1)).expand(shape)
    return empty.masked_scatter(where, values)


def pack_like(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Padded per-token values [B, T] or [B, T, K] as a batch made with this attention_mask has them: [N] or [N, K]; differentiable.

    Args:
        attention_mask: [B, T], true at N places. For tensors of responses alone, the responses' part of the mask.
    Raises: DataError if the first two dimensions differ.
    """
    if values.shape[:2] != attention_mask.shape:
        raise DataError(
            f"pack_like: values {tuple(values.shape)} for attention_mask {tuple(attention_mask.shape)}. Both must be [B, T]: take the "
            "responses' part of the mask for tensors of responses alone."
        )
    return values[attention_mask.bool()]
