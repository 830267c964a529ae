"""A policy small enough to enumerate: 3 tokens, 3 steps, 27 sequences. Expectations are exact sums, no sampling.

E_mu[rho] = 1; E_mu[min(rho, C)] <= 1; the untruncated sequence-product estimator is unbiased, whatever the baseline; each truncated
or token-level estimator has exactly the bias that the sum says, and the loss reproduces it.
"""

import itertools
import math

import pytest
import torch

from evenkeel.correction import CorrectionConfig, PackedBatch, correct, diagnose, policy_loss

VOCABULARY, STEPS = 3, 3
SEQUENCES = list(itertools.product(range(VOCABULARY), repeat=STEPS))


def logits(seed):
    """One table of logits for each prefix length and last token: a first-order policy."""
    return torch.randn(STEPS, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logprobs(table):
    """[27, 3] log probability of each token of each sequence."""
    rows = table.log_softmax(-1)
    return torch.stack([torch.stack([rows[t, s[t - 1] if t else 0, s[t]] for t in range(STEPS)]) for s in SEQUENCES])


MU_TABLE, THETA_TABLE = logits(0), logits(0) + 0.5 * logits(1)
MU, THETA = logprobs(MU_TABLE), logprobs(THETA_TABLE)
REWARD = torch.tensor([float(sum(s) % 4 == 1) + 0.3 * s[0] for s in SEQUENCES], dtype=torch.float64)


def true_gradient():
    """d/d logits of E_theta[reward]."""
    table = THETA_TABLE.clone().requires_grad_()
    (logprobs(table).sum(1).exp() * REWARD).sum().backward()
    return table.grad


def expected_gradient(settings, baseline=0.0):
    """E over mu of minus the gradient of the loss, exactly: sequence s with its probability as advantage's factor.

    The denominator is a fixed one (27 sequences, sum over tokens), so the loss is linear in advantages of one sign.
    """
    config = CorrectionConfig(**settings, denominator={"kind": "sequence_sum"})
    probability = MU.sum(1).exp()
    batch = PackedBatch(
        token_ids=torch.tensor(SEQUENCES).flatten(), offsets=torch.arange(len(SEQUENCES) + 1) * STEPS,
        loss_mask=torch.ones(len(SEQUENCES) * STEPS, dtype=torch.bool), behavior_logprobs=MU.flatten(),
        advantages=((REWARD - baseline) * probability).repeat_interleave(STEPS),
        weight_versions=torch.zeros(len(SEQUENCES) * STEPS, dtype=torch.int32), group_ids=torch.zeros(len(SEQUENCES), dtype=torch.int64),
        proximal_logprobs=THETA.flatten(),
    ).validate()  # fmt: skip
    table = THETA_TABLE.clone().requires_grad_()
    out = policy_loss(correct(batch, config), logprobs(table).flatten(), config)
    out.loss.backward()
    return -table.grad * len(SEQUENCES), batch, config


SCORE = {"kind": "score", "ratio": None}
WEIGHTS = {"mode": "raw", "level": "sequence"}


def test_mean_ratio_is_one():
    probability, product = MU.sum(1).exp(), (THETA - MU).sum(1).exp()
    assert float((probability * product).sum()) == pytest.approx(1.0)
    for cap in (0.5, 1.0, 2.0, 5.0):
        assert float((probability * product.clamp(max=cap)).sum()) <= 1.0
    for step in range(STEPS):  # the product up to any step too
        partial = (THETA - MU)[:, : step + 1].sum(1).exp()
        assert float((probability * partial).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("baseline", [0.0, 0.4, -2.0])
def test_untruncated_sequence_product_is_unbiased(baseline):
    """With any constant baseline: the gradient of sum theta = 1 is 0."""
    for settings in (
        {"objective": SCORE, "importance": WEIGHTS},
        {"proximal": "behavior", "objective": SCORE, "importance": WEIGHTS},
        {"proximal": "behavior", "objective": {"kind": "score", "ratio": "q", "level": "sequence"}},
    ):
        gradient, _, _ = expected_gradient(settings, baseline)
        torch.testing.assert_close(gradient, true_gradient(), rtol=1e-9, atol=1e-12)


BIASED = [("truncate", "sequence"), ("mask", "sequence"), ("raw", "token"), ("truncate", "token"), ("raw", "geometric")]


@pytest.mark.parametrize(("mode", "level"), BIASED)
def test_bias_of_biased_estimators_is_what_the_sum_says(mode, level):
    """bias = sum over sequences of mu(s) R(s) sum over tokens of (w - prod rho) grad log theta, enumerated by hand."""
    cap = 1.2
    gradient, _, _ = expected_gradient({"objective": SCORE, "importance": {"mode": mode, "level": level, "upper": cap}})
    table = THETA_TABLE.clone().requires_grad_()
    log_theta = logprobs(table)
    total = torch.zeros((), dtype=torch.float64)
    for s in range(len(SEQUENCES)):
        ratios = [math.exp(float(x)) for x in (THETA - MU)[s]]
        product = math.prod(ratios)
        by_token = {"sequence": [product] * STEPS, "geometric": [product ** (1 / STEPS)] * STEPS, "token": ratios}[level]
        for t, ratio in enumerate(by_token):
            weight = {"raw": ratio, "truncate": min(ratio, cap), "mask": ratio if ratio <= cap else 0.0}[mode]
            total = total + float(MU[s].sum().exp()) * float(REWARD[s]) * (weight - product) * log_theta[s, t]
    total.backward()
    torch.testing.assert_close(gradient - true_gradient(), table.grad, rtol=1e-8, atol=1e-12)
    assert float(table.grad.abs().max()) > 1e-3  # biased indeed


def test_k1_and_k3_are_unbiased_for_the_kl():
    """Exact expectation of k1 and k3 of whole sequences is KL(mu || theta)."""
    probability, log_ratio = MU.sum(1).exp(), (THETA - MU).sum(1)
    exact = float((probability * -log_ratio).sum())
    assert float((probability * (log_ratio.exp() - 1 - log_ratio)).sum()) == pytest.approx(exact)
    _, batch, config = expected_gradient({"objective": SCORE})
    numbers = diagnose(batch, correct(batch, config))
    by_hand = [math.exp(x) - 1 - x for x in (THETA - MU).flatten().tolist()]
    assert numbers["k3_kl"] == pytest.approx(sum(by_hand) / len(by_hand))
    assert min(by_hand) >= 0


def kl_gradient(sampled_from, estimator):
    """E over the sampling policy of the penalty's gradient by itself, exactly: its weight is the share of a loss that is a sum."""
    coefficient = 1e-6 if estimator == "k1" else 1.0
    kl = {"coefficient": coefficient, "estimator": estimator}
    config = CorrectionConfig(preset="bypass", kl=kl, denominator={"kind": "sequence_sum"})
    total = torch.zeros_like(THETA_TABLE)
    for sequence, probability in zip(range(len(SEQUENCES)), sampled_from.sum(1).exp(), strict=True):
        batch = PackedBatch(
            token_ids=torch.tensor(SEQUENCES[sequence]), offsets=torch.tensor([0, STEPS]), loss_mask=torch.ones(STEPS, dtype=torch.bool),
            behavior_logprobs=sampled_from[sequence], advantages=torch.zeros(STEPS, dtype=torch.float64),
            weight_versions=torch.zeros(STEPS, dtype=torch.int32), group_ids=torch.zeros(1, dtype=torch.int64),
            reference_logprobs=MU[sequence],
        ).validate()  # fmt: skip
        table = THETA_TABLE.clone().requires_grad_()
        policy_loss(correct(batch, config), logprobs(table)[sequence], config).loss.backward()
        total += probability * table.grad / coefficient
    return total


def true_kl_gradient(of_states, *, reverse):
    """d/d logits of the KL at each state, with the states visited as the sampling policy does: what a sum over tokens estimates.

    reverse: KL(theta || reference); else KL(reference || theta).
    """
    table = THETA_TABLE.clone().requires_grad_()
    theta, reference = table.log_softmax(-1), MU_TABLE.log_softmax(-1)
    by_state = (theta.exp() * (theta - reference) if reverse else reference.exp() * (reference - theta)).sum(-1)
    probability = of_states.sum(1).exp()
    visited = sum(p * sum(by_state[t, s[t - 1] if t else 0] for t in range(STEPS)) for p, s in zip(probability, SEQUENCES, strict=True))
    visited.backward()
    return table.grad


def test_what_each_kl_penalty_pulls_to():
    """On-policy: k1 pulls nowhere, k2 has the gradient of KL(theta || reference), k3 that of KL(reference || theta). Off-policy (tokens
    of another policy than theta, here a third one) unbiased_k3 alone has that of KL(theta || reference)."""
    size = float(true_kl_gradient(THETA, reverse=True).abs().max())
    assert size > 0.05
    assert float(kl_gradient(THETA, "k1").abs().max()) < 1e-12
    torch.testing.assert_close(kl_gradient(THETA, "k2"), true_kl_gradient(THETA, reverse=True))
    torch.testing.assert_close(kl_gradient(THETA, "k3"), true_kl_gradient(THETA, reverse=False))
    other = logprobs(logits(5))
    torch.testing.assert_close(kl_gradient(other, "unbiased_k3"), true_kl_gradient(other, reverse=True))
    assert float((kl_gradient(other, "k2") - true_kl_gradient(other, reverse=True)).abs().max()) > 0.1 * size


def test_the_improvement_bound_holds_what_the_trust_region_paper_proves():
    """J(theta) - J(mu) = L' - Delta exactly (Theorem 3.1), and |Delta| is under the linear bound (B.3), which `diagnose` estimates.

    For the estimate each sequence is in the batch in proportion to its probability; to the rounding of 20,000 sequences it is the sum.
    """
    probability, ratio = MU.sum(1).exp(), (THETA - MU).exp()
    after = torch.stack([ratio[:, t + 1 :].prod(1) for t in range(STEPS)], 1)  # of the tokens after each one
    surrogate = float((probability * REWARD * (ratio - 1).sum(1)).sum())
    delta = float((probability * REWARD * ((ratio - 1) * (1 - after)).sum(1)).sum())
    gain = float((THETA.sum(1).exp() * REWARD).sum() - (probability * REWARD).sum())
    assert gain == pytest.approx(surrogate - delta, abs=1e-12)

    rows, theta = MU_TABLE.log_softmax(-1).exp(), THETA_TABLE.log_softmax(-1).exp()
    distance = [[0.5 * float((rows[t, last] - theta[t, last]).abs().sum()) for last in range(VOCABULARY)] for t in range(STEPS)]
    on_the_way = torch.tensor([sum(distance[t][s[t - 1] if t else 0] for t in range(STEPS)) for s in SEQUENCES], dtype=torch.float64)
    linear = 4 * float(REWARD.max()) * float((probability * on_the_way).sum())
    assert abs(delta) <= linear

    counts = (20_000 * probability).round().long()
    index = torch.repeat_interleave(torch.arange(len(SEQUENCES)), counts)
    n = len(index)
    batch = PackedBatch(
        token_ids=torch.tensor(SEQUENCES)[index].flatten(), offsets=torch.arange(n + 1) * STEPS,
        loss_mask=torch.ones(n * STEPS, dtype=torch.bool), behavior_logprobs=MU[index].flatten(),
        advantages=REWARD[index].repeat_interleave(STEPS), weight_versions=torch.zeros(n * STEPS, dtype=torch.int32),
        group_ids=torch.zeros(n, dtype=torch.int64),
    ).validate()  # fmt: skip
    numbers = diagnose(batch, correct(batch, CorrectionConfig(preset="bypass")), THETA[index].flatten())
    assert numbers["improvement_bound_linear"] == pytest.approx(linear, rel=2e-3)
