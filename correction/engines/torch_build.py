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


def sees_no_gpu() -> bool:
    """True only where it is certain that torch sees no GPU: built for none, or for NVIDIA's, whose driver isn't here."""
    build = torch_build()
    if "torch" in sys.modules or build is None or not {"cuda", "hip"} <= build.keys() or build["hip"] is not None:
        return False
    return build["cuda"] is None or not _has_driver()


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True
