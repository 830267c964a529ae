"""The compiled norm and rotary angles: the bits of torch's operators."""

from __future__ import annotations

import pytest
import torch

from evenkeel.rollout.sglang_plugin.elementwise import Elementwise

KERNELS = Elementwise()
EPS = 1e-5


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("size", [8, 20, 100, 576, 1024, 4096, 5120])
def test_a_norm_is_the_one_of_its_definition(rows: int, size: int) -> None:
    """In float64, to some roundings of float32; and a row's result is its own."""
    x, residual = torch.randn(2, rows, size, generator=torch.Generator().manual_seed(size))
    weight = torch.linspace(-2, 2, size)
    found, sums = KERNELS.norm(x, residual, weight, EPS)
    assert torch.equal(sums, x + residual)
    exact = sums.double() * torch.rsqrt(sums.double().square().mean(-1, keepdim=True) + EPS) * weight
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-12)
    assert torch.equal(KERNELS.norm(sums, None, weight, EPS)[0], found)
    assert torch.equal(KERNELS.norm(sums[-1:], None, weight, EPS)[0], found[-1:])


@pytest.mark.parametrize("size", [64, 896, 2048, 3584])
def test_its_bits_are_those_of_the_operators_or_it_is_not_used(size: int) -> None:
    if not KERNELS.agrees():
        pytest.skip("torch adds in another order on this processor")
    x, weight = torch.randn(9, size, generator=torch.Generator().manual_seed(1)), torch.linspace(0, 3, size)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
    assert torch.equal(KERNELS.norm(x, None, weight, EPS)[0], expected)


@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_rotary_angles_have_the_bits_of_the_operators(tokens: int) -> None:
    """Queries and keys as they lie in a layer: parts of one product's rows."""
    generator = torch.Generator().manual_seed(tokens)
    query, key, _ = torch.randn(tokens, 5 * 16, generator=generator).split([48, 16, 16], -1)
    angles, positions = torch.randn(30, 16, generator=generator), torch.randint(30, (tokens,), generator=generator)
    cosine, sine = angles[positions, None].chunk(2, -1)
    for found, x in zip(KERNELS.rotate(query, key, angles, positions), (query, key), strict=True):
        first, second = x.reshape(tokens, -1, 16).chunk(2, -1)
        expected = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
        assert torch.equal(found, expected.reshape(x.shape))
