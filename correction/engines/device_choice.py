"""What `auto` means for a device, a number format and a backend, and bounds on kernel caches on a CPU: for engines and the learner alike.

Nothing else asks whether a setting is `auto`. A run decides all of these once (actors/settings/resolve.py), and its parts are given what
was decided; an engine or a learner that is used without a run decides when it starts.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from correction.errors import ConfigError

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
Backend = Literal["gloo", "nccl"]
Choice = TypeVar("Choice", Device, Dtype, Backend)

KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
"""Environment variables of a process that multiplies matrices on a CPU: sizes of oneDNN's cache of compiled kernels, and of torch's
cache in front of it, which holds the same kernels. Each keeps 1,024 by default. An engine, whose prefills have any number of tokens, would
then grow for an hour, by more than half a gigabyte."""
_DECIDE = "Decide it first: for a run actors/settings/resolve.py does, for an engine or a learner alone the section's on_this_machine()"


def is_open(*settings: str) -> bool:
    """Whether one of the settings is left to be decided."""
    return "auto" in settings


def device_of(setting: Literal["auto", "cpu", "cuda"], *, has_gpu: bool | None = None) -> Device:
    """The device of a setting; auto is cuda where there is a GPU.

    Args: has_gpu: this machine has one, or the cluster; None: as torch finds in this process.
    """
    if setting != "auto":
        return setting
    if has_gpu is None:
        import torch

        has_gpu = torch.cuda.is_available()
    return "cuda" if has_gpu else "cpu"


def dtype_of(setting: Literal["auto", "float32", "bfloat16", "float16"], device: Device, *, learner: Dtype | None = None) -> Dtype:
    """The dtype of a setting; auto is bfloat16 on a GPU and float32 on a CPU.

    Args: learner: of an engine's setting, the dtype of the learner, which auto is then.
    """
    if setting != "auto":
        return setting
    return learner or ("bfloat16" if device == "cuda" else "float32")


def group_backend_of(setting: Literal["auto", "gloo", "nccl"], device: Device) -> Backend:
    """The backend of a setting; auto is nccl on a GPU and gloo on a CPU."""
    if setting != "auto":
        return setting
    return "nccl" if device == "cuda" else "gloo"


def decided(setting: Literal["auto"] | Choice, name: str) -> Choice:
    """A setting that has been decided. Args: name: of the setting. Raises: ConfigError if it is still auto."""
    if setting == "auto":
        raise ConfigError(f"{name} = auto, which nothing has decided", remedy=_DECIDE)
    return setting
