"""Weights as flat bytes come out bit for bit, whatever types lie side by side."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from actors.weight_buckets import pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn]


def tensors_of_all_kinds() -> list[tuple[str, torch.Tensor]]:
    """Random bit patterns, NaN and infinities among them; odd sizes, so that wide types start at odd bytes."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (5, 3), (), (1, 7), (2, 1, 3)]
    named = []
    for i, (dtype, shape) in enumerate((d, s) for d in DTYPES for s in shapes):
        count = int(np.prod(shape)) * dtype.itemsize
        named.append((f"t{i}", torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)))
    order = torch.randperm(len(named), generator=generator).tolist()
    return [named[i] for i in order]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("is_sent", [False, True])
def test_bit_for_bit(is_sent: bool) -> None:
    named = tensors_of_all_kinds()
    bucket = pack(named)
    if is_sent:
        bucket = pickle.loads(pickle.dumps(bucket, protocol=5))
        bucket.data.flags.writeable = False  # as it comes out of the object store
    found = unpack(bucket)
    assert list(found) == [name for name, _ in named]
    for name, tensor in named:
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor)
    assert bucket.data.nbytes == sum(t.numel() * t.element_size() for _, t in named)


def test_a_copy_and_not_a_view_of_the_learners_weights() -> None:
    weight = torch.ones(4)
    bucket = pack([("w", weight)])
    weight.zero_()
    assert unpack(bucket)["w"].tolist() == [1.0] * 4


def test_aligned_tensors_are_views() -> None:
    """No copy on the engine's side where none is needed: the tensor's memory is the bucket's."""
    bucket = pack([("a", torch.ones(4)), ("b", torch.zeros(4))])
    assert unpack(bucket)["b"].data_ptr() == bucket.data.ctypes.data + 16


def test_a_transposed_weight_keeps_its_order() -> None:
    weight = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(unpack(pack([("w", weight)]))["w"], weight)
