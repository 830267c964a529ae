"""Gates and relaxed clips at their edges: whose advantage they look at, what happens at the bound itself, which tokens are rare."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evenkeel.correction import CorrectionConfig, PackedBatch, correct, loss_metrics, policy_loss
from evenkeel.correction.terms.objectives import clip_gate, clipped_loss, divergence_gate, relaxed_clip


def gradients(settings: dict[str, Any], rows: list[tuple[float, float, float, float]]) -> list[float]:
    """d loss / d log theta of tokens (mu, prox, theta, A), each a sequence of its own; times their number, so that it is -c A."""
    mu, prox, theta, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    count = len(rows)
    batch = PackedBatch(
        token_ids=torch.arange(count), offsets=torch.arange(count + 1), loss_mask=torch.ones(count, dtype=torch.bool),
        behavior_logprobs=mu.log(), proximal_logprobs=prox.log(), advantages=advantages,
        weight_versions=torch.zeros(count, dtype=torch.int32), group_ids=torch.arange(count),
    )  # fmt: skip
    config = CorrectionConfig.model_validate(settings)
    leaf = theta.log().requires_grad_()
    policy_loss(correct(batch, config), leaf, config).loss.backward()
    assert leaf.grad is not None
    return (count * leaf.grad).tolist()


# mu, prox, theta, A: mu 1 -> theta 1/2 is exactly 0.5 in floating point.
AT_THE_BOUND = (1.0, 1.0, 0.5, -1.0)
FURTHER, NEARER = (0.9, 0.9, 0.3, -1.0), (0.9, 0.9, 0.5, -1.0)
UPWARDS, BACK = (0.2, 0.2, 0.8, 1.0), (0.2, 0.2, 0.8, -1.0)


def test_minimal_mask_blocks_what_pushes_likely_tokens_down_by_half() -> None:
    """M = 0 if A < 0 and mu - theta >= 0.5, nothing else: neither A > 0, nor a token that moves back (mu 0.2 -> 0.8 with A < 0)."""
    rows = [AT_THE_BOUND, FURTHER, NEARER, UPWARDS, BACK]
    assert gradients({"preset": "minimal-mask"}, rows) == pytest.approx([0, 0, 5 / 9, -4, 4])
    strict = {"preset": "minimal-mask", "objective": {"gate": {"is_open": False}}}
    assert gradients(strict, rows) == pytest.approx([0.5, 0, 5 / 9, -4, 4])
    loose = {"preset": "minimal-mask", "objective": {"gate": {"threshold": 0.8}}}
    assert gradients(loose, rows) == pytest.approx([0.5, 1 / 3, 5 / 9, -4, 4])
    both = {"preset": "minimal-mask", "objective": {"gate": {"side": "any"}}}
    assert gradients(both, rows) == pytest.approx([0, 0, 5 / 9, 0, 4])
    positive = {"preset": "minimal-mask", "objective": {"gate": {"side": "positive"}}}
    assert gradients(positive, rows) == pytest.approx([0.5, 1 / 3, 5 / 9, 0, 4])


def test_minimal_mask_on_the_recomputed_policy_looks_at_another_gap() -> None:
    """ "Mask-0.5-Recompute": prox 0.6 -> theta 0.3 is 0.3 only, while mu 0.9 -> 0.3 is 0.6; and the other way round."""
    rows = [(0.9, 0.6, 0.3, -1.0), (0.6, 0.9, 0.3, -1.0)]
    recompute = {"preset": "minimal-mask", "proximal": "recompute", "objective": {"gate": {"ratio": "r"}}}
    assert gradients({"preset": "minimal-mask"}, rows) == pytest.approx([0, 0.5])
    assert gradients(recompute, rows) == pytest.approx([1 / 3, 0])


def test_clip_gate_at_its_bound_and_by_side() -> None:
    """Ratios 2 and 0.5 are exactly at the bounds 1 + 1 and 1 - 0.5; neither sign of the advantage is touched by the other's gate."""
    log_ratio, advantages = torch.tensor([2.0, 0.5, 2.5, 0.25]).double().log(), torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert clip_gate(log_ratio, advantages, low=0.5, high=1.0).tolist() == [True, True, False, False]
    assert clip_gate(log_ratio, advantages, low=0.5, high=1.0, is_open=True).tolist() == [False] * 4
    divergence = torch.tensor([0.5, 0.5, 0.6, 0.4])
    assert divergence_gate(divergence, log_ratio, advantages, threshold=0.5).tolist() == [True, True, False, True]
    assert divergence_gate(divergence, log_ratio, advantages, threshold=0.5, is_open=True).tolist() == [False, False, False, True]
    rows = [(0.2, 0.2, 0.4, 1.0), (0.4, 0.4, 0.2, -1.0)]
    assert gradients({"preset": "grpo-clip-higher", "objective": {"gate": {"side": "negative"}}}, rows) == pytest.approx([-2, 0])
    assert gradients({"preset": "grpo-clip-higher", "objective": {"gate": {"side": "positive"}}}, rows) == pytest.approx([0, 0.5])


