"""correction/ against the token loops of reference.py: loss, gradient, weights and keep mask of every preset, on random ragged batches."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from correction import PRESETS, CorrectionConfig, PackedBatch, correct, policy_loss, policy_scale
from correction.batch import CorrectedBatch
from tests.correction.reference import METHODS, VARIANTS, Method, Sequence, run

VOCABULARY, LISTED = 24, 3
SPREADS = (0.001, 0.1, 0.6, 2.0)
"""Standard deviation of the noise between the logits of two policies: at the first narrow bands keep something, at the last
minimal-mask blocks something."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:correction. every token"),
    pytest.mark.filterwarnings("ignore:kl.estimator"),
]


@cache
def example(spread: float, seed: int) -> tuple[PackedBatch, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(batch, log theta of the tokens, tables of mu, tables of theta [N, V], log theta of the listed tokens): prompts, holes in the mask,
    advantages of both signs and 0, a sequence without any trained token, groups of unequal size."""
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
        topk_ids=listed,
        topk_logprobs=mu.gather(1, listed),
    )
    return batch.validate(), theta.gather(1, tokens)[:, 0], mu.exp(), theta.exp(), theta.gather(1, listed)


def sequences(spread: float, seed: int, leaf: torch.Tensor) -> list[Sequence]:
    """The same as plain numbers; log theta are the entries of the leaf."""
    batch, _, mu, theta, _ = example(spread, seed)
    scalars = leaf.unbind()
    found = []
    for i in range(batch.num_sequences):
        own = slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
        found.append(
            Sequence(
                mu=batch.behavior_logprobs[own].tolist(),
                prox=batch.proximal_logprobs[own].tolist(),
                reference=batch.reference_logprobs[own].tolist(),
                log_theta=list(scalars[own]),
                advantage=float(batch.advantages[own][0]),
                mask=batch.loss_mask[own].tolist(),
                age=[6 - version for version in batch.weight_versions[own].tolist()],
                group=int(batch.group_ids[i]),
                tokens=batch.token_ids[own].tolist(),
                vocabulary_mu=mu[own].tolist(),
                vocabulary_theta=theta[own].tolist(),
                listed=batch.topk_ids[own].tolist(),
            )
        )
    return found


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


def compare(settings: dict, method: Method, spread: float, seed: int) -> tuple[int, int]:
    """(kept tokens that have a gradient, those of the mask) after comparing everything."""
    batch, target, _, _, listed = example(spread, seed)
    leaf = target.clone().requires_grad_()
    expected = run(method, sequences(spread, seed, leaf))
    if expected.loss.requires_grad:
        expected.loss.backward()
    gradient = torch.zeros_like(target) if leaf.grad is None else leaf.grad
    config = CorrectionConfig.model_validate(settings)
    corrected = correct(batch, config)
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
        split = gradient_of_parts(corrected, target, listed, config, [[7, 0, 3], [5, 1], [2, 4, 6, 8, 9, 10]])
        torch.testing.assert_close(split[1], gradient, rtol=1e-9, atol=1e-13 + 1e-12 * size)
        assert split[0] == pytest.approx(loss, rel=1e-10, abs=1e-13)
    return int((gradient[mask] != 0).sum()), int(mask.sum())


CASES = [*(({"preset": name}, method) for name, method in METHODS.items()), *VARIANTS]


def test_every_preset_has_a_reference() -> None:
    assert set(METHODS) == set(PRESETS)


@pytest.mark.parametrize(("settings", "method"), CASES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_loss_gradient_weights_and_mask(settings: dict, method: Method) -> None:
    moved = [compare(settings, method, spread, seed) for seed, spread in enumerate(SPREADS)]
    assert sum(count for count, _ in moved) > 0, "no token has a gradient: nothing was compared"


BLOCKING = ("minimal-mask", "grpo-relax-both", "grpo-clip-higher", "dppo-binary-kl-scale", "dppo-topk-tv", "mis-token-upper", "kpop")


@pytest.mark.parametrize("preset", BLOCKING)
def test_the_batches_reach_what_a_preset_blocks(preset: str) -> None:
    """On some batch a token of non-zero advantage has no gradient, on some batch others have one."""
    shares = []
    for seed, spread in enumerate(SPREADS):
        batch, target, *_ = example(spread, seed)
        leaf = target.clone().requires_grad_()
        loss = run(METHODS[preset], sequences(spread, seed, leaf)).loss
        if loss.requires_grad:
            loss.backward()
        looked_at = batch.loss_mask & (batch.advantages != 0)
        shares.append(0.0 if leaf.grad is None else float((leaf.grad[looked_at] != 0).double().mean()))
    assert min(shares) < 1 and max(shares) > 0.2
