"""The real SGLang engine on a CPU, against a transformers forward in float32. One engine serves the whole session.

Behaviours locked here: logprobs are log_softmax(logits / T) over the whole vocabulary; the sampler samples from what it reports; requests
in flight together don't mix; what SGLang would accept wrongly or die of is refused before it is sent.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch

from evenkeel.correction.errors import ConfigError, DataError
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.trajectory import FinishReason, Trajectory, VersionSpan
from tests.conftest import BackgroundLoop
from tests.rollout.engine_scene import TOLERANCE, prompts
from tests.rollout.hf_reference import hf_model, k3, largest_difference, response_logprobs
from tests.tiny_models import SPECIAL_TOKENS

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_behavior_logprobs_equal_a_float32_forward(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, temperature: float
) -> None:
    asked = prompts(16, 12, seed=1)

    async def sample() -> list[list[Trajectory]]:
        return await asyncio.gather(*(engine.generate(p, max_tokens=48, temperature=temperature, ignore_stop=True) for p in asked))

    sampled = [completions[0] for completions in engine_loop.run(sample())]
    model = hf_model(tiny_model)
    reference = [response_logprobs(model, p, c.response_ids, temperature) for p, c in zip(asked, sampled, strict=True)]
    behavior = [value for completion in sampled for value in completion.behavior_logprobs]
    proximal = [value for values in reference for value in values]
    assert len(behavior) == 16 * 48
    assert largest_difference(behavior, proximal) < TOLERANCE
    assert k3(behavior, proximal) < 1e-11


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_top_k_logprobs_equal_a_float32_forward(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, temperature: float
) -> None:
    """Sixteen requests together, half of them without: K different ids whose logprobs are the K largest of log_softmax(logits / T).

    Ids are held to their logprobs, not to those of the float32 forward: two tokens may be as likely as each other to the last digit.
    """
    asked, k = prompts(16, 12, seed=11), 5

    async def sample() -> list[list[Trajectory]]:
        requests = (
            engine.generate(p, max_tokens=30, temperature=temperature, topk=k * (i % 2), ignore_stop=True) for i, p in enumerate(asked)
        )
        return await asyncio.gather(*requests)

    sampled = [completions[0] for completions in engine_loop.run(sample())]
    model = hf_model(tiny_model)
    for prompt, completion in list(zip(asked, sampled, strict=True))[1::2]:
        top = completion.top_logprobs
        assert top is not None and len(top.ids) == 30 * top.k
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.response_ids]])).logits[0, len(prompt) - 1 : -1].double()
        logprobs = torch.log_softmax(logits / temperature, -1)
        ids = torch.tensor(top.ids.tolist()).view(30, k)
        assert all(len(set(row)) == k for row in ids.tolist())
        for expected in (logprobs.topk(k, -1).values, logprobs.gather(-1, ids)):
            assert largest_difference(top.logprobs.tolist(), expected.flatten().tolist()) < TOLERANCE
    assert all(completion.top_logprobs is None for completion in sampled[::2])


def test_more_top_k_logprobs_than_the_vocabulary_has_are_refused(engine: RolloutEngine) -> None:
    engine.check_topk(engine.vocab_size)
    with pytest.raises(ConfigError, match=r"correction.topk = 513: the model's vocabulary has 512"):
        engine.check_topk(engine.vocab_size + 1)


def test_sampler_samples_from_the_distribution_that_it_reports(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    """The mean of -log p over samples from p is p's entropy; over 1,500 samples within four standard errors, from p's own variance.

    With seeds, as a run gives them: the same samples each time.
    """
    prompt = prompts(1, 6, seed=2)[0]
    count = 1500
    asked = engine.generate(prompt, max_tokens=1, samples=count, temperature=0.7, ignore_stop=True, seeds=range(count))
    completions = engine_loop.run(asked)
    with torch.no_grad():
        logprobs = torch.log_softmax(hf_model(tiny_model)(torch.tensor([prompt])).logits[0, -1].double() / 0.7, -1)
    said, forward = [c.behavior_logprobs[0] for c in completions], [float(logprobs[c.response_ids[0]]) for c in completions]
    assert largest_difference(said, forward) < TOLERANCE
    entropy = float(-(logprobs.exp() * logprobs).sum())
    variance = float((logprobs.exp() * logprobs.square()).sum()) - entropy**2
    mean = -sum(c.behavior_logprobs[0] for c in completions) / count
    assert abs(mean - entropy) < 4 * math.sqrt(variance / count)


def test_64_requests_together_do_not_mix_and_end_for_their_reason(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    asked = prompts(64, 10, seed=3)

    async def sample() -> list[list[Trajectory]]:
        return await asyncio.gather(*(engine.generate(p, max_tokens=150) for p in asked))

    sampled = [completions[0] for completions in engine_loop.run(sample())]
    end_token = SPECIAL_TOKENS.index("<|im_end|>")
    for completion in sampled:
        stopped = completion.response_ids[-1] == end_token
        assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(completion.response_ids) == 150
        assert end_token not in completion.response_ids[:-1]
        assert completion.version_spans == (VersionSpan(engine.version, 0, len(completion.response_ids)),)
    assert {c.finish_reason for c in sampled} == {FinishReason.STOP, FinishReason.LENGTH}
    model = hf_model(tiny_model)
    for prompt, completion in list(zip(asked, sampled, strict=True))[::8]:
        assert largest_difference(completion.behavior_logprobs, response_logprobs(model, prompt, completion.response_ids)) < TOLERANCE


def test_samples_of_a_prompt_share_its_prefill(engine: RolloutEngine, engine_loop: BackgroundLoop) -> None:
    """All but the last prompt token come from the cache; the last one's logits are needed to sample the first token."""
    completions = engine_loop.run(engine.generate(prompts(1, 200, seed=4)[0], max_tokens=2, samples=8, ignore_stop=True))
    assert [c.cached_tokens for c in completions] == [199] * 8
    assert len({tuple(c.response_ids) for c in completions}) > 1


