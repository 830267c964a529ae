"""Parts that no preset turns on: bounds by staleness, top-K gates, turns, modulation, advantages of unequal groups."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.correction import CorrectionConfig, correct, group_advantages, policy_loss
from tests.correction.fixtures import MU, PROX, THETA, flat_log, random_batch, worked_example

RHO = [p / m for a, b in zip(PROX, MU, strict=True) for p, m in zip(a, b, strict=True)]


def test_bounds_by_staleness_of_tokens_and_of_a_sequences_oldest_token():
    """Versions 5, 4, 3, 1 at learner version 5; bounds 2.0, 1.1, 1.05, and the last holds for all older tokens."""
    versions = torch.tensor([5, 4, 3, 1, 5, 4, 3, 5, 5], dtype=torch.int32)
    batch = worked_example(weight_versions=versions, learner_version=5)
    bounds = {"upper_by_staleness": [2.0, 1.1, 1.05]}
    table = [(2.0, 1.1, 1.05)[min(5 - v, 2)] for v in versions.tolist()]
    weights = correct(batch, CorrectionConfig(preset="tis-token", importance=bounds)).importance_weights
    assert weights.tolist() == pytest.approx([min(x, c) for x, c in zip(RHO, table, strict=True)], rel=1e-6)
    by_sequence = correct(batch, CorrectionConfig(preset="tis-sequence", importance=bounds)).importance_weights
    assert by_sequence[[0, 4, 7]].tolist() == pytest.approx([0.275, 1.05, 1.0098], rel=1e-6)
    keep = correct(batch, CorrectionConfig(rejection=[{"upper_by_staleness": [2.0, 1.1, 1.05], "lower": 0.0}])).keep_mask
    assert keep.tolist() == [x <= c for x, c in zip(RHO, table, strict=True)]


MU_OF_FIVE = [0.5, 0.2, 0.15, 0.1, 0.05]


def gradient_of_token_three(preset: str | dict[str, Any], theta: list[float], advantage: float = 1.0) -> float:
    """d loss / d log theta of the one sampled token, 3 of a vocabulary of 5, of which tokens 0 and 1 are the top K."""
    mu, now = (torch.tensor(p, dtype=torch.float64).log() for p in (MU_OF_FIVE, theta))
    batch = worked_example(
        token_ids=torch.tensor([3]), offsets=torch.tensor([0, 1]), loss_mask=torch.ones(1, dtype=torch.bool), behavior_logprobs=mu[3:4],
        proximal_logprobs=None, advantages=torch.tensor([advantage]).double(), weight_versions=torch.zeros(1, dtype=torch.int32),
        group_ids=torch.zeros(1, dtype=torch.int64), topk_ids=torch.tensor([[0, 1]]), topk_logprobs=mu[None, :2],
    )  # fmt: skip
    config = CorrectionConfig.model_validate({"preset": preset} if isinstance(preset, str) else preset)
    leaf = now[3:4].clone().requires_grad_()
    policy_loss(correct(batch, config), leaf, config, target_topk_logprobs=now[None, :2]).loss.backward()
    return float(leaf.grad)


def test_topk_kl_sees_what_the_binary_one_misses():
    """Top-K KL 0.089 is over 0.05, binary KL 0.011 is not; A > 0 and q = 1.5 moves out, A < 0 back in."""
    theta = [0.3, 0.3, 0.15, 0.15, 0.10]
    assert gradient_of_token_three("dppo-topk-kl", theta) == 0
    assert gradient_of_token_three("dppo-binary-kl", theta) == pytest.approx(-1.5)
    assert gradient_of_token_three("dppo-topk-kl", theta, -1.0) == pytest.approx(1.5)
    dropped = {"preset": "pg-is", "rejection": [{"statistic": "topk_tv", "ratio": "q", "upper": 0.15}]}
    assert gradient_of_token_three(dropped, theta) == 0  # top-K TV is 0.2


def test_topk_tv_sees_what_the_binary_one_misses():
    """(0.24 + 0.1 + 0.07 + 0.07) / 2 = 0.24 is over 0.2, the sampled token's 0.07 alone is not; without 0.06 of token 0's it is 0.18."""
    far, near = [0.26, 0.3, 0.15, 0.17, 0.12], [0.32, 0.24, 0.15, 0.17, 0.12]
    assert gradient_of_token_three("dppo-topk-tv", far) == 0
    assert gradient_of_token_three("dppo-binary-tv", far) == pytest.approx(-1.7)
    assert gradient_of_token_three("dppo-topk-tv", far, -1.0) == pytest.approx(1.7)
    assert gradient_of_token_three("dppo-topk-tv", near) == pytest.approx(-1.7)


def test_a_turn_is_rejected_alone():
    """Sequence A as two turns of two tokens: products 1.25 and 0.22."""
    batch = worked_example(turn_ids=torch.tensor([0, 0, 1, 1, 0, 0, 0, 0, 0], dtype=torch.int32))
    keep = correct(batch, CorrectionConfig(rejection=[{"level": "turn", "lower": 0.5, "upper": 10}])).keep_mask
    assert keep.tolist() == [True, True, False, False] + [True] * 5


def test_modulation_multiplies_after_everything_else():
    """delta = 2 under pi_prox 0.1 is token A3 alone; the published GSPO figure is per sequence -1.435646, 0.8, -0.5."""
    wide = {"clip_low": 0.2, "clip_high": 0.2}
    config = CorrectionConfig(preset="gspo", objective=wide, modulation={"probability_below": 0.1, "factor": 2.0})
    loss = policy_loss(correct(worked_example(), config), flat_log(THETA), config).loss
    by_hand = (-1.148517 * (3 + 2) / 4 + 0.8 - 0.5) / 3
    assert by_hand == pytest.approx(-0.378549, abs=1e-6)
    assert float(loss) == pytest.approx(by_hand, abs=1e-6)


def test_noise_has_mean_one_and_follows_its_seed():
    batch, _ = random_batch(0, sequences=4000)
    settings_ = {"preset": "ppo", "modulation": {"noise_std": 0.2, "noise_seed": 3}}
    weights = correct(batch, CorrectionConfig(**settings_)).importance_weights
    assert float(weights.mean()) == pytest.approx(1.0, abs=4 * 0.2 / math.sqrt(batch.num_tokens))
    assert float(weights.std()) == pytest.approx(0.2, rel=0.03)
    torch.testing.assert_close(weights, correct(batch, CorrectionConfig(**settings_)).importance_weights)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5)), min_size=1, max_size=30), st.sampled_from(["grpo", "grpo_no_std", "rloo"]))
def test_advantages_of_unequal_groups_in_any_order(rows, estimator):
    """Against plain Python, group by group; and they sum to 0 in each group."""
    groups, rewards = [g for g, _ in rows], [r for _, r in rows]
    measured = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), estimator=estimator).tolist()
    for g, r, a in zip(groups, rewards, measured, strict=True):
        members = [x for h, x in rows if h == g]
        n, centre = len(members), sum(members) / len(members)
        std = math.sqrt(sum((x - centre) ** 2 for x in members) / (n - 1)) if n > 1 else 1.0
        divisor = {"grpo": std + 1e-6, "grpo_no_std": 1.0, "rloo": (n - 1) / n if n > 1 else 1.0}[estimator]
        assert a == pytest.approx((r - centre) / divisor if n > 1 else 0.0, rel=1e-6, abs=1e-6)
    for g in set(groups):
        assert sum(a for h, a in zip(groups, measured, strict=True) if h == g) == pytest.approx(0.0, abs=1e-6)


def test_prompt_mean_weighs_groups_alike():
    """Groups {A, B} and {C}: (sum over 7 tokens / 7 + sum over 2 / 2) / 2."""
    config = CorrectionConfig(preset="ppo", denominator={"kind": "prompt_mean"})
    batch = worked_example(group_ids=torch.tensor([4, 4, 9]))
    loss = policy_loss(correct(batch, config), flat_log(THETA), config).loss
    base = [-1.1, -1.16, -1.2, -1 / 1.1, 0.8, 0.8, 0.8, -0.5, -0.5]
    assert float(loss) == pytest.approx((sum(base[:7]) / 7 + sum(base[7:]) / 2) / 2)
