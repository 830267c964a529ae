"""True on-policy with the real SGLang and the real Megatron: sampled and trained logprobs are the same bits.

1. Prompts of 1 to 500 tokens, requests that come and go, several temperatures, prefix-cache hits: 0 differing tokens, in any packing,
   with shared prompts or without, with one and two threads of the learner. So are those over kept sets.
2. A retracting update in flight: the tokens of both versions equal their own weights' logprobs.
   So are those of turns, with an update at a turn's border.
3. SGLang's scores of given tokens are those bits, too.
4. Training steps: the logprobs that each step trains with are those that were sampled with.
5. Seeded answers repeat, whatever runs at the same time.
6. Answers that an engine hands back end elsewhere with the tokens and logprobs that they would have had.
7. With the mode off the same comparison finds differences.
8. A learner on several tensor-parallel ranks, if the engine projects in as many parts.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import defer
from evenkeel.engines.agreement import compare
from evenkeel.engines.weights import WeightBucket
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model.inputs import find_shared_prefixes
from evenkeel.rollout.config import WHOLE_VOCABULARY, TrainOverlong, Truncation
from evenkeel.rollout.continuation import is_begun, with_more_to_read
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.packing import pack_groups
from evenkeel.rollout.trajectory import FinishReason, Group, Prompt, Trajectory, VersionSpan
from lab.weight_buckets import weight_buckets
from tests.conftest import BackgroundLoop
from tests.e2e.on_policy_cases import Sampled, as_batch, random_packing, random_prompts, sample_in_random_batches, save_model
from tests.learner.learner_cases import learner_on, run_ranks

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Case:
    family: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    """Of the engine."""


SLOW_CASES = (Case("qwen2"), Case("llama", threads=2), Case("qwen3", "bfloat16"), Case("qwen2", "bfloat16"))
CASES = [
    Case("qwen3"),
    *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES),
]
TEMPERATURES = {1.0: (0, 3), 0.6: (5, 6), 1.7: (8, 11)}
"""And the seeds of two packings: one shares prompts and one doesn't, one has one thread and one has two, each cuts otherwise."""
ROOM: dict[str, Any] = {"max_total_tokens": 65_536, "max_running_requests": 48}


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("on_policy") / "model", case.family)


@pytest.fixture(scope="module")
def exact_engine(case: Case, folder: Path, engine_loop: BackgroundLoop) -> Iterator[RolloutEngine]:
    config = EngineConfig(device="cpu", dtype=case.dtype, threads=case.threads, batch_invariant=True, **ROOM)
    engine = engine_loop.run(RolloutEngine.start(folder, config, name="batch-invariant engine"))
    yield engine
    engine_loop.run(engine.shutdown())


@pytest.fixture(scope="module")
def exact_learner(case: Case, folder: Path) -> Iterator[LearnerRank]:
    learner = LearnerRank(LearnerConfig(device="cpu", dtype=case.dtype, learning_rate=1e-3, batch_invariant=True))
    learner.load(folder)
    yield learner
    learner.close()


def scored(prompt: tuple[int, ...], response: tuple[int, ...], logprobs: list[float], version: int) -> Trajectory:
    spans = (VersionSpan(version, 0, len(response)),)
    return Trajectory("", prompt, response, tuple(logprobs), spans, finish_reason=FinishReason.LENGTH)


def differing(
    engine: RolloutEngine,
    learner: LearnerRank,
    loop: BackgroundLoop,
    temperature: float,
    packings: Sequence[int],
    truncation: Truncation = WHOLE_VOCABULARY,
) -> tuple[int, int]:
    """(tokens that differ in one of the packings, tokens compared in each)."""
    asked, seed = random_prompts(24, seed=int(temperature * 10)), int(temperature * 10)
    sampled = loop.run(sample_in_random_batches(engine, asked, temperature=temperature, seed=seed, truncation=truncation))
    batch = as_batch(sampled, temperature=temperature, version=engine.version)
    assert len(find_shared_prefixes(batch, share_prompts=True)) < batch.num_sequences, "some packings share prompts"
    found = 0
    for seed in packings:
        agreement = compare(batch, random_packing(learner, batch, seed=seed, threads=1 + seed % 2))
        assert agreement.tokens == int(batch.loss_mask.sum())
        found = max(found, agreement.differing)
    return found, int(batch.loss_mask.sum())


