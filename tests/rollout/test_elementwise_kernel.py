"""The compiled norm and rotary angles: the bits of torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evenkeel.rollout.sglang_plugin.elementwise import Elementwise, register

KERNELS, HALF = Elementwise(torch.float32), Elementwise(torch.bfloat16)
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


@pytest.mark.parametrize("kernels", [KERNELS, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", [64, 896, 2048, 3584])
def test_its_bits_are_those_of_the_operators_or_it_is_not_used(size: int, kernels: Elementwise) -> None:
    """In bfloat16 SGLang adds and multiplies in float32, and rounds the sum for the residual alone."""
    if not kernels.agrees():
        pytest.skip("torch adds in another order on this processor")
    x, residual = torch.randn(2, 9, size, generator=torch.Generator().manual_seed(1)).to(kernels.dtype)
    weight = torch.linspace(0, 3, size).to(kernels.dtype)
    for before in (None, residual):
        whole = x.float() if before is None else x.float() + before.float()
        expected = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + EPS) * weight
        found, sums = kernels.norm(x, before, weight, EPS)
        assert torch.equal(found, expected.to(kernels.dtype)) and torch.equal(sums, whole.to(kernels.dtype))


def test_numbers_of_bfloat16_are_rounded_as_torch_rounds_them() -> None:
    """Ties to the even one, beyond the largest to infinity, NaN to NaN: sums of two numbers, of every exponent and sign."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, -1)
    residual = x.roll(77, -1).contiguous()
    sums = HALF.norm(x, residual, torch.ones(x.shape[1], dtype=torch.bfloat16), EPS)[1]
    assert torch.equal(sums.nan_to_num(7.0), (x.float() + residual.float()).to(torch.bfloat16).nan_to_num(7.0))


@pytest.mark.parametrize("kernels", [KERNELS, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_rotary_angles_have_the_bits_of_the_operators(tokens: int, kernels: Elementwise) -> None:
    """Queries and keys as they lie in a layer: parts of one product's rows."""
    generator = torch.Generator().manual_seed(tokens)
    query, key, _ = torch.randn(tokens, 5 * 16, generator=generator).to(kernels.dtype).split([48, 16, 16], -1)
    angles, positions = torch.randn(30, 16, generator=generator), torch.randint(30, (tokens,), generator=generator)
    cosine, sine = angles[positions, None].to(kernels.dtype).chunk(2, -1)
    for found, x in zip(kernels.rotate(query, key, angles, positions), (query, key), strict=True):
        first, second = x.reshape(tokens, -1, 16).chunk(2, -1)
        expected = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
        assert torch.equal(found, expected.reshape(x.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sglang_s_rotary_layer_is_done_by_the_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its angles as they lie there, which SGLang has rounded to the model's type; where they had to become more, with these."""
    if not Elementwise(dtype).agrees():
        pytest.skip("torch adds in another order on this processor")
    from sglang.srt.layers.rotary_embedding import base
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks: dict[str, Callable[..., Any]] = {}
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: hooks.__setitem__(target.rpartition(".")[0], hook))
    register(dtype)
    hook = hooks["sglang.srt.layers.rotary_embedding.base.RotaryEmbedding"]

    def unexpected(*_: Any) -> Any:
        raise AssertionError("SGLang's own")

    monkeypatch.setattr(base, "_is_cpu", True)  # as in an engine's processes
    layer = base.RotaryEmbedding(64, 64, 128, 10000, True, dtype)
    assert layer.cos_sin_cache.dtype is dtype
    for length in (128, 512):
        layer._ensure_cos_sin_cache_length(length - 1)
        positions = torch.arange(0, length, 7)
        query, key, _ = torch.randn(len(positions), 5 * 64).to(dtype).split([192, 64, 64], -1)
        expected = base.RotaryEmbedding.forward_native(layer, positions, query.contiguous(), key.contiguous())
        for found, its in zip(hook(unexpected, layer, positions, query, key), expected, strict=True):
            assert torch.equal(found, its)
    with pytest.raises(AssertionError, match="SGLang's own"):
        hook(unexpected, layer, positions.int(), query, key)
