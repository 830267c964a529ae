"""Megatron layers of fixed order, for the layer spec: what they say of a token does not depend on what it is packed with.

The gradients are those of the usual layers; only the forward pass has to agree with the engine to the last bit.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from correction.errors import ConfigError
from correction.invariance.operators import causal_attention, linear, pad_rows, whole_blocks
from learner.attention import PackedSequences, Run
from learner.megatron import ColumnParallelLinear, RowParallelLinear


class _FixedOrderLinear(torch.nn.Module):
    """Adds rows to a small product before Megatron's own computes it; Megatron adds the bias afterwards, as the contract wants it."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        if input.dtype != torch.float32:  # on one rank, so that torch's own gradient is the gradient
            return linear(input, weight)
        rows = input.shape[:-1].numel()
        padded = pad_rows(input.reshape(rows, input.shape[-1]))[:, None]
        output: Tensor = super()._forward_impl(padded, weight, *args, **options)  # type: ignore[misc]  # Megatron's, in the next base
        return output[:rows].view(*input.shape[:-1], output.shape[-1])


class FixedOrderColumnLinear(_FixedOrderLinear, ColumnParallelLinear):  # type: ignore[misc]  # Megatron has no types
    """Megatron's ColumnParallelLinear in fixed order. A rank's columns are what they are among all."""


class FixedOrderRowLinear(_FixedOrderLinear, RowParallelLinear):  # type: ignore[misc]
    """Megatron's RowParallelLinear in fixed order, on one rank or on two: their sum has no other order."""


class FixedOrderAttention(torch.nn.Module):
    """Megatron's `core_attention` for packed sequences, in fixed order. Neighbours of about equal length, padded, are one call."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any):
        super().__init__()
        self.scale: float = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSequences,
        attn_mask_type: Any = None,
        attention_bias: None = None,
    ) -> Tensor:
        """[N, heads * width], of query [N, heads, width] and key, value [N, groups, width]."""
        if packed_seq_params.tile_calls:
            raise ConfigError("true on-policy: shared prompts have no attention of fixed order. Turn them off in the learner")
        output: Tensor = _PackedAttention.apply(query, key, value, packed_seq_params, self.scale)  # type: ignore[no-untyped-call]
        return output.flatten(1)


class _PackedAttention(torch.autograd.Function):
    """Forward in fixed order; the gradient is computed as for the usual attention, from the same intermediate values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float) -> Tensor:
        output, log_sums = packed_attention(query, key, value, packed, scale)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.runs, ctx.scale = packed.runs, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """SDPA's own backward kernel, run by run. It wants a key head for each query head."""
        query, key, value, output, log_sums = ctx.saved_tensors
        heads, groups = query.shape[1], key.shape[1]
        sizes = [run.tokens for run in ctx.runs]
        pieces = zip(ctx.runs, *(x.split(sizes) for x in (grads[0], query, key, value, output, log_sums)), strict=True)
        found: list[list[Tensor]] = [[], [], []]
        for run, *tensors in pieces:
            g, q, k, v, out, log_sum = (x.reshape(run.count, run.length, *x.shape[1:]).transpose(1, 2) for x in tensors)
            k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
            of_run = _sdpa_backward(g, q, k, v, out, log_sum, 0.0, True, scale=ctx.scale)
            for collected, gradient in zip(found, of_run, strict=True):
                collected.append(gradient.transpose(1, 2).flatten(0, 1))
        query_grad, key_grad, value_grad = (torch.cat(collected) for collected in found)
        summed = (x.view(len(x), groups, heads // groups, -1).sum(2) for x in (key_grad, value_grad))
        return query_grad, *summed, None, None


_sdpa_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of each packed sequence to itself, without gradient.

    Args:
        query: [N, heads, width]; key, value: [N, groups, width].
    Returns: [N, heads, width], and [N, heads]: log of the sum of exponentials.
    """
    groups, outputs, sums = key.shape[1], [], []
    for rows, places, shape in _calls(packed.runs):
        q, k, v = (x.index_select(0, rows).view(*shape, groups, -1, x.shape[-1]) for x in (query, key, value))
        k, v = (x[:, :, :, 0].transpose(1, 2) for x in (k, v))  # [count, G, L, width]
        attended, log_sum = causal_attention(q.permute(0, 2, 3, 1, 4), k, v, scale)  # [count, G, R, L, width], [count, G, R, L]
        outputs.append(attended.permute(0, 3, 1, 2, 4).reshape(-1, *query.shape[1:]).index_select(0, places))
        sums.append(log_sum.permute(0, 3, 1, 2).reshape(-1, query.shape[1]).index_select(0, places))
    return torch.cat(outputs), torch.cat(sums)


@lru_cache(maxsize=64)
def _calls(runs: tuple[Run, ...]) -> tuple[tuple[Tensor, Tensor, tuple[int, int]], ...]:
    """For neighbours of the same number of blocks: packed rows of the padded sequences, [count * L], whatever row beyond their ends;
    places of the real ones among those; and (count, L). The same for all layers of a pass, hence the cache."""
    lengths = [run.length for run in runs for _ in range(run.count)]
    starts = accumulate(lengths, initial=0)
    calls = []
    for padded, neighbours in groupby(zip(lengths, starts, strict=False), key=lambda pair: whole_blocks(pair[0])):
        sizes, firsts = (torch.tensor(column) for column in zip(*neighbours, strict=True))
        place = torch.arange(padded)
        is_real = place < sizes[:, None]
        rows = torch.where(is_real, firsts[:, None] + place, firsts[:, None])
        calls.append((rows.flatten(), is_real.flatten().nonzero()[:, 0], (len(sizes), padded)))
    return tuple(calls)
