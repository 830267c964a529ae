"""Float32 matrix products on a CPU by the library that uses the whole processor, in the learner and in the engines alike.

Torch multiplies by MKL, which keeps to AVX2 on processors that aren't Intel's. Torch carries oneDNN as well, which goes by what the
processor can do: with AVX-512 on an AMD processor its products take half the time. Other processors keep torch's own.

This registers another CPU kernel for torch's operator `mm`, below autograd, so that layers and their gradients need no change. Other
operators stay with MKL: mm.out (into a given tensor), addmm (with a bias in the same call) and bmm (in batches). Torch has no setting for
this: its precision settings use oneDNN for float32 only to round the factors.

oneDNN compiles a kernel for every shape that it meets: about a millisecond, and 0.6 MB. So the numbers of rows should not be too many: here
those of a decode step are padded, and the learner fills what it trains on up to a multiple of TRAINED_ROW_MULTIPLE (but for experts; on
every CPU, because ranks on different ones have to lay out the same rows). A prefill has any number of rows: device_choice.KEPT_KERNELS
bounds what is kept.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE, MANY_ROWS = 16, 512
"""Rows between the two are padded to a multiple of the first. Below it every number of rows occurs; above the second the copy costs more
than it saves."""
TRAINED_ROW_MULTIPLE = 64
"""Rows of a micro-batch are padded to a multiple of it: at most 3 % of the usual 2,000, and few different numbers of rows in a run."""

# An override lasts as long as its library object.
_overrides: list[torch.library.Library] = []


def use_fastest() -> None:
    """Have this process multiply by oneDNN if that is faster than MKL; once is enough."""
    if is_needed() and not _overrides:
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that this is an override
            library.impl("mm", product, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
        _overrides.append(library)


@cache
def is_needed() -> bool:
    """Whether MKL leaves a part of this processor unused, and oneDNN is here to use it."""
    backends, processor = torch.backends, Path("/proc/cpuinfo")
    has_both = backends.mkl.is_available() and backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_avx512 = backends.cpu.get_cpu_capability() == "AVX512"
    return has_both and has_avx512 and processor.is_file() and "GenuineIntel" not in processor.read_text()


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of [M, K] and [K, N], in float32 by oneDNN; others by torch's own kernel, which also raises for shapes that don't fit."""
    is_served = a.dtype is b.dtype is torch.float32 and a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]
    if not is_served or not a.numel() or not b.numel():
        return torch.addmm(a.new_empty(()), a, b, beta=0)
    weight = b.t()
    if not (b.is_contiguous() or weight.is_contiguous()):
        weight = weight.contiguous()  # oneDNN adds in another order where rows lie apart, and can't take those that overlap
    rows = a.shape[0]
    padding = -rows % ROW_MULTIPLE if ROW_MULTIPLE < rows < MANY_ROWS else 0
    if padding:
        a = F.pad(a, (0, 0, 0, padding))
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")
    return result[:rows] if padding else result
