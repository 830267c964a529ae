"""How many weight updates lie between sampling a token and training on it, and where they happened."""

from __future__ import annotations

import torch
from torch import Tensor

from correction.batch import PackedBatch
from correction.segments import Segments


def token_staleness(batch: PackedBatch) -> Tensor:
    """[N] int64, versions, >= 0; 0 for tokens that no weights sampled."""
    age = batch.learner_version - batch.weight_versions.long()
    return torch.where(batch.weight_versions >= 0, age.clamp(min=0), 0)


def split_staleness(batch: PackedBatch, sequences: Segments) -> tuple[Tensor, Tensor]:
    """Token staleness as (in-flight [N], in-queue [N]), which add up to it.

    In-flight: updates between this token and the last token of its sequence, while the sequence was being sampled.
    In-queue: updates from then to the training step, while the finished sequence waited.
    """
    staleness = token_staleness(batch)
    sampled = batch.loss_mask & (batch.weight_versions >= 0)
    newest = -sequences.maximum(torch.where(sampled, -staleness.double(), -torch.inf))  # least staleness in the sequence
    in_queue = torch.minimum(sequences.spread(newest), staleness.double()).long()
    return staleness - in_queue, in_queue


def is_mixed(batch: PackedBatch, sequences: Segments) -> Tensor:
    """[S] bool: sequences with trained tokens of more than one version."""
    sampled = batch.loss_mask & (batch.weight_versions >= 0)
    versions = batch.weight_versions.double()
    newest = sequences.maximum(torch.where(sampled, versions, -torch.inf))
    oldest = -sequences.maximum(torch.where(sampled, -versions, -torch.inf))
    return newest > oldest