def test_score_equals_a_forward_and_the_sampled_logprobs(engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path) -> None:
    prompt = prompts(1, 9, seed=5)[0]
    sampled = engine_loop.run(engine.generate(prompt, max_tokens=30, ignore_stop=True))[0]
    ids = [*prompt, *sampled.response_ids]
    scores = engine_loop.run(engine.score(ids))
    assert len(scores) == len(ids) - 1
    assert largest_difference(scores, response_logprobs(hf_model(tiny_model), ids[:1], ids[1:])) < TOLERANCE
    assert largest_difference(scores[len(prompt) - 1 :], sampled.behavior_logprobs) < TOLERANCE


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "message"),
    [
        ([5, 512], 4, "token id 512"),
        ([5, -1], 4, "token id -1"),
        ([], 4, "empty prompt"),
        ([5] * 1000, 23, "together up to 1022"),
        ([5] * 1018, 1, "up to 1017"),
        ([5], 0, "max_tokens = 0"),
    ],
)
def test_prompts_that_would_kill_or_confuse_the_engine_are_refused(
    engine: RolloutEngine, engine_loop: BackgroundLoop, token_ids: list[int], max_tokens: int, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        engine_loop.run(engine.generate(token_ids, max_tokens=max_tokens))
    assert len(engine_loop.run(engine.generate([5, 511], max_tokens=3, ignore_stop=True))[0].response_ids) == 3


def test_longest_request_that_fits(engine: RolloutEngine, engine_loop: BackgroundLoop) -> None:
    """SGLang keeps two of the model's 1,024 tokens, and would cut a longer answer without a word; the settings count as it does."""
    told = EngineConfig().with_context(1024).lengths
    assert told == engine.lengths
    for answer in (22, 5, 1):
        prompt = [5] * told.longest_prompt(answer)
        completion = engine_loop.run(engine.generate(prompt, max_tokens=answer, ignore_stop=True))[0]
        assert len(completion.response_ids) == answer
        assert len(engine_loop.run(engine.score(prompt))) == len(prompt) - 1, "the probe's prompt is one of these"
        with pytest.raises(DataError, match="the engine takes up to 1017"):
            engine_loop.run(engine.generate([*prompt, 5], max_tokens=answer))


def test_an_engine_has_no_file_of_sglang_s_in_shared_memory(engine: RolloutEngine) -> None:
    """One of its load stayed there after each engine. What a process has mapped it has made, whatever other engines leave meanwhile."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in engine.process_ids.values()]
    assert maps and not any("/dev/shm/sglang" in one for one in maps)
