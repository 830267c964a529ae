"""Numbers that are not finite: what a config doesn't read plays no part, what the sampler didn't report is taken at ratio 1 or left out,
what is broken is left out, counted and said. A forward pass that broke, and a batch of which nothing is left, are said as well."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from evenkeel.correction import (
    PRESETS,
    CorrectedBatch,
    CorrectionConfig,
    correct,
    defer,
    diagnose,
    loss_metrics,
    needs_proximal_forward,
    policy_loss,
    settle,
    shard_sums,
)
from evenkeel.correction.settings.schedule import policies_read
from tests.correction.fixtures import flat_log, random_batch, worked_example

NAN, INF = float("nan"), float("inf")
FIELDS = ("behavior_logprobs", "proximal_logprobs", "reference_logprobs", "topk_logprobs")


def trained(batch, target, config, way=correct):
    """(corrected, loss, gradient, partials) with warnings off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        corrected = settle(way(batch, config), target, config)
    leaf = target.clone().requires_grad_()
    listed = None if batch.topk_logprobs is None else torch.full_like(batch.topk_logprobs, -3.0)
    out = policy_loss(corrected, leaf, config, target_topk_logprobs=listed)
    out.loss.backward()
    return corrected, out.loss.detach(), leaf.grad, out.partials


def bits(result):
    corrected, loss, gradient, partials = result
    loss_sums = torch.stack([partials[0], partials[1], *partials[3:9]])  # without the drift, which is measured, not trained on
    return [one.tolist() for one in (corrected.importance_weights, corrected.keep_mask, corrected.token_scale, loss, gradient, loss_sums)]


def with_value(batch, field, index, value):
    values = getattr(batch, field).clone()
    values[index] = value
    return replace(batch, **{field: values})


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_hole_counts_where_the_number_is_read_and_nowhere_else(preset):
    """Whether a preset reads a tensor is seen by moving its finite values: then loss, gradient, weights or masks move. A NaN in one that
    isn't read changes no bit of them and nothing is said; in one that is read it is said."""
    config = CorrectionConfig(preset=preset)
    spread = 0.1 if preset == "k3-sequence" else 0.5  # with more it leaves out every sequence, whatever is moved
    batch, target = random_batch(5, sequences=6, topk=2, staleness=3, spread=spread)
    plain = bits(trained(batch, target, config))
    index = int(batch.loss_mask.nonzero()[3])
    for field in FIELDS:
        moved = replace(batch, **{field: (getattr(batch, field) * 1.7).clamp(-9, -1e-3)})
        is_read = bits(trained(moved, target, config)) != plain
        holed = with_value(batch, field, index, NAN)
        assert is_read or bits(trained(holed, target, config)) == plain, field
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            correct(holed, config)
        sentence = "the sampler reported no logprob (NaN) for 1 of" if field in FIELDS[::3] else f"is not finite ({field} at 1)"
        assert any(sentence in str(one.message) for one in said) == is_read, field


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("way", [correct, defer])
def test_a_token_without_its_logprob_is_trained_at_ratio_1(preset, way):
    """The same bits as if the sampler had reported pi_v where a part reads that, or pi_prox, or, where no part knows pi_prox, pi_theta."""
    config = CorrectionConfig(preset=preset)
    batch, target = random_batch(7, sequences=6, staleness=3)
    if "topk" in preset:
        pytest.skip("its tables: test_a_hole_in_a_table")
    same = batch.proximal_logprobs if way is correct and "proximal" in policies_read(config) else target
    if "at_sampling" in policies_read(config):
        same = torch.where(batch.at_sampling_logprobs.isnan(), same, batch.at_sampling_logprobs)
    holes = batch.loss_mask & (torch.arange(batch.num_tokens) % 5 == 0)
    known = replace(batch, behavior_logprobs=torch.where(holes, same, batch.behavior_logprobs))
    holed = replace(batch, behavior_logprobs=torch.where(holes, NAN, batch.behavior_logprobs))
    if way is defer and needs_proximal_forward(config, 1):
        pytest.skip("not to be deferred")
    for mine, theirs in zip(bits(trained(holed, target, config, way)), bits(trained(known, target, config, way)), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12, abs=1e-15)


