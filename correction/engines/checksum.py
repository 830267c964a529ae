"""One checksum of a weight tensor, computed alike by the learner and inside the engine's own process, each on the device of its tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from correction.errors import SyncError

ROW_WORDS = 2**16
"""Words of 8 bytes that make one sum."""
ROWS_AT_ONCE = {"cpu": 1}
"""By type of device: on a CPU a row stays in its cache."""
MANY_ROWS = 128
"""Elsewhere."""
_FACTORS = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64
"""Factors of SplitMix64, as signed numbers: torch multiplies modulo 2^64."""


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
    """In place: two rounds of SplitMix64's finaliser. The masks make shifts of signed numbers ones of unsigned numbers."""
    x ^= (x >> 30) & (2**34 - 1)
    x *= _FACTORS[1]
    x ^= (x >> 27) & (2**37 - 1)
    return x
