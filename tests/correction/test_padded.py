"""Padded tensors of other trainers, there and back; what can be seen to be wrong with them is refused in a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evenkeel.correction import (
    PRESETS,
    ConfigError,
    CorrectedBatch,
    CorrectionConfig,
    DataError,
    check_without_gradient_factor,
    correct,
    from_padded,
    group_advantages,
    needs_topk,
    pack_like,
    policy_loss,
    settle,
    to_padded,
    token_coefficients,
)
from tests.correction.fixtures import random_batch


def padded(batch, **changes):
    """(attention mask, arguments of from_padded) of a batch, rows shifted to the right by different amounts, rubbish in the padding."""
    real = torch.zeros(batch.num_sequences, int(batch.lengths.max()) + 3, dtype=torch.bool)
    for row, length in enumerate(batch.lengths.tolist()):
        real[row, row % 3 : row % 3 + length] = True
    names = ("token_ids", "loss_mask", "advantages", "weight_versions", "turn_ids", "topk_ids")
    values = {name: to_padded(getattr(batch, name), real) for name in names if getattr(batch, name) is not None}
    for name in ("behavior_logprobs", "proximal_logprobs", "at_sampling_logprobs", "reference_logprobs", "topk_logprobs"):
        if getattr(batch, name) is not None:
            values[name] = to_padded(getattr(batch, name), real, padding=float("nan"))
    known = {"attention_mask": real, "group_ids": batch.group_ids, "learner_version": batch.learner_version, "advantages_by": "own"}
    return real, {**values, **known, **changes}


def loss_and_gradient(batch, target, config):
    leaf = target.clone().requires_grad_()
    listed = None if batch.topk_logprobs is None else batch.topk_logprobs + 0.1
    loss = policy_loss(settle(correct(batch, config), target, config), leaf, config, target_topk_logprobs=listed).loss
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_takes_padded_tensors(preset):
    """Top-K ones too."""
    config = CorrectionConfig(preset=preset)
    batch, target = random_batch(6, topk=3 if needs_topk(config) else 0)
    _, arguments = padded(batch)
    torch.testing.assert_close(loss_and_gradient(from_padded(**arguments), target, config), loss_and_gradient(batch, target, config))


def test_responses_alone_are_enough():
    """Tensors as verl has them: responses, and the responses' part of the attention mask."""
    batch, target = random_batch(6)
    config = CorrectionConfig(preset="mis-full", importance={"level": "sequence"}, denominator={"kind": "sequence_mean"})
    real, arguments = padded(batch)
    start = torch.where(to_padded(batch.loss_mask, real), 0, 1)  # prompts and the holes between: left out entirely
    response = real & (start == 0)
    names = ("token_ids", "loss_mask", "behavior_logprobs", "proximal_logprobs", "advantages")
    own = {name: arguments[name] for name in names}
    alone = from_padded(**own, attention_mask=response, group_ids=batch.group_ids, advantages_by="own")
    loss, gradient = loss_and_gradient(alone, target[batch.loss_mask], config)
    expected, whole = loss_and_gradient(batch, target, config)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, whole[batch.loss_mask])


def test_values_come_back_to_their_places():
    batch, target = random_batch(1, topk=2)
    real, _ = padded(batch)
    for values in (target, batch.topk_logprobs, batch.loss_mask, batch.token_ids):
        there = to_padded(values, real)
        assert there.shape == (*real.shape, *values.shape[1:]) and not there[~real].any()
        assert torch.equal(pack_like(there, real), values)
    leaf = to_padded(target, real).requires_grad_()
    pack_like(leaf, real).square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * to_padded(target, real))
    with pytest.raises(DataError, match="responses' part"):
        pack_like(leaf, real[:, 1:])
    with pytest.raises(DataError, match="values for the"):
        to_padded(target[1:], real)


