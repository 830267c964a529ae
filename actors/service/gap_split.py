"""The gap of stale tokens, split exactly into mismatch and staleness, on a sample of a batch.

A token of version v was sampled by the engine at weights v. What the learner says of it at weights v differs from that by the mismatch
alone; what it says at the weights where the update starts, by staleness as well. So the ranks keep copies of the versions that such a batch
may hold (actors/driver/batches.py).
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.diagnostics.variance_split import split_numbers
from evenkeel.learner.results import SplitLogprobs

TRAJECTORIES = 16
"""Most trajectories of a batch that are scored, at each version that their tokens have and at the present one."""


def stale_sample(batch: PackedBatch, version: int, *, replays_engine: bool = False) -> PackedBatch:
    """Some of the sequences with tokens of earlier versions than `version`, always the same ones of a batch; possibly none.

    Args: replays_engine: the batch's routed experts are the engine's; those of the present weights are not to be replayed at others.
    """
    stale = batch.loss_mask & (batch.weight_versions >= 0) & (batch.weight_versions < version)
    sequences = torch.unique(torch.searchsorted(batch.offsets, stale.nonzero().flatten(), right=True) - 1).tolist()
    chosen = sorted(random.Random(version).sample(sequences, min(TRAJECTORIES, len(sequences))))
    sample = batch if replays_engine else replace(batch, routed_experts=None, wide=None)
    return replace(sample, proximal_logprobs=None, reference_logprobs=None, topk_ids=None, topk_logprobs=None).select(chosen)


def to_numbers(sample: PackedBatch, found: SplitLogprobs, version: int) -> dict[str, float]:
    """The numbers of quantities.SPLIT. Args: found: the learner's logprobs of the sample's tokens."""
    known = sample.loss_mask & (sample.weight_versions < version) & found.at_sampling.isfinite() & found.now.isfinite()
    return split_numbers(sample.behavior_logprobs[known], found.at_sampling[known], found.now[known])
