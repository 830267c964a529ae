"""The gap of stale tokens, split exactly into mismatch and staleness: on a sample of a batch, or on all of one whose correction reads both.

A token of version v was sampled by the engine at weights v. What the learner says of it at weights v differs from that by the mismatch
alone; what it says at the weights where the update starts, by staleness as well. So the ranks keep copies of the versions that such a batch
may hold (actors/driver/batches.py).
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.diagnostics.variance_split import split_numbers
from evenkeel.correction.terms.segments import where_finite

TRAJECTORIES = 16
"""Most trajectories of a batch that are scored, at each version that their tokens have and at the present one."""


def stale_sample(batch: PackedBatch, version: int) -> PackedBatch:
    """Some of the sequences with tokens of earlier versions than `version`, always the same ones of a batch; possibly none.

    Args: batch: with the wide fields that a forward needs; routes of the present weights are not to be replayed at others.
    """
    stale = batch.loss_mask & (batch.weight_versions >= 0) & (batch.weight_versions < version)
    sequences = torch.unique(torch.searchsorted(batch.offsets, stale.nonzero().flatten(), right=True) - 1).tolist()
    chosen = sorted(random.Random(version).sample(sequences, min(TRAJECTORIES, len(sequences))))
    return replace(batch, proximal_logprobs=None, reference_logprobs=None, topk_ids=None, topk_logprobs=None).select(chosen)


def to_numbers(batch: PackedBatch, at_sampling: Tensor, now: Tensor, version: int, chosen: Tensor | None = None) -> dict[str, float]:
    """The numbers of quantities.SPLIT, of stale tokens.

    Args: at_sampling, now: [N] the learner's logprobs of the batch's tokens; chosen: [N] bool: those for which `now` holds; None: all.
    """
    known = batch.loss_mask & (batch.weight_versions < version) if chosen is None else chosen & (batch.weight_versions < version)
    known = where_finite(known, batch.behavior_logprobs, at_sampling, now)
    return split_numbers(batch.behavior_logprobs[known], at_sampling[known], now[known])