def test_what_was_decided_travels_with_a_trainers_rows():
    """Corrected as a whole, padded, rows shuffled and split over two workers: losses of the parts add up to the whole's."""
    config = CorrectionConfig(preset="mis-full", denominator={"kind": "sequence_mean", "count": "kept"})
    batch, target = random_batch(9)
    corrected = correct(batch, config)
    real, arguments = padded(batch)
    columns = corrected.to_padded(real)
    assert sorted(columns) == ["importance_weights", "keep_mask", "token_scale"]
    total = 0.0
    for rows in ([7, 0, 3, 11, 5], [1, 2, 4, 6, 8, 9, 10]):
        part = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
        share = from_padded(**part)
        mine = CorrectedBatch.from_padded(share, real[rows], **{name: value[rows] for name, value in columns.items()})
        total += policy_loss(mine, pack_like(to_padded(target, real)[rows], real[rows]), config).loss
    torch.testing.assert_close(total, policy_loss(corrected, target, config).loss)
    with pytest.raises(DataError, match="attention_mask has"):
        CorrectedBatch.from_padded(share, real, **columns)


def test_a_late_mean_is_that_of_the_plain_weights_after_a_trainers_rows():
    """Distortions that are injected into the weights are no part of it, here as there."""
    rejection = [{"ratio": "q", "level": "token", "lower": 0.5, "upper": 2.0}]
    late = {"normalize": {"population": "kept"}, "rejection": rejection, "modulation": {"noise_std": 0.2}}
    config = CorrectionConfig(preset="mis-full", importance={"level": "sequence"}, **late)
    batch, target = random_batch(9)
    corrected = correct(batch, config)
    real, arguments = padded(batch)
    again = CorrectedBatch.from_padded(from_padded(**arguments), real, **corrected.to_padded(real))
    torch.testing.assert_close(policy_loss(again, target, config).partials, policy_loss(corrected, target, config).partials)
    without = replace(again, plain_weights=None)
    assert not torch.equal(policy_loss(without, target, config).partials, policy_loss(corrected, target, config).partials)


@pytest.mark.parametrize("name", ["behavior_logprobs", "proximal_logprobs", "reference_logprobs"])
def test_logprobs_that_can_not_be_are_refused(name):
    batch, _ = random_batch(2)
    real, arguments = padded(batch)
    trained = to_padded(batch.loss_mask, real)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(DataError, match=rf"{name} is torch.{dtype}".replace("torch.torch", "torch") + r".*\.float\(\)"):
            from_padded(**{**arguments, name: arguments[name].to(dtype)})
    with pytest.raises(DataError, match=rf"{name} has .* no logprob is positive"):
        from_padded(**{**arguments, name: -arguments[name]})
    rounded = arguments[name].clone()
    rounded[trained] = rounded[trained].clamp(min=-1.0) + 1.0 + 1e-7  # some are 1e-7, by rounding
    assert from_padded(**{**arguments, name: rounded - rounded[trained].max() + 1e-7})
    outside = torch.where(trained, arguments[name], 5.0)
    assert from_padded(**{**arguments, name: outside})  # what is not trained may be anything


def test_shapes_are_refused_by_name():
    batch, _ = random_batch(2, topk=2)
    _, arguments = padded(batch)
    for name, wrong in {
        "proximal_logprobs": arguments["proximal_logprobs"][:, 1:],
        "topk_ids": arguments["topk_ids"][..., 0],
        "group_ids": batch.group_ids[1:],
        "advantages": torch.ones(12, 2),
    }.items():
        with pytest.raises(DataError, match=f"from_padded: {name} is"):
            from_padded(**{**arguments, name: wrong})


def test_advantages_by_row_as_column_and_by_token_are_one():
    batch, _ = random_batch(2)
    real, arguments = padded(batch)
    by_row = batch.advantages[batch.offsets[:-1]]
    for given in (by_row, by_row[:, None], by_row[:, None].expand(real.shape)):
        assert torch.equal(from_padded(**{**arguments, "advantages": given}).advantages, batch.advantages)