def test_a_hole_in_a_table():
    """A token whose table has one is not blocked, as a token whose table is the target's."""
    config = CorrectionConfig(preset="dppo-topk-tv")
    batch, target = random_batch(3, topk=3)
    index = int(batch.loss_mask.nonzero()[2])
    listed = batch.topk_logprobs.clone()
    listed[index, 1] = NAN
    _, _, gradient, partials = trained(replace(batch, topk_logprobs=listed), target, config)
    assert gradient.isfinite().all() and gradient[index] != 0 and partials[5] == 0


def test_one_percent_of_holes_keeps_long_answers():
    """100 answers of 200 tokens, 1 % holes: 99 % of tokens or more stay, where one hole used to cost its answer (0.99^200 = 13 %). With
    missing: drop it does so on purpose, and tokens alone are lost where tokens alone are judged."""
    generator = torch.Generator().manual_seed(0)
    n = 100 * 200
    mu = -torch.rand(n, generator=generator) - 0.01
    holes = torch.rand(n, generator=generator) < 0.01
    batch = replace(
        worked_example(), token_ids=torch.zeros(n, dtype=torch.int64), offsets=torch.arange(0, n + 1, 200),
        loss_mask=torch.ones(n, dtype=torch.bool), behavior_logprobs=torch.where(holes, NAN, mu), proximal_logprobs=mu - 1e-4,
        advantages=torch.ones(n), weight_versions=torch.zeros(n, dtype=torch.int32), group_ids=torch.arange(100),
    )  # fmt: skip
    share = float(holes.float().mean())
    for preset in ("tis-token", "mis-full", "tis-sequence", "gspo", "grpo", "bypass"):
        corrected, *_, partials = trained(batch, mu - 1e-4, CorrectionConfig(preset=preset))
        assert float(partials[4]) == n, preset
        assert diagnose(batch, corrected)["missing_share"] == pytest.approx(share)
        assert diagnose(batch, corrected)["broken_tokens"] == 0
    by_sequence = float(holes.view(100, 200).any(1).float().mean())
    for preset, lost in (("tis-token", share), ("tis-sequence", by_sequence), ("gspo", 0), ("grpo", 0)):
        *_, partials = trained(batch, mu - 1e-4, CorrectionConfig(preset=preset, missing="drop"))
        assert 1 - float(partials[4]) / n == pytest.approx(lost), preset
    with pytest.warns(UserWarning, match=rf"no logprob \(NaN\) for {int(holes.sum())} of 20000 trained tokens .* \(missing: drop\)"):
        correct(batch, CorrectionConfig(preset="tis-token", missing="drop"))


def test_an_impossible_logprob_is_not_a_missing_one():
    """-inf says that the token could not be sampled, and it was: its ratio is infinite, not 1. It is left out, and named."""
    batch = with_value(worked_example(), "behavior_logprobs", 2, -INF)
    with pytest.warns(UserWarning, match=r"1 of 9 trained tokens .* are left out.* \(behavior_logprobs at 1\)"):
        corrected = correct(batch, CorrectionConfig(preset="tis-token"))
    assert corrected.keep_mask.tolist() == [True, True, False] + [True] * 6
    assert diagnose(batch, corrected)["broken_tokens"] == 1 and diagnose(batch, corrected)["missing_share"] == 0


def test_a_veto_on_mu_has_nothing_to_say_of_a_missing_one():
    batch = with_value(worked_example(), "behavior_logprobs", 2, NAN)
    for bounds in ({"lower": 1e-6}, {"lower": None, "upper": 0.99}):
        config = CorrectionConfig(preset="bypass", veto={"quantity": "probability", **bounds})
        assert trained(batch, flat_log(((0.5, 0.5, 0.1, 0.8), (0.7, 0.2, 0.3), (0.6, 0.7))), config)[0].keep_mask.all()


