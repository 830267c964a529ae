"""Three times: the Megatron learner trains, its weights go to SGLang as the sync sends them, and transformers loads what the learner saves.

After each update the logprobs that SGLang samples with are transformers' on the saved folder, to 1e-5, and every tensor's checksum in the
engine's own process is the learner's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from evenkeel.actors.record.recorder import ProbeWatch
from evenkeel.actors.settings.probe_limits import ProbeLimits
from evenkeel.engines.weights import WeightBucket, compare_checksums
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.training.step import unsampled_batch
from evenkeel.rollout.config import ExactMatchReward, SamplingConfig, TrainOverlong
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.packing import pack_groups
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.sampler import Player, Sampler
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import Group, Prompt
from lab.weight_buckets import weight_buckets
from tests.conftest import BackgroundLoop
from tests.rollout.engine_scene import prompts
from tests.rollout.hf_reference import hf_model, k3, largest_difference, response_logprobs

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


def test_turns_of_a_session_are_those_of_one_forward_of_the_learner(
    learner: LearnerRank, engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    """Eight sessions of eight turns, each read on from the engine's cache, and an update after the fourth: the learner computes logprobs
    of all tokens of a session in one forward, with the weights of either version. k3 of a version's tokens is rounding."""
    sampling = SamplingConfig(samples_per_group=8, max_tokens=400)
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(tiny_model))
    sampler = Sampler(engine, {"": Player(encoder, RewardPool(ExactMatchReward(processes=1)), sampling)})
    prompt = Prompt("train/0/0", "", tuple(prompts(1, 9, seed=2)[0]), "")
    rollouts = [sampler.session(prompt, number) for number in range(8)]
    readings = [[], *prompts(7, 6, seed=3)]

    def turns(these: list[list[int]]) -> None:
        async def run() -> None:
            for reading in these:
                await asyncio.gather(*(one.sample(reading, max_tokens=9) for one in rollouts))

        engine_loop.run(run())

    weights = []
    for part in (readings[:4], readings[4:]):
        train(learner, seed=len(weights) + 5)
        engine_loop.run(engine.update_weights(engine.version + 1, on_the_wire(learner)))
        weights.append(learner.weights_copy())
        turns(part)

    scored = tuple(replace(one.trajectory, reward=float(i)) for i, one in enumerate(rollouts))
    groups = [Group(0, prompt, scored, admitted_version=0)]
    overlong = TrainOverlong()
    batch = pack_groups(groups, learner_version=engine.version, advantage=lambda r, _: r, overlong=overlong, max_tokens={"": 400}).batch
    assert batch.turn_ids is not None and int(batch.turn_ids.max()) == 7
    for version, of_version in zip((engine.version - 1, engine.version), weights, strict=True):
        logprobs = learner.logprobs_with(of_version, batch)
        sampled = batch.loss_mask & (batch.weight_versions == version)
        others = batch.loss_mask & ~sampled
        assert k3(batch.behavior_logprobs[sampled].tolist(), logprobs[sampled].tolist()) < 1e-12
        assert k3(batch.behavior_logprobs[others].tolist(), logprobs[others].tolist()) > 1e-6, "the other version's are others"


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