def test_the_advantages_of_a_preset_are_made_or_asked_for():
    """dr-grpo's are R - mean; the std-normalised ones of most trainers make another method of it."""
    config = CorrectionConfig(preset="dr-grpo")
    batch, _ = random_batch(2)
    _, arguments = padded(batch)
    rewards = torch.arange(12.0)
    made = from_padded(**{**arguments, "advantages": None, "rewards": rewards, "advantages_by": config.advantage})
    expected = group_advantages(rewards, batch.group_ids, estimator="grpo_no_std")
    assert torch.equal(made.advantages[made.offsets[:-1]], expected.double())
    assert correct(made, config).batch is made
    with pytest.raises(ConfigError, match=r"made with estimator = grpo_no_std, but the config has estimator = grpo\."):
        correct(made, CorrectionConfig(preset="grpo"))
    with pytest.raises(ConfigError, match=r"made with level = rollout, but the config has level = turn\."):
        correct(made, CorrectionConfig(preset="dr-grpo", advantage={"level": "turn"}))
    with pytest.warns(UserWarning, match=r"preset dr-grpo has advantages of its own \(grpo_no_std"):
        correct(replace(made, advantages_by=None), config)
    with pytest.raises(DataError, match="either advantages or rewards"):
        from_padded(**{**arguments, "rewards": rewards})
    with pytest.raises(DataError, match="rewards need advantages_by"):
        from_padded(**{**arguments, "advantages": None, "rewards": rewards})


@pytest.mark.filterwarnings("error::UserWarning")
def test_presets_of_usual_advantages_ask_nothing():
    batch, _ = random_batch(2)
    correct(replace(batch, advantages_by=None), CorrectionConfig(preset="tis-token"))
    correct(batch, CorrectionConfig(preset="dr-grpo"))  # "own": somebody has said so


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_coefficients_and_losses_of_tokens_are_the_loss(preset):
    """Losses of tokens add up to it; a sum of logprobs times coefficients has its gradient; what the trust region stopped has none."""
    config = CorrectionConfig(preset=preset)
    batch, target = random_batch(3, topk=3 if needs_topk(config) else 0, spread=0.5)
    listed = None if batch.topk_logprobs is None else batch.topk_logprobs + 0.1
    corrected = settle(correct(batch, config), target, config)
    coefficients, result = token_coefficients(corrected, target, config, target_topk_logprobs=listed)
    leaf = target.clone().requires_grad_()
    again = policy_loss(corrected, leaf, config, target_topk_logprobs=listed)
    again.loss.backward()
    torch.testing.assert_close(coefficients, leaf.grad)
    torch.testing.assert_close(result.token_losses.sum(), again.loss)
    if config.kl.coefficient == 0:
        assert not coefficients[result.decided.is_clipped | ~result.decided.keep_mask].any()
        assert not result.token_losses[~result.decided.keep_mask].any()


def test_a_trainer_with_a_mask_of_its_own():
    """TRL's entropy mask: half of the tokens are left out of the finished loss, and of its gradient."""
    config = CorrectionConfig(preset="tis-token")
    batch, target = random_batch(3)
    mine = torch.arange(batch.num_tokens) % 2 == 0
    leaf = target.clone().requires_grad_()
    policy_loss(correct(batch, config), leaf, config).token_losses[mine].sum().backward()
    coefficients, _ = token_coefficients(correct(batch, config), target, config)
    torch.testing.assert_close(leaf.grad, torch.where(mine, coefficients, 0))


def test_coefficients_refuse_an_entropy_bonus():
    config = CorrectionConfig(preset="tis-token", entropy_coefficient=0.01)
    batch, target = random_batch(3)
    with pytest.raises(ConfigError, match="entropy bonus"):
        token_coefficients(correct(batch, config), target, config)


def test_a_trainer_without_a_hook_is_told_what_it_can_not_train():
    check_without_gradient_factor(CorrectionConfig(preset="mis-full"))
    with pytest.raises(ConfigError, match=r"correct\(\) instead of defer"):
        check_without_gradient_factor(CorrectionConfig(preset="mis-full"), is_deferred=True)
    late = CorrectionConfig(preset="bypass", rejection=[{"upper": 1.3}], denominator={"count": "kept"})
    with pytest.raises(ConfigError, match=r"denominator\.count: original"):
        check_without_gradient_factor(late)