def test_when_nothing_is_left_the_warning_names_the_cause():
    """Not "rejected" where nothing was judged: every proximal logprob is NaN."""
    batch = replace(worked_example(), proximal_logprobs=torch.full((9,), NAN, dtype=torch.float64))
    with pytest.warns(UserWarning) as said:
        correct(batch, CorrectionConfig(preset="tis-token"))
    texts = [str(one.message) for one in said]
    assert any("(proximal_logprobs at 9)" in text for text in texts)
    assert any("every token of the batch was rejected or left out, as a number of it is not finite" in text for text in texts)


def test_sums_of_shards_with_a_hole_are_those_of_the_batch():
    batch = with_value(worked_example(), "behavior_logprobs", 2, NAN)
    config = CorrectionConfig(preset="mis-full")
    whole = shard_sums(batch, config)
    parts = [shard_sums(batch.select(rows), config) for rows in ([0], [1, 2])]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_a_broken_forward_is_counted_and_said():
    """One NaN embedding or a whole model of NaN: the loss stays finite, so that a guard on it sees nothing. The numbers say how much."""
    config = CorrectionConfig(preset="tis-token")
    batch, target = random_batch(3)
    count = int(batch.loss_mask.sum())
    chosen = batch.loss_mask & (batch.token_ids < 30)
    for broken in (chosen, batch.loss_mask):
        *_, partials = trained(batch, torch.where(broken, NAN, target), config)
        with pytest.warns(UserWarning, match=rf"{int(broken.sum())} of {count} trained tokens are left out .* gradient's norm"):
            numbers = loss_metrics(partials, config)
        assert numbers["batch_broken_tokens"] == int(broken.sum())
        assert numbers["batch_kept_share"] == pytest.approx(1 - int(broken.sum()) / count)


@pytest.mark.parametrize(
    "settings",
    [{"preset": "rollout-is"}, {"preset": "prime-ipo"}, {"preset": "bypass", "rejection": [{"ratio": "q", "lower": 0.5, "upper": 2.0}]}],
)
def test_late_parts_that_keep_nothing_are_said(settings):
    """mu is 0.99 and theta e^-6 everywhere: the criteria run inside the training forward, where `correct` can't warn."""
    batch, _ = random_batch(4)
    batch = replace(batch, behavior_logprobs=torch.full_like(batch.behavior_logprobs, -0.01))
    config = CorrectionConfig(**settings)
    *_, partials = trained(batch, batch.behavior_logprobs - 6, config)
    with pytest.warns(UserWarning, match="every token of the batch was rejected; its policy loss is 0"):
        assert loss_metrics(partials, config)["batch_kept_share"] == 0
    *_, healthy = trained(batch, batch.behavior_logprobs, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loss_metrics(healthy, config)["batch_kept_share"] == 1


def test_an_entropy_that_is_not_finite_leaves_its_token_out_of_the_loss():
    """0 log 0 in a trainer's entropy is NaN, and the bonus is part of the loss."""
    config = CorrectionConfig(preset="ppo", entropy_coefficient=0.1)
    batch, target = random_batch(3)
    index = int(batch.loss_mask.nonzero()[2])
    entropy = torch.ones(batch.num_tokens, dtype=torch.float64)
    entropy[index] = NAN
    out = policy_loss(correct(batch, config), target, config, entropy)
    assert out.loss.isfinite() and out.partials[5] == 1


def test_a_batch_made_by_hand_is_not_asked_who_corrected_it():
    batch, target = random_batch(3)
    ones = torch.ones(batch.num_tokens, dtype=torch.float64)
    mine = CorrectedBatch(batch, ones, batch.loss_mask, ones)
    assert policy_loss(mine, target, CorrectionConfig(preset="ppo")).loss.isfinite()