def test_random_prompts_batches_and_packings(exact_engine: RolloutEngine, exact_learner: LearnerRank, engine_loop: BackgroundLoop) -> None:
    for temperature, packings in TEMPERATURES.items():
        found, tokens = differing(exact_engine, exact_learner, engine_loop, temperature, packings)
        assert tokens > 700
        assert found == 0, f"{found} of {tokens} tokens differ at temperature {temperature}"


def test_tokens_drawn_from_a_part_of_the_vocabulary(
    exact_engine: RolloutEngine, exact_learner: LearnerRank, engine_loop: BackgroundLoop
) -> None:
    """Every other request, in batches with others: both sides take one softmax over the same kept set."""
    for truncation, packings in ((Truncation(top_p=0.8, top_k=20), (1, 2)), (Truncation(min_p=0.02), (4, 7))):
        found, tokens = differing(exact_engine, exact_learner, engine_loop, 0.9, packings, truncation)
        assert tokens > 700 and found == 0, f"{found} of {tokens} tokens differ under {truncation}"


def test_turns_that_go_on_from_the_prefix_cache(
    exact_engine: RolloutEngine, exact_learner: LearnerRank, engine_loop: BackgroundLoop
) -> None:
    """The keys of a first answer were computed by decode; the second turn finds them in the cache, and prefills the rest."""

    async def two_turns() -> list[Sampled]:
        second = []
        for prompt in random_prompts(8, seed=5, longest=200):
            first = (await exact_engine.generate(prompt, max_tokens=70, ignore_stop=True))[0]
            longer = (*prompt, *first.response_ids, 7, 8, 9)
            second.append(Sampled(longer, (await exact_engine.generate(longer, max_tokens=20, ignore_stop=True))[0]))
        return second

    sampled = engine_loop.run(two_turns())
    assert all(one.completion.cached_tokens >= len(one.prompt) - 4 for one in sampled)
    batch = as_batch(sampled, temperature=1.0, version=exact_engine.version)
    assert compare(batch, random_packing(exact_learner, batch, seed=0, threads=1)).first is None


def test_scores_of_a_prefill_are_the_same_bits(
    exact_engine: RolloutEngine, exact_learner: LearnerRank, engine_loop: BackgroundLoop
) -> None:
    """SGLang's scoring of given tokens, which the probe of each weight sync uses."""
    for ids in random_prompts(6, seed=9)[1:]:
        scores = engine_loop.run(exact_engine.score(ids))
        sequence = Sampled(ids[:1], scored(ids[:1], ids[1:], scores, exact_engine.version))
        batch = as_batch([sequence], temperature=1.0, version=exact_engine.version)
        agreement = compare(batch, exact_learner.logprobs(batch))
        assert (agreement.tokens, agreement.first) == (len(ids) - 1, None)


def test_an_update_in_flight_under_retract(
    exact_engine: RolloutEngine, exact_learner: LearnerRank, engine_loop: BackgroundLoop, folder: Path, tmp_path: Path
) -> None:
    """Sampled tokens are prefilled again under the new weights: keys of a prefill and of decode have to be the same bits, too."""
    dtype, version = exact_learner.config.torch_dtype, exact_engine.version
    old = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    new = {name: tensor + 0.02 * tensor.std() for name, tensor in old.items()}
    asked = random_prompts(12, seed=3, longest=150)

    async def across() -> list[Sampled]:
        running = [asyncio.ensure_future(exact_engine.generate(p, max_tokens=250, ignore_stop=True)) for p in asked]
        await exact_engine.generate([5], max_tokens=80, ignore_stop=True)
        await exact_engine.update_weights(version + 1, [WeightBucket.of(new)], mode="retract")
        return [Sampled(p, (await request)[0]) for p, request in zip(asked, running, strict=True)]

    batch = as_batch(engine_loop.run(across()), temperature=1.0, version=version + 1)
    engine_loop.run(exact_engine.update_weights(version + 2, [WeightBucket.of(old)]))
    changed = shutil.copytree(folder, tmp_path / "changed")
    save_file(new, changed / "model.safetensors", metadata={"format": "pt"})
    for held, weights in ((version + 1, changed), (version, folder)):
        exact_learner.load(weights)
        logprobs = random_packing(exact_learner, batch, seed=held, threads=1)
        agreement = compare(replace(batch, learner_version=held), logprobs)
        assert agreement.tokens > 200
        assert agreement.first is None, f"{agreement.differing} of {agreement.tokens}: {agreement.first}"


