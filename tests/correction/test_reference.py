"""correction/ against the token loops of reference.py: loss, gradient, weights and keep mask of every preset, on random ragged batches."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise, starmap
from typing import Any

import pytest
import torch

from evenkeel.correction import PRESETS, CorrectionConfig, PackedBatch, correct, policy_loss, policy_scale, settle
from evenkeel.correction.batch import CorrectedBatch
from tests.correction.reference import Method, Sequence, run
from tests.correction.reference_methods import METHODS, VARIANTS, kl_of_two

VOCABULARY, LISTED = 24, 3
SPREADS = (0.001, 0.1, 0.6, 2.0)
"""Standard deviation of the noise between the logits of two policies: at the first narrow bands keep something, at the last
minimal-mask blocks something."""


@dataclass(frozen=True)
class ReferenceCase:
    """A batch, and what the reference needs in addition."""

    batch: PackedBatch
    target: torch.Tensor
    """[N] log theta."""
    mu: torch.Tensor
    theta: torch.Tensor
    """[N, V] probabilities of the whole vocabulary."""

    def listed(self) -> torch.Tensor:
        """[N, K] log theta of the tokens that the sampler listed."""
        assert self.batch.topk_ids is not None
        return self.theta.gather(1, self.batch.topk_ids).log()

    def sequences(self, leaf: torch.Tensor) -> list[Sequence]:
        """The same as plain numbers; log theta are the entries of the leaf."""
        scalars, advantages = leaf.unbind(), self.batch.advantages.tolist()
        owns = starmap(slice, pairwise(self.batch.offsets.tolist()))
        return [
            Sequence(
                **{name: values[own] for name, values in self._columns.items()},
                log_theta=list(scalars[own]),
                advantage=advantages[own.start],
                group=group,
                rollout=rollout,
                version=self.batch.learner_version,
            )
            for group, rollout, own in zip(self.batch.group_ids.tolist(), self.batch.rollout_ids.tolist(), owns, strict=True)
        ]

    @cached_property
    def _columns(self) -> dict[str, list[Any]]:
        """What a Sequence has of each of its tokens, here of all."""
        batch = self.batch
        return {
            "mu": batch.behavior_logprobs.tolist(),
            "prox": batch.proximal_logprobs.tolist(),
            "reference": batch.reference_logprobs.tolist(),
            "then": batch.at_sampling_logprobs.tolist(),
            "mask": batch.loss_mask.tolist(),
            "age": (batch.learner_version - batch.weight_versions).tolist(),
            "tokens": batch.token_ids.tolist(),
            "vocabulary_mu": self.mu.tolist(),
            "vocabulary_theta": self.theta.tolist(),
            "listed": batch.topk_ids.tolist(),
        }


@cache
def ragged(spread: float, seed: int) -> ReferenceCase:
    """Prompts, holes in the mask, advantages of both signs and 0, a sequence without any trained token, groups of unequal size; tokens of
    the present weights, of two earlier versions that are kept, and of one that isn't."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [rng.randint(2, 9) for _ in range(11)]
    count, offsets = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)

    def noise() -> torch.Tensor:
        return spread * torch.randn(count, VOCABULARY, generator=generator, dtype=torch.float64)

    logits = 2.5 * torch.randn(count, VOCABULARY, generator=generator, dtype=torch.float64)
    mu, prox = logits.log_softmax(1), (logits + noise()).log_softmax(1)
    theta, reference = (logits + 1.4 * noise()).log_softmax(1), (logits + noise()).log_softmax(1)
    tokens = torch.multinomial(mu.exp(), 1, generator=generator)
    listed = mu.topk(LISTED, dim=1).indices
    mask = torch.rand(count, generator=generator) < 0.8
    mask[offsets[:-1]] = False  # prompts
    mask[offsets[1:] - 1] = True
    mask[: lengths[0]] = False
    advantages = [0.0, *(rng.choice((-1.0, 1.0)) * rng.uniform(0.2, 2.0) for _ in range(9)), 0.0]
    batch = PackedBatch(
        token_ids=tokens[:, 0],
        offsets=offsets,
        loss_mask=mask,
        behavior_logprobs=mu.gather(1, tokens)[:, 0],
        proximal_logprobs=prox.gather(1, tokens)[:, 0],
        reference_logprobs=reference.gather(1, tokens)[:, 0],
        advantages=torch.repeat_interleave(torch.tensor(advantages, dtype=torch.float64), torch.tensor(lengths)),
        weight_versions=torch.randint(3, 7, (count,), generator=generator, dtype=torch.int32),
        learner_version=6,
        group_ids=torch.tensor([0, 0, 0, 1, 1, 5, 5, 5, 5, 2, 2]),
        rollout_ids=torch.tensor([0, 1, 1, 2, 3, 7, 4, 7, 7, 6, 6]),
        topk_ids=listed,
        topk_logprobs=mu.gather(1, listed),
    )
    unknown = (batch.weight_versions == batch.learner_version) | (batch.weight_versions == 3)
    then = (logits + noise()).log_softmax(1).gather(1, tokens)[:, 0]
    batch = replace(batch, at_sampling_logprobs=torch.where(unknown, torch.nan, then))
    return ReferenceCase(batch.validate(), theta.gather(1, tokens)[:, 0], mu.exp(), theta.exp())


