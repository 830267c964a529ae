"""Batches for the tests: the worked example of three sequences, and random ragged ones."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch

from evenkeel.correction import PackedBatch

# The worked example: probabilities of the sampled tokens under mu, the proximal and the target policy.
ADVANTAGE = (1.0, -1.0, 0.5)
MU = ((0.50, 0.40, 0.10, 0.80), (0.90, 0.20, 0.05), (0.60, 0.70))
PROX = ((0.50, 0.50, 0.02, 0.88), (0.72, 0.24, 0.30), (0.612, 0.693))
THETA = ((0.55, 0.58, 0.03, 0.80), (0.54, 0.18, 0.18), (0.612, 0.693))


def flat_log(rows):
    """Natural logs of the rows, end to end, float64."""
    return torch.tensor([math.log(p) for row in rows for p in row], dtype=torch.float64)


def worked_example(**changes) -> PackedBatch:
    """The worked example as a batch without prompts."""
    lengths = [len(row) for row in MU]
    values = {
        "token_ids": torch.arange(9),
        "offsets": torch.tensor([0, 4, 7, 9]),
        "loss_mask": torch.ones(9, dtype=torch.bool),
        "behavior_logprobs": flat_log(MU),
        "proximal_logprobs": flat_log(PROX),
        "advantages": torch.tensor([a for a, n in zip(ADVANTAGE, lengths, strict=True) for _ in range(n)], dtype=torch.float64),
        "weight_versions": torch.zeros(9, dtype=torch.int32),
        "group_ids": torch.arange(3),
        "advantages_by": "own",
    }
    return PackedBatch(**{**values, **changes}).validate()


def random_batch(seed: int, *, sequences: int = 12, longest: int = 9, spread: float = 0.3, staleness: int = 2, topk: int = 0):
    """(batch float64 with all logprobs, those at sampling of stale tokens alone; target logprobs): ragged, prompts masked, several groups
    and turns."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = [rng.randint(2, longest) for _ in range(sequences)]
    count = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0)

    def noise() -> torch.Tensor:
        return spread * torch.randn(count, generator=generator, dtype=torch.float64)

    mu = -0.05 - 3 * torch.rand(count, generator=generator, dtype=torch.float64)
    mask = torch.rand(count, generator=generator) < 0.8
    mask[offsets[:-1]] = False
    mask[offsets[1:] - 1] = True
    group_ids = torch.arange(sequences) // 3
    advantage = torch.randn(sequences, generator=generator, dtype=torch.float64)
    proximal = (mu + noise()).clamp(max=-1e-3)
    target = (proximal + noise()).clamp(max=-1e-3)
    batch = PackedBatch(
        token_ids=torch.randint(100, (count,), generator=generator),
        offsets=offsets,
        loss_mask=mask,
        behavior_logprobs=mu,
        advantages=torch.repeat_interleave(advantage, torch.tensor(lengths)),
        weight_versions=torch.randint(5 - staleness, 6, (count,), generator=generator, dtype=torch.int32),
        group_ids=group_ids,
        learner_version=5,
        proximal_logprobs=proximal,
        reference_logprobs=(mu + noise()).clamp(max=-1e-3),
        turn_ids=torch.cat([torch.arange(n, dtype=torch.int32) // 4 for n in lengths]),
        advantages_by="own",
        topk_ids=torch.randint(100, (count, topk), generator=generator) if topk else None,
        topk_logprobs=(torch.rand(count, topk, generator=generator, dtype=torch.float64) / (2 * topk)).log() if topk else None,
    )
    then = torch.where(batch.weight_versions < 5, (mu + noise()).clamp(max=-1e-3), math.nan)
    return replace(batch, at_sampling_logprobs=then).validate(), target