def test_turns_of_a_session_with_an_update_at_their_border(
    exact_engine: RolloutEngine, exact_learner: LearnerRank, engine_loop: BackgroundLoop, folder: Path, tmp_path: Path
) -> None:
    """Three turns: the second goes on from the cache, the third after new weights, which read all before it anew. Tokens of both versions
    have the bits of one forward over the whole."""
    dtype, version = exact_learner.config.torch_dtype, exact_engine.version
    old = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    new = {name: tensor + 0.02 * tensor.std() for name, tensor in old.items()}

    async def turn(prompt: tuple[int, ...], begun: Sequence[Trajectory], length: int) -> Trajectory:
        limit = length + sum(len(one.answer_ids) for one in begun)
        return (await exact_engine.generate(prompt, max_tokens=limit, ignore_stop=True, begun=begun))[0]

    async def turns() -> list[Trajectory]:
        asked = random_prompts(8, seed=6, longest=150)
        found = await asyncio.gather(*(turn(prompt, (), 5 * i + 5) for i, prompt in enumerate(asked)))
        for reading in ([7, 8, 9], list(range(20, 60))):
            if reading[0] == 20:
                await exact_engine.update_weights(version + 1, [WeightBucket.of(new)])
            begun = [with_more_to_read(one, reading) for one in found]
            found = await asyncio.gather(*(turn(p, [one], 40 - 3 * i) for i, (p, one) in enumerate(zip(asked, begun, strict=True))))
        return [replace(one, reward=1.0) for one in found]

    sessions = tuple(engine_loop.run(turns()))
    engine_loop.run(exact_engine.update_weights(version + 2, [WeightBucket.of(old)]))
    group = Group(0, Prompt("p", "", (5,), ""), sessions, admitted_version=0)
    how: dict[str, Any] = {"advantage": lambda rewards, _: rewards, "overlong": TrainOverlong(), "max_tokens": {"": 1000}}
    batch = pack_groups([group], learner_version=version + 1, **how).batch
    changed = shutil.copytree(folder, tmp_path / "changed")
    save_file(new, changed / "model.safetensors", metadata={"format": "pt"})
    for held, weights in ((version + 1, changed), (version, folder)):
        exact_learner.load(weights)
        agreement = compare(replace(batch, learner_version=held), random_packing(exact_learner, batch, seed=held, threads=1))
        assert agreement.tokens > 200
        assert agreement.first is None, f"{agreement.differing} of {agreement.tokens}: {agreement.first}"


