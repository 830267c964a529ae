"""Advantages of a group of answers to one prompt, by explicit group id: groups may differ in size and lie in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DataError
from ..settings.choices import AdvantageEstimator


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    estimator: AdvantageEstimator | str = AdvantageEstimator.GRPO,
    ddof: int = 1,
    epsilon: float = 1e-6,
    temperature: float = 1.0,
) -> Tensor:
    """Group-relative advantage of each sequence.

    A group of one has no baseline: its advantage is 0 (verl gives it its raw reward). So has a group whose
    rewards are all alike.
    Args:
        rewards: [S] float, any unit.
        group_ids: [S] int; equal ids are one group.
        ddof: 1 sample, 0 population standard deviation; 1 is what all the code that was read does.
        epsilon: added to the standard deviation.
        temperature: of soft_value, in units of the reward.
    Returns: [S] float32 (float64 for float64 rewards).
    Raises: DataError if the shapes differ or a reward is not finite.
    Source: GRPO: arXiv 2402.03300; without std: arXiv 2503.20783; RLOO: Ahmadian et al. (2024);
        soft value: OAPL (arXiv 2602.19362) and its authors' code, whose beta1 is the temperature.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise DataError(f"group_advantages: rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [S]")
    if not bool(rewards.isfinite().all()):
        raise DataError("group_advantages: a reward is not finite; leave failed trajectories out of the group before this")
    estimator = AdvantageEstimator(estimator)
    _, group = torch.unique(group_ids, return_inverse=True)
    values = rewards.double()
    size = _group_sums(torch.ones_like(values), group)
    mean = _group_sums(values, group) / size
    centred = torch.where(size > 1, values - mean, 0)
    if estimator is AdvantageEstimator.GRPO:
        std = (_group_sums(centred.square(), group) / (size - ddof).clamp(min=1)).sqrt()
        centred = centred / (std + epsilon)
    elif estimator is AdvantageEstimator.RLOO:
        centred = centred * size / (size - 1).clamp(min=1)
    elif estimator is AdvantageEstimator.MAX_RL:
        centred = torch.where(mean > 0, centred / mean.clamp(min=epsilon), 0)
    elif estimator is AdvantageEstimator.SOFT_VALUE:
        best = torch.full_like(values, -torch.inf).scatter_reduce(0, group, values, "amax")[group]
        over_best = temperature * (_group_sums(((values - best) / temperature).exp(), group) / size).log()
        centred = values - best - over_best
    return centred.to(torch.float64 if rewards.dtype == torch.float64 else torch.float32)


def _group_sums(values: Tensor, group: Tensor) -> Tensor:
    """[S] the sum over each sequence's group."""
    return torch.zeros_like(values).index_add_(0, group, values)[group]