@pytest.mark.parametrize(
    ("ends", "rare_ones_move"), [(None, (False, False)), ("low", (False, True)), ("high", (True, False)), ("both", (True, True))]
)
@pytest.mark.parametrize("form", ["gate", "clip"])
def test_rare_tokens_are_not_clipped_at_the_relaxed_ends(form: str, ends: str | None, rare_ones_move: tuple[bool, bool]) -> None:
    """mu 0.05 up and down by the factor 2 moves where its end is relaxed, mu 0.2 never. PPO's form and the gated score agree."""
    rows = [(0.05, 0.05, 0.1, 1.0), (0.05, 0.05, 0.025, -1.0), (0.2, 0.2, 0.4, 1.0), (0.2, 0.2, 0.1, -1.0)]
    relax = None if ends is None else {"below": 0.1, "ends": ends}
    if form == "gate":
        settings: dict[str, Any] = {"preset": "grpo-clip-higher", "objective": {"gate": {"relax": relax}}}
    else:
        settings = {"preset": "bypass", "objective": {"clip_high": 0.28, "relax": relax}}
    up, down = rare_ones_move
    assert gradients(settings, rows) == pytest.approx([-2.0 * up, 0.5 * down, 0, 0])


def test_a_token_at_the_border_is_not_rare_and_dual_clip_holds_for_rare_ones() -> None:
    behavior = torch.tensor([0.25, 0.2499]).double().log()
    low, high = relaxed_clip(behavior, 0.2, 0.28, below=0.25, ends="both")
    assert low.tolist() == pytest.approx([0.2, math.inf]) and high.tolist() == pytest.approx([0.28, math.inf])
    log_ratio = torch.tensor([1e6, 1e6]).double().log().requires_grad_()  # 13.8 nats
    loss, is_clipped = clipped_loss(log_ratio, torch.tensor([1.0, -1.0]).double(), clip_low=low, clip_high=high, dual_clip=3.0)
    assert loss.tolist() == pytest.approx([-1.28, 3.0]) and is_clipped.tolist() == [True, True]
    free, is_clipped = clipped_loss(log_ratio, torch.tensor([1.0, 1.0]).double(), clip_low=low, clip_high=high)
    assert free.tolist() == pytest.approx([-1.28, -1e6]) and is_clipped.tolist() == [True, False]
    free.sum().backward()
    assert log_ratio.grad is not None and log_ratio.grad.tolist() == pytest.approx([0, -1e6])


def test_what_is_relaxed_is_not_counted_as_clipped() -> None:
    mu, theta = torch.tensor([0.05, 0.2]).double().log(), torch.tensor([0.1, 0.4]).double().log()
    batch = PackedBatch(
        token_ids=torch.arange(2), offsets=torch.tensor([0, 2]), loss_mask=torch.ones(2, dtype=torch.bool), behavior_logprobs=mu,
        advantages=torch.ones(2).double(), weight_versions=torch.zeros(2, dtype=torch.int32), group_ids=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    shares = {}
    for name in ("grpo-clip-higher", "grpo-relax-both"):
        config = CorrectionConfig(preset=name)
        shares[name] = loss_metrics(policy_loss(correct(batch, config), theta, config).partials, config)["clip_share"]
    assert shares == {"grpo-clip-higher": 1.0, "grpo-relax-both": 0.5}
