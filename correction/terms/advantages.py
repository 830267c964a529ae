"""Advantages of a group of answers to one prompt, by explicit group id: groups may differ in size and lie in any order."""

from __future__ import annotations

from typing import Any

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


def turn_advantages(rewards: Tensor, rollout_ids: Tensor, group_ids: Tensor, **how: Any) -> Tensor:
    """Advantage of each turn: the sum of its own and all later turns' rewards in its rollout, each less the mean and over the standard
    deviation of the rewards of all turns of the group. With one reward a rollout it is that of `group_advantages`.

    Args:
        rewards: [U] float, of U turns; those of a rollout lie together, in order.
        rollout_ids: [U] int; equal ids are one rollout. group_ids: [U] int, of its group.
        how: as of group_advantages; estimator: grpo, or grpo_no_std.
    Returns: [U], as group_advantages.
    Raises: DataError as that, or if the turns of a rollout don't lie together.
    Source: Shao et al. (2024), DeepSeekMath, arXiv 2402.03300, section 4.1.3: process supervision RL with GRPO.
    """
    normalised = group_advantages(rewards, group_ids, **how)
    _, rollout, turns = torch.unique_consecutive(rollout_ids, return_inverse=True, return_counts=True)
    if rollout_ids.shape != rewards.shape or len(turns) != len(torch.unique(rollout_ids)):
        raise DataError("turn_advantages: rollout_ids must be [U], as rewards, and the turns of a rollout lie together, in order")
    values = normalised.double()
    until = values.cumsum(0)
    return (until[(turns.cumsum(0) - 1)[rollout]] - until + values).to(normalised.dtype)


def _group_sums(values: Tensor, group: Tensor) -> Tensor:
    """[S] the sum over each sequence's group."""
    return torch.zeros_like(values).index_add_(0, group, values)[group]
