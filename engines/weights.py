"""Weights on their way from learner to engines: what a tensor is without its values, which both agree on before an update is sent; tensors
in buckets of bytes; their checksums; and their values in float8."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evenkeel.correction.errors import SyncError
from evenkeel.engines.float8_format import BLOCK, SCALE_SUFFIX, is_projection


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


# Buckets: some tensors, in bytes.

ALIGNMENT = 16
"""Bytes. Every tensor begins at a multiple of it, so that it can be viewed in place, whatever the types of the tensors before it."""


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some of the tensors of one version of the weights."""

    specs: tuple[WeightSpec, ...]
    """Name, type and shape of each tensor, in the order in which they travel."""
    parts: tuple[Any, ...]
    """A numpy uint8 [bytes] for each tensor: Ray's object store hands on numpy arrays without a copy, but not torch tensors. An array that
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
        """Tensors by Hugging Face name, as views; they must not be written to."""
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


# One checksum of a weight tensor, computed alike by the learner and inside the engine's own process, each on the device of its tensor.

ROW_WORDS = 2**16
"""Words of 8 bytes that make one sum."""
ROWS_AT_ONCE = {"cpu": 1}
"""Rows by type of device: on a CPU a row stays in its cache."""
MANY_ROWS = 128
"""Elsewhere."""
# Factors of SplitMix64, as signed numbers: torch multiplies modulo 2^64.
_FACTORS = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


def tensor_checksum(tensor: Tensor) -> str:
    """SHA-256 of what a tensor is: dtype, shape, and a sum of 64 bits for each half MiB of its elements' bytes in row-major order.

    A word of 8 bytes is mixed with its place (SplitMix64's finaliser, a bijection) before it is added modulo 2^64. A word that changes
    changes the sum, whichever it is; of other changes one in 2^64 leaves it. 0.0 and -0.0 differ, and so do two NaNs of different payload.
    All of this is exact arithmetic on integers, the same on every device; what leaves the device are the sums.
    Both sides must hold the same dtype: cast first when the learner trains in another one than the engine serves.

    Args:
        tensor: any shape, dtype, device and strides.
    Returns: 64 hexadecimal digits.
    """
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    for total in _sums(_words(tensor.detach())):
        digest.update(total.to_bytes(8, "little", signed=True))
    return digest.hexdigest()


def digest_of(checksums: Mapping[str, str]) -> str:
    """SHA-256 of all checksums together, whatever their order. Args: checksums: by Hugging Face name. Returns: 64 hexadecimal digits."""
    return hashlib.sha256("".join(f"{name} {checksum}\n" for name, checksum in sorted(checksums.items())).encode()).hexdigest()


def compare_checksums(worker: str, learner: Mapping[str, str], engine: Mapping[str, str], *, version: int) -> None:
    """Compare the learner's checksums with those of a rollout worker's engine, weight by weight.

    Raises: SyncError naming the first weight that differs, and the first that one side lacks.
    """
    if learner == engine:
        return
    missing = sorted(learner.keys() ^ engine.keys())
    different = sorted(name for name in learner.keys() & engine.keys() if learner[name] != engine[name])
    raise SyncError(
        f"weight sync v{version} -> rollout worker {worker}: "
        + (f"{len(different)} tensors differ, first {different[0]}; " if different else "")
        + (f"{len(missing)} tensors are on one side only, first {missing[0]}; " if missing else "")
        + "the engine gets no work until a full sync succeeds"
    )


def _words(tensor: Tensor) -> Tensor:
    """[n] int64: the tensor's bytes, padded with zeros to a multiple of 8; a view where its alignment allows that."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    is_aligned = flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0 and flat.data_ptr() % 8 == 0
    return (flat if is_aligned else F.pad(flat, (0, -flat.numel() % 8)).clone()).view(torch.int64)


def _sums(words: Tensor) -> list[int]:
    """The sum of each row."""
    places = _mixed(torch.arange(1, ROW_WORDS + 1, device=words.device) * _FACTORS[0])
    whole = words.numel() // ROW_WORDS * ROW_WORDS
    at_once = ROWS_AT_ONCE.get(words.device.type, MANY_ROWS)
    found = [_mixed((rows ^ places) * _FACTORS[0]).sum(1) for rows in torch.split(words[:whole].view(-1, ROW_WORDS), at_once)]
    if whole < words.numel():
        rest = words[whole:]
        found.append(_mixed((rest ^ places[: len(rest)]) * _FACTORS[0]).sum()[None])
    return torch.cat(found).tolist() if found else []


def _mixed(x: Tensor) -> Tensor:
    """Two rounds of SplitMix64's finaliser, in place. The masks make shifts of signed numbers ones of unsigned numbers."""
    x ^= (x >> 30) & (2**34 - 1)
    x *= _FACTORS[1]
    x ^= (x >> 27) & (2**37 - 1)
    return x


# Weights to float8 and back, in the format of float8_format.py: the learner quantises its own weights as it sends them.

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def in_float8(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by Hugging Face name: each projection as its values and its scales, the rest as it is."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if is_projection(name):
            found[name], found[name + SCALE_SUFFIX] = quantised(weight, BLOCK)
        else:
            found[name] = weight
    return found


def quantised(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The nearest float8 e4m3 of a weight over the scale of its block, and the scales.

    Args:
        weight: [rows, columns].
        block: rows and columns that share a scale, by which their largest entry becomes the format's largest number; 0: one for all.
    Returns: [rows, columns] float8_e4m3fn, and [rows / block, columns / block] float32, rounded up; a value is their product.
    """
    rows, columns = weight.shape
    height, width = (block or rows), (block or columns)
    padded = F.pad(weight.detach().float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.view(-1, height, padded.shape[1] // width, width)  # [blocks, height, blocks, width]
    largest = blocks.new_full((), LARGEST)  # a tensor: by a number a GPU multiplies with its inverse, which rounds otherwise
    scale = (blocks.abs().amax((1, 3), keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    values = (blocks / scale).to(torch.float8_e4m3fn)
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scale[:, 0, :, 0].contiguous()


def dequantised(values: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns]: what `quantised` stands for, in a type."""
    rows, columns = values.shape
    spread = scales.repeat_interleave(block or rows, 0).repeat_interleave(block or columns, 1)[:rows, :columns]
    return (values.float() * spread).to(dtype)
