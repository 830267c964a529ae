"""Causal attention over packed sequences, for Megatron's `core_attention` slot.

Every other operator of the model works on the packed tokens as they are. Attention alone needs sequences apart: they are sorted into
buckets of nearly equal length, each padded to its longest at the right, where causality hides the padding from every real token. One
call for each bucket replaces one for each sequence; padding is bounded by the bucket's width. On a GPU in half precision torch's
variable-length kernel needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.megatron import PackedSeqParams

BUCKET_RATIO = 1.25
"""A bucket's longest sequence over its shortest, at most ..."""
BUCKET_SLACK = 8
"""... plus this many tokens: below that a call costs more than the padding."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences that share one attention call: cells [start, start + count * length) of the padded layout."""

    start: int
    count: int
    length: int


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # Megatron has no types
    """Megatron's description of packed sequences, with the padded layout of the attention calls; made once for each micro-batch.

    Megatron uses cu_seqlens for its rotary embedding alone, and is told of one sequence, because PolicyModel hands it one angle for each
    token. max_seqlen is the longest real sequence: the length of the table of angles.
    """

    bounds: Tensor | None = None
    """[S + 1] int32: the sequences' bounds among the packed tokens."""
    buckets: tuple[Bucket, ...] = ()
    token_of_cell: Tensor | None = None
    """[P] int64: the packed token in each cell; a padding cell repeats some token of the pack."""
    cell_of_token: Tensor | None = None
    """[N] int64: the cell of each packed token."""


def pack(offsets: Tensor, device: torch.device) -> tuple[Tensor, PackedSequences]:
    """Positions and layout of packed sequences.

    Args:
        offsets: [S + 1] int64.
    Returns: [1, N] int64 position of each token in its sequence, and what the attention needs to know.
    """
    offsets = offsets.cpu()
    lengths = offsets.diff()
    n = int(offsets[-1])
    positions = torch.arange(n) - torch.repeat_interleave(offsets[:-1], lengths)
    longest = int(lengths.max()) if len(lengths) else 0
    buckets, token_of_cell, cell_of_token = _padded_layout(offsets, lengths)
    whole = torch.tensor([0, n], dtype=torch.int32, device=device)
    return positions[None].to(device), PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        bounds=offsets.to(device=device, dtype=torch.int32),
        buckets=buckets,
        token_of_cell=token_of_cell.to(device),
        cell_of_token=cell_of_token.to(device),
    )


def _padded_layout(offsets: Tensor, lengths: Tensor) -> tuple[tuple[Bucket, ...], Tensor, Tensor]:
    order = torch.argsort(lengths, stable=True)
    sorted_lengths = lengths[order].tolist()
    buckets: list[Bucket] = []
    tokens: list[Tensor] = []
    cell_of_token = torch.zeros(int(offsets[-1]), dtype=torch.int64)
    start = 0
    for first, last in _bucket_bounds(sorted_lengths):
        members, longest = order[first:last], sorted_lengths[last - 1]
        column = torch.arange(longest)
        token = (offsets[members, None] + column).clamp(max=int(offsets[-1]) - 1)  # beyond the end: any token will do
        is_real = column < lengths[members, None]
        cells = start + torch.arange(token.numel()).view_as(token)
        cell_of_token[token[is_real]] = cells[is_real]
        tokens.append(token.flatten())
        buckets.append(Bucket(start, last - first, longest))
        start += token.numel()
    return tuple(buckets), torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64), cell_of_token


def _bucket_bounds(sorted_lengths: Sequence[int]) -> list[tuple[int, int]]:
    """[first, last) of runs of nearly equal length; empty sequences are in none."""
    bounds: list[tuple[int, int]] = []
    first = next((i for i, length in enumerate(sorted_lengths) if length > 0), len(sorted_lengths))
    for i in range(first, len(sorted_lengths)):
        if sorted_lengths[i] > sorted_lengths[first] * BUCKET_RATIO + BUCKET_SLACK:
            bounds.append((first, i))
            first = i
    if first < len(sorted_lengths):
        bounds.append((first, len(sorted_lengths)))
    return bounds


class _TakeRows(torch.autograd.Function):
    """x[index], where each row that matters to the gradient is taken once: its gradient is a plain gather, not a scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class _PutBack(torch.autograd.Function):
    """padded[cell_of_token]; the padding cells get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, cell_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(cell_of_token)
        ctx.num_cells = padded.shape[0]
        return padded.index_select(0, cell_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (cell_of_token,) = ctx.saved_tensors
        padded = grads[0].new_zeros(ctx.num_cells, *grads[0].shape[1:])
        return padded.index_copy_(0, cell_of_token, grads[0]), None


def bucketed_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None) -> Tensor:
    """Causal attention of each packed sequence to itself, one call for each bucket.

    Args:
        query: [N, heads, width]; key, value: [N, groups, width].
    Returns: [N, heads, width].
    """
    cells, tokens = packed.token_of_cell, packed.cell_of_token
    query, key, value = (_TakeRows.apply(x, cells, tokens) for x in (query, key, value))  # type: ignore[no-untyped-call]
    outputs = [_attend(bucket, query, key, value, scale) for bucket in packed.buckets]
    padded = torch.cat(outputs) if len(outputs) != 1 else outputs[0]
    packed_output: Tensor = _PutBack.apply(padded, tokens)  # type: ignore[no-untyped-call]
    return packed_output


def _attend(bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """One bucket's cells, as [count * length, heads, width]."""
    q, k, v = (
        x[bucket.start : bucket.start + bucket.count * bucket.length].view(bucket.count, bucket.length, *x.shape[1:]).transpose(1, 2)
        for x in (query, key, value)
    )
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return output.transpose(1, 2).flatten(0, 1)


def variable_length_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None) -> Tensor:
    """The same by torch's variable-length FlashAttention kernel: CUDA, half precision."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = packed.bounds, packed.max_seqlen_q
    assert bounds is not None
    output = varlen_attn(
        query, key, value, bounds, bounds, longest, longest, window_size=(-1, 0), scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    assert isinstance(output, Tensor)  # a tuple only when return_aux is asked for
    return output


def choose_kernel(device_type: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The attention for a device and a type."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return variable_length_attention if device_type == "cuda" and is_half else bucketed_attention


class PackedAttention(torch.nn.Module):
    """Megatron's `core_attention` for packed sequences. It has no weights and no dropout."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: Any, softmax_scale: float | None = None, **_: Any
    ):
        super().__init__()
        self.scale = softmax_scale
        self.kernel = choose_kernel("cuda" if torch.cuda.is_available() else "cpu", config.params_dtype)

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
        return self.kernel(query, key, value, packed_seq_params, self.scale).flatten(1)
