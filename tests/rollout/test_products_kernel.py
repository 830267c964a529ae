"""The compiled products of few rows, and the compiled draw: torch's own results."""

from __future__ import annotations

import pytest
import torch

from evenkeel.rollout.sglang_plugin.products import FewRows, depth_with_avx512

KERNEL = FewRows()


def factors(rows: int, inner: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, inner, generator=generator), torch.randn(columns, inner, generator=generator)


@pytest.mark.parametrize("rows", [2, 3, 5, 6, 7, 64, 256])
@pytest.mark.parametrize(("inner", "columns"), [(8, 16), (192, 32), (200, 16), (576, 48), (1536, 16)])
def test_they_are_products(rows: int, inner: int, columns: int) -> None:
    """To the rounding of as many additions in float32."""
    x, weight = factors(rows, inner, columns)
    exact = x.double() @ weight.double().t()
    assert float((KERNEL.product(x, weight.t()) - exact).abs().max()) < 2e-6 * inner**0.5 * 3


@pytest.mark.parametrize("rows", [2, 5, 17, 64])
def test_a_row_is_its_own(rows: int) -> None:
    x, weight = factors(256, 584, 64)
    assert torch.equal(KERNEL.product(x[:rows], weight.t()), KERNEL.product(x, weight.t())[:rows])


@pytest.mark.parametrize(("inner", "columns"), [(576, 3072), (896, 1152), (1536, 576)])
def test_they_have_the_bits_of_torch_or_are_not_used(inner: int, columns: int) -> None:
    """Shapes of real models, which `agrees` hasn't looked at: one, two and three pieces of what MKL adds up at once."""
    x, weight = factors(1024, inner, columns)
    if not KERNEL.agrees:
        pytest.skip("torch adds in another order on this processor")
    for rows in (4, 16, 64):
        assert torch.equal(KERNEL(x[:rows], weight.t()), (x @ weight.t())[:rows])


def test_the_pieces_that_mkl_adds_up_on_intels_processors_with_avx512() -> None:
    """Found by trying all depths against products of MKL, of 16 to 512 rows and 192 to 3,072 columns, on a Xeon with AMX."""
    assert [depth_with_avx512(inner) for inner in (64, 384, 400, 576, 768, 896, 1536)] == [64, 384, 200, 288, 384, 384, 384]


@pytest.mark.parametrize("case", ["one row", "many rows", "odd columns", "odd inner", "weights apart", "half", "empty"])
def test_others_are_left_to_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"one row": 1, "many rows": 300, "empty": 0}.get(case, 4)
    x, weight = factors(rows, 30 if case == "odd inner" else 32, 20 if case == "odd columns" else 32)
    if case == "half":
        x, weight = x.half(), weight.half()
    right = weight if case == "weights apart" else weight.t()
    expected, is_used = torch.mm(x, right), KERNEL.agrees
    monkeypatch.setattr(FewRows, "product", None)  # nothing may call it
    if is_used:
        assert torch.equal(KERNEL(x, right), expected)
    else:  # it isn't used on this processor, where torch's ways to one product have other bits, too
        torch.testing.assert_close(KERNEL(x, right), expected)


def test_what_does_not_fit_is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        KERNEL(torch.ones(2, 8), torch.ones(16, 16).t())


def test_not_finite_numbers_stay_in_their_rows() -> None:
    x, weight = factors(7, 192, 16)
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    found = KERNEL.product(x, weight.t())
    assert [bool(row.isfinite().all()) for row in found] == [True, True, True, False, False, True, True]
