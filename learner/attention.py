"""Causal attention over packed sequences, for Megatron's `core_attention` slot.

Every other operator of the model works on the packed tokens as they are. Attention alone needs sequences apart: neighbours of equal length
are one call on a view of the pack, without padding and without a copy. `balance` packs sequences in the order of their lengths, so that
many short ones become few calls. On a GPU in half precision torch's variable-length kernel takes all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.megatron import PackedSeqParams


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring sequences of equal length."""

    count: int
    length: int

    @property
    def tokens(self) -> int:
        return self.count * self.length


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # Megatron has no types
    """Megatron's description of packed sequences, with what the attention calls need; made once for each micro-batch.

    Megatron uses cu_seqlens for its rotary embedding alone, and is told of one sequence, because PolicyModel hands it one angle for each
    token. max_seqlen is the longest real sequence: the length of the table of angles.
    """

    bounds: Tensor | None = None
    """[S + 1] int32: the sequences' bounds among the packed tokens."""
    runs: tuple[Run, ...] = ()
    """In packed order; together they hold every token once."""


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
    whole = torch.tensor([0, n], dtype=torch.int32, device=device)
    return positions[None].to(device), PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        bounds=offsets.to(device=device, dtype=torch.int32),
        runs=tuple(Run(len(list(same)), length) for length, same in groupby(filter(None, lengths.tolist()))),
    )


def run_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None) -> Tensor:
    """Causal attention of each packed sequence to itself, one call for each run.

    Args:
        query: [N, heads, width]; key, value: [N, groups, width].
    Returns: [N, heads, width].
    """
    sizes = [run.tokens for run in packed.runs]
    pieces = zip(packed.runs, torch.split(query, sizes), torch.split(key, sizes), torch.split(value, sizes), strict=True)
    return torch.cat([_attend(run, q, k, v, scale) for run, q, k, v in pieces])


def _attend(run: Run, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """One run's tokens, [count * length, heads, width]."""
    q, k, v = (x.view(run.count, run.length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
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
    return variable_length_attention if device_type == "cuda" and is_half else run_attention


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
