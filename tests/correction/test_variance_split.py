"""The split of the log ratio's variance: against numpy's covariance matrix, and in cases that can be said in advance."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from evenkeel.correction.diagnostics.quantities import SPLIT
from evenkeel.correction.diagnostics.variance_split import split_numbers, split_variance


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


def test_numbers_of_the_split_against_plain_python() -> None:
    generator = torch.Generator().manual_seed(4)
    mu, at_sampling, now = (-2 + 0.3 * torch.randn(50, generator=generator) for _ in range(3))
    numbers = split_numbers(mu, at_sampling, now)
    first = [float(b) - float(a) for a, b in zip(mu, at_sampling, strict=True)]
    second = [float(b) - float(a) for a, b in zip(at_sampling, now, strict=True)]
    assert numbers["split_mismatch_k3_kl"] == pytest.approx(sum(math.exp(x) - 1 - x for x in first) / 50)
    assert numbers["split_staleness_k3_kl"] == pytest.approx(sum(math.exp(x) - 1 - x for x in second) / 50)
    assert numbers["split_mismatch_variance"] == pytest.approx(statistics.pvariance(first))
    parts = numbers["split_mismatch_variance"] + numbers["split_staleness_variance"] + 2 * numbers["split_covariance"]
    assert numbers["split_total_variance"] == pytest.approx(parts) and numbers["split_tokens"] == 50
    assert set(numbers) == set(SPLIT)
    assert split_numbers(mu[:0], mu[:0], mu[:0]) == {}
