"""Weights in float8 by blocks of 128: which ones, and each block by itself against torch's own rounding."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.engines.float8_format import BLOCK, CONFIG
from evenkeel.engines.weights import dequantised, in_float8, quantised


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 2**31), spread=st.floats(0.0, 6.0))
def test_each_block_is_rounded_by_a_scale_of_its_own(rows: int, columns: int, seed: int, spread: float) -> None:
    """Its largest entry is 448, the format's largest, and torch rounds the others; those at an edge are smaller."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * torch.logspace(0, -spread, rows)[:, None]).bfloat16()
    values, scales = quantised(weight, BLOCK)
    assert scales.shape == (-(-rows // BLOCK), -(-columns // BLOCK)) and scales.dtype is torch.float32
    assert values.shape == weight.shape and values.is_contiguous() and scales.is_contiguous()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(BLOCK * i, BLOCK * (i + 1)), slice(BLOCK * j, BLOCK * (j + 1))
            block = weight[part].float()
            assert scales[i, j] == block.abs().max() / 448
            assert torch.equal(values[part].float(), (block / scales[i, j]).to(torch.float8_e4m3fn).float())
    again = quantised(dequantised(values, scales, BLOCK, torch.float32), BLOCK)
    assert torch.equal(again[0].float(), values.float()), "float8 numbers are their own float8 numbers"


def test_zeros_are_zeros() -> None:
    values, scales = quantised(torch.zeros(3, 200), BLOCK)
    assert torch.equal(dequantised(values, scales, BLOCK, torch.float32), torch.zeros(3, 200)) and bool((scales > 0).all())


def test_projections_are_in_float8_and_the_rest_as_it_is() -> None:
    names = ["self_attn.q_proj.weight", "self_attn.q_proj.bias", "mlp.down_proj.weight", "self_attn.q_norm.weight"]
    weights = {f"model.layers.0.{name}": torch.ones(4) if "proj.weight" not in name else torch.ones(4, 4) for name in names}
    weights |= {"lm_head.weight": torch.ones(8, 4), "model.embed_tokens.weight": torch.ones(8, 4)}
    found = in_float8(weights)
    scaled = {name for name in found if name.endswith("_scale_inv")}
    assert scaled == {"model.layers.0.self_attn.q_proj.weight_scale_inv", "model.layers.0.mlp.down_proj.weight_scale_inv"}
    assert {name for name, one in found.items() if one.dtype is torch.float8_e4m3fn} == {name.removesuffix("_scale_inv") for name in scaled}
    assert all(found[name] is one for name, one in weights.items() if f"{name}_scale_inv" not in scaled)
    assert CONFIG["weight_block_size"] == [BLOCK, BLOCK]
