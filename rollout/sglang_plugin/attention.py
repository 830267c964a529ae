"""Attention on a CPU for all running sequences at once.

SGLang's `torch_native` backend calls SDPA once for each sequence and layer; at 64 requests that loop takes half of a decode step and more.
Here a decode step is one SDPA call a layer, over keys and values padded to the longest sequence. They stay in that form from step to step
(rollout.sglang_plugin.running_cache), so that a step appends to them instead of gathering them from the paged cache. Prefill is one call
for each sequence, but computes the new rows only: the stock one computes, and throws away, the rows of the cached prefix too. Sequences
with a single new token (a group's samples: their prompt is in the cache but for its last token) are one call together, as in a decode step.

In float32 a prefill attends in float64, as the learner does (learner/attention.py says why); a decode step, which reads its keys and values
from memory and hardly computes, would take a sixth longer.
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
    """Shapes: B sequences, H query heads, G key heads, D head size, L longest sequence of those B, T new tokens of all sequences.

    Layers with anything but plain causal self-attention (sliding window, cross attention, encoder) go to the stock backend.
    """

    _mask: Tensor
    """Of a decode step, [B, 1, 1, L] bool: False on padding."""
    _longer: list[tuple[int, int, int, int]]
    """Of a prefill, the sequences with several new tokens: request, cached tokens, first row, new tokens."""
    _single_rows: Tensor
    """... and the rows of those B with one; _single_mask as _mask, _single_slots [B, L] in the paged cache."""
    _single_mask: Tensor
    _single_slots: Tensor

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._running = RunningCache(layers=runner.model_config.num_hidden_layers)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        lengths = forward_batch.seq_lens                            # the tokens that this step computes are counted
        if not forward_batch.forward_mode.is_decode():
            self._running.forget()
            self._plan_extend(forward_batch, lengths)
            return
        self._running.begin_step(forward_batch.req_pool_indices, lengths, self.req_to_token_pool.req_to_token)
        self._mask = _padding_mask(lengths)

    def _plan_extend(self, forward_batch: Any, lengths: Tensor) -> None:
        """Which sequences have one new token, and which have more; the same for all layers."""
        if forward_batch.extend_seq_lens is None:                   # an idle step
            return
        new = forward_batch.extend_seq_lens
        starts = new.cumsum(0) - new                                # rows of the new tokens
        is_single = new == 1
        requests = forward_batch.req_pool_indices
        columns = (requests, forward_batch.extend_prefix_lens, starts, new)
        self._longer = list(zip(*(column[~is_single].tolist() for column in columns), strict=True))
        self._single_rows = starts[is_single]
        if len(self._single_rows):
            self._single_mask = _padding_mask(lengths[is_single])
            self._single_slots = self.req_to_token_pool.req_to_token[requests[is_single], : self._single_mask.shape[-1]]
            # What lies beyond a sequence's length in that table is left over from another one: a slot, but maybe not a finite key.
            self._single_slots = torch.where(self._single_mask[:, 0, 0], self._single_slots, self._single_slots[:, :1])

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Tensor:
        if not is_plain(layer) or k is None:
            stock: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return stock
        self._save(k, v, layer, forward_batch, save_kv_cache)
        heads, groups, size = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        pool, index = self.token_to_kv_pool, layer.layer_id
        keys = self._running.extended("keys", index, k.view(-1, groups, size), pool.get_key_buffer(index))       # [B, G, L, D]
        values = self._running.extended("values", index, v.view(-1, groups, size), pool.get_value_buffer(index))
        return self._attend_one(q.reshape(-1, heads, size), keys.to(q.dtype), values.to(q.dtype), self._mask, layer).view(-1, heads * size)

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
        for request, cached, start, new in self._longer:
            slots = self.req_to_token_pool.req_to_token[request, : cached + new]
            rows = _widened(query[start : start + new].transpose(0, 1)[None])                           # [1, H, new, D]
            keys = _widened(gather(key_buffer, slots).transpose(0, 1)[None].to(q.dtype))                # [1, G, cached + new, D]
            values = _widened(gather(value_buffer, slots).transpose(0, 1)[None].to(q.dtype))
            mask = None if cached == 0 else torch.ones(new, cached + new, dtype=torch.bool, device=q.device).tril(cached)
            attended = scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=layer.scaling
            )
            out[start : start + new] = attended[0].transpose(0, 1).to(q.dtype)
        if len(self._single_rows):
            keys = _widened(gather(key_buffer, self._single_slots).transpose(1, 2).to(q.dtype))         # [B, G, L, D]
            values = _widened(gather(value_buffer, self._single_slots).transpose(1, 2).to(q.dtype))
            rows = _widened(query[self._single_rows])
            out[self._single_rows] = self._attend_one(rows, keys, values, self._single_mask, layer).to(q.dtype)
        return out.view(-1, heads * size)

    @staticmethod
    def _attend_one(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, layer: Any) -> Tensor:
        """One query token a sequence: [B, H, D] against [B, G, L, D] under mask [B, 1, 1, L]. Returns [B, H, D]."""
        rows = query.reshape(len(query), keys.shape[1], -1, query.shape[2])  # the query heads of one key head are its rows: no copy of keys
        return scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=layer.scaling).flatten(1, 2)

    def _save(self, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool) -> None:
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)


def _widened(x: Tensor) -> Tensor:
    """Float32 as float64."""
    return x.double() if x.dtype == torch.float32 else x


def _padding_mask(lengths: Tensor) -> Tensor:
    """[B, 1, 1, longest] bool: False beyond each sequence's length."""
    return (torch.arange(int(lengths.max()), device=lengths.device)[None] < lengths[:, None])[:, None, None, :]


def is_plain(layer: Any) -> bool:
    """Whether a layer has causal self-attention to all earlier tokens, and nothing else."""
    has_window = layer.sliding_window_size is not None and layer.sliding_window_size > -1
    return (
        not has_window
        and not layer.is_cross_attention
        and layer.attn_type == AttentionType.DECODER
        and layer.qk_head_dim == layer.v_head_dim
    )
