"""Attention on a CPU for all new tokens at once.

SGLang's `torch_native` backend calls SDPA once for each sequence and layer; at 64 requests that loop takes half of a decode step and more.
Here a step, decode or prefill, is one call of a kernel of ours a layer (attention_kernel.py), which reads keys and values where they lie in
the paged cache. It computes in float64, as the learner does where the rounding shows (learner/model/attention.py says why).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from evenkeel.rollout.sglang_plugin.attention_kernel import AttentionKernel

STOCK_NAME = "torch_native"
"""Our backend takes SGLang's name: SGLang decides by it, in several places, not to use Triton kernels."""


def register(kind: Literal["batched", "stock"]) -> None:
    """Args: kind: "batched" serves torch_native by BatchedAttentionBackend, "stock" by SGLang's own."""
    backend = BatchedAttentionBackend if kind == "batched" else PlainAttentionBackend
    register_attention_backend(STOCK_NAME)(lambda runner: backend(runner))


class PlainAttentionBackend(TorchNativeAttnBackend):  # type: ignore[misc]  # SGLang has no types
    """SGLang's, and what all of our backends need."""

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Tokens of the empty sequences by which SGLang fills up a step, where groups of ranks compute together; its own says none."""
        return 1

    def _save(self, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool) -> None:
        """Write the new tokens' keys and values to the paged cache."""
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)


class BatchedAttentionBackend(PlainAttentionBackend):
    """Layers with anything but plain causal self-attention (sliding window, cross attention, encoder) go to the stock backend."""

    # [T] int64, of each new token: its sequence's row of req_to_token.
    _requests: Tensor
    # [T] int64: the tokens of its sequence up to and with it.
    _lengths: Tensor

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._kernels: dict[tuple[int, int, int], AttentionKernel] = {}
        if runner.kv_cache_dtype == runner.dtype:
            for layer in runner.model.modules():
                if isinstance(layer, RadixAttention) and is_plain(layer) and _shape(layer) not in self._kernels:
                    self._kernels[_shape(layer)] = AttentionKernel(*_shape(layer), runner.dtype)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._requests, self._lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
        new = forward_batch.extend_seq_lens
        if not forward_batch.forward_mode.is_decode() and new is not None:
            ends = new.cumsum(0)
            self._requests = self._requests.repeat_interleave(new)
            self._lengths = torch.arange(1, int(ends[-1]) + 1) + (self._lengths - ends).repeat_interleave(new)

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Tensor:
        if not self._is_served(layer, k):
            stock: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return stock
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Tensor:
        if not self._is_served(layer, k):
            stock: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return stock
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def _is_served(self, layer: Any, k: Tensor | None) -> bool:
        return k is not None and is_plain(layer) and _shape(layer) in self._kernels

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool) -> Tensor:
        """q [T, H*D] -> [T, H*D], the new keys and values among those that it meets."""
        self._save(k, v, layer, forward_batch, save_kv_cache)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        table = self.req_to_token_pool.req_to_token
        heads, _, size = _shape(layer)
        attended = self._kernels[_shape(layer)](
            q.reshape(-1, heads, size), keys, values, table, self._requests, self._lengths, layer.scaling
        )
        return attended.flatten(1)


def _shape(layer: Any) -> tuple[int, int, int]:
    """Query heads, key heads, head size."""
    return layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim


def is_plain(layer: Any) -> bool:
    """Whether a layer has causal self-attention to all earlier tokens, and nothing else."""
    has_window = layer.sliding_window_size is not None and layer.sliding_window_size > -1
    return (
        not has_window
        and not layer.is_cross_attention
        and layer.attn_type == AttentionType.DECODER
        and layer.qk_head_dim == layer.v_head_dim
    )
