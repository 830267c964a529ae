"""What a weight tensor is without its values: learner and engine agree on it before an update is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of the model, under its Hugging Face name."""

    name: str
    dtype: str
    """torch's name without "torch.", e.g. "float32"."""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> WeightSpec:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @classmethod
    def parse(cls, name: str, text: str) -> WeightSpec:
        """text: "float32:128,64", as an engine's processes report it."""
        dtype, _, shape = text.partition(":")
        return cls(name, dtype, tuple(int(size) for size in shape.split(",") if size))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def widest_first(specs: Iterable[WeightSpec]) -> list[WeightSpec]:
    """The order of a bucket's tensors in a broadcast, where they lie end to end without gaps: the widest elements first. Each tensor then
    begins at a multiple of its element's bytes, as torch needs it for a view."""
    return sorted(specs, key=lambda spec: -spec.itemsize)


def goes_whole(specs: Sequence[WeightSpec]) -> bool:
    """Whether a bucket is broadcast as the one tensor that it holds, instead of as bytes. SGLang copies bytes into new tensors, so a tensor
    that fills a bucket by itself would be in memory twice. A tensor in float8 always goes as bytes: gloo doesn't know its type."""
    return len(specs) == 1 and specs[0].dtype in ("float32", "bfloat16", "float16")
