"""What `auto` means for a device and a number format, and what a CPU wants: the same for engines and the learner."""

from __future__ import annotations

from typing import Literal

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]

KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
"""Environment of a process that multiplies on a CPU: oneDNN's own cache of compiled kernels, and torch's before it, which holds the same
ones. Each keeps 1,024 by default: an engine, whose prefills have any number of tokens, grows for an hour, by more than half a gigabyte."""


def device_of(setting: Literal["auto", "cpu", "cuda"]) -> Device:
    """auto is decided by what torch sees in this process."""
    if setting != "auto":
        return setting
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(setting: Literal["auto", "float32", "bfloat16", "float16"], device: Device) -> Dtype:
    """auto is bfloat16 on a GPU and float32 on a CPU."""
    if setting != "auto":
        return setting
    return "bfloat16" if device == "cuda" else "float32"
