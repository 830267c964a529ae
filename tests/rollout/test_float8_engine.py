"""An engine with projections in float8 on a CPU: what it holds, and what it computes, against float8 made and computed by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from evenkeel.engines.float8_format import BLOCK, is_projection
from evenkeel.engines.weights import WeightBucket, WeightSpec, in_float8, quantised
from evenkeel.learner.weights.broadcast import WeightBroadcaster
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from lab.ports import free_port
from tests.tiny_models import save_tiny_model

SHAPE = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
"""192 = 128 + 64: blocks at an edge are smaller."""
OF_TWO = SHAPE | {"head_dim": 128}
"""Whose matrices are cut in two between blocks."""
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 4}
SQUARE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
"""Of families whose heads share the hidden channels."""


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}


def reference_logprobs(folder: Path, ids: list[int], *, is_float8: bool) -> Tensor:
    """[len(ids) - 1] by transformers in bfloat16; with projections and experts in float8 by hand."""
    from transformers import AutoModelForCausalLM

    held = in_float8(weights_of(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, module in model.named_modules():
        if is_float8 and is_projection(f"{name}.weight") and isinstance(module, torch.nn.Linear):
            values, scales = held[f"{name}.weight"], held[f"{name}.weight_scale_inv"]
            module.forward = partial(by_hand, values=values, scales=scales)
        elif is_float8 and name.endswith(".experts"):
            module.forward = partial(experts_by_hand, matrices=experts_of(held, name.split(".")[2]))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    return torch.log_softmax(logits[:-1], -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def by_hand(x: Tensor, *, values: Tensor, scales: Tensor) -> Tensor:
    """Block by block: the sum of float8 times float8 by the product of the two scales, in float64."""
    rows = x.double().reshape(-1, x.shape[-1])
    product = torch.zeros(len(rows), len(values), dtype=torch.float64)
    for j in range(0, rows.shape[1], BLOCK):
        part = rows[:, j : j + BLOCK]
        scale = part.abs().amax(1, keepdim=True).float().clamp(min=1e-10) / 448
        rounded_part = (part.float() / scale).to(torch.float8_e4m3fn).double()
        for i in range(0, len(values), BLOCK):
            block = values[i : i + BLOCK, j : j + BLOCK].double()
            product[:, i : i + BLOCK] += rounded_part @ block.T * scale.double() * float(scales[i // BLOCK, j // BLOCK])
    return product.to(x.dtype).reshape(*x.shape[:-1], len(values))


Matrix = tuple[Tensor, Tensor]
"""Values and scales."""


def experts_of(held: Mapping[str, Tensor], layer: str) -> list[list[Matrix]]:
    """Of each expert of a layer its gate, up and down projection, as the files of any family name them."""
    of_layer = {name: one for name, one in held.items() if name.startswith(f"model.layers.{layer}.")}
    prefix = next(name for name in of_layer if ".experts." in name).partition(".experts.")[0]
    names = ("w1", "w3", "w2") if f"{prefix}.experts.0.w1.weight" in of_layer else ("gate_proj", "up_proj", "down_proj")
    count = sum(".experts." in name for name in of_layer) // 6
    experts = [[f"{prefix}.experts.{index}.{name}.weight" for name in names] for index in range(count)]
    return [[(held[name], held[f"{name}_scale_inv"]) for name in matrices] for matrices in experts]


def experts_by_hand(x: Tensor, chosen: Tensor, weights: Tensor, *, matrices: list[list[Matrix]]) -> Tensor:
    """Token by token [tokens, hidden], as SGLang's kernels for GPUs round: the input of either product, and each expert's output."""
    total = torch.zeros(x.shape)
    for row, experts, shares, of_row in zip(x, chosen.tolist(), weights.float().tolist(), total, strict=True):
        for expert, share in zip(experts, shares, strict=True):
            if expert >= 0:
                gate, up, down = ({"values": values, "scales": scales} for values, scales in matrices[expert])
                between = torch.nn.functional.silu(by_hand(row, **gate).float()) * by_hand(row, **up).float()
                of_row += (by_hand(between.to(x.dtype).float(), **down) * share).to(x.dtype)
    return total.to(x.dtype)


def test_a_product_is_that_of_the_rounded_numbers() -> None:
    """On a CPU, edges and an all-zero token included, to float32's rounding of a sum and bfloat16's of the result."""
    from evenkeel.rollout.sglang_plugin.float8 import _apply

    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 5, 192, generator=generator) * torch.logspace(-3, 2, 192)).bfloat16()
    x[0, 0] = 0.0
    values, scales = quantised(torch.randn(200, 192, generator=generator).bfloat16(), BLOCK)
    layer, bias = torch.nn.Module(), torch.randn(200, generator=generator).bfloat16()
    layer.weight, layer.weight_scale_inv = (torch.nn.Parameter(one, requires_grad=False) for one in (values, scales))
    expected = by_hand(x, values=values, scales=scales)
    torch.testing.assert_close(_apply(print, None, layer, x), expected, rtol=2**-7, atol=1e-2)
    assert torch.equal(_apply(print, None, layer, x, bias), _apply(print, None, layer, x) + bias)
    assert float((_apply(print, None, layer, x) == expected).float().mean()) > 0.98


def test_no_random_scales_are_left_for_the_cache() -> None:
    """Both below 0: SGLang then takes 1."""
    from evenkeel.rollout.sglang_plugin.float8 import _no_scales_of_the_cache

    layer = SimpleNamespace(k_scale=torch.nn.Parameter(torch.tensor(5e-4)), v_scale=torch.nn.Parameter(torch.tensor(-5e-4)))
    _no_scales_of_the_cache(None, layer)
    assert float(layer.k_scale) == float(layer.v_scale) == -1.0


def test_a_token_s_experts_are_products_of_rounded_numbers() -> None:
    """Of four experts on a rank; one that isn't there, an all-zero token, and a token whose experts are all elsewhere."""
    from evenkeel.rollout.sglang_plugin.float8 import _of_experts

    generator = torch.Generator().manual_seed(0)
    shapes = ((256, 192), (256, 192), (192, 256))
    matrices = [[quantised(torch.randn(shape, generator=generator).bfloat16(), BLOCK) for shape in shapes] for _ in range(4)]
    layer = SimpleNamespace()
    for i, end in enumerate(("", "_scale_inv")):
        setattr(layer, f"w13_weight{end}", torch.stack([torch.cat([gate[i], up[i]]) for gate, up, _ in matrices]))
        setattr(layer, f"w2_weight{end}", torch.stack([down[i] for *_, down in matrices]))
    x = (torch.randn(6, 192, generator=generator) * torch.logspace(-2, 1, 192)).bfloat16()
    x[1] = 0.0
    chosen = torch.tensor([[0, 1], [2, 3], [3, 0], [-1, 2], [1, -1], [-1, -1]], dtype=torch.int32)
    weights = torch.rand(6, 2, generator=generator)
    found = _of_experts(layer, x, weights, chosen)
    expected = experts_by_hand(x, chosen, weights, matrices=matrices)
    assert found.dtype is torch.bfloat16 and not found[[1, 5]].any() and bool(expected[[0, 2, 3, 4]].any(1).all())
    # In float32 a sum has other last bits, by which one entry in 50 falls into another step on its way; an expert left out is 1.
    assert float((found == expected).float().mean()) > 0.9
    assert float((found - expected).double().norm() / expected.double().norm()) < 5e-3


