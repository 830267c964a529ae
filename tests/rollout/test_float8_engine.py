"""An engine with projections in float8 on a CPU: what it holds, and what it computes, against float8 made and computed by hand."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from correction.engines.float8 import BLOCK, in_float8, is_projection, quantised
from correction.engines.weight_bucket import WeightBucket
from correction.engines.weight_spec import WeightSpec
from learner.broadcast import WeightBroadcaster
from rollout.engine import RolloutEngine
from rollout.engine_config import EngineConfig
from tests.tiny_models import save_tiny_model

SHAPE = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
"""192 = 128 + 64: blocks at an edge are smaller."""
OF_TWO = SHAPE | {"head_dim": 128}
"""Whose matrices are cut in two between blocks."""


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}


def reference_logprobs(folder: Path, ids: list[int], *, is_float8: bool) -> Tensor:
    """[len(ids) - 1] by transformers in bfloat16; with projections in float8 by hand."""
    from transformers import AutoModelForCausalLM

    held = in_float8(weights_of(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, module in model.named_modules():
        if is_float8 and is_projection(f"{name}.weight") and isinstance(module, torch.nn.Linear):
            values, scales = held[f"{name}.weight"], held[f"{name}.weight_scale_inv"]
            module.forward = partial(by_hand, values=values, scales=scales)
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


def test_a_product_is_that_of_the_rounded_numbers() -> None:
    """On a CPU, edges and an all-zero token included, to float32's rounding of a sum and bfloat16's of the result."""
    from rollout.sglang_plugin.float8 import _apply

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


async def by_broadcast(engine: RolloutEngine, version: int, weights: dict[str, Tensor]) -> None:
    """Float8, float32 and bfloat16 in one bucket, which is sent as bytes: gloo knows no float8."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
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
@pytest.mark.parametrize(("ranks", "shape"), [(1, SHAPE), (2, OF_TWO)])
def test_an_engine_takes_float8_and_computes_with_it(tmp_path: Path, ranks: int, shape: dict[str, int]) -> None:
    """Of two ranks each has whole blocks of values, and their scales; what it holds are the parts of what was sent."""
    folder = save_tiny_model(tmp_path / "m", tie=False, **shape)
    ids = torch.randint(5, 512, (120,), generator=torch.Generator().manual_seed(0)).tolist()
    sent = in_float8(weights_of(folder))

    async def scenario() -> tuple[dict[str, str], dict[str, str], list[float]]:
        config = EngineConfig(device="cpu", dtype="bfloat16", quantization="float8_block", tensor_parallel=ranks)
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
    assert specs["model.layers.0.self_attn.k_proj.weight"] == f"float8_e4m3fn [{128 * ranks}, 192]"
    assert specs["model.layers.0.self_attn.k_proj.weight_scale_inv"] == f"float32 [{ranks}, 2]"
    assert specs["model.layers.1.mlp.down_proj.weight_scale_inv"] == "float32 [2, 2]"
    assert checksums == WeightBucket.of(sent).checksums(), "to the last bit, under the names and in the shapes of the files"
    plain, float8 = (reference_logprobs(folder, ids, is_float8=is_float8) for is_float8 in (False, True))
    moved, expected = torch.tensor(scored) - plain, float8 - plain
    found = float(torch.corrcoef(torch.stack([moved, expected]))[0, 1])
    # 0.78: where bfloat16 sums differ in the last bit, an entry now and then falls into another step of float8. Of unlike rounding it is 0.
    assert found > 0.6 and 0.5 < float(moved.std() / expected.std()) < 2.0, found