RATIOS_UNDER_1 = (1e-4, 0.2, 0.5, math.exp(-0.4), 0.8, math.exp(-0.1), 0.99, 0.999, 1 - 3e-4)
RATIOS = (*RATIOS_UNDER_1, 1 + 4e-4, 1.001, 1.002, 1.2, 1.27, 1.28, math.exp(0.4), 1.5, 2.0, 3.0, 4.0, 5.0)
"""Bounds of ratios that presets have."""
K3_BOUND = 0.01
GAPS, DIVERGENCES = (0.1, 0.15, 0.2, 0.5), (0.05, 0.1)
"""Bounds of |p - p'|, and of a binary KL."""


@cache
def at_the_bounds() -> ReferenceCase:
    """Sequences of one token, just under and over each bound, as rho and q (r = 1) or as r and q (rho = 1), with both signs of A.

    So a bound that is 1% off (of its logarithm, if it is one of ratios) decides otherwise about some token, at every level.
    """
    pairs = []
    for bound in RATIOS:
        for x in (bound**0.99, bound**1.01):
            base = min(0.3, 0.5 / x)
            pairs += [(base, base * x)] + [(0.05, 0.05 * x)] * (bound in (0.8, 1.28))  # rare ones, where clips are relaxed
    for gap in GAPS:
        pairs += [(p, p + sign * gap * edge) for p, sign in ((0.3, 1), (0.7, -1)) for edge in (0.99, 1.01)]
    for bound in DIVERGENCES:
        pairs += [(0.3, divergent(0.3, bound * edge, end, way)) for end in (1e-9, 1 - 1e-9) for edge in (0.99, 1.01) for way in (0, 1)]
    pairs += [(0.3, 0.3 * k3_ratio(K3_BOUND * edge, end)) for end in (1e-9, 3.0) for edge in (0.99, 1.01)]
    rows = [(mu, prox, theta, a) for p, x in pairs for mu, prox, theta in ((p, x, x), (p, p, x)) for a in (1.0, -1.0)]
    mu, prox, theta, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    count = len(rows)
    batch = PackedBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        offsets=torch.arange(count + 1),
        loss_mask=torch.ones(count, dtype=torch.bool),
        behavior_logprobs=mu.log(),
        proximal_logprobs=prox.log(),
        reference_logprobs=mu.log() - 0.1,
        advantages=advantages,
        weight_versions=torch.zeros(count, dtype=torch.int32),
        group_ids=torch.arange(count) // 5,
        rollout_ids=torch.arange(count) // 2,
        topk_ids=torch.zeros(count, 1, dtype=torch.int64),
        topk_logprobs=mu.log()[:, None],
        at_sampling_logprobs=torch.full((count,), torch.nan, dtype=torch.float64),
    )
    return ReferenceCase(batch.validate(), theta.log(), torch.stack([mu, 1 - mu], 1), torch.stack([theta, 1 - theta], 1))


def divergent(p: float, value: float, end: float, way: int) -> float:
    """The probability between p and `end` whose binary KL with p is `value`; way 0: from p to it, 1: from it to p."""
    near, far = p, end
    for _ in range(100):
        x = (near + far) / 2
        kl = kl_of_two(p, x) if way == 0 else kl_of_two(x, p)
        near, far = (x, far) if kl < value else (near, x)
    return near


