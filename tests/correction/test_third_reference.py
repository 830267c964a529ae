"""Presets and parts against reference_third.py, which was written from papers and their authors' code without a look at ours.

Loss and gradient of every token, on random ragged batches with holes in the mask and advantages of both signs; the reference's own figures
first, so that it is held to its worked examples.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from evenkeel.correction import CorrectionConfig, correct, group_advantages, policy_loss, policy_scale, settle, step_size_factor
from evenkeel.correction.settings.schedule import needs_step_forward
from evenkeel.correction.terms.covariance import chosen_count
from evenkeel.correction.terms.objectives import divergence_band
from tests.correction import reference_third as third
from tests.correction.fixtures import random_batch

MEAN = {"denominator": {"kind": "token_mean"}}
SEEDS = range(4)


def close(found, wanted):
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(close(a, b) for a, b in zip(found, wanted, strict=True))
    return found == pytest.approx(wanted, abs=1.01e-6)


@pytest.mark.parametrize("example", third.EXAMPLES, ids=lambda example: example["call"].__name__)
def test_the_reference_gives_its_own_figures(example):
    outcome = example["call"](**example["inputs"])
    for name in example.keys() - {"call", "inputs"}:
        assert close(outcome if name == "value" else getattr(outcome, name), example[name]), name


class Rows:
    """A random batch as lists over sequences."""

    def __init__(self, seed: int, spread: float = 0.6):
        self.batch, self.target = random_batch(seed, spread=spread)
        self.bounds = list(pairwise(self.batch.offsets.tolist()))
        self.mu, self.prox = self.of(self.batch.behavior_logprobs), self.of(self.batch.proximal_logprobs)
        self.theta, self.advantages = self.of(self.target), self.of(self.batch.advantages)
        self.mask = self.of(self.batch.loss_mask.int())
        self.groups = self.batch.group_ids.tolist()

    def of(self, values: torch.Tensor) -> list[list[float]]:
        return [values[a:b].tolist() for a, b in self.bounds]


def ours(settings, rows: Rows):
    """(loss, gradient by token in rows, outcome)."""
    config = CorrectionConfig(**settings)
    corrected = correct(rows.batch, config)
    if needs_step_forward(config):
        corrected = settle(corrected, rows.target, config)
    leaf = rows.target.clone().requires_grad_()
    out = policy_loss(corrected, leaf, config)
    out.loss.backward()
    assert policy_scale(out.partials, config) == 1.0
    return out.loss.item(), rows.of(leaf.grad), out


def check(settings, rows: Rows, wanted: third.Reference) -> int:
    loss, gradient, _ = ours(settings, rows)
    assert loss == pytest.approx(wanted.loss, rel=1e-10, abs=1e-13)
    for found, expected in zip(gradient, wanted.coefficients, strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-13)
    return sum(x != 0 for row in wanted.coefficients for x in row)


@pytest.mark.parametrize("seed", SEEDS)
def test_dro(seed):
    rows = Rows(seed)
    wanted = third.dro(theta=rows.theta, anchor=rows.mu, advantages=rows.advantages, mask=rows.mask, beta=0.05)
    assert check({"preset": "dro", **MEAN}, rows, wanted)
    wanted = third.dro(theta=rows.theta, anchor=rows.prox, advantages=rows.advantages, mask=rows.mask, beta=0.7)
    kl = {"coefficient": 0.7, "anchor": "proximal"}
    assert check({"preset": "dro", "proximal": "recompute", "kl": kl, **MEAN}, rows, wanted)


def with_rewards(rows: Rows, seed: int, **advantage) -> list[float]:
    """Rewards of the sequences, whose advantages the batch is given."""
    rewards = torch.randn(len(rows.bounds), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    advantages = group_advantages(rewards, rows.batch.group_ids, **advantage)
    rows.batch = replace(rows.batch, advantages=torch.repeat_interleave(advantages, rows.batch.lengths))
    return rewards.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_mirror_descent(seed):
    """Groups are equally large: a mean over groups of means over their answers is the mean over answers."""
    rows = Rows(seed)
    rewards = with_rewards(rows, seed, estimator="grpo_no_std")
    known = {"theta": rows.theta, "rewards": rewards, "groups": rows.groups, "mask": rows.mask}
    assert check({"preset": "mirror-descent"}, rows, third.kimi_mirror_descent(**known, anchor=rows.mu, tau=1e-3))
    kl = {"coefficient": 0.5, "anchor": "proximal"}
    wanted = third.kimi_mirror_descent(**known, anchor=rows.prox, tau=0.5)
    assert check({"preset": "mirror-descent", "proximal": "recompute", "kl": kl}, rows, wanted)


@pytest.mark.parametrize(("beta1", "beta2"), [(1.0, 1e-3), (0.3, 0.5)])
@pytest.mark.parametrize("seed", SEEDS)
def test_oapl(seed, beta1, beta2):
    """Its squared regression has 2 beta2 times the gradient of ours; the loss differs by a constant besides."""
    rows = Rows(seed)
    advantage = {"estimator": "soft_value", "temperature": beta1}
    rewards = with_rewards(rows, seed, **advantage)
    wanted = third.oapl(
        theta=rows.theta, mu=rows.mu, rewards=rewards, groups=rows.groups, mask=rows.mask, beta1=beta1, beta2=beta2
    ).coefficients
    settings = {"preset": "oapl", "kl": {"coefficient": beta2}, "advantage": advantage}
    for found, expected in zip(ours(settings, rows)[1], wanted, strict=True):
        assert [2 * beta2 * x for x in found] == pytest.approx(expected, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("seed", SEEDS)
def test_delightful(seed):
    rows = Rows(seed)
    known = {"theta": rows.theta, "advantages": rows.advantages, "mask": rows.mask}
    assert check({"preset": "delightful"}, rows, third.delightful(**known))  # no surprisal is over 10
    delight = {"temperature": 0.3, "surprisal_limit": 1.5, "gain": 2.0}
    wanted = third.delightful(**known, eta=0.3, surprisal_cap=1.5, gain=2.0)
    assert check({"preset": "delightful", "objective": {"delight": delight}}, rows, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_weight_of_the_current_policy(seed):
    rows = Rows(seed)
    known = {"theta": rows.theta, "mu": rows.mu, "advantages": rows.advantages, "mask": rows.mask}
    assert check({"preset": "pg-clip", **MEAN}, rows, third.current_policy_weight(**known, low=0.8, high=1.28))
    objective = {"lower": 0.0, "upper": 2.0}  # slime's
    assert check({"preset": "pg-clip", "objective": objective, **MEAN}, rows, third.current_policy_weight(**known, low=0.0, high=2.0))


@pytest.mark.parametrize("seed", SEEDS)
def test_sao_mask(seed):
    rows = Rows(seed, spread=1.0)
    known = {"theta": rows.theta, "mu": rows.mu, "advantages": rows.advantages, "mask": rows.mask}
    moved = [check({"preset": "sao-mask"}, rows, third.sao_mask(**known, eps_low=0.8, eps_high=3.0))]
    moved += [check({"preset": "rollout-is"}, rows, third.sao_mask(**known, eps_low=0.2, eps_high=0.28))]
    assert moved[0] > moved[1] > 0


def test_a_ratio_on_a_bound_is_out():
    """Of sao-mask at 4, which is exact in floating point; a hair below it is in."""
    for ratio, is_in in ((4.0, False), (3.999999, True)):
        batch, target = random_batch(0)
        batch = replace(batch, behavior_logprobs=torch.full_like(target, -math.log(ratio)))
        config = CorrectionConfig(preset="sao-mask")
        out = policy_loss(correct(batch, config), torch.zeros_like(target), config)
        assert bool(out.decided.keep_mask.any()) == is_in


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov(seed):
    """Who is drawn is a matter of lots; of whom, and how many, is not. All eligible ones, then one token of them."""
    rows = Rows(seed)
    known = {"theta": rows.theta, "prox": rows.prox, "advantages": rows.advantages, "mask": rows.mask}
    part = {"lower": 0.1, "upper": 2.0, "share": 1.0}
    wanted = third.clip_cov(**known, cov_low=0.1, cov_high=2.0, fraction=1.0)
    assert check({"preset": "clip-cov", "covariance": part}, rows, wanted)
    settings = {"preset": "clip-cov", "covariance": part | {"share": 1e-6}}
    eligible = third.clip_cov_eligible(**known, eps_low=0.2, eps_high=0.2, cov_low=0.1, cov_high=2.0)
    keep = rows.of(ours(settings, rows)[2].decided.keep_mask)
    (left_out,) = [(i, t) for i, row in enumerate(rows.mask) for t, trained in enumerate(row) if trained and not keep[i][t]]
    order = [eligible.index(left_out)]
    assert check(settings, rows, third.clip_cov(**known, cov_low=0.1, cov_high=2.0, fraction=1e-6, order=order))


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_cov(seed):
    """Score form: the gradient of the reference's -A r, and another value."""
    rows = Rows(seed)
    known = {"theta": rows.theta, "prox": rows.prox, "advantages": rows.advantages, "mask": rows.mask}
    for fraction, coefficient in ((2e-4, 1.0), (0.3, 0.1)):
        wanted = third.kl_cov(**known, fraction=fraction, kl_coefficient=coefficient)
        gradient = ours({"preset": "kl-cov", "covariance": {"share": fraction, "coefficient": coefficient}}, rows)[1]
        for found, expected in zip(gradient, wanted.coefficients, strict=True):
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-13)
        assert sum(map(sum, wanted.factors)) >= 1


