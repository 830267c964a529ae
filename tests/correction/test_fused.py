"""The fused way (decided in the training forward, in micro-batches) and the staged way give the same gradient."""

from dataclasses import replace

import pytest
import torch

from evenkeel.correction import (
    PARTIALS,
    PRESETS,
    CorrectionConfig,
    correct,
    defer,
    loss_metrics,
    needs_proximal_forward,
    policy_loss,
    policy_scale,
)
from evenkeel.correction.settings.choices import Level
from evenkeel.correction.terms.segments import Levels
from tests.correction.fixtures import random_batch

VARIANTS = [
    {"preset": "mis-full", "normalize": {"population": "kept"}},
    {"preset": "mis-full", "denominator": {"count": "kept"}},
    {"preset": "mis-full", "importance": {"level": "sequence"}},
    {"preset": "mis-full", "importance": {"level": "turn"}},
    {"preset": "mis-full", "importance": {"level": "geometric"}},
    {"preset": "mis-sequence", "denominator": {"kind": "sequence_mean", "count": "kept"}},
    {"preset": "mis-sequence", "denominator": {"kind": "sequence_sum", "count": "kept"}},
    {"preset": "mis-sequence", "denominator": {"kind": "constant", "count": "kept", "constant": 7}},
    {"preset": "mis-token", "importance": {"upper_by_staleness": [2.0, 1.3, 1.1]}},
    {"preset": "mis-token", "modulation": {"probability_below": 0.2, "noise_std": 0.2}},
    {"preset": "tis-token", "veto": {"quantity": "probability", "lower": 0.06}},
    {"preset": "grpo", "kl": {"coefficient": 0.1, "estimator": "unbiased_k3"}},
    {"preset": "tis-token", "kl": {"coefficient": 0.1, "anchor": "behavior", "estimator": "k2"}},
]


def gradient(corrected, target, config, parts):
    """Gradient of the batch's loss, accumulated over micro-batches, with the factor folded in; and the summed partials."""
    leaf = target.clone().requires_grad_()
    partials = 0
    for sequences in parts:
        micro = corrected.select(sequences)
        out = policy_loss(micro, leaf[corrected.batch.token_index(sequences)], config)
        out.loss.backward()
        partials = partials + out.partials
    return leaf.grad * policy_scale(partials, config), partials


FUSABLE = [
    {"preset": name}
    for name in PRESETS
    if needs_proximal_forward(CorrectionConfig(preset=name), 2) and not needs_proximal_forward(CorrectionConfig(preset=name), 1)
]
NARROW = ("mis-geometric", "mis-geometric-miles", "seq-mask-tis")


@pytest.mark.parametrize("settings", [*FUSABLE, *VARIANTS], ids=str)
def test_fused_gradient_is_the_staged_one(settings):
    config = CorrectionConfig(**settings)
    for seed in range(3):
        batch, target = random_batch(seed, spread=0.002 if settings["preset"] in NARROW else 0.3)
        staged = correct(replace(batch, proximal_logprobs=target), config)  # one optimizer step: proximal = target before it
        fused = defer(replace(batch, proximal_logprobs=None), config)
        assert fused.is_deferred
        assert bool(staged.keep_mask.any())
        whole, whole_partials = gradient(staged, target, config, [range(batch.num_sequences)])
        split, split_partials = gradient(fused, target, config, [[5, 0, 3], [1], [2, 4, 6, 7], list(range(8, batch.num_sequences))])
        torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-9 * float(whole.abs().max()))
        loss, expected = loss_metrics(split_partials, config)["loss"], loss_metrics(whole_partials, config)["loss"]
        assert loss == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_what_is_no_single_factor_needs_the_forward():
    apart = {name for name in PRESETS if needs_proximal_forward(CorrectionConfig(preset=name), 1)}
    assert apart == {"m2po", "m2po-areal", "clip-cov", "kl-cov"}
    assert needs_proximal_forward(CorrectionConfig(preset="m2po"), 1) and needs_proximal_forward(CorrectionConfig(preset="m2po-areal"), 1)
    assert needs_proximal_forward(CorrectionConfig(preset="mis-full", kl={"coefficient": 0.01}), 1)
    assert needs_proximal_forward(CorrectionConfig(preset="mis-token", denominator={"kind": "prompt_mean", "count": "kept"}), 1)
    assert needs_proximal_forward(CorrectionConfig(preset="mis-full"), 1, has_auxiliary_loss=True)
    assert not needs_proximal_forward(CorrectionConfig(preset="mis-full"), 1)
    assert needs_proximal_forward(CorrectionConfig(preset="mis-full"), 2)
    assert not needs_proximal_forward(CorrectionConfig(preset="bypass"), 2)
    assert not needs_proximal_forward(CorrectionConfig(preset="a-3po"), 2)


MEAN_KNOWN_LATE = {"preset": "mis-full", "importance": {"level": "sequence"}, "normalize": {"population": "kept"},
                   "rejection": [{"ratio": "q", "level": "token", "lower": 0.5, "upper": 2.0}]}  # fmt: skip
"""Weights on rho are settled early, and a criterion on q says which of them are averaged."""


@pytest.mark.parametrize("level", ["token", "turn", "sequence", "geometric"])
@pytest.mark.parametrize("modulation", [{}, {"probability_below": 0.2, "noise_std": 0.2}], ids=["plain", "modulated"])
def test_the_late_mean_is_of_the_weights_that_were_decided_early(level, modulation):
    """Injected distortions are no part of it, and neither is what a token's logprob of the training forward would make of its unit's."""
    settings = MEAN_KNOWN_LATE | {"importance": {"level": level}}
    config, plain = CorrectionConfig(**settings, modulation=modulation), CorrectionConfig(**settings)
    for seed in range(3):
        batch, target = random_batch(seed, sequences=30)
        broken = target.clone()
        broken[batch.offsets[1:4] - 1] = torch.nan  # the last token of each sequence is trained
        weights = correct(batch, plain).importance_weights
        corrected = correct(batch, config)
        out = policy_loss(corrected.select(range(batch.num_sequences)), broken, config)
        keep = out.decided.keep_mask
        assert 0 < int(keep.sum()) < int(batch.loss_mask.sum())
        units = Levels(batch).at(Level(level))
        kept = units.any(keep)
        found = dict(zip(PARTIALS, out.partials.tolist(), strict=True))
        assert found["normalizer_units"] == int(kept.sum())
        assert found["normalizer_weight"] == pytest.approx(float(units.maximum(weights)[kept].sum()), rel=1e-12)