def k3_ratio(value: float, end: float) -> float:
    """The ratio x between 1 and `end` with x - 1 - log x = value."""
    near, far = 1.0, end
    for _ in range(100):
        x = (near + far) / 2
        near, far = (x, far) if x - 1 - math.log(x) < value else (near, x)
    return near


def examples() -> list[ReferenceCase]:
    return [*(ragged(spread, seed) for seed, spread in enumerate(SPREADS)), at_the_bounds()]


def gradient_of_parts(corrected: CorrectedBatch, target: torch.Tensor, listed: torch.Tensor, config: CorrectionConfig, parts):
    """(loss, gradient, policy loss of the last part) added up over micro-batches, with the late global factor on both."""
    leaf = target.clone().requires_grad_()
    loss, partials, out = 0.0, 0, None
    for part in parts:
        index = corrected.batch.token_index(part)
        out = policy_loss(corrected.select(part), leaf[index], config, target_topk_logprobs=listed[index])
        out.loss.backward()
        loss, partials = loss + out.loss.item(), partials + out.partials
    scale = policy_scale(partials, config)
    return loss * scale, leaf.grad * scale, out


def compare(settings: dict, method: Method, example: ReferenceCase) -> int:
    """Tokens that have a gradient, after comparing everything."""
    batch, target, listed = example.batch, example.target, example.listed()
    leaf = target.clone().requires_grad_()
    expected = run(method, example.sequences(leaf))
    if expected.loss.requires_grad:
        expected.loss.backward()
    gradient = torch.zeros_like(target) if leaf.grad is None else leaf.grad
    config = CorrectionConfig.model_validate(settings)
    corrected = settle(correct(batch, config), target, config)
    everything = list(range(batch.num_sequences))
    loss, measured, out = gradient_of_parts(corrected, target, listed, config, [everything])
    scale = policy_scale(out.partials, config)
    mask = batch.loss_mask
    assert out.decided.keep_mask.tolist() == expected.keep
    weights = torch.tensor(expected.weights, dtype=torch.float64)
    late_factor = scale if method.normalize else 1.0
    torch.testing.assert_close(out.decided.importance_weights[mask] * late_factor, weights[mask], rtol=1e-10, atol=1e-12)
    assert loss == pytest.approx(float(expected.loss.detach()), rel=1e-10, abs=1e-13)
    size = float(gradient.abs().max())
    torch.testing.assert_close(measured, gradient, rtol=1e-9, atol=1e-13 + 1e-12 * size)
    if "prompt" not in method.mean or not method.counts_kept:
        split = gradient_of_parts(corrected, target, listed, config, [everything[7::-2], everything[0:8:2], everything[8:]])
        torch.testing.assert_close(split[1], gradient, rtol=1e-9, atol=1e-13 + 1e-12 * size)
        assert split[0] == pytest.approx(loss, rel=1e-10, abs=1e-13)
    return int((gradient[mask] != 0).sum())


CASES = [*(({"preset": name}, method) for name, method in METHODS.items()), *VARIANTS]


def test_every_preset_has_a_reference() -> None:
    assert set(METHODS) == set(PRESETS)


@pytest.mark.parametrize(("settings", "method"), CASES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_loss_gradient_weights_and_mask(settings: dict, method: Method) -> None:
    moved = [compare(settings, method, example) for example in examples()]
    assert sum(moved) > 0, "no token has a gradient: nothing was compared"


BLOCKING = ("minimal-mask", "grpo-relax-both", "grpo-clip-higher", "dppo-binary-kl-scale", "dppo-topk-tv", "mis-token-upper", "kpop")


@pytest.mark.parametrize("preset", BLOCKING)
def test_the_batches_reach_what_a_preset_blocks(preset: str) -> None:
    """On some batch a token of non-zero advantage has no gradient, on some batch others have one."""
    shares = []
    for example in examples():
        batch = example.batch
        leaf = example.target.clone().requires_grad_()
        loss = run(METHODS[preset], example.sequences(leaf)).loss
        if loss.requires_grad:
            loss.backward()
        looked_at = batch.loss_mask & (batch.advantages != 0)
        shares.append(0.0 if leaf.grad is None else float((leaf.grad[looked_at] != 0).double().mean()))
    assert min(shares) < 1 and max(shares) > 0.2
