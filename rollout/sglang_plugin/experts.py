"""Experts that are divided among ranks, on a CPU. SGLang numbers those of other ranks -1; its kernels for GPUs leave those rows out, and
its loop over experts in plain torch takes the number for an index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor


def register() -> None:
    HookRegistry.register("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", of_own_experts, HookType.AROUND)


def of_own_experts(original: Callable[..., Tensor], layer: Any, x: Tensor, chosen: Any, *args: Any, **kwargs: Any) -> Tensor:
    """This rank's share of a sum over experts: 0 for a token whose experts are all elsewhere.

    Args:
        x: [tokens, hidden].
        chosen: SGLang's topk_weights and topk_ids, [tokens, k].
    """
    if layer.moe_ep_size == 1:
        return original(layer, x, chosen, *args, **kwargs)
    total = torch.zeros_like(x)
    tokens, places = (chosen.topk_ids >= 0).nonzero(as_tuple=True)
    if len(tokens):
        weights, ids = (numbers[tokens, places, None] for numbers in (chosen.topk_weights, chosen.topk_ids))
        own = chosen._replace(topk_weights=weights, topk_ids=ids)
        total.index_add_(0, tokens, original(layer, x[tokens], own, *args, **kwargs))
    return total
