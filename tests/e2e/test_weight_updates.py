"""Three times: the Megatron learner trains, its weights go to SGLang as the sync sends them, and transformers loads what the learner saves.

After each update the logprobs that SGLang samples with are transformers' on the saved folder, to 1e-5, and every tensor's checksum in the
engine's own process is the learner's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from evenkeel.actors.record.recorder import ProbeWatch
from evenkeel.actors.settings.probe_limits import ProbeLimits
from evenkeel.engines.weights import WeightBucket, compare_checksums
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.training.step import unsampled_batch
from evenkeel.rollout.engine.engine import RolloutEngine
from lab.weight_buckets import weight_buckets
from tests.conftest import BackgroundLoop
from tests.rollout.hf_reference import hf_model, largest_difference, response_logprobs

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def learner(tiny_model: Path) -> Iterator[LearnerRank]:
    learner = LearnerRank(LearnerConfig(device="cpu", learning_rate=1e-2))
    learner.load(tiny_model)
    yield learner
    learner.close()


def train(learner: LearnerRank, seed: int) -> None:
    """A supervised step on random text: any step that moves every tensor will do."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 512, (8 * 32,), generator=generator)
    offsets = torch.arange(0, 8 * 32 + 1, 32)
    mask = torch.ones(8 * 32, dtype=torch.bool)
    mask[offsets[:-1]] = False
    learner.supervised_step(ids, offsets, mask)


async def on_the_wire(learner: LearnerRank) -> AsyncIterator[WeightBucket]:
    """Several small buckets, one after the other, as the sync sends them."""
    for bucket in weight_buckets(learner, 64 << 10):
        yield bucket


def test_three_updates(
    learner: LearnerRank, engine: RolloutEngine, engine_loop: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prompt = list(range(20, 32))
    before: list[float] | None = None
    for update in range(3):
        train(learner, seed=update)
        receipt = engine_loop.run(engine.update_weights(engine.version + 1, on_the_wire(learner)))
        assert receipt.bytes > 64 << 10, "one bucket would hold them all"
        compare_checksums("test", learner.weight_checksums(), engine_loop.run(engine.weight_checksums()), version=receipt.version)
        folder = tmp_path_factory.mktemp("saved") / "hf"
        learner.save_hf(folder)
        model = hf_model(folder)
        completions = engine_loop.run(engine.generate(prompt, max_tokens=48, samples=4, temperature=1.0, ignore_stop=True))
        for completion in completions:
            assert largest_difference(completion.behavior_logprobs, response_logprobs(model, prompt, completion.response_ids)) < 1e-5
            assert {span.version for span in completion.version_spans} == {receipt.version}
        scored = engine_loop.run(engine.score(prompt))
        assert largest_difference(scored, response_logprobs(model, prompt[:1], prompt[1:])) < 1e-5
        if before is not None:
            moved = largest_difference(scored, before)
            assert moved > ProbeLimits.of("float32", layers=2).largest, "the probe of a sync would not see that an update went missing"
        before = scored


def test_the_probe_finds_weights_that_did_not_arrive(learner: LearnerRank, engine: RolloutEngine, engine_loop: BackgroundLoop) -> None:
    """Of two layers in float32: one tensor that an update left out, or two of its rows in each other's place. What arrives whole isn't
    reported, before or after."""
    prompt = list(range(20, 60))

    def differences(weights: dict[str, torch.Tensor]) -> list[float]:
        engine_loop.run(engine.update_weights(engine.version + 1, [WeightBucket.of(weights)]))
        scored, ids = engine_loop.run(engine.score(prompt)), torch.tensor(prompt)
        batch = unsampled_batch(ids, torch.tensor([0, len(ids)]), torch.arange(len(ids)) > 0)
        return [abs(a - b) for a, b in zip(scored, learner.logprobs(batch)[1:].tolist(), strict=True)]

    watch = ProbeWatch(ProbeLimits.of("float32", layers=2))
    before = {name: tensor.clone() for part in learner.weights() for name, tensor in part.items()}
    assert watch.add("0", 0, differences(before)) is None
    train(learner, seed=7)
    whole = {name: tensor.clone() for part in learner.weights() for name, tensor in part.items()}
    name = "model.layers.1.mlp.down_proj.weight"
    swapped = whole[name].clone()
    swapped[[3, 4]] = whole[name][[4, 3]]
    for version, wrong in enumerate((before[name], swapped), start=1):
        told = watch.add("0", 2 * version, differences(whole | {name: wrong}))
        assert told is not None and told.endswith("the engine doesn't have the learner's weights")
        assert watch.add("0", 2 * version + 1, differences(whole)) is None
