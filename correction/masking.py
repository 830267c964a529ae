"""Selection by mask without multiplication, so that an infinity outside the mask can't poison a batch.

On a CPU torch.where runs one element at a time (2 ns each, where an addition takes 0.1), and these two are most of what the
correction does to a token. For tensors without a gradient they select on the bits instead: same values, an eighth of the time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BITS = {torch.float32: torch.int32, torch.int32: torch.int32, torch.float64: torch.int64, torch.int64: torch.int64}


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


def where_finite(mask: Tensor, *values: Tensor) -> Tensor:
    """[N] bool: the mask without tokens of which one of the values [N] is not a finite number; the mask itself where all are.

    On a CPU a finite sum says that all are, for a quarter of the time of looking at each.
    """
    if mask.device.type == "cpu" and all(math.isfinite(float(v.sum())) for v in values):
        return mask
    zero = values[0] - values[0]  # not a number, which is true, where the value is not finite
    for more in values[1:]:
        zero = zero + (more - more)
    return mask & ~zero.bool()  # a cast costs a sixth of a comparison on a CPU
