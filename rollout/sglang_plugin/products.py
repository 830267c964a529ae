"""Matrix products of a decode step, few rows by many weights in float32, where our kernel (products.c) has the bits of torch's own.

Torch's take up to twice as long: MKL copies the weights into another layout, each time. Its products of one row read them where they are,
as fast as memory is, and stay. The bits that count are those of products of many rows, which the learner computes: on processors with
AVX-512 MKL's own products of few rows have others. Where MKL adds in an order that the kernel does not know all stays MKL's: engine and
learner would differ by more than they do.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from evenkeel.rollout.sglang_plugin.compiled import compiled

SOURCE = Path(__file__).with_name("products.c")
COLUMN_MULTIPLE, INNER_MULTIPLE = 16, 8
"""Of what products.c takes."""


def depth_with_avx512(inner: int) -> int:
    """Pieces of 384 products, but of a contraction of up to two such pieces the halves."""
    return 384 if inner > 768 else inner if inner <= 384 else -(-inner // 2)


@dataclass(frozen=True, slots=True)
class Order:
    """MKL's, on one kind of processors."""

    depth: Callable[[int], int]
    """Products that are added up in one piece, by the length of a contraction."""
    rows: range
    """With which the kernel is faster than MKL."""


ORDERS = (Order(lambda _: 192, range(2, 257)), Order(depth_with_avx512, range(4, 97)))
"""On AMD's, and on Intel's with AVX-512."""

_overrides: list[torch.library.Library] = []
"""An override lasts as long as its library object."""


def use() -> None:
    """Have this process multiply few rows by the kernel, if its bits are torch's here; once is enough."""
    kernel = FewRows()
    if _overrides or not kernel.agrees:
        return
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that this is an override
        library.impl("mm", kernel, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
    _overrides.append(library)


class FewRows:
    """Products by the kernel, of what it takes, and by torch."""

    def __init__(self) -> None:
        """Raises: EngineError without a working C compiler."""
        self._multiply = compiled(SOURCE, []).multiply
        self._multiply.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 4]
        self._multiply.restype = None
        self._order = ORDERS[0]
        self.agrees = any(map(self._agrees_with, ORDERS))
        """Whether its bits are torch's here."""

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b of [M, K] and [K, N]; raises as torch does."""
        is_served = _is_fit(a, b) and len(a) in self._order.rows and self._order.depth(len(b)) % INNER_MULTIPLE == 0
        return self.product(a, b) if is_served else torch.addmm(a.new_empty(()), a, b, beta=0)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """The kernel's, of factors that it takes."""
        a = a.contiguous()
        out = a.new_empty(len(a), b.shape[1])
        self._multiply(a.data_ptr(), b.data_ptr(), out.data_ptr(), *a.shape, b.shape[1], self._order.depth(len(b)))
        return out

    def _agrees_with(self, order: Order) -> bool:
        """Take this order; whether it has the bits of torch's products of many rows, for contractions of several lengths."""
        self._order, generator = order, torch.Generator().manual_seed(0)
        for rows, inner in ((64, 576), (17, 1536), (6, 64)):
            a, weight = torch.randn(512, inner, generator=generator), torch.randn(576, inner, generator=generator)
            if not torch.equal(self.product(a[:rows], weight.t()), (a @ weight.t())[:rows]):
                return False
        return True


def _is_fit(a: Tensor, b: Tensor) -> bool:
    if not (a.dtype is b.dtype is torch.float32 and a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]):
        return False
    inner, columns = b.shape
    return inner > 0 and inner % INNER_MULTIPLE == 0 and columns % COLUMN_MULTIPLE == 0 and b.t().is_contiguous()
