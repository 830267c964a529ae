"""Advantages by turn, against the formula of GRPO's process supervision in plain Python, and in the cases that are known."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.correction import AdvantageConfig, group_advantages, turn_advantages
from evenkeel.correction.errors import ConfigError, DataError

REWARDS = st.lists(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0, -0.5]), min_size=1, max_size=4), min_size=2, max_size=4), max_size=3)


def by_the_formula(groups: list[list[list[float]]], *, with_std: bool) -> list[float]:
    """Shao et al. (2024), 4.1.3: r~ = (r - mean(R)) / std(R), of all steps of the group; the sum of r~ of this and the later steps."""
    found = []
    for group in groups:
        pool = [reward for rollout in group for reward in rollout]
        mean, std = statistics.fmean(pool), statistics.stdev(pool) + 1e-6 if with_std else 1.0
        for rollout in group:
            scaled = [(reward - mean) / std for reward in rollout]
            found += [sum(scaled[turn:]) for turn in range(len(rollout))]
    return found


def tensors(groups: list[list[list[float]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = [(reward, 10 * g + n, g) for g, group in enumerate(groups) for n, rollout in enumerate(group) for reward in rollout]
    rewards, rollouts, ids = zip(*rows, strict=True) if rows else ((), (), ())
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(rollouts, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64)


@settings(deadline=None)
@given(REWARDS, st.booleans())
def test_it_is_the_formula(groups: list[list[list[float]]], with_std: bool) -> None:
    estimator = "grpo" if with_std else "grpo_no_std"
    found = turn_advantages(*tensors(groups), estimator=estimator)
    assert found.tolist() == pytest.approx(by_the_formula(groups, with_std=with_std), rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=5), min_size=1, max_size=3))
def test_with_one_turn_it_is_the_groups(groups: list[list[float]]) -> None:
    rewards, rollouts, ids = tensors([[[reward] for reward in group] for group in groups])
    assert turn_advantages(rewards, rollouts, ids).tolist() == pytest.approx(group_advantages(rewards, ids).tolist())


def test_a_turn_that_helps_is_worth_more_than_the_ones_after_it() -> None:
    """Two rollouts of two turns: the first earns 1 at its first turn, the second nothing. Rewards less their mean of 1/4 are 3/4, -1/4 and
    -1/4, -1/4: the turn that earned has 1/2, the one after it -1/4, and both of the other rollout's share what came after them."""
    found = turn_advantages(*tensors([[[1.0, 0.0], [0.0, 0.0]]]), estimator="grpo_no_std")
    assert found.tolist() == [0.5, -0.25, -0.5, -0.25]


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(DataError, match="turns of a rollout lie together"):
        turn_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 1, 0]), torch.tensor([0, 0, 0]))
    with pytest.raises(ConfigError, match=r"advantage.level = turn with advantage.estimator = rloo.* Set estimator to grpo or grpo_no_std"):
        AdvantageConfig(estimator="rloo", level="turn")
