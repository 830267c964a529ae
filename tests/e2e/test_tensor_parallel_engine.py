"""An engine of two ranks, over gloo: weights go from the real Megatron learner to both, whole, and SGLang's loaders take the parts.

Behaviours locked here: the learner's logprobs of what the two ranks sample are those that the engine reports, before and after an update
that comes while requests run, by tensors and by broadcast; each rank's own parameters are the parts of what was sent; one rank that dies
takes the engine with it, and nobody hangs. All of it also where each rank has half of the experts, whole, and they are told by their
numbers in the files.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.correction.correct import correct
from evenkeel.correction.errors import EngineError, SyncError
from evenkeel.engines.weights import WeightBucket
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.weights.broadcast import WeightBroadcaster
from evenkeel.plan.shape import ModelShape
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from lab.ports import free_port
from tests.conftest import BackgroundLoop
from tests.e2e.on_policy_cases import Sampled, as_batch, random_prompts, sample_in_random_batches
from tests.e2e.test_families import copies, worst
from tests.learner.learner_cases import TIS, learner_on
from tests.rollout.test_engine_moe import differing_rows, updated_model
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOLERANCE = 1e-5
"""Largest |log ratio| of float32 forwards by two implementations."""
RANKS = 2
EXPERTS = {"tie": False, "moe_intermediate_size": 64}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied head": ("qwen3", {"vocab_size": 515}, {}),  # whose rows two ranks can't share evenly
    "fused files": ("glm4", {"tie": False}, {}),  # gate and up projection are one tensor, of which a rank has two pieces
    "groups of ranks": ("qwen3", {"tie": False}, {"attention_data_parallel": RANKS}),
    "experts and groups": ("qwen3_moe", EXPERTS, {"attention_data_parallel": RANKS}),
    "parts of experts": ("qwen3_moe", EXPERTS, {"return_routed_experts": True}),
    "whole experts": ("qwen3_moe", EXPERTS, {"return_routed_experts": True, "expert_parallel": RANKS}),
}
"""Family, its shape, settings of the engine."""


@dataclass(frozen=True)
class SplitEngineScene:
    engine: RolloutEngine
    learner: LearnerRank
    loop: BackgroundLoop
    folder: Path

    def batch_of(self, version: int, seed: int) -> Any:
        prompts = random_prompts(12, seed=seed, longest=100)
        sampled = self.loop.run(sample_in_random_batches(self.engine, prompts, temperature=0.8, seed=seed))
        return as_batch(sampled, temperature=0.8, version=version)

    def step(self, batch: Any) -> list[WeightBucket]:
        ready = replace(batch, proximal_logprobs=self.learner.logprobs(batch))
        self.learner.step(correct(ready, TIS), TIS, step=0)
        return copies(self.learner)

    def across(self, update: Any) -> list[Sampled]:
        """Answers of requests that are under way during an update."""
        prompts = random_prompts(6, seed=1, longest=100)

        async def run() -> list[Sampled]:
            running = [asyncio.ensure_future(self.engine.generate(p, max_tokens=200, ignore_stop=True)) for p in prompts]
            await self.engine.generate([5], max_tokens=20, ignore_stop=True)
            await update()
            return [Sampled(p, (await request)[0]) for p, request in zip(prompts, running, strict=True)]

        return self.loop.run(run())

    def check_across(self, sampled: list[Sampled], version: int) -> None:
        later = as_batch(sampled, temperature=1.0, version=version)
        assert set(later.weight_versions[later.loss_mask].tolist()) == {version - 1, version}
        assert worst(later, self.learner, version) < TOLERANCE
        before = (self.learner.logprobs(later) - later.behavior_logprobs)[later.loss_mask & (later.weight_versions == version - 1)]
        assert float(before.abs().max()) > 100 * TOLERANCE, "the step must matter"


@pytest.fixture(scope="module", params=CASES)
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine_loop: BackgroundLoop
) -> Iterator[SplitEngineScene]:
    family, shape, settings = CASES[request.param]
    folder = save_tiny_model(save_tiny_tokenizer(tmp_path_factory.mktemp("ranks")), family, **shape)
    config = EngineConfig(device="cpu", max_total_tokens=16_384, max_running_requests=32, tensor_parallel=RANKS, **settings)
    with learner_on(folder, learning_rate=2e-3) as learner:
        engine = engine_loop.run(RolloutEngine.start(folder, config, name="engine of two ranks", has_weights=False))
        engine_loop.run(engine.update_weights(1, copies(learner)))
        yield SplitEngineScene(engine, learner, engine_loop, folder)
        engine_loop.run(engine.shutdown())


def test_what_two_ranks_sample_is_the_learner_s(scene: SplitEngineScene) -> None:
    """Across an update that comes as tensors, in shared memory that both ranks read."""
    engine, learner, first = scene.engine, scene.learner, scene.engine.version + 1
    assert len([role for role in engine.process_ids if role.startswith("scheduler")]) == RANKS
    sent = copies(learner)
    scene.loop.run(engine.update_weights(first, sent))
    assert len(sent) > 1 and scene.loop.run(engine.weight_checksums(sent)) == learner.weight_checksums()
    batch = scene.batch_of(first, seed=1)
    assert worst(batch, learner, first) < TOLERANCE
    stepped = scene.step(batch)
    with pytest.raises(SyncError, match=r"rank 0 of 2 holds other bytes of \S+ than were sent"):
        scene.loop.run(engine.weight_checksums(stepped))
    scene.check_across(scene.across(lambda: engine.update_weights(first + 1, stepped)), first + 1)
    assert scene.loop.run(engine.weight_checksums(stepped)) == learner.weight_checksums()


def test_what_a_rank_holds_of_a_group_s_attention_is_what_plan_says(scene: SplitEngineScene) -> None:
    """Each group has all heads, each rank the whole embedding; the rest is cut over all ranks."""
    groups = scene.engine.config.attention_data_parallel
    if groups == 1:
        pytest.skip("one group")
    parts = scene.engine._parts
    assert parts is not None
    for of_rank in parts.by_rank:
        assert not [name for name in of_rank if "self_attn" in name or "embed" in name]
        shares = {name: sum(end - first for first, end in part.ranges) / part.size for name, part in of_rank.items()}
        held = sum(spec.nbytes * shares.get(name, 1) for name, spec in parts.specs.items())
        assert held == ModelShape.read(scene.folder).weight_bytes("float32", RANKS, attention_groups=groups)


def test_experts_are_told_by_their_numbers_in_the_files(scene: SplitEngineScene, tmp_path: Path) -> None:
    """Whichever rank holds them: what is replayed is what Hugging Face's routers choose with these weights."""
    if not scene.engine.config.return_routed_experts:
        pytest.skip("a dense model")
    weights = {name: tensor for bucket in copies(scene.learner) for name, tensor in bucket.tensors().items()}
    model = updated_model(scene.folder, weights, tmp_path)
    prompts = random_prompts(4, seed=7, longest=60)
    sampled = [scene.loop.run(scene.engine.generate(prompt, max_tokens=30, ignore_stop=True))[0] for prompt in prompts]
    assert [differing_rows(model, prompt, completion) for prompt, completion in zip(prompts, sampled, strict=True)] == [[]] * 4
    numbers = {number for completion in sampled for number in completion.routed_experts.ids}
    assert numbers == set(range(8)), "of both ranks"


