"""Float8 by blocks against the 256 numbers of the format, and against transformers' own code for such folders."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from evenkeel.engines.float8_format import BLOCK, CONFIG, PROJECTIONS, is_projection
from evenkeel.engines.weights import dequantised, in_float8, quantised
from evenkeel.learner.hf.families import FAMILIES, TensorLayout
from lab.float8 import rounded_weight, write_float8_folder
from tests.tiny_models import save_tiny_model

NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
FINITE = NUMBERS[NUMBERS.isfinite()].unique()


def nearest(x: Tensor) -> Tensor:
    """Of all numbers of the format, in float64. No entry lies half-way between two."""
    distance = (x.double()[..., None] - FINITE).abs()
    two = distance.topk(2, largest=False).values
    assert bool((two[..., 0] < two[..., 1]).all())
    return FINITE[distance.argmin(-1)]


@pytest.mark.parametrize(("rows", "columns", "block"), [(64, 96, 32), (80, 48, 32), (33, 31, 16), (40, 24, 0)])
def test_values_are_the_nearest_numbers_of_the_format(rows: int, columns: int, block: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, rows)[:, None]
    values, scales = quantised(weight, block)
    for top in range(0, rows, block or rows):
        for left in range(0, columns, block or columns):
            part = (slice(top, top + (block or rows)), slice(left, left + (block or columns)))
            scale = weight[part].abs().max() / 448
            assert torch.equal(scales[top // (block or rows), left // (block or columns)], scale)
            assert torch.equal(values[part].double(), nearest(weight[part] / scale))
            torch.testing.assert_close(rounded_weight(weight, block)[part], values[part].float() * scale, rtol=0, atol=0)


def test_a_folder_s_values_and_scales_are_transformers_own() -> None:
    """It multiplies by the inverse of a scale, so that now and then a number half-way between two falls to the other side."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    owner = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(32, 32), scale_fmt="float"))
    weight = torch.randn(256, 320, generator=torch.Generator().manual_seed(1))
    theirs = Fp8Quantize(owner)._quantize_one("a.weight", weight)
    values, scales = quantised(weight, 32)
    torch.testing.assert_close(scales, theirs["a.weight_scale_inv"], rtol=3e-7, atol=0)
    assert float((values.float() != theirs["a.weight"].float()).float().mean()) < 1e-4
    back = Fp8Dequantize(owner)._dequantize_one(values, scales, torch.float32)
    assert torch.equal(dequantised(values, scales, 32, torch.float32), back)


def test_transformers_reads_experts_as_they_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, shapes and scales of a mixture's folder in float8: its own loader multiplies them out to the numbers that were meant."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)  # which a CPU has no use for
    folder = save_tiny_model(tmp_path / "m", "qwen3_moe", tie=False, hidden_size=256, moe_intermediate_size=256, num_experts=4)
    file = folder / "model.safetensors"
    sent = in_float8({name: one.bfloat16() for name, one in load_file(file).items()})
    save_file(sent, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(config))
    whole = FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK))
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=whole).state_dict()

    def meant(name: str) -> Tensor:
        return dequantised(sent[f"{name}.weight"], sent[f"{name}.weight_scale_inv"], BLOCK, torch.bfloat16)

    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        for index in range(4):
            both = torch.cat([meant(f"{experts}.{index}.{name}_proj") for name in ("gate", "up")])
            assert torch.equal(read[f"{experts}.gate_up_proj"][index], both)
            assert torch.equal(read[f"{experts}.down_proj"][index], meant(f"{experts}.{index}.down_proj"))
        router = f"model.layers.{layer}.mlp.gate.weight"
        assert torch.equal(read[router], sent[router]) and sent[router].dtype is torch.bfloat16


def test_blocks_keep_an_outlier_to_themselves() -> None:
    """e4m3 has 3 bits after the point: a half step is 1/16 of a number's power of two, and numbers that it holds stay as they are.

    One huge entry pushes a tensor's small ones below half of the least number, 2^-10 x 1e5 / 448 = 0.22, which are 17 % of normal ones;
    blocks keep that to the 1,024 of 3,840 entries in its own.
    """
    weight = torch.randn(80, 48, generator=torch.Generator().manual_seed(0))
    for block in (0, 32):
        assert float(((rounded_weight(weight, block) - weight).abs() / weight.abs().clamp(min=0.05)).max()) <= 1 / 16 + 1e-6
    exact = torch.tensor([[448.0, 1.0, -1.125], [0.0, 2**-6, 26.0]])
    assert torch.equal(rounded_weight(exact, 0), exact)
    weight[0, 0] = 1e5
    lost = [float((rounded_weight(weight, block) == 0).float().mean()) for block in (0, 32)]
    assert 0.15 < lost[0] < 0.2 and lost[1] < 0.4 * lost[0]


def test_float32_masters_are_other_numbers_than_the_bfloat16_weights() -> None:
    """Bfloat16 rounds by up to 2^-8 of a number's power of two, by 2^-9 on average, and a step of e4m3 is 2^-3 of it: one in 64 values
    falls into another step. Two sides that quantise the one and the other differ there by a whole step."""
    master = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    of_weights, of_masters = rounded_weight(master.bfloat16().float(), 32), rounded_weight(master, 32)
    steps = ((of_weights - of_masters).abs() / of_masters.abs()) > 0.03
    assert 0.7 / 64 < float(steps.float().mean()) < 1.5 / 64


def test_what_is_rounded_in_a_folder(tmp_path: Path) -> None:
    matrices = (TensorLayout.QKV, TensorLayout.ROW, TensorLayout.GATE_UP)
    rules = [rule for family in FAMILIES.values() for rule in family.rules if rule.layout in matrices]
    assert {name.split(".")[-2] for rule in rules for name in rule.hf} == PROJECTIONS, "of all families that can be trained"
    folder = save_tiny_model(tmp_path / "m", "qwen3_moe", tie=False)
    write_float8_folder(folder, tmp_path / "rounded", 32, rounded_first=torch.bfloat16)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "rounded"))
    assert before.keys() == after.keys() and (tmp_path / "rounded" / "config.json").is_file()
    for name, weight in before.items():
        source = weight.bfloat16().float()
        assert torch.equal(after[name], rounded_weight(source, 32) if is_projection(name) else source)
        assert is_projection(name) == (weight.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight")))