@pytest.mark.parametrize("preset", ["clip-cov", "kl-cov"])
def test_how_many_tokens_are_chosen_by_covariance(preset):
    """verl's fraction of 2e-4, rounded down, and at least one: batches as small as those above don't tell another fraction apart."""
    part = CorrectionConfig(preset=preset).covariance
    assert [chosen_count(tokens, part.share) for tokens in (0, 4, 9_999, 10_000, 1_000_000)] == [0, 1, 1, 2, 200]


@pytest.mark.parametrize(("divergence", "delta"), [("kl", 0.05), ("kl", 1e-3), ("tv", 0.05), ("chi2", 0.01)])
@pytest.mark.parametrize("seed", SEEDS)
def test_bandpo(seed, divergence, delta):
    """Widened to 0.8 and 1.28, and the band alone."""
    rows = Rows(seed)
    known = {"theta": rows.theta, "prox": rows.prox, "advantages": rows.advantages, "mask": rows.mask}
    band = {"divergence": divergence, "delta": delta}
    for relax, low, high in ((True, 0.2, 0.28), (False, 0.0, 0.0)):
        wanted = third.bandpo(**known, divergence=divergence, delta=delta, relax=relax, eps_low=0.2, eps_high=0.28)
        objective = {"band": band, "clip_low": low, "clip_high": high}
        moved = check({"preset": "bandpo", "objective": objective}, rows, wanted)
        assert 0 < moved < sum(map(sum, rows.mask))


