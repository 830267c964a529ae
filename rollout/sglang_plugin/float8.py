"""Engines in float8. On a CPU their products: SGLang has kernels for GPUs and for CPUs with AMX, which re-arrange the weights.

Here the numbers are those of its Triton kernels, of experts too: what goes in is rounded to float8 by 128 neighbours of a token, products
are added in float32, the sum is rounded to the type of what went in. Weights are spread out anew in each call: for tries and tests, not for
speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from evenkeel.engines.float8_format import BLOCK
from evenkeel.engines.weights import LARGEST, dequantised

# SGLang's largest entry of a group whose entries are all smaller.
_LEAST = 1e-10


def register(*, on_cpu: bool) -> None:
    cache = "sglang.srt.layers.quantization.kv_cache.BaseKVCacheMethod"
    HookRegistry.register(f"{cache}.process_weights_after_loading", _no_scales_of_the_cache, HookType.BEFORE)
    if not on_cpu:
        return
    for method, apply in (("Fp8LinearMethod", _apply), ("Fp8MoEMethod", _apply_experts)):
        name = f"sglang.srt.layers.quantization.fp8.{method}"
        HookRegistry.register(f"{name}.process_weights_after_loading_block_quant", _leave_as_sent, HookType.AROUND)
        HookRegistry.register(f"{name}.apply", apply, HookType.AROUND)


def _no_scales_of_the_cache(_method: Any, layer: Any) -> None:
    """In most families SGLang's attention of a model in float8 has scales for a cache in float8, random ones where no folder is read. Those
    that aren't above 0 count as missing, and become 1."""
    layer.k_scale.data.fill_(-1.0)
    layer.v_scale.data.fill_(-1.0)


def rounded(x: Tensor) -> Tensor:
    """[..., columns] float32: the nearest float8 e4m3 over the scale of each BLOCK columns of a row, times that scale."""
    columns = x.shape[-1]
    padded = F.pad(x.float(), (0, -columns % BLOCK))
    groups = padded.reshape(-1, BLOCK)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=_LEAST) / LARGEST
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).view(padded.shape)[..., :columns]


def _leave_as_sent(_original: Callable[..., Any], *_: Any, **__: Any) -> None:
    return None


def _apply(_original: Callable[..., Any], _method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    product = _product(x, layer.weight.data, layer.weight_scale_inv.data).to(x.dtype)
    return product if bias is None else product + bias


def _apply_experts(_original: Callable[..., Any], _method: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput  # loads kernels, which wait for the stand-ins

    weights, chosen, _ = dispatch_output.topk_output
    return StandardCombineInput(hidden_states=_of_experts(layer, dispatch_output.hidden_states, weights, chosen))


def _of_experts(layer: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """[tokens, hidden]: of each token the sum over its experts by their weights. An expert's output is rounded before it is added, like
    what goes into its second product; one of another rank has the number -1, and adds nothing.

    Args:
        x: [tokens, hidden].
        weights, chosen: [tokens, k], and the numbers of experts among this rank's.
    """
    outputs = torch.zeros(*chosen.shape, x.shape[-1], dtype=x.dtype)
    for expert in set(chosen.flatten().tolist()) - {-1}:
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        both = _product(x[tokens], layer.w13_weight.data[expert], layer.w13_weight_scale_inv.data[expert]).to(x.dtype)
        gate, up = both.float().chunk(2, -1)
        made = _product((F.silu(gate) * up).to(x.dtype), layer.w2_weight.data[expert], layer.w2_weight_scale_inv.data[expert])
        outputs[tokens, places] = (made * weights[tokens, places, None]).to(x.dtype)
    return outputs.float().sum(1).to(x.dtype)


def _product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """[..., rows] float32. Args: x: [..., columns]; values, scales: of a matrix [rows, columns]."""
    return F.linear(rounded(x), dequantised(values, scales, BLOCK, torch.float32))
