"""The split of the log ratio's variance: against numpy's covariance matrix, and in cases that can be said in advance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from correction.variance_split import split_variance


def test_the_parts_are_those_of_the_covariance_matrix_and_add_up() -> None:
    draw = torch.Generator().manual_seed(0)
    behavior = -torch.rand(1000, generator=draw) * 5
    noise = torch.randn(2, 1000, generator=draw)
    at_sampling = behavior + 0.01 * noise[0]
    target = at_sampling + 0.1 * noise[1] - 0.05 * noise[0]  # staleness undoes a part of the mismatch: a covariance below 0
    found = split_variance(behavior, at_sampling, target)
    steps = torch.stack([at_sampling.double() - behavior.double(), target.double() - at_sampling.double()])
    matrix = np.cov(steps.numpy(), ddof=0)
    assert (found.mismatch, found.staleness, found.covariance) == pytest.approx((matrix[0, 0], matrix[1, 1], matrix[0, 1]), rel=1e-9)
    assert found.covariance < -1e-4
    assert found.total == pytest.approx(found.mismatch + found.staleness + 2 * found.covariance, rel=1e-9)
    assert found.tokens == 1000


def test_with_equal_engines_all_of_it_is_staleness() -> None:
    behavior, target = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -2.5])
    found = split_variance(behavior, behavior, target)
    assert (found.mismatch, found.covariance) == (0.0, 0.0)
    assert found.total == found.staleness == pytest.approx(1 / 6)  # log ratios -0.5, 0, 0.5


def test_without_tokens_there_is_no_variance() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        split_variance(*torch.zeros(3, 0))
