"""Every model family, with the real SGLang and the real Megatron: weights go from the learner to an engine that has none of its own, and
the learner's logprobs of what the engine then samples are those that the engine reports.

The learner's side is compared with transformers in tests/learner/test_learner_model.py. Here are the engine's names and shapes of the
weights, its layers, and an update while requests run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.correct import correct
from evenkeel.engines.weights import WeightBucket
from evenkeel.learner.hf.families import FAMILIES
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from lab.weight_buckets import weight_buckets
from tests.conftest import BackgroundLoop
from tests.e2e.on_policy_cases import Sampled, as_batch, random_prompts, sample_in_random_batches
from tests.learner.learner_cases import TIS, learner_on
from tests.tiny_models import LLAMA3_ROPE, save_tiny_model, save_tiny_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOLERANCE = 1e-5
"""Largest |log ratio| of float32 forwards by two implementations."""


@dataclass(frozen=True)
class FamilyCase:
    family: str
    tie: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.family + ("-tied" if self.tie else "")


CASES = [
    FamilyCase("qwen3", tie=True),
    FamilyCase("qwen3"),
    FamilyCase("qwen2", tie=True),
    FamilyCase("llama", options={"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16_384}),
    FamilyCase("mistral", options={"head_dim": 24}),
    FamilyCase("olmo2", tie=True),
    FamilyCase("olmo2"),
    FamilyCase("glm4"),
    FamilyCase("qwen3_moe"),
    FamilyCase("mixtral"),
    FamilyCase("olmoe"),
]


def test_every_family_has_a_case() -> None:
    assert {case.family for case in CASES} == set(FAMILIES)


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> FamilyCase:
    assert isinstance(request.param, FamilyCase)
    return request.param


@pytest.fixture(scope="module")
def folder(case: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(save_tiny_tokenizer(tmp_path_factory.mktemp("family")), case.family, tie=case.tie, **case.options)


@pytest.fixture(scope="module")
def family_learner(folder: Path) -> Iterator[LearnerRank]:
    with learner_on(folder, learning_rate=2e-3) as learner:
        yield learner


@pytest.fixture(scope="module")
def family_engine(folder: Path, engine_loop: BackgroundLoop) -> Iterator[RolloutEngine]:
    """Without weights: what it holds in the end came by updates."""
    config = EngineConfig(device="cpu", max_total_tokens=16_384, max_running_requests=32)
    engine = engine_loop.run(RolloutEngine.start(folder, config, name="engine of a family", has_weights=False))
    yield engine
    engine_loop.run(engine.shutdown())


def copies(learner: LearnerRank) -> list[WeightBucket]:
    return [WeightBucket.of(bucket.tensors()) for bucket in weight_buckets(learner, bucket_bytes=50_000)]


def worst(batch: PackedBatch, learner: LearnerRank, version: int) -> float:
    """Largest difference on the tokens that a version sampled."""
    mask = batch.loss_mask & (batch.weight_versions == version)
    assert int(mask.sum()) > 100
    return float((learner.logprobs(batch) - batch.behavior_logprobs)[mask].abs().max())


def test_weights_and_samples_are_the_learner_s(
    family_engine: RolloutEngine, family_learner: LearnerRank, engine_loop: BackgroundLoop
) -> None:
    first, prompts = family_engine.version + 1, random_prompts(16, seed=1, longest=100)
    engine_loop.run(family_engine.update_weights(first, copies(family_learner)))
    assert engine_loop.run(family_engine.weight_checksums()) == family_learner.weight_checksums()
    sampled = engine_loop.run(sample_in_random_batches(family_engine, prompts, temperature=0.8, seed=1))
    batch = as_batch(sampled, temperature=0.8, version=first)
    assert worst(batch, family_learner, first) < TOLERANCE
    # A step with these, whose weights come while other requests run.
    ready = replace(batch, proximal_logprobs=family_learner.logprobs(batch))
    family_learner.step(correct(ready, TIS), TIS, step=0)
    stepped = copies(family_learner)

    async def across() -> list[Sampled]:
        running = [asyncio.ensure_future(family_engine.generate(p, max_tokens=200, ignore_stop=True)) for p in prompts[:6]]
        await family_engine.generate([5], max_tokens=20, ignore_stop=True)
        await family_engine.update_weights(first + 1, stepped)
        return [Sampled(p, (await request)[0]) for p, request in zip(prompts[:6], running, strict=True)]

    later = as_batch(engine_loop.run(across()), temperature=1.0, version=first + 1)
    assert set(later.weight_versions[later.loss_mask].tolist()) == {first, first + 1}
    assert worst(later, family_learner, first + 1) < TOLERANCE
    before = (family_learner.logprobs(later) - later.behavior_logprobs)[later.loss_mask & (later.weight_versions == first)]
    assert float(before.abs().max()) > 100 * TOLERANCE, "the step must matter"
    assert torch.isfinite(before).all()