@pytest.mark.parametrize("seed", SEEDS)
def test_ctpo(seed):
    """Its own constants clip most tokens of so wide a batch; the wider ones fewer."""
    rows = Rows(seed, spread=0.4)
    known = {"theta": rows.theta, "prox": rows.prox, "advantages": rows.advantages, "mask": rows.mask}
    moved = [check({"preset": "ctpo"}, rows, third.ctpo(**known))]
    wider = {"log_low": 0.2, "log_high": 0.3, "log_dual": 0.7, "power": 0.2}
    moved.append(check({"preset": "ctpo", "objective": wider}, rows, third.ctpo(**known, **wider)))
    assert 0 < moved[0] < moved[1] < sum(map(sum, rows.mask))


def test_bands_of_single_tokens():
    """From certain to very rare; beyond 1e-6 they are those at 1e-6."""
    probabilities = [1e-9, 1e-6, 1e-3, 0.02, 0.3, 0.9, 0.999]
    for divergence in ("kl", "tv", "chi2"):
        low, high = divergence_band(torch.tensor(probabilities, dtype=torch.float64), divergence=divergence, delta=0.05)
        wanted = [third.band(max(p, 1e-6), divergence=divergence, delta=0.05) for p in probabilities]
        assert low.tolist() == pytest.approx([pair[0] for pair in wanted], rel=1e-9, abs=1e-12)
        assert high.tolist() == pytest.approx([pair[1] for pair in wanted], rel=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_k3_by_sequence(seed):
    rows = Rows(seed, spread=0.2)
    wanted = third.k3_rejection(numerator=rows.prox, mu=rows.mu, mask=rows.mask, threshold=0.01)
    out = ours({"preset": "k3-sequence"}, rows)[2]
    assert rows.of(out.decided.keep_mask.int()) == wanted.mask
    wanted = third.k3_rejection(numerator=rows.theta, mu=rows.mu, mask=rows.mask, threshold=0.03)  # verl's bypass
    criterion = {"statistic": "k3", "level": "geometric", "upper": 0.03}
    out = ours({"preset": "k3-sequence", "proximal": "behavior", "rejection": [criterion]}, rows)[2]
    assert rows.of(out.decided.keep_mask.int()) == wanted.mask
    assert any(wanted.kept) and not all(wanted.kept)


@pytest.mark.parametrize("seed", SEEDS)
def test_learning_rate_of_vcpo(seed):
    rows = Rows(seed, spread=0.3)
    weights = third.sequence_weights(numerator=rows.theta, mu=rows.mu, mask=rows.mask)
    config = {"preset": "grpo", "step_size": {"by": "ess"}}
    factor = step_size_factor(ours(config, rows)[2].partials, CorrectionConfig(**config))
    assert factor == pytest.approx(third.vcpo_learning_rate_factor(weights), rel=1e-7) and 0.1 < factor < 0.99
