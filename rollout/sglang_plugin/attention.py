"""Attention on a CPU for all running sequences at once.

SGLang's `torch_native` backend calls SDPA once for each sequence and layer; at 64 requests that loop takes half of a decode step and more.
Here a decode step is one SDPA call a layer, over keys and values padded to the longest sequence. They stay in that form from step to step
(rollout.sglang_plugin.running_cache), so that a step appends to them instead of gathering them from the paged cache. Prefill stays one call
for each sequence, but computes the new rows only: the stock one computes, and throws away, the rows of the cached prefix too.
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

from rollout.sglang_plugin.running_cache import RunningCache, gather

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

    _mask: Tensor
    """[B, 1, 1, L] bool: False on padding."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._running = RunningCache(layers=runner.model_config.num_hidden_layers)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        if not forward_batch.forward_mode.is_decode():
            self._running.forget()
            return
        lengths = forward_batch.seq_lens                            # the token that this step computes is counted
        self._running.begin_step(forward_batch.req_pool_indices, lengths, self.req_to_token_pool.req_to_token)
        longest = int(lengths.max())
        self._mask = (torch.arange(longest, device=lengths.device)[None] < lengths[:, None])[:, None, None, :]

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Tensor:
        if not is_plain(layer) or k is None:
            stock: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return stock
        self._save(k, v, layer, forward_batch, save_kv_cache)
        heads, groups, size = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        pool, index = self.token_to_kv_pool, layer.layer_id
        keys = self._running.extended("keys", index, k.view(-1, groups, size), pool.get_key_buffer(index))       # [B, G, L, D]
        values = self._running.extended("values", index, v.view(-1, groups, size), pool.get_value_buffer(index))
        query = q.reshape(-1, groups, heads // groups, size)        # the query heads of one key head are its rows: no copy of keys
        out = scaled_dot_product_attention(query, keys.to(q.dtype), values.to(q.dtype), attn_mask=self._mask, scale=layer.scaling)
        return out.reshape(-1, heads * size)

    def forward_extend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Tensor:
        if not is_plain(layer):
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
            keys = gather(key_buffer, slots).transpose(0, 1)[None].to(q.dtype)                         # [1, G, cached + new, D]
            values = gather(value_buffer, slots).transpose(0, 1)[None].to(q.dtype)
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


def is_plain(layer: Any) -> bool:
    """Whether a layer has causal self-attention to all earlier tokens, and nothing else."""
    has_window = layer.sliding_window_size is not None and layer.sliding_window_size > -1
    return (
        not has_window
        and not layer.is_cross_attention
        and layer.attn_type == AttentionType.DECODER
        and layer.qk_head_dim == layer.v_head_dim
    )
