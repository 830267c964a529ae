"""The delta of a bucket of weights between two versions: positions and changes of its elements, compressed, and a checksum of the result.

Elements are compared by their bits, read as unsigned integers, so the result is exact for every dtype. In bfloat16 a usual update changes
a few per cent of the elements, most of them to the next representable number. A delta holds the distances between changed elements and
the integer differences, zigzag-coded (sign in the lowest bit): small numbers whose upper bytes are 0. The lowest bytes of all numbers come
first, then the next higher ones, compressed by zlib with run lengths and Huffman codes only (Z_RLE): its search for repeated strings finds
none here, and takes most of its time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from correction.engines.weight_bucket import WeightBucket
from correction.engines.weight_spec import WeightSpec
from correction.errors import SyncError

CHUNK = 2**22
"""Elements that are compared and coded at once; this takes a few times their bytes of memory."""
_GAP = np.dtype(np.uint32)

ForEach = Callable[[Callable[..., Any], Iterable[Any], Iterable[Any]], Iterable[Any]]
"""`map`, or that of a thread pool: numpy and zlib release the GIL."""


@dataclass(frozen=True, slots=True)
class BucketDelta:
    """Turns an older bucket into a newer one."""

    specs: tuple[WeightSpec, ...]
    """Types and shapes of the tensors; the same in both buckets."""
    chunks: tuple[tuple[bytes, ...], ...]
    """For each tensor, compressed changes of every CHUNK elements; empty bytes: none."""
    checksum: str
    """Checksum of the new bucket."""

    @classmethod
    def between(cls, base: WeightBucket, new: WeightBucket, each: ForEach = map) -> BucketDelta:
        """The delta from `base` to `new`. Raises: SyncError if their tensors differ in name, type or shape."""
        _require_same(base.specs, new.specs)
        chunks = tuple(
            tuple(each(_changes, _chunks(old, spec), _chunks(part, spec)))
            for spec, old, part in zip(new.specs, base.parts, new.parts, strict=True)
        )
        return cls(new.specs, chunks, bucket_checksum(new))

    @property
    def nbytes(self) -> int:
        """Size of the compressed changes."""
        return sum(len(chunk) for chunks in self.chunks for chunk in chunks)

    def applied(self, base: WeightBucket, each: ForEach = map) -> WeightBucket:
        """The new bucket, a copy. Raises: SyncError if the changes can't be decoded, or the result's checksum is wrong."""
        _require_same(base.specs, self.specs)
        parts = tuple(part.copy() for part in base.parts)
        try:
            for spec, part, chunks in zip(self.specs, parts, self.chunks, strict=True):
                for _ in each(_change, _chunks(part, spec), chunks):
                    pass
        except (zlib.error, ValueError, IndexError) as error:
            raise SyncError(f"{self.specs[0].name} and others: the delta can't be decoded: {error}") from error
        made = WeightBucket(self.specs, parts)
        if bucket_checksum(made) != self.checksum:
            raise SyncError(f"{self.specs[0].name} and others: the weights made from a delta have another checksum than the learner's")
        return made


def bucket_checksum(bucket: WeightBucket) -> str:
    """XXH3 (128 bits) of names, types, shapes and all bytes: it detects errors, not attacks."""
    digest = xxhash.xxh3_128()
    for spec, part in zip(bucket.specs, bucket.parts, strict=True):
        digest.update(f"{spec.name} {spec}".encode())
        digest.update(part)
    return digest.hexdigest()


def _require_same(base: tuple[WeightSpec, ...], new: tuple[WeightSpec, ...]) -> None:
    if base != new:
        raise SyncError(f"a delta of different tensors: {len(base)} and {len(new)} of them, the first {base[:1]} and {new[:1]}")


def _chunks(part: Any, spec: WeightSpec) -> Iterator[Any]:
    """The tensor's elements as unsigned numbers, CHUNK at a time."""
    elements = part.view(f"u{spec.itemsize}")
    return (elements[start : start + CHUNK] for start in range(0, len(elements), CHUNK))


def _changes(base: Any, new: Any) -> bytes:
    places = np.flatnonzero(base != new)
    if not len(places):
        return b""
    gaps = np.diff(places, prepend=-1).astype(_GAP)
    differences = new[places] - base[places]
    signs = differences >> (8 * differences.itemsize - 1)
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, strategy=zlib.Z_RLE)
    return packer.compress(_by_rank(gaps)) + packer.compress(_by_rank((differences << 1) ^ -signs)) + packer.flush()


def _change(elements: Any, changes: bytes) -> None:
    """Apply compressed changes to the elements, in place."""
    if not changes:
        return
    numbers, size = np.frombuffer(zlib.decompress(changes, -zlib.MAX_WBITS), np.uint8), elements.itemsize
    count = len(numbers) // (_GAP.itemsize + size)
    places = _of_ranks(numbers[: _GAP.itemsize * count], _GAP).cumsum(dtype=np.int64) - 1
    folded = _of_ranks(numbers[_GAP.itemsize * count :], elements.dtype)
    elements[places] += (folded >> 1) ^ -(folded & 1)


def _by_rank(numbers: Any) -> Any:
    """The lowest bytes of all numbers, then the next higher ones."""
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, numbers.itemsize).T)


def _of_ranks(numbers: Any, dtype: Any) -> Any:
    return np.ascontiguousarray(numbers.reshape(dtype.itemsize, -1).T).view(dtype).reshape(-1)
