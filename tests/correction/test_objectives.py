"""The gradient of every objective.

Where the loss is a plain function of the target logprobs: torch's numerical gradcheck in float64. Where a part is detached:
central differences of the published formula, written out below over whole sequences, with the detached factors held at their value.
"""

import math

import pytest
import torch

from evenkeel.correction import CorrectionConfig, correct, loss_metrics, policy_loss
from evenkeel.correction.terms.objectives import clipped_loss, gamma_coefficient, score_loss, soft_gate_loss
from tests.correction.fixtures import MU, PROX, THETA, flat_log, random_batch, worked_example

LENGTHS, ADVANTAGES = (4, 3, 2), (1.0, -1.0, 0.5)
FLAT = [(i, j) for i, n in enumerate(LENGTHS) for j in range(n)]
LOG_PROX, LOG_MU = ([[math.log(p) for p in row] for row in rows] for rows in (PROX, MU))
THETA_0 = [math.log(p) for row in THETA for p in row]


def rows_of(theta):
    return [theta[0:4], theta[4:7], theta[7:9]]


def gspo(theta, low=0.2, high=0.2, by_length=False):
    total = 0.0
    for a, row, prox in zip(ADVANTAGES, rows_of(theta), LOG_PROX, strict=True):
        s = math.exp(sum(t - p for t, p in zip(row, prox, strict=True)) / len(row))
        total += max(-a * s, -a * min(max(s, 1 - low), 1 + high)) * (len(row) if by_length else 1)
    return total / 3


def gmpo(theta):
    total = 0.0
    for a, row, prox in zip(ADVANTAGES, rows_of(theta), LOG_PROX, strict=True):
        logs = [min(t - p, 0.4) if a > 0 else max(t - p, -0.4) for t, p in zip(row, prox, strict=True)]
        total += -a * math.exp(sum(logs) / len(logs))
    return total / 3


def weighted_score(weights):
    """Token mean of -w A log theta with fixed weights."""
    return lambda theta: sum(-w * ADVANTAGES[i] * t for w, (i, _), t in zip(weights, FLAT, theta, strict=True)) / 9


def surrogate(level, source=LOG_MU):
    """Token sum of -A x over the ratio x = exp(theta - source), differentiable: what the score form has the gradient of."""

    def loss(theta):
        total = 0.0
        for a, row, old in zip(ADVANTAGES, rows_of(theta), source, strict=True):
            logs = [t - o for t, o in zip(row, old, strict=True)]
            total += -a * (sum(math.exp(x) for x in logs) if level == "token" else math.exp(sum(logs)))
        return total / 3

    return loss


def numerical(function, theta, step=1e-6):
    gradient = []
    for k in range(len(theta)):
        up, down = list(theta), list(theta)
        up[k] += step
        down[k] -= step
        gradient.append((function(up) - function(down)) / (2 * step))
    return gradient


def gradient(settings):
    config = CorrectionConfig(**settings)
    leaf = flat_log(THETA).requires_grad_()
    policy_loss(correct(worked_example(), config), leaf, config).loss.backward()
    return leaf.grad.tolist()


CAP5 = [min(math.exp(t - m), 5) for t, m in zip(THETA_0, [x for row in LOG_MU for x in row], strict=True)]
GAMMA = [math.exp(3 + 2 * math.log(0.4785) - 3 * 0.4785)] * 4 + [math.exp(2 + 3 * math.log(1.944) - 2 * 1.944)] * 3
GAMMA += [math.exp(3 + 2 * math.log(1.0098) - 3 * 1.0098)] * 2
WIDE = {"clip_low": 0.2, "clip_high": 0.2}


