"""The compiled attention against its definition in float64, and what it promises: a row's result is its own."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenkeel.correction.errors import EngineError
from evenkeel.rollout.sglang_plugin.attention_kernel import AttentionKernel, check_compiler

SLOTS, REQUESTS, CONTEXT = 900, 5, 300
SHAPES = [(4, 2, 48), (2, 2, 20), (8, 1, 64)]  # query heads, key heads, head size
SCALE = 0.2


@cache
def kernel(shape: tuple[int, int, int], dtype: torch.dtype) -> AttentionKernel:
    return AttentionKernel(*shape, dtype)


class Step:
    """T new tokens over a paged cache, as SGLang keeps it: slots anywhere, and garbage in the table beyond a sequence's length."""

    def __init__(self, shape: tuple[int, int, int], lengths: list[int], dtype: torch.dtype, seed: int, spread: float = 1.0) -> None:
        random = torch.Generator().manual_seed(seed)
        heads, key_heads, size = shape
        self.keys = (spread * torch.randn(SLOTS, key_heads, size, generator=random)).to(dtype)
        self.values = torch.randn(SLOTS, key_heads, size, generator=random).to(dtype)
        self.query = torch.randn(len(lengths), heads, size, generator=random).to(dtype)
        self.table = torch.randint(-5, 10 * SLOTS, (REQUESTS, CONTEXT), generator=random, dtype=torch.int32)
        for request in range(REQUESTS):
            self.table[request, : max(lengths)] = torch.randperm(SLOTS, generator=random)[: max(lengths)]
        self.requests, self.lengths = torch.randint(0, REQUESTS, (len(lengths),), generator=random), torch.tensor(lengths)

    def attended(self, kernel: AttentionKernel, rows: slice = slice(None)) -> Tensor:
        return kernel(self.query[rows], self.keys, self.values, self.table, self.requests[rows], self.lengths[rows], SCALE)

    def expected(self, row: int) -> Tensor:
        """softmax(q k) v of one row, [H, D] float64."""
        slots = self.table[self.requests[row], : self.lengths[row]].long()
        shared = self.query.shape[1] // self.keys.shape[1]
        keys, values = (x[slots].double().repeat_interleave(shared, dim=1) for x in (self.keys, self.values))
        weights = (SCALE * torch.einsum("hd,thd->ht", self.query[row].double(), keys)).softmax(-1)
        return torch.einsum("ht,thd->hd", weights, values)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=9),
    spread=st.sampled_from([0.0, 1.0, 40.0]),
    seed=st.integers(0, 1000),
)
def test_is_softmax_attention(shape: tuple[int, int, int], lengths: list[int], spread: float, seed: int) -> None:
    """Also with scores of some hundreds, of which exp alone would overflow. float32 rounds the result, whose largest values are about 4."""
    step = Step(shape, lengths, torch.float32, seed, spread)
    attended = step.attended(kernel(shape, torch.float32))
    for row in range(len(lengths)):
        torch.testing.assert_close(attended[row].double(), step.expected(row), rtol=1.2e-7, atol=1e-12)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_half_precision_is_rounded_once(dtype: torch.dtype, digits: int) -> None:
    """All between reading and writing a tensor is exact to float32: half a unit in the last place, of `digits` binary digits."""
    step = Step((4, 2, 48), [1, 64, 65, 200], dtype, seed=0)
    attended = step.attended(kernel((4, 2, 48), dtype))
    assert attended.dtype == dtype
    for row in range(4):
        torch.testing.assert_close(attended[row].double(), step.expected(row), rtol=1.001 * 2.0**-digits, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_half_precision_is_read(dtype: torch.dtype) -> None:
    """Attention to a single key is that key's value: all 65,536 bit patterns but NaN come back as they were."""
    numbers = torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[~numbers.isnan()]
    values = torch.cat([numbers, numbers[: -len(numbers) % 96]]).view(-1, 2, 48)
    rows = len(values)
    attended = kernel((2, 2, 48), dtype)(
        torch.ones(rows, 2, 48, dtype=dtype), torch.zeros(rows, 2, 48, dtype=dtype), values, torch.arange(rows, dtype=torch.int32)[:, None],
        torch.arange(rows), torch.ones(rows, dtype=torch.int64), SCALE,
    )  # fmt: skip
    assert torch.equal(attended, values)


def test_row_does_not_depend_on_the_others() -> None:
    step, attend = Step((4, 2, 48), [7, 130, 1, 64, 299], torch.float32, seed=1), kernel((4, 2, 48), torch.float32)
    together = step.attended(attend)
    for row in range(5):
        assert torch.equal(step.attended(attend, slice(row, row + 1))[0], together[row])


def test_threads_share_the_rows() -> None:
    step, threads = Step((4, 2, 48), [9, 200, 31, 4, 5, 6, 280], torch.float32, seed=2), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = AttentionKernel(4, 2, 48, torch.float32)
        torch.set_num_threads(3)
        shared = AttentionKernel(4, 2, 48, torch.float32)
        assert torch.equal(step.attended(shared), step.attended(alone))
        assert torch.equal(step.attended(shared, slice(0, 2)), step.attended(alone, slice(0, 2)))  # fewer rows than threads
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["query", "keys", "values"])
def test_broken_numbers_show(dtype: torch.dtype, name: str) -> None:
    """A model gone to NaN must not look like one that samples well."""
    step = Step((4, 2, 48), [70, 70], dtype, seed=3)
    getattr(step, name).fill_(torch.nan)
    assert step.attended(kernel((4, 2, 48), dtype)).isnan().all()


def test_tensors_that_it_would_misread_are_refused() -> None:
    step, attend = Step((4, 2, 48), [5, 6], torch.float32, seed=4), kernel((4, 2, 48), torch.float32)
    with pytest.raises(EngineError, match=r"compiled for torch\.float32.*bfloat16"):
        attend(step.query.bfloat16(), step.keys, step.values, step.table, step.requests, step.lengths, SCALE)
    with pytest.raises(EngineError, match="attention_backend=stock"):
        attend(step.query, step.keys, step.values, step.table, step.requests[:1], step.lengths, SCALE)


def test_subnormal_numbers_stay() -> None:
    """Loading code that was linked with fast-math can turn them to zero in the whole process."""
    kernel((4, 2, 48), torch.float32)
    assert (torch.tensor(1e-40) / 2).item() > 0


def test_error_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler --fast")
    with pytest.raises(EngineError, match=r"'no-such-compiler --fast' .*failed: .*Install a C compiler.*attention_backend=stock"):
        check_compiler()