async def by_broadcast(engine: RolloutEngine, version: int, weights: dict[str, Tensor]) -> None:
    """Float8, float32 and bfloat16 in one bucket, which is sent as bytes: gloo knows no float8."""
    port = free_port()
    size = 1 + engine.config.tensor_parallel
    joining = asyncio.ensure_future(engine.join_weight_group("127.0.0.1", port, 1, size, "weights"))
    learner = await asyncio.to_thread(WeightBroadcaster, "127.0.0.1", port, size, "weights", 60.0, torch.device("cpu"))
    await joining
    specs = [WeightSpec.of(name, tensor) for name, tensor in weights.items()]
    receiving = asyncio.ensure_future(engine.receive_weights(version, [specs], group="weights"))
    await asyncio.to_thread(learner.send, weights)
    assert (await receiving).bytes == sum(tensor.nbytes for tensor in weights.values())
    learner.close()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "ranks", "groups", "shape"),
    [
        ("qwen3", 1, 1, SHAPE),
        ("qwen3", 2, 1, OF_TWO),
        ("qwen3_moe", 1, 1, SHAPE | EXPERTS),
        ("qwen3_moe", 2, 1, OF_TWO | EXPERTS),  # half of each expert
        ("qwen3_moe", 2, 2, OF_TWO | EXPERTS),  # half of the experts
        ("mixtral", 1, 1, SQUARE | {"num_local_experts": 4}),
        ("olmoe", 1, 1, SQUARE | {"num_experts": 4}),
    ],
)
def test_an_engine_takes_float8_and_computes_with_it(tmp_path: Path, family: str, ranks: int, groups: int, shape: dict[str, int]) -> None:
    """Of two ranks each has whole blocks of values, and their scales; what it holds are the parts of what was sent."""
    folder = save_tiny_model(tmp_path / "m", family, tie=False, **shape)
    ids = torch.randint(5, 512, (120,), generator=torch.Generator().manual_seed(0)).tolist()
    sent = in_float8(weights_of(folder))

    async def scenario() -> tuple[dict[str, str], dict[str, str], list[float]]:
        ways = {"tensor_parallel": ranks, "expert_parallel": groups}
        config = EngineConfig(device="cpu", dtype="bfloat16", quantization="float8_block", **ways)
        engine = await RolloutEngine.start(folder, config, has_weights=False)
        try:
            specs = {name: str(spec) for name, spec in (await engine.weight_specs()).items()}
            other = in_float8({name: -tensor for name, tensor in weights_of(folder).items()})
            for version, weights in ((1, sent), (2, other)):  # once more, over weights that are in use
                await engine.update_weights(version, [WeightBucket.of(weights)])
            await by_broadcast(engine, 3, sent)
            return specs, await engine.weight_checksums([WeightBucket.of(sent)]), await engine.score(ids)
        finally:
            await engine.shutdown()

    specs, checksums, scored = asyncio.run(asyncio.wait_for(scenario(), 300.0))
    assert specs == {name: str(WeightSpec.of(name, tensor)) for name, tensor in sent.items()}
    assert specs[min(name for name in specs if "down_proj" in name or ".w2." in name)].startswith("float8_e4m3fn [")
    assert checksums == WeightBucket.of(sent).checksums(), "to the last bit, under the names and in the shapes of the files"
    plain, float8 = (reference_logprobs(folder, ids, is_float8=is_float8) for is_float8 in (False, True))
    moved, expected = torch.tensor(scored) - plain, float8 - plain
    found = float(torch.corrcoef(torch.stack([moved, expected]))[0, 1])
    # 0.78: where bfloat16 sums differ in the last bit, an entry now and then falls into another step of float8. Of unlike rounding it is 0.
    assert found > 0.6 and 0.5 < float(moved.std() / expected.std()) < 2.0, found
