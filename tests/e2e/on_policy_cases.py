"""Sampling with SGLang in random batches, and scoring the same tokens with Megatron in random packings."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.rollout.config import WHOLE_VOCABULARY, Truncation
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.trajectory import KeptTokens, Trajectory
from tests.tiny_models import SPECIAL_TOKENS, save_tiny_model, save_tiny_tokenizer

VOCABULARY = 512


@dataclass(frozen=True)
class Sampled:
    """One answer of the engine."""

    prompt: tuple[int, ...]
    completion: Trajectory


def save_model(folder: Path, family: str, **changes: int) -> Path:
    """Two layers of widths that kernels like less than powers of two, and heads of 24."""
    folder.mkdir()
    shape = {"hidden_size": 96, "intermediate_size": 96, **({"head_dim": 24} if family == "qwen3" else {}), **changes}
    return save_tiny_model(save_tiny_tokenizer(folder), family, tie=family != "llama", **shape)


def random_prompts(count: int, seed: int, longest: int = 500) -> list[tuple[int, ...]]:
    """Lengths 1 to `longest`, those of both ends included; every fourth begins like the one before it."""
    draw = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    for i in range(count):
        length = [1, 2, longest][i] if i < 3 else draw.randint(1, longest)
        head = prompts[-1][: length // 2] if i % 4 == 3 else ()
        prompts.append((*head, *(draw.randrange(len(SPECIAL_TOKENS), VOCABULARY) for _ in range(length - len(head)))))
    return prompts


async def sample_in_random_batches(
    engine: RolloutEngine,
    prompts: Sequence[tuple[int, ...]],
    *,
    temperature: float,
    seed: int,
    longest: int = 60,
    truncation: Truncation = WHOLE_VOCABULARY,
) -> list[Sampled]:
    """Requests come and go at random times, so that the engine's batches are of any size and mix prefill and decode, and mix requests with
    the truncation, every other one, with those without.

    They come within about the time that the longest answer takes: what comes later finds nobody.
    """
    draw, last_s = random.Random(seed), longest / 50

    async def one(number: int, prompt: tuple[int, ...], delay_s: float, tokens: int, samples: int) -> list[Sampled]:
        await asyncio.sleep(delay_s)
        how: dict[str, Any] = {"temperature": temperature, "truncation": truncation if number % 2 else WHOLE_VOCABULARY}
        answers = await engine.generate(prompt, max_tokens=tokens, samples=samples, ignore_stop=True, **how)
        return [Sampled(prompt, answer) for answer in answers]

    plans = [(p, draw.random() * last_s * draw.randint(0, 1), draw.randint(1, longest), draw.choice((1, 1, 3))) for p in prompts]
    return [sampled for group in await asyncio.gather(*(one(i, *plan) for i, plan in enumerate(plans))) for sampled in group]


def as_batch(sampled: Sequence[Sampled], *, temperature: float, version: int = 0) -> PackedBatch:
    """Sequences in the order given; every sampled token is in the loss mask and carries the version of its span."""
    token_ids, loss_mask, logprobs, versions, counts, ids, offsets = [], [], [], [], [], [], [0]
    for one in sampled:
        answer = one.completion
        token_ids += [*one.prompt, *answer.response_ids]
        loss_mask += [False] * len(one.prompt) + [True] * len(answer.response_ids)
        logprobs += [0.0] * len(one.prompt) + list(answer.behavior_logprobs)
        versions += [-1] * len(one.prompt) + [span.version for span in answer.version_spans for _ in range(span.start, span.end)]
        sets = answer.kept_tokens or KeptTokens.of([()] * len(answer.response_ids))
        counts += [0] * len(one.prompt) + list(sets.counts)
        ids += list(sets.ids)
        offsets.append(len(token_ids))
    advantages = torch.randn(len(sampled), generator=torch.Generator().manual_seed(version)) * 0.5
    return PackedBatch(
        token_ids=torch.tensor(token_ids),
        offsets=torch.tensor(offsets),
        loss_mask=torch.tensor(loss_mask),
        behavior_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.repeat_interleave(advantages, torch.tensor(offsets).diff()),
        weight_versions=torch.tensor(versions, dtype=torch.int32),
        group_ids=_groups([one.prompt for one in sampled]),
        learner_version=version,
        temperature=temperature,
        kept_counts=torch.tensor(counts, dtype=torch.int32) if ids else None,
        kept_ids=torch.tensor(ids, dtype=torch.int32) if ids else None,
    ).validate()


def _groups(prompts: Sequence[tuple[int, ...]]) -> Tensor:
    """Neighbours with the same prompt are a group."""
    return torch.tensor([i for i, (_, same) in enumerate(groupby(prompts)) for _ in same])


def random_packing(learner: LearnerRank, batch: PackedBatch, *, seed: int, threads: int) -> Tensor:
    """[N] the learner's logprobs of the batch, its sequences shuffled and cut into micro-batches of some random size, with shared
    prompts or without."""
    draw = random.Random(seed)
    order = list(range(batch.num_sequences))
    draw.shuffle(order)
    found = torch.empty(batch.num_tokens)
    before, settings = torch.get_num_threads(), learner.config
    torch.set_num_threads(threads)
    learner.config = settings.model_copy(
        update={
            "tokens_per_microbatch": draw.choice((1, 300, 2000, 10**6)),
            "logprob_chunk_tokens": draw.choice((13, 100, 1024)),
            "shared_prompts": seed % 4 < 2,
        }
    )
    try:
        cut = draw.randint(1, len(order))
        for part in (order[:cut], order[cut:]):
            if part:
                found[batch.token_index(part)] = learner.logprobs(batch.select(part))
    finally:
        torch.set_num_threads(before)
        learner.config = settings
    return found
