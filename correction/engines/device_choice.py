"""What `auto` means for a device and a number format, and bounds on kernel caches on a CPU: the same for engines and the learner."""

from __future__ import annotations

from typing import Literal

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]

KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
"""Environment variables of a process that multiplies matrices on a CPU: sizes of oneDNN's cache of compiled kernels, and of torch's
cache in front of it, which holds the same kernels. Each keeps 1,024 by default. An engine, whose prefills have any number of tokens, would
then grow for an hour, by more than half a gigabyte."""


def device_of(setting: Literal["auto", "cpu", "cuda"]) -> Device:
    """The device of a setting; auto is cuda if torch finds a GPU in this process."""
    if setting != "auto":
        return setting
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(setting: Literal["auto", "float32", "bfloat16", "float16"], device: Device) -> Dtype:
    """The dtype of a setting; auto is bfloat16 on a GPU and float32 on a CPU."""
    if setting != "auto":
        return setting
    return "bfloat16" if device == "cuda" else "float32"
