"""What this environment's torch was built for, without importing it, which takes seconds."""

from __future__ import annotations

import ctypes
import runpy
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_DRIVER = "libcuda.so.1"
"""NVIDIA's driver, under the name by which torch loads it."""
_NO_DEVICE = 100
"""What the driver answers where CUDA_VISIBLE_DEVICES hides all GPUs, or there are none (CUDA_ERROR_NO_DEVICE)."""


@cache
def torch_build() -> dict[str, Any] | None:
    """Names and values of torch/version.py, such as cuda: "13.0" or None; None: there is no such file."""
    spec = find_spec("torch")
    places = spec.submodule_search_locations or [] if spec is not None else []
    files = [path for place in places if (path := Path(place) / "version.py").is_file()]
    return runpy.run_path(str(files[0])) if files else None


def has_cuda() -> bool:
    """Whether torch is a build with CUDA."""
    build = torch_build()
    if build is not None and "cuda" in build:
        return build["cuda"] is not None
    import torch

    return torch.version.cuda is not None


def gpus_without_torch() -> int | None:
    """Number of GPUs that torch sees, by what it was built for and by NVIDIA's driver; None: torch alone can tell."""
    build = torch_build()
    if "torch" in sys.modules or build is None or not {"cuda", "hip"} <= build.keys() or build["hip"] is not None:
        return None
    if build["cuda"] is None:
        return 0
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return 0
    return _counted(driver, str(build["cuda"]))


def _counted(driver: Any, cuda: str) -> int | None:
    """The driver's own count, which minds CUDA_VISIBLE_DEVICES; None if it isn't sure that torch, with its CUDA, can use this driver.

    A CUDA runs with drivers that are as new as the first of its major version. Args: cuda: such as 13.0.
    """
    version, count = ctypes.c_int(), ctypes.c_int()
    try:
        is_known = driver.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value // 1000 >= int(cuda.partition(".")[0])
        if not is_known or (ends := driver.cuInit(0)) not in (0, _NO_DEVICE):
            return None
        if ends == _NO_DEVICE:
            return 0
        return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else None
    except (AttributeError, ValueError):  # another library, another version's name
        return None
