"""On a CPU: products with weights in float8. SGLang has kernels for GPUs and for CPUs with AMX, which re-arrange the weights.

Here the numbers are those of its Triton kernel: what goes in is rounded to float8 by 128 neighbours of a token, products are added in
float32, the sum is rounded to the type of what went in. Weights are spread out anew in each call: for tries and tests, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from correction.engines.float8 import BLOCK, LARGEST, dequantised

_LEAST = 1e-10
"""SGLang's largest entry of a group whose entries are all smaller."""


def register() -> None:
    method = "sglang.srt.layers.quantization.fp8.Fp8LinearMethod"
    HookRegistry.register(f"{method}.process_weights_after_loading_block_quant", _leave_as_sent, HookType.AROUND)
    HookRegistry.register(f"{method}.apply", _apply, HookType.AROUND)


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
    weight = dequantised(layer.weight.data, layer.weight_scale_inv.data, BLOCK, torch.float32)
    product = F.linear(rounded(x), weight).to(x.dtype)
    return product if bias is None else product + bias
