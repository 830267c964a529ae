"""Attention on a CPU for all running sequences at once.

SGLang's `torch_native` backend calls SDPA once for each sequence; at 64 requests that loop takes 78 % of the scheduler's time. Here a
decode step gathers the keys and values of all sequences, padded to the longest, into one SDPA call. Prefill stays one call for each
sequence, but computes the new rows only (the stock one computes, and throws away, the rows of the cached prefix too).
"""


from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

STOCK_NAME = "torch_native"
"""Our backend takes SGLang's name: SGLang decides by it, in several places, not to use Triton kernels."""


def register(kind: str) -> None:
    """kind: "batched" serves torch_native by BatchedAttentionBackend, "stock" leaves SGLang's."""
    if kind == "batched":
        register_attention_backend(STOCK_NAME)(lambda runner: BatchedAttentionBackend(runner))



class BatchedAttentionBackend(TorchNativeAttnBackend):  # type: ignore[misc]  # SGLang has no types
    """Shapes: B sequences, H query heads, G key heads, D head size, L longest sequence of the batch, T new tokens of all sequences.

    Layers with anything but plain causal self-attention (sliding window, cross attention, encoder) go to the stock backend.
    """

    _slots: Tensor
    """[B, L] int: where the keys of each position lie in the KV cache; padding repeats the sequence's first slot."""
    _mask: Tensor
    """[B, 1, 1, L] bool: False on padding."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        if not forward_batch.forward_mode.is_decode():
            return
        lengths = forward_batch.seq_lens
        longest = int(lengths.max())
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, :longest]
        inside = torch.arange(longest, device=slots.device)[None] < lengths[:, None]
        self._slots = torch.where(inside, slots, slots[:, :1])
        self._mask = inside[:, None, None, :]

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Tensor:
        if not _is_plain(layer):
            stock: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return stock
        self._save(k, v, layer, forward_batch, save_kv_cache)
        heads, groups, size = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[self._slots].transpose(1, 2)       # [B, G, L, D]
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)[self._slots].transpose(1, 2)
        query = q.reshape(-1, groups, heads // groups, size)        # the query heads of one key head are its rows: no copy of keys
        out = scaled_dot_product_attention(query, keys.to(q.dtype), values.to(q.dtype), attn_mask=self._mask, scale=layer.scaling)
        return out.reshape(-1, heads * size)

    def forward_extend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Tensor:
        if not _is_plain(layer):
            stock: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return stock
        self._save(k, v, layer, forward_batch, save_kv_cache)
        heads, size = layer.tp_q_head_num, layer.qk_head_dim
        query = q.reshape(-1, heads, size)                          # [T, H, D]
        out = torch.empty_like(query)
        key_buffer = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        value_buffer = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        start = 0
        for request, cached, new in zip(
            forward_batch.req_pool_indices.tolist(),
            forward_batch.extend_prefix_lens.tolist(),
            forward_batch.extend_seq_lens.tolist(),
            strict=True,
        ):
            slots = self.req_to_token_pool.req_to_token[request, : cached + new]
            rows = query[start : start + new].transpose(0, 1)[None]                                    # [1, H, new, D]
            keys = key_buffer[slots].transpose(0, 1)[None].to(q.dtype)                                 # [1, G, cached + new, D]
            values = value_buffer[slots].transpose(0, 1)[None].to(q.dtype)
            mask = None if cached == 0 else torch.ones(new, cached + new, dtype=torch.bool, device=q.device).tril(cached)
            attended = scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=layer.scaling
            )
            out[start : start + new] = attended[0].transpose(0, 1)
            start += new
        return out.view(-1, heads * size)

    def _save(self, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool) -> None:
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)


def _is_plain(layer: Any) -> bool:
    has_window = layer.sliding_window_size is not None and layer.sliding_window_size > -1
    return (
        not has_window
        and not layer.is_cross_attention
        and layer.attn_type == AttentionType.DECODER
        and layer.qk_head_dim == layer.v_head_dim
    )
