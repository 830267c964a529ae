"""SGLang with batch-invariant operators, on a CPU: what it samples with is bit for bit what the learner trains with.

Everything here is registered only in the processes of an engine that asked for it. The rotary embedding is SGLang's own: it is
row-independent, and in the learner's order. The sampler reports log_softmax in either mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from evenkeel.correction.errors import ConfigError
from evenkeel.engines import operators
from evenkeel.rollout.sglang_plugin.attention import STOCK_NAME, PlainAttentionBackend, is_plain
from evenkeel.rollout.sglang_plugin.running_cache import RunningCache, gather


def register(projection_parts: int) -> None:
    """
    Args:
        projection_parts: pieces in which attention and MLP are projected back to the residual, one on each of the learner's ranks.
    """
    register_attention_backend(STOCK_NAME)(lambda runner: BatchInvariantAttentionBackend(runner))
    for target, function in replacements(projection_parts).values():
        HookRegistry.register(target, function, HookType.REPLACE)


def replacements(projection_parts: int) -> dict[str, tuple[str, Callable[..., Any]]]:
    """Operator -> what computes it in SGLang, and what is to instead; the attention is a backend of its own."""
    layers = "sglang.srt.layers"
    return {
        "projections": (f"{layers}.quantization.unquant.UnquantizedLinearMethod.apply", _linear_of(projection_parts)),
        "head": (f"{layers}.logits_processor.LogitsProcessor._compute_lm_head", _head),
        "silu": (f"{layers}.activation.SiluAndMul.forward_native", _silu_and_mul),
        "norms": (f"{layers}.layernorm.RMSNorm.forward_native", _rms_norm),
    }


def _linear_of(projection_parts: int) -> Callable[..., Tensor]:
    def apply(_method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return operators.linear(x, layer.weight, bias, parts=projection_parts if isinstance(layer, RowParallelLinear) else 1)

    return apply


def _head(_processor: Any, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None = None) -> Tensor:
    logits = operators.product(hidden_states, lm_head.weight)
    return logits if embedding_bias is None else logits + embedding_bias


def _silu_and_mul(_layer: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return operators.silu(gate) * up


def _rms_norm(norm: Any, x: Tensor, residual: Tensor | None = None, *_: Any, **__: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The residual is rounded before it is normalised, as it is in the learner; SGLang would normalise the sum in float32."""
    if residual is None:
        return operators.rms_norm(x, norm.weight, norm.variance_epsilon)[0]
    residual = x + residual
    return operators.rms_norm(residual, norm.weight, norm.variance_epsilon)[0], residual


class BatchInvariantAttentionBackend(PlainAttentionBackend):
    """B sequences, G key heads, R query heads for each, D head size, T new tokens of all sequences, L tokens of the longest sequence,
    rounded up to a multiple of operators.BLOCK. A decode step is one call a layer, over keys and values that stay padded from step to step
    (RunningCache); a prefill is one for each sequence. There is no other kernel to fall back to.
    """

    # [B, 1, 1, 1, L]: 0, or -inf on padding.
    _bias: Tensor

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        layers = runner.model_config.num_hidden_layers
        self._running = RunningCache(layers, multiple=operators.BLOCK, dtype=torch.float32)  # in which the attention computes

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        if not forward_batch.forward_mode.is_decode():
            self._running.forget()
            return
        lengths = forward_batch.seq_lens
        self._running.begin_step(forward_batch.req_pool_indices, lengths, self.req_to_token_pool.req_to_token)
        keys = torch.arange(operators.whole_blocks(int(lengths.max())), device=lengths.device)
        self._bias = operators.key_bias(keys < lengths[:, None])[:, None, None, None]

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Tensor:
        _require_plain(layer)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        groups, size = layer.tp_k_head_num, layer.qk_head_dim
        pool, index = self.token_to_kv_pool, layer.layer_id
        keys = self._running.extended("keys", index, k.view(-1, groups, size), pool.get_key_buffer(index))  # [B, G, L, D]
        values = self._running.extended("values", index, v.view(-1, groups, size), pool.get_value_buffer(index))
        query = q.reshape(len(keys), groups, -1, 1, size)
        return operators.attention(query, keys, values, self._bias, layer.scaling)[0].view(len(keys), -1)

    def forward_extend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Tensor:
        _require_plain(layer)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        groups, size = layer.tp_k_head_num, layer.qk_head_dim
        query = q.reshape(-1, groups, layer.tp_q_head_num // groups, size)  # [T, G, R, D]
        out = torch.empty_like(query)
        buffers = [read(layer.layer_id) for read in (self.token_to_kv_pool.get_key_buffer, self.token_to_kv_pool.get_value_buffer)]
        start = 0
        for request, cached, new in zip(
            forward_batch.req_pool_indices.tolist(),
            forward_batch.extend_prefix_lens.tolist(),
            forward_batch.extend_seq_lens.tolist(),
            strict=True,
        ):
            slots = self.req_to_token_pool.req_to_token[request, : cached + new]
            padded = torch.cat([slots, slots[:1].expand(operators.whole_blocks(cached + new) - len(slots))])
            keys, values = (gather(buffer, padded).transpose(0, 1)[None].contiguous() for buffer in buffers)  # [1, G, L, D]
            rows = query[start : start + new].movedim(0, 2)[None]  # [1, G, R, new, D]
            attended, _ = operators.causal_attention(rows, keys, values, layer.scaling, first=cached)
            out[start : start + new] = attended[0].movedim(2, 0)
            start += new
        return out.view(q.shape[0], -1)


def _require_plain(layer: Any) -> None:
    if not is_plain(layer):
        raise ConfigError(
            f"true on-policy: layer {layer.layer_id} has a sliding window, cross attention or value heads of another size, which "
            "the batch-invariant attention does not have. Train this model with true_on_policy: false"
        )
