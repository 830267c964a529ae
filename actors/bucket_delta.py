"""What an update has changed in a bucket of weights: the places and the differences, compressed, and a checksum of the whole bucket.

Elements are compared as whole numbers, by their bits: an element is as it was or it isn't, whatever it stands for. In bfloat16 an update
of usual size changes a few elements in a hundred, most of them to the next number up or down. So what travels are the gaps between
changed elements and the differences as whole numbers, sign in the lowest bit: small ones, whose upper bytes are zeros. Bytes of equal rank
lie together, and are coded by how often they occur (zlib, runs and Huffman codes alone: its search for repetitions finds none here, and
takes most of its time).
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
"""Elements that are compared and coded at once: what that takes besides is a few times their bytes."""
_GAP = np.dtype(np.uint32)

ForEach = Callable[[Callable[..., Any], Iterable[Any], Iterable[Any]], Iterable[Any]]
"""`map`, or that of a pool of threads: numpy and zlib let others run meanwhile."""


@dataclass(frozen=True, slots=True)
class BucketDelta:
    """Makes a new bucket of an older one."""

    specs: tuple[WeightSpec, ...]
    """Of the tensors of both."""
    chunks: tuple[tuple[bytes, ...], ...]
    """For each tensor, of each CHUNK elements what has changed; empty: nothing."""
    checksum: str
    """Of the new bucket."""

    @classmethod
    def between(cls, base: WeightBucket, new: WeightBucket, each: ForEach = map) -> BucketDelta:
        """Raises: SyncError if they are not of the same tensors."""
        _require_same(base.specs, new.specs)
        chunks = tuple(
            tuple(each(_changes, _chunks(old, spec), _chunks(part, spec)))
            for spec, old, part in zip(new.specs, base.parts, new.parts, strict=True)
        )
        return cls(new.specs, chunks, bucket_checksum(new))

    @property
    def nbytes(self) -> int:
        """Of what travels, names and shapes left out."""
        return sum(len(chunk) for chunks in self.chunks for chunk in chunks)

    def applied(self, base: WeightBucket, each: ForEach = map) -> WeightBucket:
        """The new bucket, in memory of its own. Raises: SyncError if its checksum is another than that of the one that was meant."""
        _require_same(base.specs, self.specs)
        parts = tuple(part.copy() for part in base.parts)
        try:
            for spec, part, chunks in zip(self.specs, parts, self.chunks, strict=True):
                for _ in each(_change, _chunks(part, spec), chunks):
                    pass
        except (zlib.error, ValueError, IndexError) as error:
            raise SyncError(f"{self.specs[0].name} and others: what has changed in them can't be read: {error}") from error
        made = WeightBucket(self.specs, parts)
        if bucket_checksum(made) != self.checksum:
            raise SyncError(f"{self.specs[0].name} and others: what differences made of older weights are other bytes than were meant")
        return made


def bucket_checksum(bucket: WeightBucket) -> str:
    """Of names, types, shapes and all bytes, at the speed of the memory: against chance and mistakes, not against malice."""
    digest = xxhash.xxh3_128()
    for spec, part in zip(bucket.specs, bucket.parts, strict=True):
        digest.update(f"{spec.name} {spec}".encode())
        digest.update(part)
    return digest.hexdigest()


def _require_same(base: tuple[WeightSpec, ...], new: tuple[WeightSpec, ...]) -> None:
    if base != new:
        raise SyncError(f"differences between buckets of other tensors: {len(base)} and {len(new)} of them, {base[:1]} and {new[:1]} first")


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
    """In place."""
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
