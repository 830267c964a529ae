"""The factor on the learning rate (VCPO): the root of what a step's sequences are worth, against plain Python and in its limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from evenkeel.correction import (
    CorrectionConfig,
    check_without_gradient_factor,
    correct,
    defer,
    loss_metrics,
    policy_loss,
    step_size_factor,
)
from evenkeel.correction.errors import ConfigError
from tests.correction.fixtures import MU, THETA, flat_log, random_batch, worked_example

ESS = {"step_size": {"by": "ess"}}
PRODUCTS = [math.prod(t / m for t, m in zip(*rows, strict=True)) for rows in zip(THETA, MU, strict=True)]


def root_ess(weights):
    return math.sqrt(sum(weights) ** 2 / sum(w * w for w in weights) / len(weights))


def partials_of(corrected, target, config, parts=None):
    total = 0
    for part in parts or [list(range(corrected.batch.num_sequences))]:
        own = corrected.select(part)
        total = total + policy_loss(own, target[corrected.batch.token_index(part)].requires_grad_(), config).partials
    return total


@pytest.mark.parametrize("preset", ["bypass", "grpo", "mis-sequence", "mis-full", "a-3po", "pg"])
def test_factor_of_the_worked_example(preset):
    """Products of theta/mu are 0.4785, 1.944 and 1.0098: two and a half sequences out of three, whatever else the preset does to them."""
    config = CorrectionConfig(preset=preset, **ESS)
    corrected = correct(worked_example(), config)
    expected = root_ess(PRODUCTS)
    assert expected == pytest.approx(math.sqrt(3.4323**2 / (0.4785**2 + 1.944**2 + 1.0098**2) / 3), abs=1e-5)
    whole = partials_of(corrected, flat_log(THETA), config)
    split = partials_of(corrected, flat_log(THETA), config, [[2], [0, 1]])
    assert step_size_factor(whole, config) == pytest.approx(expected, rel=1e-12)
    assert step_size_factor(split, config) == pytest.approx(expected, rel=1e-12)
    assert loss_metrics(whole, config)["step_size_factor"] == step_size_factor(whole, config)


def test_a_deferred_batch_has_the_same_factor():
    config = CorrectionConfig(preset="mis-full", **ESS)
    partials = partials_of(defer(worked_example(proximal_logprobs=None), config), flat_log(THETA), config)
    assert step_size_factor(partials, config) == pytest.approx(root_ess(PRODUCTS), rel=1e-12)


def test_limits():
    """1 where every sequence has the same weight, whatever it is; the root of 1/S where one of S has all of it."""
    config = CorrectionConfig(preset="bypass", **ESS)
    batch, _ = random_batch(3, sequences=6)
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask), behavior_logprobs=torch.full_like(batch.behavior_logprobs, -9.0))
    last = torch.zeros(batch.num_tokens, dtype=torch.bool)
    last[batch.offsets[1:] - 1] = True
    alike = torch.where(last, -8.0, batch.behavior_logprobs)
    one = torch.where(last, -9.0, batch.behavior_logprobs)
    one[batch.offsets[1] - 1] = -0.0
    one[: batch.offsets[1] - 1] = -2.0
    for target, factor in ((batch.behavior_logprobs, 1.0), (alike, 1.0), (one, math.sqrt(1 / 6))):
        assert step_size_factor(partials_of(correct(batch, config), target.clone(), config), config) == pytest.approx(factor, rel=1e-3)


def test_what_is_rejected_counts_and_what_is_broken_does_not():
    """VCPO's S is the whole minibatch. A sequence with a number that is not finite has no product."""
    config = CorrectionConfig(preset="bypass", **ESS, rejection=[{"level": "sequence", "upper": 1.5}])
    theta = flat_log(THETA)
    assert step_size_factor(partials_of(correct(worked_example(), config), theta, config), config) == pytest.approx(root_ess(PRODUCTS))
    theta[5] = torch.nan
    factor = step_size_factor(partials_of(correct(worked_example(), config), theta, config), config)
    assert factor == pytest.approx(root_ess([PRODUCTS[0], PRODUCTS[2]]))


def test_a_logprob_that_the_sampler_did_not_report_is_noticed():
    """Plain policy gradient reads no mu; with the factor it does. By default such a token's ratio is 1."""
    batch = worked_example()
    holed = replace(batch, behavior_logprobs=batch.behavior_logprobs.masked_fill(torch.arange(9) == 1, torch.nan))
    config = CorrectionConfig(preset="pg", **ESS)
    with pytest.warns(UserWarning, match="reported no logprob"):
        corrected = correct(holed, config)
    first = PRODUCTS[0] / (THETA[0][1] / MU[0][1])
    factor = step_size_factor(partials_of(corrected, flat_log(THETA), config), config)
    assert factor == pytest.approx(root_ess([first, *PRODUCTS[1:]]), rel=1e-12)


def test_off_is_one_and_says_nothing():
    config = CorrectionConfig(preset="bypass")
    partials = partials_of(correct(worked_example(), config), flat_log(THETA), config)
    assert step_size_factor(partials, config) == 1.0 and "step_size_factor" not in loss_metrics(partials, config)


def test_a_trainer_without_a_place_for_it_refuses():
    with pytest.raises(ConfigError, match=r"step_size.by = ess: .* Set step_size.by: off"):
        check_without_gradient_factor(CorrectionConfig(preset="bypass", **ESS))