def test_seeded_answers_depend_on_weights_prompt_and_seed_alone(
    exact_engine: RolloutEngine, engine_loop: BackgroundLoop, folder: Path, case: Case
) -> None:
    """One request at a time, all together at random times, and across a retraction: the same tokens and logprobs, to the last bit."""
    asked, dtype = random_prompts(8, seed=11, longest=150), getattr(torch, case.dtype)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}

    async def answer(prompt: tuple[int, ...], seed: int, delay_s: float = 0.0) -> list[Trajectory]:
        await asyncio.sleep(delay_s)
        seeds = [seed, seed + 1, seed + 2]
        return await exact_engine.generate(prompt, max_tokens=120, temperature=1.3, samples=3, seeds=seeds, ignore_stop=True)

    async def alone() -> list[list[Trajectory]]:
        return [await answer(prompt, seed=100 * i) for i, prompt in enumerate(asked)]

    async def together(order: random.Random) -> list[list[Trajectory]]:
        return await asyncio.gather(*(answer(prompt, 100 * i, delay_s=order.random()) for i, prompt in enumerate(asked)))

    async def across_a_retraction() -> list[list[Trajectory]]:
        running = [asyncio.ensure_future(answer(prompt, seed=100 * i)) for i, prompt in enumerate(asked)]
        await exact_engine.generate([5], max_tokens=20, ignore_stop=True)
        await exact_engine.update_weights(exact_engine.version + 1, [WeightBucket.of(weights)], mode="retract")
        return [await request for request in running]

    def contents(groups: list[list[Trajectory]]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        return [(tuple(one.response_ids), tuple(one.behavior_logprobs)) for group in groups for one in group]

    expected = contents(engine_loop.run(alone()))
    retracted = engine_loop.run(across_a_retraction())
    assert sum(one.retractions > 0 for group in retracted for one in group) > 12
    assert len({tokens for tokens, _ in expected}) == 24, "other seeds, other answers"
    assert contents(retracted) == expected
    assert contents(engine_loop.run(together(random.Random(0)))) == expected


@pytest.mark.parametrize("elsewhere", ["the same engine, emptied", pytest.param("a second engine", marks=pytest.mark.slow)])
def test_answers_handed_back_end_elsewhere_as_if_nothing_had_happened(
    exact_engine: RolloutEngine, engine_loop: BackgroundLoop, folder: Path, case: Case, elsewhere: str
) -> None:
    """One engine leaves in the midst of answers, others of them are at their beginning. Whoever goes on with them reads their tokens anew:
    ids, logprobs, likeliest tokens and kept sets are the bits of the answers that nobody interrupted.

    The second engine has another number of threads than the first. Where the same engine stands for it, its whole KV cache is flushed
    before, so that it has nothing of the answers but their tokens.
    """
    asked, dtype = random_prompts(8, seed=13, longest=150), getattr(torch, case.dtype)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}

    async def answers(engine: RolloutEngine, of: Sequence[int], begun: Sequence[list[Trajectory]] = ()) -> list[list[Trajectory]]:
        ask: dict[str, Any] = {"max_tokens": 120, "temperature": 1.3, "samples": 3, "topk": 2, "ignore_stop": True}
        seeds = [[100 * i, 100 * i + 1, 100 * i + 2] for i in of]
        cuts = [Truncation(top_p=0.9, min_p=1e-3) if i % 2 else WHOLE_VOCABULARY for i in of]
        plans = zip(of, seeds, cuts, begun or [[] for _ in of], strict=True)
        return await asyncio.gather(
            *(engine.generate(asked[i], seeds=own, truncation=cut, begun=first, **ask) for i, own, cut, first in plans)
        )

    async def interrupted() -> list[list[Trajectory]]:
        early = asyncio.ensure_future(answers(exact_engine, range(5)))
        await exact_engine.generate([5], max_tokens=40, ignore_stop=True)
        late = asyncio.ensure_future(answers(exact_engine, range(5, 8)))
        await exact_engine.generate([5], max_tokens=10, ignore_stop=True)
        try:
            await exact_engine.hand_back()
            return await early + await late
        finally:
            exact_engine.is_leaving = False

    async def run() -> tuple[list[list[Trajectory]], ...]:
        await exact_engine.update_weights(exact_engine.version + 1, [WeightBucket.of(weights)])
        whole, begun = await answers(exact_engine, range(8)), await interrupted()
        if elsewhere == "the same engine, emptied":
            assert (await exact_engine._manager.flush_cache()).success
            return whole, begun, await answers(exact_engine, range(8), begun)
        settings = EngineConfig(device="cpu", dtype=case.dtype, threads=3 - case.threads, batch_invariant=True, **ROOM)
        second = await RolloutEngine.start(folder, settings, name="a second batch-invariant engine")
        try:
            return whole, begun, await answers(second, range(8), begun)
        finally:
            await second.shutdown()

    def contents(groups: list[list[Trajectory]]) -> list[tuple[Any, ...]]:
        return [(one.response_ids, one.behavior_logprobs, one.top_logprobs, one.kept_tokens) for group in groups for one in group]

    whole, begun, ended = engine_loop.run(run())
    assert all(len(one.response_ids) == 120 and not is_begun(one) for group in whole + ended for one in group)
    lengths = [len(one.response_ids) for group in begun for one in group if is_begun(one)]
    assert len(lengths) == 24 and sum(20 <= length < 119 for length in lengths) >= 15 and min(lengths) < 20, lengths
    assert contents(ended) == contents(whole)