@pytest.mark.parametrize(
    ("settings", "formula"),
    [
        ({"preset": "gspo", "objective": WIDE}, gspo),
        ({"preset": "gspo"}, lambda theta: gspo(theta, 3e-4, 4e-4)),
        ({"preset": "luspo", "objective": WIDE}, lambda theta: gspo(theta, by_length=True)),
        ({"preset": "gmpo"}, gmpo),
        ({"preset": "pg"}, weighted_score([1.0] * 9)),
        ({"preset": "pg-tis", "objective": {"upper": 5}, "denominator": {"kind": "token_mean"}}, weighted_score(CAP5)),
        ({"preset": "vespo"}, weighted_score(GAMMA)),
        ({"preset": "pg-is"}, surrogate("token")),
        ({"preset": "pg-is", "objective": {"level": "sequence"}}, surrogate("sequence")),
        ({"preset": "pg-is", "objective": {"kind": "score", "ratio": "r"}, "proximal": "recompute"}, surrogate("token", LOG_PROX)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_gradient_is_that_of_the_formula(settings, formula):
    assert gradient(settings) == pytest.approx(numerical(formula, THETA_0), rel=1e-6, abs=1e-9)


PLAIN = ["ppo", "ppo-dual-clip", "grpo", "dr-grpo", "dapo", "sapo", "bypass", "tis-token", "mis-full", "icepop", "kpop"]
WITH_KL = [(preset, kl) for preset in ("ppo", "bypass", "sapo") for kl in ("k2", "k3", "unbiased_k3")]


@pytest.mark.parametrize(("preset", "kl"), [*((preset, None) for preset in PLAIN), *WITH_KL])
def test_gradcheck_of_surrogates(preset, kl):
    """All factors apart from the ratio are constants here (they are on mu and prox), so the loss is a plain function."""
    config = CorrectionConfig(preset=preset, **({} if kl is None else {"kl": {"coefficient": 0.3, "estimator": kl}}))
    batch, target = random_batch(7, sequences=4)
    corrected = correct(batch, config)

    def loss(theta):
        return policy_loss(corrected, theta, config).loss

    assert torch.autograd.gradcheck(loss, (target.requires_grad_(),), eps=1e-7, atol=1e-6)


def test_entropy_bonus_reaches_the_entropy():
    config = CorrectionConfig(preset="ppo", entropy_coefficient=0.1)
    entropy = torch.full((9,), 2.0, dtype=torch.float64, requires_grad=True)
    out = policy_loss(correct(worked_example(), config), flat_log(THETA).requires_grad_(), config, entropy)
    out.loss.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.1 / 9] * 9)


def test_sapo_gradient_weights():
    """df / dlog theta = 4 p (1 - p) r: 1 at r = 1, the printed figures elsewhere."""
    log_ratio = torch.tensor([1.0, 1.1, 1.5, 3.0], dtype=torch.float64).log().requires_grad_()
    soft_gate_loss(log_ratio, torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64)).sum().backward()
    assert (-log_ratio.grad).tolist() == pytest.approx([1.0, 1.097255, 1.410022, -1.166336], abs=1e-6)
    value = soft_gate_loss(torch.tensor([1.5]).double().log(), torch.tensor([-1.0]).double())
    assert float(value) == pytest.approx(2.393585, abs=1e-6)


def test_vespo_coefficients():
    w = torch.tensor([1.0, 2.0, 0.5, 1.0, 2.0, 0.5], dtype=torch.float64).log()
    a = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    assert gamma_coefficient(w, a).tolist() == pytest.approx([1, 0.199148, 1.120422, 1, 1.082682, 0.339785], abs=1e-6)


def test_ppo_has_no_gradient_exactly_where_it_clips():
    log_ratio = torch.tensor([1.3, 0.7, 1.3, 0.7, 1.0], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0], dtype=torch.float64)
    loss, is_clipped = clipped_loss(log_ratio, advantages)
    loss.sum().backward()
    assert is_clipped.tolist() == [True, False, False, True, False]
    assert (log_ratio.grad == 0).tolist() == [True, False, False, True, True]


def test_score_and_surrogate_have_one_gradient():
    theta, mu = flat_log(THETA).requires_grad_(), flat_log(MU)
    advantages = worked_example().advantages
    (-advantages * (theta - mu).exp()).sum().backward()
    other = flat_log(THETA).requires_grad_()
    score_loss(other, advantages, (other - mu).exp()).sum().backward()
    torch.testing.assert_close(other.grad, theta.grad)


def test_dppo_example_of_the_paper():
    """mu 1e-4 to pi 1e-2: a ratio of 100, clipped by PPO, a TV of 0.0099, free under DPPO. 0.99 to 0.80: ratio 0.81, inside PPO's clip
    for A < 0, but a TV of 0.19: blocked by DPPO at 0.15."""
    mu, theta = torch.tensor([1e-4, 0.99], dtype=torch.float64).log(), torch.tensor([1e-2, 0.80], dtype=torch.float64).log()
    batch = worked_example(
        token_ids=torch.arange(2), offsets=torch.tensor([0, 1, 2]), loss_mask=torch.ones(2, dtype=torch.bool), behavior_logprobs=mu,
        proximal_logprobs=mu, advantages=torch.tensor([1.0, -1.0]).double(), weight_versions=torch.zeros(2, dtype=torch.int32),
        group_ids=torch.arange(2),
    )  # fmt: skip

    def moves(preset):
        config = CorrectionConfig(preset=preset)
        leaf = theta.clone().requires_grad_()
        policy_loss(correct(batch, config), leaf, config).loss.backward()
        return (leaf.grad != 0).tolist()

    assert moves("ppo") == [False, True]
    assert moves("dppo-binary-tv") == [True, False]
    assert moves("dppo-binary-kl") == [True, False]
    assert moves("grpo-clip-higher") == [False, True]
    assert moves("grpo-relax-both") == [True, True]  # no clip for the rare token
    assert moves("minimal-mask") == [True, True]  # 0.19 is less than its 0.5


def test_bounded_coefficients_are_counted():
    """q of the worked example is above 3 at one token; the product of q is 1.94 for the sequence of negative advantage, and 0.48 and 1.01
    for the others, which TOPR leaves alone."""
    batch = worked_example()
    for preset, share in (("pg-tis", 1 / 9), ("topr", 3 / 9), ("cispo", 0.0)):
        config = CorrectionConfig(preset=preset)
        partials = policy_loss(correct(batch, config), flat_log(THETA), config).partials
        assert loss_metrics(partials, config)["bounded_share"] == pytest.approx(share)
    config = CorrectionConfig(preset="pg-is")
    assert "bounded_share" not in loss_metrics(policy_loss(correct(batch, config), flat_log(THETA), config).partials, config)
