"""Weights on their way from the learner to the engines: some tensors, in bytes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from correction.engines.checksum import tensor_checksum
from correction.engines.weight_spec import WeightSpec

ALIGNMENT = 16
"""Bytes. Every tensor begins at a multiple of it, so that it can be viewed in place, whatever the types of the tensors before it."""


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some of the tensors of one version of the weights."""

    specs: tuple[WeightSpec, ...]
    """Name, type and shape of each tensor, in the order in which they travel."""
    parts: tuple[Any, ...]
    """For each tensor numpy uint8 [bytes]: Ray's object store hands on numpy arrays without a copy, but not torch tensors. An array that
    was read from the store is read-only."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], memory: Tensor | None = None) -> WeightBucket:
        """A bucket with a copy of each tensor: the learner may change its own while the bucket travels.

        Args:
            tensors: Hugging Face name -> weight, of any device and strides.
            memory: as of_specs.
        """
        bucket = cls.of_specs(tuple(WeightSpec.of(name, tensor) for name, tensor in tensors.items()), memory)
        for copy, tensor in zip(bucket.tensors().values(), tensors.values(), strict=True):
            copy.copy_(tensor.detach())
        return bucket

    @classmethod
    def of_specs(cls, specs: tuple[WeightSpec, ...], memory: Tensor | None = None) -> WeightBucket:
        """A bucket for tensors of these names, types and shapes; their values are not set.

        Args:
            memory: [packed_bytes or more] uint8, on the CPU: the tensors are laid in it end to end. None: new memory is allocated.
        """
        places = packed(specs)
        flat = torch.empty(packed_bytes(specs), dtype=torch.uint8) if memory is None else memory
        return cls(specs, tuple(flat[place.start : place.stop].numpy() for place in places))

    @classmethod
    def over(cls, tensors: Mapping[str, Tensor]) -> WeightBucket:
        """A bucket that shares the tensors' memory. They must be contiguous and on the CPU, and nobody may write to them meanwhile."""
        parts = tuple(tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values())
        return cls(tuple(WeightSpec.of(name, tensor) for name, tensor in tensors.items()), parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(spec.nbytes for spec in self.specs)

    def checksums(self) -> dict[str, str]:
        """HF name -> tensor_checksum."""
        return {name: tensor_checksum(tensor) for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """By Hugging Face name, as views; they must not be written to."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that the memory is read-only; so it shall be
            return {
                spec.name: torch.from_numpy(part).view(getattr(torch, spec.dtype)).reshape(spec.shape)
                for spec, part in zip(self.specs, self.parts, strict=True)
            }


def packed(specs: tuple[WeightSpec, ...]) -> list[range]:
    """The range of bytes that each tensor takes when all are laid end to end."""
    found, end = [], 0
    for spec in specs:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + spec.nbytes
        found.append(range(start, end))
    return found


def packed_bytes(specs: tuple[WeightSpec, ...]) -> int:
    """Bytes that the tensors take when they lie end to end."""
    return packed(specs)[-1].stop if specs else 0
