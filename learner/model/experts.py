"""The experts of a layer on one rank, all at once: Megatron's modules and parameters, one set for each expert, and two grouped products.

Megatron computes its local experts one after the other, each with kernels of its own: with 32 small experts on a rank a GPU waits for
launches most of the time. Its grouped layers want other libraries, and hold their parameters under other names and in other shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.model.megatron import MoELayer, SequentialMLP


def grouped_product(x: Tensor, weights: Sequence[Tensor], rows: Tensor) -> Tensor:
    """[R, out]: each run of rows times the transpose of its own matrix.

    On a GPU in bfloat16 one kernel (torch's grouped_mm), elsewhere a loop. In each pass the matrices are stacked for the kernel: a copy at
    the speed of the GPU's memory, freed after the product.

    Args:
        x: [R, in], the runs one below the other.
        weights: a run's matrix each, [out, in].
        rows: [runs] int64, rows of each run; any may be 0.
    """
    return _by_kernel(x, weights, rows) if x.is_cuda and x.dtype == torch.bfloat16 and len(x) else _by_loop(x, weights, rows)


def _by_kernel(x: Tensor, weights: Sequence[Tensor], rows: Tensor) -> Tensor:
    ends = rows.to(x.device).cumsum(0, dtype=torch.int32)
    product: Tensor = _GroupedProduct.apply(x, ends, *weights)  # type: ignore[no-untyped-call]
    return product


class _GroupedProduct(torch.autograd.Function):
    """The kernel with a gradient of its own. Autograd would keep the stack of every layer until its backward pass: a second copy of all
    experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        gradient, of_x = gradient.contiguous(), None
        if ctx.needs_input_grad[0]:
            of_x = F.grouped_mm(gradient, torch.stack(weights), offs=ends)
        if not any(ctx.needs_input_grad[2:]):
            return of_x, None, *(None for _ in weights)
        return of_x, None, *F.grouped_mm(gradient.t(), x, offs=ends).unbind()


def _by_loop(x: Tensor, weights: Sequence[Tensor], rows: Tensor) -> Tensor:
    return torch.cat([F.linear(run, weight) for run, weight in zip(torch.split(x, rows.tolist()), weights, strict=True)])


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # Megatron has no types
    """SequentialMLP with its products grouped: gated feed-forward parts without biases, whole on their rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments: SequentialMLP's."""
        super().__init__(*args, **options)
        if self.config.tensor_model_parallel_size > 1:
            # Each tensor-parallel rank sends rows of its own to its experts, whose gradients are sums over these ranks, too. Megatron marks
            # experts as such where expert_parallel is above 1 alone; others it would take for matrices of one tensor-parallel rank.
            for parameter in self.parameters():
                parameter.allreduce = False

    def forward(self, rows: Tensor, rows_of_experts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """
        Args:
            rows: [R, hidden], those of an expert one below the other.
            rows_of_experts: [experts of this rank] int64.
            weights: [R], by which the router weighs each row's expert.
        """
        up = grouped_product(rows, [expert.linear_fc1.weight for expert in self.local_experts], rows_of_experts)
        gate, linear = up.chunk(2, dim=-1)
        inner = self.config.activation_func(gate) * linear
        inner = (inner * weights.unsqueeze(-1)).to(inner.dtype)
        return grouped_product(inner, [expert.linear_fc2.weight for expert in self.local_experts], rows_of_experts), None


def keep_no_routes(layer: MoELayer) -> None:
    """Have a layer forget the tokens' routes when it has used them.

    Megatron keeps them until its next pass. With recomputed activations they hold on to the layer's input and its gradient: two tensors
    [tokens, hidden] of each layer, 3 GB of Qwen3-30B-A3B's 48 with 8,192 tokens in bfloat16.
    """
    layer.register_forward_hook(_forget_routes)


def _forget_routes(layer: MoELayer, *_: Any) -> None:
    layer.token_dispatcher.probs = layer.token_dispatcher.routing_map = None