def train(engine: RolloutEngine, learner: LearnerRank, loop: BackgroundLoop, steps: int) -> list[int]:
    """Differing tokens of each step: sampled by the engine, trained by the learner, whose weights then go to the engine. In every other
    step half of the answers come from kept sets."""
    found, config = [], CorrectionConfig()
    for step in range(steps):
        asked = random_prompts(8, seed=step, longest=40)
        cut = Truncation(top_p=0.9) if step % 2 else WHOLE_VOCABULARY
        sampled = loop.run(sample_in_random_batches(engine, asked, temperature=1.0, seed=step, longest=30, truncation=cut))
        batch = as_batch(sampled, temperature=1.0, version=engine.version)
        result = learner.step(defer(batch, config), config, step=step)
        assert result.grad_norm > 0, "agreement at later versions would be a matter of course"
        agreement = compare(batch, result.target_logprobs)
        assert agreement.tokens == result.trained_tokens
        found.append(agreement.differing)
        loop.run(engine.update_weights(engine.version + 1, list(weight_buckets(learner))))
    return found


def test_five_training_steps(exact_engine: RolloutEngine, exact_learner: LearnerRank, engine_loop: BackgroundLoop) -> None:
    assert train(exact_engine, exact_learner, engine_loop, 5) == [0] * 5


def test_without_the_mode_there_are_differences(shared_engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path) -> None:
    learner = LearnerRank(LearnerConfig(device="cpu"))  # not closed: the process group is the other learner's, too
    learner.load(tiny_model)
    found, tokens = differing(shared_engine, learner, engine_loop, 1.0, packings=(0, 3))
    assert found > tokens // 100


def _logprobs_of_a_rank(rank: int, ranks: int, port: int, folder: Path, batch: PackedBatch, dtype: Any) -> Tensor:
    config = LearnerConfig(device="cpu", dtype=dtype, tensor_parallel=ranks, batch_invariant=True, tokens_per_microbatch=700)
    learner = LearnerRank(config, rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    found = learner.logprobs(batch)
    learner.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype", "ranks"), [("qwen3", "float32", 2), ("llama", "float32", 4), ("qwen3", "bfloat16", 2)])
def test_a_learner_on_tensor_parallel_ranks(
    tmp_path: Path, engine_loop: BackgroundLoop, family: str, dtype: Literal["float32", "bfloat16"], ranks: int
) -> None:
    """The engine is not split; it adds the products that the learner's ranks add. One rank of a learner adds them otherwise."""
    folder = save_model(tmp_path / "model", family, num_key_value_heads=ranks)
    settings = EngineConfig(device="cpu", dtype=dtype, batch_invariant=True, projection_parts=ranks, **ROOM)
    engine = engine_loop.run(RolloutEngine.start(folder, settings))
    sampled = engine_loop.run(sample_in_random_batches(engine, random_prompts(24, seed=4), temperature=0.7, seed=4))
    engine_loop.run(engine.shutdown())
    batch = as_batch(sampled, temperature=0.7)
    for found in run_ranks(_logprobs_of_a_rank, folder, batch, dtype, ranks=ranks):
        agreement = compare(batch, found)
        assert agreement.tokens > 700
        assert agreement.first is None, f"{agreement.differing} of {agreement.tokens}: {agreement.first}"
    with learner_on(folder, batch_invariant=True, dtype=dtype) as alone:
        # Fewer in bfloat16, where the sum is rounded and most other orders give the same: 63 of 1,064 tokens.
        assert compare(batch, alone.logprobs(batch)).differing > 20
