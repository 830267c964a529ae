"""RMSNorm. On a CPU, and in float32, in Hugging Face's order: normalise in float32, round, multiply by the weight, which `true_on_policy`
asks of both engines. In half precision on a GPU it rounds once, at the end, as SGLang does there, and on a CPU unless `true_on_policy` is
on. And where some families have norms that Megatron's layers have no place for: over all heads of queries or keys, and after a product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from correction.engines.operators import rms_norm


class HFRMSNorm(torch.nn.Module):
    """y = weight * (x / sqrt(mean(x^2) + eps)), the mean over the last dimension.

    x / sqrt(...) is rounded to the weights' type before it is multiplied: in half precision that shows. On a GPU half precision has torch's
    own kernel, which rounds once.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if rounds_once(x):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        output: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return output


def rounds_once(x: Tensor) -> bool:
    """Whether rows get torch's own kernel: those in half precision on a GPU."""
    return x.is_cuda and x.dtype != torch.float32


class AllHeadsNorm(HFRMSNorm):
    """Over the channels of all heads, for Megatron's `q_layernorm` and `k_layernorm`, which it hands one head's width. All heads have to be
    on this rank."""

    def __init__(self, config: Any, hidden_size: int, heads: int, **options: Any):
        super().__init__(config, hidden_size * heads, **options)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., heads, width]."""
        return super().forward(x.flatten(-2)).view(x.shape)


def with_norm_after(linear: type, norm: type) -> type:
    """A class like `linear`, a row-parallel product of Megatron's, whose output goes through a norm. What is added to the residual is the
    product's output, and nothing stands between the two in Megatron's layer."""

    class LinearWithNorm(linear):  # type: ignore[misc]  # of any base
        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any):
            super().__init__(input_size, output_size, config=config, **options)
            self.norm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(x)
            return self.norm(output), bias

    return LinearWithNorm


class _RMSNorm(torch.autograd.Function):
    """With n = x / r, r = sqrt(mean(x^2) + eps) and g the gradient of y = w n:  dx = (g w - n mean(g w n)) / r,  dw = sum of g n.

    Autograd would go over the activations twice as often: norms are the largest part of a small model's step after its matrices.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, normal, scale = rms_norm(x, weight, eps)
        ctx.save_for_backward(normal, scale, weight)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normal, scale, weight = ctx.saved_tensors
        (grad,) = grads
        weight_grad = (grad * normal).flatten(0, -2).sum(0)
        inner = (grad * weight).float()
        wide = normal.float()
        mean = torch.linalg.vecdot(inner, wide).div_(wide.shape[-1]).unsqueeze(-1)
        return inner.addcmul_(wide, mean, value=-1).mul_(scale).to(grad.dtype), weight_grad, None
