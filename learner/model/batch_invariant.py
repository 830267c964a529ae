"""Batch-invariant Megatron layers, for the layer spec: their result for a token does not depend on what it is packed with.

The gradients are those of the usual layers; only the forward pass has to agree with the engine to the last bit.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from correction.engines.operators import attention, key_bias, linear, product
from learner.model.attention import PackedSequences, TileCall
from learner.model.megatron import ColumnParallelLinear, RowParallelLinear, copy_to_tensor_model_parallel_region


class BatchInvariantColumnLinear(ColumnParallelLinear):  # type: ignore[misc]  # Megatron has no types
    """Megatron's ColumnParallelLinear, batch-invariant. A rank's columns have the same bits as in the whole product."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, allreduce_dgrad: bool, **_: Any) -> Tensor:
        if allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        return linear(input, weight, bias)


class BatchInvariantRowLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron's RowParallelLinear, batch-invariant, without a bias: the ranks' products are added in the order of ranks, in float32, and
    the sum is rounded."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        summed: Tensor = _SumOverRanks.apply(product(input_, self.weight), self.tp_group)  # type: ignore[no-untyped-call]
        return summed.to(input_.dtype), None


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks, added in their order: an all-reduce would choose its own."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        if group.size() == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return reduce(torch.add, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class BatchInvariantAttention(torch.nn.Module):
    """Megatron's `core_attention` for packed texts, batch-invariant: an answer that goes on from a shared prompt gets the bits that it gets
    after a prompt of its own."""

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
        output: Tensor = _TiledAttention.apply(query, key, value, packed_seq_params, self.scale)  # type: ignore[no-untyped-call]
        return output.flatten(1)


class _TiledAttention(torch.autograd.Function):
    """Forward batch-invariant; the gradient by SDPA's own backward kernel, from the same intermediate values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float) -> Tensor:
        found = [attention(*_gathered(call, query, key, value), key_bias(call.mask)[:, None], scale) for call in packed.tile_calls]
        ctx.save_for_backward(query, key, value, *(tensor for pair in found for tensor in pair))
        ctx.packed, ctx.scale = packed, scale
        in_tiles = torch.cat([output.permute(0, 3, 1, 2, 4).reshape(-1, *query.shape[1:]) for output, _ in found])
        return in_tiles.index_select(0, packed.row_in_tiles)  # type: ignore[arg-type]  # there are tiles

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """In float32, as SDPA's kernel is fastest. The heads of a group stand one below the other, as queries of one head."""
        query, key, value, *of_calls = ctx.saved_tensors
        dtype, calls, row_in_tiles = query.dtype, ctx.packed.tile_calls, ctx.packed.row_in_tiles
        query, key, value = query.float(), key.float(), value.float()
        sizes = [call.query_rows.numel() for call in calls]
        slopes = query.new_zeros(sum(sizes), *query.shape[1:]).index_copy_(0, row_in_tiles, grads[0].float()).split(sizes)  # 0 for padding
        query_grads, key_grad, value_grad = [], torch.zeros_like(key), torch.zeros_like(value)
        for call, slope, output, log_sums in zip(calls, slopes, of_calls[::2], of_calls[1::2], strict=True):
            q, k, v = _gathered(call, query, key, value)
            g = slope.view(*call.query_rows.shape, *q.shape[1:3], -1).permute(0, 2, 3, 1, 4)
            bias = key_bias(call.mask).expand(-1, q.shape[2], -1, -1).flatten(1, 2)[:, None]
            g, q, output, log_sums = (x.flatten(2, 3) for x in (g, q, output.float(), log_sums))
            of_query, *of_keys = _sdpa_backward(g, q, k, v, output, log_sums, 0.0, False, attn_mask=bias, scale=ctx.scale)
            query_grads.append(of_query.unflatten(2, (-1, call.query_rows.shape[1])).permute(0, 3, 1, 2, 4).reshape(slope.shape))
            for found, gradient in zip((key_grad, value_grad), of_keys, strict=True):
                found.index_add_(0, call.key_rows.flatten(), gradient.transpose(1, 2).flatten(0, 1))
        query_grad = torch.cat(query_grads).index_select(0, row_in_tiles)
        return query_grad.to(dtype), key_grad.to(dtype), value_grad.to(dtype), None, None


_sdpa_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _gathered(call: TileCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, G, R, Q, width] queries, R heads for each of G key heads, and [n, G, K, width] keys and values of the tiles."""
    groups = key.shape[1]
    q = query.index_select(0, call.query_rows.flatten()).view(*call.query_rows.shape, groups, -1, query.shape[-1])
    k, v = (x.index_select(0, call.key_rows.flatten()).view(*call.key_rows.shape, groups, -1).transpose(1, 2) for x in (key, value))
    return q.permute(0, 2, 3, 1, 4), k, v
