"""What an update changed in a bucket, compressed, makes the new bucket of the old one, bit for bit; of any other it makes none."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.weights import bucket_delta
from actors.weights.bucket_delta import BucketDelta, bucket_checksum
from correction.engines.float8 import in_float8
from correction.engines.weight_bucket import WeightBucket
from correction.errors import SyncError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn]
SHAPES = [(3,), (5, 3), (), (1, 7), (40,)]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """NaN of any payload and infinities among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


@st.composite
def updates(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before and after, or none at all: from no element changed to all of them, by a little or to anything."""
    kinds = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), max_size=5))
    share, is_small, seed = draw(st.sampled_from([0.0, 0.1, 1.0])), draw(st.booleans()), draw(st.integers(0, 2**20))
    before = {f"t{i}": random_bits(dtype, shape, seed + i) for i, (dtype, shape) in enumerate(kinds)}
    after = {}
    for i, (name, tensor) in enumerate(before.items()):
        numbers = np.frombuffer(bits(tensor), f"u{tensor.dtype.itemsize}")
        draws = np.random.default_rng(seed + i)
        anything = np.frombuffer(bits(random_bits(tensor.dtype, tuple(tensor.shape), seed + 100 + i)), numbers.dtype)
        new = numbers + draws.choice(np.array([-1, 1]), numbers.shape).astype(numbers.dtype) if is_small else anything
        changed = np.where(draws.random(numbers.shape) < share, new, numbers)
        after[name] = torch.from_numpy(changed.view(np.uint8).copy()).view(tensor.dtype).reshape(tensor.shape)
    return before, after


@pytest.mark.parametrize("chunk", [3, bucket_delta.CHUNK])
@settings(max_examples=80, deadline=None)
@given(updates())
def test_base_and_differences_make_the_new_bucket_bit_for_bit(
    chunk: int, update: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
) -> None:
    """As it comes out of the object store, read-only; the base stays as it is."""
    before, after = update
    base, new = WeightBucket.of(before), WeightBucket.of(after)
    for part in base.parts:
        part.flags.writeable = False
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(bucket_delta, "CHUNK", chunk)
        delta = pickle.loads(pickle.dumps(BucketDelta.between(base, new, pool.map), protocol=5))
        made = delta.applied(base, pool.map)
    assert made.specs == new.specs and [bits(one) for one in made.tensors().values()] == [bits(one) for one in after.values()]
    assert [bits(one) for one in base.tensors().values()] == [bits(one) for one in before.values()]
    assert bucket_checksum(made) == delta.checksum == bucket_checksum(new)


def test_float8_and_its_scales() -> None:
    generator = torch.Generator().manual_seed(0)
    before = {"model.layers.0.mlp.up_proj.weight": torch.randn(256, 256, generator=generator).bfloat16()}
    after = {name: one + 1e-2 * torch.randn(one.shape, generator=generator).bfloat16() for name, one in before.items()}
    base, new = WeightBucket.of(in_float8(before)), WeightBucket.of(in_float8(after))
    assert {spec.dtype for spec in new.specs} == {"float8_e4m3fn", "float32"}
    made = BucketDelta.between(base, new).applied(base)
    assert [part.tobytes() for part in made.parts] == [part.tobytes() for part in new.parts]


def test_the_usual_update_of_a_bfloat16_weight_takes_a_fiftieth_of_its_bytes() -> None:
    """float32 weights of usual size that Adam moves by 1e-6: 4 % of their bfloat16 copies change, to a neighbouring number."""
    generator = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(2**20, generator=generator)
    moved = weights + 1e-6 * torch.randn(2**20, generator=generator).sign()
    base, new = (WeightBucket.of({"w": one.bfloat16()}) for one in (weights, moved))
    changed = float((weights.bfloat16() != moved.bfloat16()).float().mean())
    delta = BucketDelta.between(base, new)
    assert 0.03 < changed < 0.06
    assert delta.nbytes / new.nbytes == pytest.approx(0.022, abs=0.004)
    same = BucketDelta.between(base, base)
    assert same.nbytes == 0 and same.applied(base).parts[0].tobytes() == base.parts[0].tobytes()


def test_any_other_base_is_refused() -> None:
    base, new = WeightBucket.of({"w": torch.arange(100.0)}), WeightBucket.of({"w": torch.arange(100.0) + 1})
    delta = BucketDelta.between(base, new)
    for other in (torch.arange(100.0) - 1, torch.arange(100.0).flip(0)):
        with pytest.raises(SyncError, match="w and others: the weights made from a delta have another checksum"):
            delta.applied(WeightBucket.of({"w": other}))
    for tensors in ({"v": torch.arange(100.0)}, {"w": torch.arange(50.0)}, {"w": torch.arange(100.0).half()}, {}):
        with pytest.raises(SyncError, match="a delta of different tensors"):
            delta.applied(WeightBucket.of(tensors))
        with pytest.raises(SyncError, match="a delta of different tensors"):
            BucketDelta.between(WeightBucket.of(tensors), new)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_differences_make_nothing(data: st.DataObject) -> None:
    """Whatever byte is another one: no crash, no other weights."""
    base, new = WeightBucket.of({"w": torch.arange(100.0)}), WeightBucket.of({"w": (torch.arange(100.0) * 1.01)})
    delta = BucketDelta.between(base, new)
    changes = bytearray(delta.chunks[0][0])
    place = data.draw(st.integers(0, len(changes) - 1))
    changes[place] ^= data.draw(st.integers(1, 255))
    try:
        made = replace(delta, chunks=((bytes(changes[: data.draw(st.sampled_from([place, len(changes)]))]),),)).applied(base)
    except SyncError:
        return
    assert made.parts[0].tobytes() == new.parts[0].tobytes(), "a bit that stands for nothing"
