"""What must not break: empty, single, masked, vetoed, huge ratios, probabilities 0 and 1, not-a-number, a million tokens."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from evenkeel.correction import (
    PRESETS,
    CorrectionConfig,
    DataError,
    PackedBatch,
    correct,
    defer,
    diagnose,
    loss_metrics,
    policy_loss,
    policy_scale,
    settle,
)
from evenkeel.correction.settings.schedule import policies_read
from tests.correction.fixtures import THETA, flat_log, random_batch, worked_example
from tests.correction.test_properties import NAMES

NAN, INF = float("nan"), float("inf")


def step(batch, target, config):
    leaf = target.clone().requires_grad_()
    corrected = settle(correct(batch, config), target, config)
    out = policy_loss(corrected, leaf, config)
    out.loss.backward()
    out = replace(out, loss=out.loss.detach())
    numbers = diagnose(batch, corrected, target, decided=out.decided, detailed=True)
    assert all(math.isfinite(value) for value in numbers.values()), numbers
    assert all(math.isfinite(value) for value in loss_metrics(out.partials, config).values())
    return corrected, out, leaf.grad


def tiny(lengths, *, mu=-1.0, mask=True, dtype=torch.float32):
    n = sum(lengths)
    return PackedBatch(
        token_ids=torch.zeros(n, dtype=torch.int64), offsets=torch.tensor([0, *lengths]).cumsum(0),
        loss_mask=torch.full((n,), mask), behavior_logprobs=torch.full((n,), mu, dtype=dtype), advantages=torch.ones(n, dtype=dtype),
        weight_versions=torch.zeros(n, dtype=torch.int32), group_ids=torch.arange(len(lengths)),
        proximal_logprobs=torch.full((n,), mu, dtype=dtype), at_sampling_logprobs=torch.full((n,), torch.nan, dtype=dtype),
        advantages_by="own",
    ).validate()  # fmt: skip


@pytest.mark.parametrize("preset", NAMES)
def test_empty_short_and_fully_masked(preset):
    config = CorrectionConfig(preset=preset)
    for lengths, mask in itertools.product(([], [0], [1], [0, 3, 0, 1, 0]), (True, False)):
        batch = tiny(lengths, mask=mask)
        _, out, grad = step(batch, batch.behavior_logprobs, config)
        assert grad.isfinite().all() and math.isfinite(float(out.loss)), (lengths, mask)
        if not mask or sum(lengths) == 0:
            assert float(out.loss) == 0 and not grad.any(), (lengths, mask)


@pytest.mark.parametrize("way", [correct, defer])
def test_everything_vetoed_is_zero_loss_without_nan(way):
    config = CorrectionConfig(preset="mis-full", veto={"lower": 10.0}, denominator={"count": "kept"})
    batch = worked_example()
    if way is correct:
        with pytest.warns(UserWarning, match="every token of the batch was rejected"):
            corrected = way(batch, config)
    else:
        corrected = way(batch, config)
    leaf = batch.proximal_logprobs.clone().requires_grad_()
    out = policy_loss(corrected, leaf, config)
    out.loss.backward()
    assert float(out.loss.detach()) == 0 and not leaf.grad.any() and math.isfinite(policy_scale(out.partials, config))
    assert diagnose(batch, corrected, leaf, decided=out.decided)["kept_share"] == 0


@pytest.mark.parametrize("preset", NAMES)
def test_ratios_of_e_to_the_60_stay_finite(preset):
    """Products over a sequence reach e^300 and e^-300 here."""
    batch, _ = random_batch(5)
    batch = replace(batch, behavior_logprobs=batch.behavior_logprobs.float() - 61, advantages=batch.advantages.float())
    for jump in (60.0, -60.0):
        moved = replace(batch, proximal_logprobs=batch.behavior_logprobs + jump)
        _, _, grad = step(moved, (batch.behavior_logprobs + jump).float(), CorrectionConfig(preset=preset))
        assert grad.isfinite().all(), jump


@pytest.mark.parametrize("preset", NAMES)
def test_probabilities_zero_and_one(preset):
    """log 1 = 0 is a good value; log 0 = -inf at a kept token is left out and counted, where the preset reads mu (test_holes.py looks at
    who does)."""
    batch = worked_example()
    mu, theta = batch.behavior_logprobs.clone(), batch.proximal_logprobs.clone()
    mu[0], theta[0] = 0.0, 0.0
    batch = replace(batch, behavior_logprobs=mu, proximal_logprobs=theta, at_sampling_logprobs=torch.full_like(mu, torch.nan))
    _, out, grad = step(batch, theta, CorrectionConfig(preset=preset))
    assert out.partials[5] == 0 and grad.isfinite().all()
    is_read = "behavior" in policies_read(CorrectionConfig(preset=preset))
    mu[1] = -INF
    _, out, grad = step(batch, theta, CorrectionConfig(preset=preset))
    assert out.partials[5] == is_read and grad.isfinite().all() and (grad[1] == 0) == is_read


@pytest.mark.parametrize("preset", NAMES)
def test_what_is_masked_changes_nothing(preset):
    config = CorrectionConfig(preset=preset)
    batch, target = random_batch(11, spread=0.05)
    _, expected, expected_grad = step(batch, target, config)
    names = ("behavior_logprobs", "proximal_logprobs", "reference_logprobs", "advantages")
    for poison in (NAN, INF, -INF):
        dirty = replace(batch, **{name: torch.where(batch.loss_mask, getattr(batch, name), poison) for name in names})
        _, out, grad = step(dirty, torch.where(batch.loss_mask, target, poison), config)
        torch.testing.assert_close(out.partials, expected.partials, rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("field", ["behavior_logprobs", "proximal_logprobs", "advantages", "target"])
@pytest.mark.parametrize(("preset", "lost"), [("tis-token", 1), ("tis-sequence", 4), ("gspo", 4)])
def test_a_kept_nan_is_counted_and_takes_its_unit_with_it(field, preset, lost):
    """Token decisions lose the token, sequence decisions the sequence; the rest trains on. Of mu it is an infinity: a NaN is a missing
    number (test_holes.py). GSPO's own ratio doesn't know mu."""
    if (preset, field) == ("gspo", "behavior_logprobs"):
        pytest.skip("not read")
    batch = worked_example()
    target = flat_log(((0.55, 0.58, 0.03, 0.80), (0.54, 0.18, 0.18), (0.612, 0.693)))
    if field == "target":
        target[2] = NAN
    else:
        values = getattr(batch, field).clone()
        values[2] = -INF if field == "behavior_logprobs" else NAN
        batch = replace(batch, **{field: values})
    config = CorrectionConfig(preset=preset, objective={"clip_low": 0.99, "clip_high": 99})
    corrected = correct(batch, config)
    leaf = target.requires_grad_()
    out = policy_loss(corrected, leaf, config)
    out.loss.backward()
    assert out.partials[5] == 1
    assert int((leaf.grad == 0).sum()) == (lost if preset == "gspo" or lost == 1 or field != "target" else 1)
    assert leaf.grad.isfinite().all()
    assert diagnose(batch, corrected, leaf)["broken_tokens"] == 1


WIDE = {"log_low": 40, "log_high": 40, "log_dual": 40}
"""Bounds of ctpo that no token meets."""


@pytest.mark.parametrize("settings", [{"preset": "ctpo", "objective": WIDE}, {"preset": "mirror-descent"}])
def test_a_sum_over_an_answer_is_not_made_of_the_rest_of_it(settings):
    """A token of the first answer is no number: its answer has no products (ctpo), and no square (mirror-descent, whose other term goes on
    without that token). The other two answers don't notice."""
    whole, broken = flat_log(THETA), flat_log(THETA)
    broken[2] = NAN
    batch = worked_example()
    expected = step(batch, whole, CorrectionConfig(**settings))[2]
    _, _, grad = step(batch, broken, CorrectionConfig(**settings))
    torch.testing.assert_close(grad[4:], expected[4:], rtol=1e-12, atol=0)
    if settings["preset"] == "mirror-descent":
        score = step(batch, whole, CorrectionConfig(**settings, kl={"coefficient": 0.0}))[2]
        assert score[:2].all()
        torch.testing.assert_close(grad[[0, 1, 3]], score[[0, 1, 3]], rtol=1e-12, atol=0)
    else:
        assert not grad[:4].any() and expected[:4].any()


