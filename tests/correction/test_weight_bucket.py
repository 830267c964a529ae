"""Weights as flat bytes come out bit for bit, whatever types lie side by side."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

from evenkeel.engines.weights import ALIGNMENT, WeightBucket, packed_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn]


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    """Random bit patterns, NaN and infinities among them; odd sizes, so that wide types start at odd bytes."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (5, 3), (), (1, 7), (2, 1, 3)]
    named = []
    for i, (dtype, shape) in enumerate((d, s) for d in DTYPES for s in shapes):
        count = int(np.prod(shape)) * dtype.itemsize
        named.append((f"t{i}", torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)))
    order = torch.randperm(len(named), generator=generator).tolist()
    return dict(named[i] for i in order)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("make", [WeightBucket.of, WeightBucket.over])
def test_bit_for_bit(make: Callable[[dict[str, torch.Tensor]], WeightBucket], is_sent: bool) -> None:
    tensors = tensors_of_all_kinds()
    bucket = make(tensors)
    if is_sent:
        bucket = pickle.loads(pickle.dumps(bucket, protocol=5))
        for part in bucket.parts:
            part.flags.writeable = False  # as it comes out of the object store
    found = bucket.tensors()
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor)
    assert bucket.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_a_copy_and_not_a_view_of_the_learners_weights() -> None:
    weight = torch.ones(4)
    bucket = WeightBucket.of({"w": weight})
    weight.zero_()
    assert bucket.tensors()["w"].tolist() == [1.0] * 4


def test_the_learners_weights_themselves() -> None:
    """For a copy that is made at once, as into the object store: one in between would cost as much again."""
    weight = torch.ones(4)
    bucket = WeightBucket.over({"w": weight})
    weight.zero_()
    assert bucket.tensors()["w"].tolist() == [0.0] * 4


@pytest.mark.parametrize("has_memory", [False, True])
def test_its_tensors_are_views(has_memory: bool) -> None:
    """No copy on the engine's side, whatever types lie side by side: end to end, each at a multiple of ALIGNMENT."""
    specs = WeightBucket.of(tensors_of_all_kinds()).specs
    memory = torch.empty(packed_bytes(specs) + 100, dtype=torch.uint8) if has_memory else None
    bucket = WeightBucket.of_specs(specs, memory)
    start = end = bucket.parts[0].ctypes.data if memory is None else memory.data_ptr()
    for tensor in bucket.tensors().values():
        assert tensor.data_ptr() == start + -(-(end - start) // ALIGNMENT) * ALIGNMENT
        end = tensor.data_ptr() + tensor.nbytes
    assert end == start + packed_bytes(specs)


def test_a_transposed_weight_keeps_its_order() -> None:
    weight = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(WeightBucket.of({"w": weight}).tensors()["w"], weight)


def test_nothing_is_a_bucket_too() -> None:
    bucket = WeightBucket.of({})
    assert (bucket.tensors(), bucket.nbytes, bucket.parts) == ({}, 0, ())
