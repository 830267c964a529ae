"""RMSNorm in the order of operations of Hugging Face and SGLang: normalise in float32, round, then multiply by the weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HFRMSNorm(torch.nn.Module):
    """y = weight * (x / sqrt(mean(x^2) + eps)), the mean over the last dimension.

    In float32 the order is of no account; in bfloat16 the product of two roundings is what the other engine computes.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normal.to(x.dtype)
