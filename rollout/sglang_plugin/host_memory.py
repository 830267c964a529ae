"""Host buffers on a CPU engine (SGLang keeps routed experts in them): plain memory, where SGLang would register them with CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from torch import Tensor


def register() -> None:
    ALLOC_MEMORY_FUNCS["cpu"] = _plain


def _plain(dims: Sequence[int], dtype: torch.dtype, *_: Any, **__: Any) -> Tensor:
    return torch.empty(dims, dtype=dtype)