def test_both_ranks_are_members_of_a_broadcast(scene: SplitEngineScene) -> None:
    engine, version = scene.engine, scene.engine.version + 1
    stepped = scene.step(scene.batch_of(version - 1, seed=2))
    specs = [bucket.specs for bucket in stepped]
    port = free_port()

    async def join() -> WeightBroadcaster:
        joining = asyncio.ensure_future(engine.join_weight_group("127.0.0.1", port, 1, 1 + RANKS, "weights"))
        sender = await asyncio.to_thread(WeightBroadcaster, "127.0.0.1", port, 1 + RANKS, "weights", 60.0, torch.device("cpu"))
        await joining
        return sender

    sender = scene.loop.run(join())

    async def update() -> None:
        receiving = asyncio.ensure_future(engine.receive_weights(version, specs, group="weights"))
        for bucket in stepped:
            await asyncio.to_thread(sender.send, bucket.tensors())
        receipt = await receiving
        assert receipt.bytes == sum(bucket.nbytes for bucket in stepped)
        await engine.leave_weight_group("weights")
        sender.close()

    scene.check_across(scene.across(update), version)
    assert scene.loop.run(engine.weight_checksums(stepped)) == scene.learner.weight_checksums()


def test_one_rank_that_dies_takes_the_engine_with_it(scene: SplitEngineScene) -> None:
    """The last test of an engine: calls that wait, and later ones, are told; no process is left after the shutdown."""
    engine, weights = scene.engine, copies(scene.learner)
    pids = engine.process_ids
    (second,) = [pid for role, pid in pids.items() if role.startswith("scheduler") and role != "scheduler"]

    async def run() -> None:
        waiting = asyncio.ensure_future(engine.generate([5, 6, 7], max_tokens=900, ignore_stop=True))
        await engine.generate([5], max_tokens=5, ignore_stop=True)
        os.kill(second, signal.SIGKILL)
        with pytest.raises(EngineError, match=rf"the scheduler process \(pid {second}\) ended"):
            await asyncio.wait_for(waiting, 60.0)
        with pytest.raises(EngineError, match="ended"):
            await engine.update_weights(engine.version + 1, weights)

    scene.loop.run(run())
    scene.loop.run(engine.shutdown())
    assert [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()] == []
