"""An engine on a tiny mixture of experts with a head of its own: its fused experts, seen and updated under Hugging Face's names, and the
experts that it sends tokens to, compared with those that Hugging Face's routers choose."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evenkeel.engines.weights import WeightBucket, WeightSpec, tensor_checksum
from evenkeel.rollout.continuation import with_more_to_read
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.trajectory import Trajectory
from tests.conftest import BackgroundLoop
from tests.rollout.hf_reference import hf_model, largest_difference, perturbed, response_logprobs, tiny_weights
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 experts, 2 a token; 512 tokens, head not tied."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny_moe"), "qwen3_moe", tie=False)


@pytest.fixture(scope="module")
def moe_engine(moe_folder: Path, engine_loop: BackgroundLoop) -> Iterator[RolloutEngine]:
    config = EngineConfig(device="cpu", max_total_tokens=8192, return_routed_experts=True)
    engine = engine_loop.run(RolloutEngine.start(moe_folder, config, name="moe engine"))
    yield engine
    engine_loop.run(engine.shutdown())


def updated_model(folder: Path, weights: dict[str, Tensor], target: Path) -> Any:
    """Hugging Face's with other weights: transformers fuses experts in memory, not in files."""
    from safetensors.torch import save_file

    hf_model(folder).save_pretrained(target)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return hf_model(target)


def differing_rows(model: Any, prompt: Sequence[int], completion: Trajectory) -> list[int]:
    """Rows whose experts are not those of Hugging Face's routers in some layer; every row that was read has some."""
    routes, rows = completion.routed_experts, len(prompt) + len(completion.response_ids) - 1
    assert routes is not None and routes.ids.typecode == array("B").typecode and len(routes.ids) == rows * routes.layers * routes.k
    found = torch.frombuffer(routes.ids, dtype=torch.uint8).view(rows, routes.layers, routes.k).long()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion.response_ids][:-1]]), output_router_logits=True).router_logits
    own = torch.stack([layer.topk(routes.k).indices for layer in logits], 1)
    return (found.sort(-1).values != own.sort(-1).values).flatten(1).any(1).nonzero()[:, 0].tolist()


def test_routes_line_up_with_the_tokens(moe_engine: RolloutEngine, engine_loop: BackgroundLoop, moe_folder: Path) -> None:
    """Prompts prefilled for several samples at once, found in the prefix cache again, and of a single token; many requests together."""
    model = hf_model(moe_folder)
    asked = [[7], list(range(20, 90)), list(range(20, 60)), list(range(20, 90)), [5, 6, 7, 8]]

    async def sample() -> list[list[Trajectory]]:
        return await asyncio.gather(*(moe_engine.generate(p, max_tokens=30, samples=3) for p in asked))

    sampled = [(p, c) for p, completions in zip(asked, engine_loop.run(sample()), strict=True) for c in completions]
    assert max(completion.cached_tokens for _, completion in sampled) >= 69
    assert [differing_rows(model, prompt, completion) for prompt, completion in sampled] == [[]] * len(sampled)


def test_routes_of_a_turn_are_those_of_all_tokens_before_it(
    moe_engine: RolloutEngine, engine_loop: BackgroundLoop, moe_folder: Path
) -> None:
    """Three turns, each read on from the cache: the experts of all tokens, read and sampled, come with the last turn."""
    model, prompt = hf_model(moe_folder), list(range(20, 60))

    async def sample() -> Trajectory:
        (one,) = await moe_engine.generate(prompt, max_tokens=12, ignore_stop=True)
        for turn, reading in enumerate(([7, 8, 9, 7], [300])):
            limit = 12 * (turn + 2) + len(one.answer_ids)
            (one,) = await moe_engine.generate(prompt, max_tokens=limit, ignore_stop=True, begun=[with_more_to_read(one, reading)])
        return one

    one = engine_loop.run(sample())
    assert one.turns == 3 and one.retractions == 0
    assert differing_rows(model, prompt, replace(one, response_ids=one.answer_ids)) == []


def test_an_answer_that_does_not_ask_for_routes_has_none_and_is_the_same(moe_engine: RolloutEngine, engine_loop: BackgroundLoop) -> None:
    """As an evaluation's: the same tokens, and nothing of what is wide."""
    prompt, how = list(range(20, 60)), {"max_tokens": 30, "seeds": [5]}
    (whole,), (narrow,) = (
        engine_loop.run(moe_engine.generate(prompt, is_trained=is_trained, **how))  # type: ignore[arg-type]
        for is_trained in (True, False)
    )
    assert whole.routed_experts is not None and narrow.routed_experts is None
    assert whole.response_ids == narrow.response_ids


def test_routes_of_a_request_that_an_update_found_under_way(
    moe_engine: RolloutEngine, engine_loop: BackgroundLoop, moe_folder: Path, tmp_path: Path
) -> None:
    """Its tokens are read again by the new weights: all routes are theirs, also at tokens that the old ones sampled."""
    new, prompt = perturbed(tiny_weights(moe_folder), seed=3), list(range(100, 140))

    async def run() -> Trajectory:
        running = asyncio.ensure_future(moe_engine.generate(prompt, max_tokens=200, ignore_stop=True))
        await moe_engine.generate([5], max_tokens=20, ignore_stop=True)
        await moe_engine.update_weights(moe_engine.version + 1, [WeightBucket.of(new)])
        return (await running)[0]

    completion = engine_loop.run(run())
    assert completion.retractions == 1 and len(completion.version_spans) == 2
    assert differing_rows(updated_model(moe_folder, new, tmp_path / "new"), prompt, completion) == []
    assert len(differing_rows(hf_model(moe_folder), prompt, completion)) > 20, "the update must matter"


def test_experts_under_their_own_names(moe_engine: RolloutEngine, engine_loop: BackgroundLoop, moe_folder: Path, tmp_path: Path) -> None:
    weights = tiny_weights(moe_folder)
    engine_loop.run(moe_engine.update_weights(moe_engine.version + 1, [WeightBucket.of(weights)]))
    assert engine_loop.run(moe_engine.weight_specs()) == {name: WeightSpec.of(name, tensor) for name, tensor in weights.items()}
    assert engine_loop.run(moe_engine.weight_checksums()) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
    new = perturbed(weights, seed=1, scale=0.02)
    engine_loop.run(moe_engine.update_weights(moe_engine.version + 1, [WeightBucket.of(new)]))
    assert engine_loop.run(moe_engine.weight_checksums()) == {name: tensor_checksum(tensor) for name, tensor in new.items()}
    completion = engine_loop.run(moe_engine.generate([5, 6, 7, 8], max_tokens=40, ignore_stop=True))[0]
    reference = response_logprobs(updated_model(moe_folder, new, tmp_path / "new"), [5, 6, 7, 8], completion.response_ids)
    assert largest_difference(completion.behavior_logprobs, reference) < 2e-5
