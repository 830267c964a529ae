"""Matrix products by oneDNN against float64, and torch with them in place of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenkeel.engines import matrix_products
from evenkeel.engines.machine import KEPT_KERNELS
from evenkeel.engines.matrix_products import MANY_ROWS, ROW_MULTIPLE, product

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN")  # type: ignore[no-untyped-call]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, MANY_ROWS + 40),
    inner=st.integers(1, 200),
    columns=st.integers(1, 200),
    transposed=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**32),
)
@example(rows=ROW_MULTIPLE + 1, inner=64, columns=64, transposed=(False, True), seed=0)
@example(rows=MANY_ROWS - 1, inner=64, columns=64, transposed=(True, False), seed=0)
def test_products_are_those_of_float64(rows: int, inner: int, columns: int, transposed: tuple[bool, bool], seed: int) -> None:
    """The rounding of a sum of n products is at most n u sum |a b|, u = 2^-24 (Higham 2002, eq. 3.5), whatever their order."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(inner, rows, generator=generator).t() if transposed[0] else torch.randn(rows, inner, generator=generator)
    b = torch.randn(columns, inner, generator=generator).t() if transposed[1] else torch.randn(inner, columns, generator=generator)
    found = product(a, b)
    assert found.shape == (rows, columns) and found.dtype == torch.float32
    bound = (inner + 1) * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert bool(((found.double() - a.double() @ b.double()).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_types_are_left_to_torch(dtype: torch.dtype) -> None:
    a, b = (torch.arange(n, dtype=dtype).reshape(shape) for n, shape in ((6, (2, 3)), (12, (3, 4))))
    expected = torch.tensor([[20, 23, 26, 29], [56, 68, 80, 92]], dtype=dtype)
    assert torch.equal(product(a, b), expected)


@pytest.mark.parametrize("rows", [1, 8, 24, 200])
def test_a_slice_of_the_weights_gives_the_bits_of_its_copy(rows: int) -> None:
    """True on-policy, one side multiplies by slices of what the other side's ranks hold apart."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 96), torch.randn(160, 192)
    for half in weight.chunk(2, -1):
        assert torch.equal(product(x, half.t()), product(x, half.clone().t()))


def test_factors_whose_rows_overlap_are_copied() -> None:
    """As torch.Tensor.unfold makes them; oneDNN has no description for such a tensor."""
    a, b = torch.eye(4), torch.arange(12.0).as_strided((4, 5), (2, 1))
    assert torch.equal(product(a, b), b) and torch.equal(product(torch.eye(5), b.t()), b.t())


def test_empty_factors_and_those_that_do_not_fit_are_left_to_torch() -> None:
    assert product(torch.ones(0, 3), torch.ones(3, 4)).shape == (0, 4)
    assert torch.equal(product(torch.ones(2, 0), torch.ones(0, 4)), torch.zeros(2, 4))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        product(torch.ones(2, 3), torch.ones(4, 5))


PROGRAM = """
import psutil, torch
from torch.profiler import profile
from evenkeel.engines import matrix_products
matrix_products.is_needed = lambda: True
matrix_products.use_fastest()
matrix_products.use_fastest()
torch.manual_seed(0)
x, weight = torch.randn(3, 7, 65, requires_grad=True), torch.randn(33, 65, requires_grad=True)
with profile() as profiled:
    y = torch.nn.functional.linear(x, weight)
    slope = torch.randn_like(y)
    y.backward(slope)
assert {e.key: e.count for e in profiled.key_averages()}["mkldnn::_linear_pointwise"] == 3
exact = torch.nn.functional.linear(x.double(), weight.double())
torch.testing.assert_close(y, exact.float())
torch.testing.assert_close(x.grad, (slope.double() @ weight.double()).float())
torch.testing.assert_close(weight.grad, (slope.double().flatten(0, 1).t() @ x.double().flatten(0, 1)).float())

torch.set_num_threads(1)
weight = torch.ones(64, 64)
def megabytes(rows):
    for count in rows:
        torch.mm(torch.ones(count, 64), weight)
    return psutil.Process().memory_info().rss / 1e6
kept = megabytes(range(600, 1200))
print(megabytes(range(1200, 1800)) - kept)
"""


@pytest.fixture(scope="module")
def ended() -> subprocess.CompletedProcess[str]:
    """A process of its own, since an override is for all of it, and so are warnings and the sizes of caches."""
    command, environment = [sys.executable, "-W", "error", "-c", PROGRAM], os.environ | KEPT_KERNELS
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


def test_torch_multiplies_and_differentiates_with_them(ended: subprocess.CompletedProcess[str]) -> None:
    """The second call must not override again, nor anything warn."""
    assert ended.returncode == 0, ended.stderr
    assert "Warning" not in ended.stderr


def test_kernels_that_were_compiled_are_not_all_kept(ended: subprocess.CompletedProcess[str]) -> None:
    """Of 600 numbers of rows, after 600 others: half a megabyte each, unless earlier ones give way."""
    assert float(ended.stdout) < 100, ended.stderr


@pytest.mark.parametrize(
    ("capability", "vendor", "expected"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_only_processors_that_mkl_does_not_use_wholly_need_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: str, vendor: str, expected: bool
) -> None:
    processor = tmp_path / "cpuinfo"
    processor.write_text(f"vendor_id : {vendor}\n")
    monkeypatch.setattr(matrix_products, "Path", lambda _: processor)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert matrix_products.is_needed.__wrapped__() is expected