def test_a_prefix_counts_no_ratio_for_more_than_e_to_the_20():
    """Log ratios 25, -24 and 0.1: the products are e^20, 1 and e^0.1."""
    theta, proximal = (torch.tensor(values, dtype=torch.float64) for values in ([-1.0, -30.0, -1.0], [-26.0, -6.0, -1.1]))
    batch = replace(tiny([3], dtype=torch.float64), proximal_logprobs=proximal, advantages=torch.ones(3, dtype=torch.float64))
    _, _, grad = step(batch, theta, CorrectionConfig(preset="ctpo", objective=WIDE))
    assert grad.tolist() == pytest.approx([-math.exp(20) / 3, -1 / 3, -math.exp(0.1) / 3], rel=1e-12)


def test_a_million_tokens_in_lengths_from_1_to_65536():
    """Long products are summed in float64: the sequence of 65536 tokens agrees with math.fsum."""
    lengths = [1, 65536, 2, 16384, 1, *([4096] * 200), *([17] * 6000)]
    n = sum(lengths)
    assert n > 10**6 - 10**5
    generator = torch.Generator().manual_seed(0)
    mu = -torch.rand(n, generator=generator)
    proximal = (mu + 1e-2 * torch.randn(n, generator=generator)).clamp(max=0)
    batch = replace(tiny(lengths), behavior_logprobs=mu, proximal_logprobs=proximal)
    config = CorrectionConfig(preset="mis-full", importance={"level": "geometric"})
    corrected = correct(batch, config)
    policy_loss(corrected, batch.proximal_logprobs.clone().requires_grad_(), config).loss.backward()
    diagnose(batch, corrected, batch.proximal_logprobs)
    raw = correct(batch, CorrectionConfig(preset="tis-sequence", importance={"level": "geometric", "upper": 9}))
    rows = slice(1, 65537)
    exact = math.fsum((batch.proximal_logprobs[rows] - mu[rows]).tolist()) / 65536
    assert float(raw.importance_weights[1]) == pytest.approx(math.exp(exact), rel=3e-7)


def test_wrong_shape_and_missing_inputs_are_refused():
    batch, config = worked_example(), CorrectionConfig(preset="tis-token")
    with pytest.raises(DataError, match="proximal_logprobs is None"):
        correct(replace(batch, proximal_logprobs=None), config)
    with pytest.raises(DataError, match="for 9 tokens"):
        policy_loss(correct(batch, config), torch.zeros(4), config)
    topk = CorrectionConfig(preset="dppo-topk-tv")
    with pytest.raises(DataError, match="no top-K logprobs"):
        policy_loss(correct(batch, topk), torch.zeros(9).double(), topk)
    kl = CorrectionConfig(preset="ppo", kl={"coefficient": 0.1})
    with pytest.raises(DataError, match="no reference_logprobs"):
        policy_loss(correct(batch, kl), torch.zeros(9).double(), kl)
    assert len(NAMES) + 2 == len(PRESETS)
