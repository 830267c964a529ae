"""Weights on their way from the learner to the engines: some tensors end to end, in bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from correction.engines.checksum import tensor_checksum
from correction.engines.weight_spec import WeightSpec

ALIGNMENT = 16
"""Bytes; every tensor begins at a multiple, so that it can be viewed where it lies, whatever types stand before it."""


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some of a version's weights, as they were when the bucket was made."""

    specs: tuple[WeightSpec, ...]
    """Of the tensors, in the order in which they lie."""
    data: Any
    """numpy uint8 [bytes], because numpy arrays cross Ray's object store without a copy, and torch tensors don't. Read-only where it comes
    out of there."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], *, memory: Tensor | None = None) -> WeightBucket:
        """A copy of the tensors, one of each: the learner may change its own while this one travels.

        Args:
            tensors: Hugging Face name -> weight, of any device and strides.
            memory: [`bytes_for` or more] uint8, on the CPU, in which the copy is to lie; None: in memory of its own.
        """
        specs = tuple(WeightSpec.of(name, tensor) for name, tensor in tensors.items())
        size = _end(specs)
        bucket = cls(specs, (torch.empty(size, dtype=torch.uint8) if memory is None else memory[:size]).numpy())
        for copy, tensor in zip(bucket.tensors().values(), tensors.values(), strict=True):
            copy.copy_(tensor.detach())
        return bucket

    @staticmethod
    def bytes_for(tensors: Mapping[str, Tensor]) -> int:
        """Of `data` in a bucket of these tensors."""
        return _end(tuple(WeightSpec.of(name, tensor) for name, tensor in tensors.items()))

    def checksums(self) -> dict[str, str]:
        """HF name -> tensor_checksum."""
        return {name: tensor_checksum(tensor) for name, tensor in self.tensors().items()}

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        return sum(spec.nbytes for spec in self.specs)

    def items(self) -> Iterator[tuple[WeightSpec, range]]:
        """Each tensor, and the bytes of `data` in which it lies."""
        return zip(self.specs, _ranges(self.specs), strict=True)

    def flat(self) -> Tensor:
        """[bytes] uint8 in the memory of `data`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that the memory is read-only; so it shall be
            return torch.from_numpy(self.data)

    def tensors(self) -> dict[str, Tensor]:
        """By Hugging Face name, as views; they must not be written to."""
        flat = self.flat()
        return {
            spec.name: flat[place.start : place.stop].view(getattr(torch, spec.dtype)).reshape(spec.shape) for spec, place in self.items()
        }


def _end(specs: tuple[WeightSpec, ...]) -> int:
    return _ranges(specs)[-1].stop if specs else 0


def _ranges(specs: tuple[WeightSpec, ...]) -> list[range]:
    found, end = [], 0
    for spec in specs:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + spec.nbytes
        found.append(range(start, end))
    return found
