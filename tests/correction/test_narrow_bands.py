"""What `evenkeel presets` says of the narrow geometric bands: the mean of log rho is -KL, so that they hold only what has hardly a gap."""

from __future__ import annotations

import math

import pytest
import torch

from evenkeel.correction import CorrectionConfig, PackedBatch, correct


def sampled(noise: float, sequences: int = 300, vocabulary: int = 64) -> PackedBatch:
    """Answers of 16 to 2048 tokens (log-uniform), each token drawn exactly from mu; prox has Gaussian noise on the logits."""
    generator = torch.Generator().manual_seed(0)
    lengths = (16 * 128 ** torch.rand(sequences, generator=generator)).long()
    count = int(lengths.sum())
    logits = 2 * torch.randn(count, vocabulary, generator=generator)
    mu = logits.log_softmax(1)
    prox = (logits + noise * torch.randn(count, vocabulary, generator=generator)).log_softmax(1)
    tokens = torch.multinomial(mu.exp(), 1, generator=generator)
    return PackedBatch(
        token_ids=tokens[:, 0], offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        loss_mask=torch.ones(count, dtype=torch.bool), behavior_logprobs=mu.gather(1, tokens)[:, 0],
        proximal_logprobs=prox.gather(1, tokens)[:, 0], advantages=torch.ones(count),
        weight_versions=torch.zeros(count, dtype=torch.int32), group_ids=torch.arange(sequences),
    )  # fmt: skip


def kept(batch: PackedBatch, preset: str) -> float:
    """Share of sequences that are left, whatever their weight."""
    return float(correct(batch, CorrectionConfig(preset=preset)).keep_mask[batch.offsets[:-1]].double().mean())


def test_geometric_bands_hold_what_hardly_differs() -> None:
    """Share of sequences kept at a k3 of 0.008: 3 in 100, where others keep all; most at 4e-5, where short ones scatter out."""
    far, near = sampled(0.137), sampled(0.01)
    log_rho = (far.proximal_logprobs - far.behavior_logprobs).double()  # type: ignore[operator]  # it has proximal logprobs
    k3 = float((torch.expm1(log_rho) - log_rho).mean())
    assert k3 == pytest.approx(0.008, rel=0.1) and float(log_rho.mean()) == pytest.approx(-k3, rel=0.1)
    assert kept(far, "mis-geometric") == pytest.approx(0.03, abs=0.02)
    assert kept(far, "seq-mask-tis") < 0.1
    assert 0.2 < kept(far, "mis-geometric-miles") < 0.6
    assert kept(far, "tis-token") == kept(far, "mis-full") == 1.0
    assert 0.6 < kept(near, "mis-geometric") < 0.8 < kept(near, "mis-geometric-miles")
    # At 4e-5 std(log rho) = 9e-3: answers of more than (9e-3 / 1e-3)^2 = 81 tokens are mostly kept, shorter ones mostly not.
    keep = correct(near, CorrectionConfig(preset="mis-geometric")).keep_mask[near.offsets[:-1]].double()
    std = math.sqrt(2 * 4e-5)
    long = near.lengths > 4 * (std / 1e-3) ** 2
    short = near.lengths < (std / 1e-3) ** 2 / 2
    assert keep[long].mean() > 0.9 and keep[short].mean() < 0.5
