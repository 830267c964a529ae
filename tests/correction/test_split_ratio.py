"""Mismatch and staleness told apart: what each part sees of a token, whichever way its batch is prepared, and which tokens have no pi_v."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch

from evenkeel.correction import CorrectionConfig, PackedBatch, correct, defer, policy_loss
from evenkeel.correction.errors import DataError
from evenkeel.correction.settings.choices import Ratio
from tests.correction.fixtures import random_batch


def tokens(*, mu: list[float], then: list[float], prox: list[float], version: list[int], now: int = 6) -> PackedBatch:
    """A batch of sequences of one token, with a probability of each policy; A = 1."""
    n = len(mu)
    columns = {"behavior_logprobs": mu, "at_sampling_logprobs": then, "proximal_logprobs": prox}
    return PackedBatch(
        token_ids=torch.zeros(n, dtype=torch.int64),
        offsets=torch.arange(n + 1),
        loss_mask=torch.ones(n, dtype=torch.bool),
        advantages=torch.ones(n, dtype=torch.float64),
        weight_versions=torch.tensor(version, dtype=torch.int32),
        group_ids=torch.zeros(n, dtype=torch.int64),
        learner_version=now,
        advantages_by="own",
        **{name: torch.tensor(values, dtype=torch.float64).log() for name, values in columns.items()},
    ).validate()


def slopes(batch: PackedBatch, settings: dict[str, object], way=correct) -> list[float]:
    """d loss / d log theta of each token at theta = prox, times the number of tokens and without its sign."""
    config = CorrectionConfig.model_validate(settings)
    leaf = batch.proximal_logprobs.clone().requires_grad_()
    policy_loss(way(batch, config), leaf, config).loss.backward()
    return (-batch.num_tokens * leaf.grad).tolist()


@pytest.mark.parametrize("way", [correct, defer])
def test_a_bound_meets_the_part_that_it_is_for(way) -> None:
    """Tokens: mismatch 3 at staleness 1, staleness 3 at mismatch 1, and 3 times 1/3, which is rho = 1. PPO(q) has no gradient where
    q > 1.2, whatever made it so; min(rho, 2) cuts both alike and sees nothing in the third. Apart, min(m, 2) PPO(theta / pi_v) weighs the
    first with 2, and clips the second alone; the third, which the engine drew 3 times too seldom, has both its factors, 2 and 1/3."""
    batch = tokens(mu=[0.1, 0.1, 0.1], then=[0.3, 0.1, 0.3], prox=[0.3, 0.3, 0.1], version=[4, 4, 4])
    assert slopes(batch, {"preset": "bypass"}, way) == pytest.approx([0, 0, 1])
    assert slopes(batch, {"preset": "tis-token"}, way) == pytest.approx([2, 2, 1])
    assert slopes(batch, {"preset": "split-tis"}, way) == pytest.approx([2, 0, 2 / 3])
    assert slopes(batch, {"preset": "split-mis"}, way) == pytest.approx([0, 0, 0])
    staleness = {"objective": {"kind": "clip"}, "importance": {"mode": "truncate", "ratio": "staleness", "upper": 2.0}}
    assert slopes(batch, staleness, way) == pytest.approx([1, 2, 1 / 3])


@pytest.mark.parametrize("names", [("split-tis", "tis-token"), ("split-mis", "mis-token")])
@pytest.mark.parametrize("way", [correct, defer])
def test_at_staleness_0_all_of_rho_is_mismatch(names, way) -> None:
    """Then pi_v is pi_prox, and the presets are those that they are made of, to the last bit, whether or not earlier weights are kept."""
    batch, target = random_batch(3, staleness=0)
    outcomes = []
    for name in names:
        config = CorrectionConfig(preset=name)
        leaf = target.clone().requires_grad_()
        policy_loss(way(batch, config), leaf, config).loss.backward()
        outcomes.append(leaf.grad)
    assert outcomes[0].any() and torch.equal(*outcomes)


def test_the_parts_multiply_to_the_whole() -> None:
    """rho = mismatch x staleness, q = mismatch x since_sampling, since_sampling = staleness x r: by their policies, and by the factors on
    which the refusal of a ratio that would be applied twice rests."""
    for whole, first, second in (
        (Ratio.RHO, Ratio.MISMATCH, Ratio.STALENESS),
        (Ratio.Q, Ratio.MISMATCH, Ratio.SINCE_SAMPLING),
        (Ratio.SINCE_SAMPLING, Ratio.STALENESS, Ratio.R),
        (Ratio.Q, Ratio.RHO, Ratio.R),
    ):
        (over_first, under_first), (over_second, under_second) = first.policies, second.policies
        assert over_first == under_second and whole.policies == (over_second, under_first)
        assert whole.factors == first.factors | second.factors and not first.factors & second.factors


def test_stale_tokens_of_weights_that_are_not_kept_are_said() -> None:
    """Two of three stale tokens; the fourth is of the present weights, which need no copy. The split of the rest is not touched."""
    batch = tokens(mu=[0.1] * 4, then=[0.3, math.nan, math.nan, math.nan], prox=[0.1, 0.3, 0.3, 0.1], version=[4, 4, 5, 6])
    with pytest.warns(UserWarning, match="of 2 of 3 stale tokens the learner has no copy of the weights that sampled them"):
        assert slopes(batch, {"preset": "split-tis"}) == pytest.approx([2 / 3, 2, 2, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known = replace(batch, at_sampling_logprobs=torch.where(batch.weight_versions < 6, math.log(0.3), torch.nan))
        correct(known, CorrectionConfig(preset="split-tis"))
        correct(batch, CorrectionConfig(preset="tis-token"))  # which doesn't look


@pytest.mark.parametrize("way", [correct, defer])
def test_a_batch_without_the_field_is_refused_and_not_taken_for_fresh(way) -> None:
    batch, target = random_batch(1)
    config = CorrectionConfig(preset="split-tis")
    with pytest.raises(DataError, match="at_sampling_logprobs is None"):
        policy_loss(way(replace(batch, at_sampling_logprobs=None), config), target, config)


def test_an_infinity_leaves_its_token_out_and_is_named() -> None:
    batch, _ = random_batch(1)
    index = int((batch.loss_mask & batch.at_sampling_logprobs.isfinite()).nonzero()[0])
    broken = batch.at_sampling_logprobs.clone()
    broken[index] = -math.inf
    with pytest.warns(UserWarning, match=r"is not finite \(at_sampling_logprobs at 1\)"):
        corrected = correct(replace(batch, at_sampling_logprobs=broken), CorrectionConfig(preset="split-tis"))
    assert not corrected.keep_mask[index]
