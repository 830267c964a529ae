"""What the library is given: gradients are taken off, what can't be is refused in a sentence, a batch keeps the settings that it was
corrected by."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evenkeel import correction
from evenkeel.correction import (
    PRESETS,
    AdvantageConfig,
    ConfigError,
    CorrectedBatch,
    CorrectionConfig,
    DataError,
    EvenkeelError,
    MonitorConfig,
    correct,
    for_step,
    from_lists,
    from_padded,
    policy_loss,
)
from evenkeel.correction.presets import methods
from tests.correction.fixtures import random_batch, worked_example

DATA = ("behavior_logprobs", "proximal_logprobs", "reference_logprobs", "advantages")


def gradient(batch, target, config):
    leaf = target.clone().requires_grad_()
    loss = policy_loss(correct(batch, config), leaf, config).loss
    loss.backward()
    return leaf.grad


@pytest.mark.parametrize("preset", ["ppo", "gspo", "tis-token", "minirl", "bypass", "a-3po", "vespo", "prime-tv"])
def test_what_comes_in_with_a_gradient_has_none_inside(preset):
    """pi_prox made of the same parameters as pi_theta, without detach: theta / prox would be 1 for every theta, and its gradient 0. And a
    critic that the advantages come from isn't trained by the policy's loss."""
    settings = {"kl": {"coefficient": 0.1}} if preset == "ppo" else {}
    config = CorrectionConfig(preset=preset, **settings)
    batch, target = random_batch(3)
    expected = gradient(replace(batch, proximal_logprobs=target), target, config)
    assert expected.abs().max() > 1e-4
    leaf, critic = target.clone().requires_grad_(), batch.advantages.clone().requires_grad_()
    live = replace(batch, proximal_logprobs=leaf * 1, advantages=critic * 1, behavior_logprobs=batch.behavior_logprobs + 0 * leaf)
    assert not any(getattr(live, name).requires_grad for name in DATA)
    policy_loss(correct(live, config), leaf, config).loss.backward()
    torch.testing.assert_close(leaf.grad, expected)
    assert critic.grad is None


def test_decisions_that_come_in_with_a_gradient_have_none_inside():
    batch, target = random_batch(3)
    ones = torch.ones(batch.num_tokens, dtype=torch.float64, requires_grad=True)
    corrected = CorrectedBatch(batch, ones * 2, batch.loss_mask, ones * 3, plain_weights=ones * 4)
    policy_loss(corrected, target.requires_grad_(), CorrectionConfig(preset="ppo")).loss.backward()
    assert ones.grad is None


WRONG = {
    "advantages as a column": ({"advantages": torch.ones(9, 1)}, r"advantages has shape \(9, 1\); it must be \[9\]"),
    "logprobs as a column": ({"behavior_logprobs": -torch.ones(9, 1)}, r"behavior_logprobs has shape \(9, 1\)"),
    "a short mask": ({"loss_mask": torch.ones(8, dtype=torch.bool)}, r"loss_mask has shape \(8,\); it must be \[9\]"),
    "a mask of numbers": ({"loss_mask": torch.ones(9)}, "loss_mask must be bool, got torch.float32"),
    "a list": ({"advantages": [1.0] * 9}, "advantages is list.*from_lists"),
    "probabilities": ({"behavior_logprobs": torch.full((9,), 0.5)}, "behavior_logprobs has 0.5 at a trained token, and no logprob"),
    "wrong sign": ({"proximal_logprobs": torch.full((9,), 3.0)}, "proximal_logprobs has 3 at a trained token"),
    "an infinity": ({"behavior_logprobs": torch.full((9,), float("inf"))}, "behavior_logprobs has inf at a trained token"),
    "half precision": ({"reference_logprobs": torch.ones(9, dtype=torch.bfloat16)}, "reference_logprobs must be float32 or float64"),
    "a table without K": ({"topk_ids": torch.ones(9, dtype=torch.int64)}, r"topk_ids has shape \(9,\); it must be \[9, any\]"),
    "tables of two sizes": (
        {"topk_ids": torch.ones(9, 3, dtype=torch.int64), "topk_logprobs": -torch.ones(9, 2)},
        r"topk_logprobs has shape \(9, 2\); it must be \[9, 3\]",
    ),
    "times as versions": ({"learner_version": 1_760_000_000_000}, "learner_version = 1760000000000: versions are int32, counted from 0"),
    "a version under -1": ({"weight_versions": torch.full((9,), -2, dtype=torch.int32)}, "weight_versions has -2"),
    "offsets that fall": ({"offsets": torch.tensor([0, 7, 4, 9])}, "offsets must rise from 0 to 9"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_can_not_be_is_refused_by_validate_and_by_correct(case):
    """A column of advantages would be broadcast to N x N losses: ten times the loss for ten tokens."""
    changes, reason = WRONG[case]
    batch = replace(worked_example(), **changes)
    for use in (batch.validate, lambda: correct(batch, CorrectionConfig(preset="tis-token"))):
        with pytest.raises(DataError, match=reason):
            use()


def test_versions_that_int32_does_not_have_do_not_wrap():
    """2^31 would be -2^31, and every token as old as can be."""
    batch = worked_example()
    row, ones = (lambda values: values[None]), torch.ones(1, 9, dtype=torch.bool)
    given = (row(batch.token_ids), ones, ones, row(batch.behavior_logprobs), row(batch.advantages), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(DataError, match="weight_versions reach 2147483648, and learner_version is 5"):
        from_padded(*given, weight_versions=torch.full((1, 9), 2**31), learner_version=5)


def test_target_values_that_can_not_be_are_refused():
    config = CorrectionConfig(preset="dppo-topk-tv", entropy_coefficient=0.1)
    batch, target = random_batch(3, topk=3)
    corrected = correct(batch, config)
    with pytest.raises(DataError, match=r"target_logprobs has .* at a trained token, and no logprob is positive"):
        policy_loss(corrected, -target, config)
    for wrong in (
        {"target_logprobs": target[:, None]},
        {"entropy": target.abs()[:, None]},
        {"target_topk_logprobs": batch.topk_logprobs[:, :2]},
        {"target_logprobs": target.tolist()},
    ):
        given = {"target_logprobs": target, "entropy": target.abs(), "target_topk_logprobs": batch.topk_logprobs, **wrong}
        with pytest.raises(DataError, match=f"policy_loss: {next(iter(wrong))} "):
            policy_loss(corrected, config=config, **given)
    outside = torch.where(batch.loss_mask, target, 5.0)
    assert policy_loss(corrected, outside, config, target.abs(), target_topk_logprobs=batch.topk_logprobs).loss.isfinite()


def test_a_batch_keeps_the_settings_that_corrected_it():
    """Through a share, a step, another process and a preset spelled out; other settings are refused by the key."""
    config = CorrectionConfig(preset="tis-token")
    batch, target = random_batch(3)
    corrected = correct(batch, config)
    index = batch.token_index([0, 2])
    for mine in (corrected.select([0, 2]), for_step(corrected, [0, 2], config), pickle.loads(pickle.dumps(corrected.select([0, 2])))):
        for same in (config, config.resolve(), CorrectionConfig(**config.model_dump())):
            policy_loss(mine, target[index], same)
        with pytest.raises(ConfigError, match=r"corrected by other settings \(importance = .*upper=2.0.*upper=3.0"):
            policy_loss(mine, target[index], CorrectionConfig(preset="tis-token", importance={"upper": 3.0}))
    with pytest.raises(ConfigError, match=r"for_step: the batch was corrected by other settings"):
        for_step(corrected, [0], CorrectionConfig(preset="grpo"))


def test_first_uses_that_are_wrong_give_a_sentence():
    batch, target = random_batch(3)
    config = CorrectionConfig(preset="tis-token")
    for use, reason in (
        (lambda: correct(batch, "mis-full"), r"correct: config is str 'mis-full'\. Give a CorrectionConfig of evenkeel\.correction"),
        (lambda: correct(batch, {"preset": "grpo"}), "Give a CorrectionConfig"),
        (lambda: correct(batch, PRESETS["grpo"]), "Give a CorrectionConfig"),
        (lambda: correct({"token_ids": target}, config), "batch is a dict, not a PackedBatch"),
        (lambda: policy_loss(correct(batch, config), target, "tis-token"), "policy_loss: config is str"),
        (lambda: policy_loss(batch, target, config), "the batch is a PackedBatch. Give it what correct"),
        (lambda: from_padded([[1]], *(4 * [None]), [0]), "from_padded: token_ids is a list, not a torch tensor"),
        (lambda: CorrectionConfig("mis-full"), r"by their names: CorrectionConfig\(preset='mis-full'\)"),
        (lambda: CorrectionConfig(preset="mis-ful"), "Did you mean mis-full"),
        (lambda: CorrectionConfig(importance={"uper": 3}), r"importance\.uper = 3: there is no such key; the nearest is upper"),
        (lambda: AdvantageConfig(ddof=2), "AdvantageConfig: ddof = 2"),
        (lambda: MonitorConfig(skip_stepps=1), "nearest is skip_steps"),
    ):
        with pytest.raises(EvenkeelError, match=reason):
            use()


def test_the_command_that_an_error_names_is_one_that_its_reader_has(monkeypatch):
    """The distribution has no command line."""
    with pytest.raises(ConfigError, match="`evenkeel presets` lists all"):
        CorrectionConfig(preset="zzz")
    monkeypatch.setattr(methods, "__name__", "evenkeel_correction.presets.methods")
    with pytest.raises(ConfigError, match=r"`print\(evenkeel_correction\.presets_table\(\)\)` lists all"):
        CorrectionConfig(preset="zzz")


def test_the_names_of_the_package_can_be_listed():
    assert set(correction.__all__) | {"__version__"} <= set(dir(correction))


def test_lists_as_slime_has_them():
    """Prompts in the tokens alone, rows of responses, a logprob that wasn't reported: as padded tensors of the responses."""
    tokens, masks = [[9, 9, 1, 2, 3], [8, 4, 5]], [[1, 0, 1], [1, 1]]
    sampled = [[-0.1, -0.2, None], [-0.3, -0.4]]
    proximal = [torch.tensor([-0.1, -0.3, -0.2]), torch.tensor([-0.5, -0.4])]
    batch = from_lists(tokens, masks, sampled, [1.0, -1.0], [0, 0], proximal_logprobs=proximal, advantages_by="own")
    assert (batch.token_ids.tolist(), batch.offsets.tolist()) == ([1, 2, 3, 4, 5], [0, 3, 5])
    assert batch.loss_mask.tolist() == [True, False, True, True, True] and batch.advantages.tolist() == [1, 1, 1, -1, -1]
    assert batch.behavior_logprobs.isnan().tolist() == [False, False, True, False, False]
    by_token = from_lists(tokens, masks, sampled, [[1.0, 1, 1], [-1.0, -1]], [0, 0], proximal_logprobs=proximal, advantages_by="own")
    assert torch.equal(by_token.advantages, batch.advantages)
    scalars = from_lists(tokens, masks, sampled, list(torch.tensor([1.0, -1.0])), [0, 0], proximal_logprobs=proximal, advantages_by="own")
    assert torch.equal(scalars.advantages, batch.advantages)
    config = CorrectionConfig(preset="dr-grpo")
    rewards = {"rewards": [1, 0], "advantages_by": config.advantage}
    made = from_lists(tokens, masks, sampled, None, [0, 0], **rewards, weight_versions=masks, learner_version=1)
    assert made.advantages.tolist() == [0.5, 0.5, 0.5, -0.5, -0.5] and made.weight_versions.tolist() == [1, 0, 1, 1, 1]
    with pytest.raises(DataError, match=r"behavior_logprobs\[1\] has 1 values, and loss_mask\[1\] 2"):
        from_lists(tokens, masks, [sampled[0], [-0.3]], [1.0, -1.0], [0, 0])
    with pytest.raises(DataError, match="group_ids is"):
        from_lists(tokens, masks, sampled, [1.0, -1.0], [0])


def test_the_example_of_the_page_with_lists_runs():
    page = (Path(__file__).parents[2] / "docs" / "library.md").read_text()
    code = re.search(r"<!-- example: lists -->\n```python\n(.*?)```", page, re.DOTALL)
    assert code
    rows = [torch.tensor([-0.1, -0.3]), torch.tensor([-0.5])]
    data = {"tokens": [[9, 1, 2], [9, 3]], "loss_masks": [[1, 1], [1]], "rollout_log_probs": rows, "log_probs": rows, "rewards": [1.0, 0.0]}
    names = {"from_lists": from_lists, "data": data, "group_ids": [0, 0], "config": CorrectionConfig(preset="grpo")}
    exec(code[1], names)
    assert correct(names["batch"], names["config"]).token_scale.tolist() == [0.25, 0.25, 0.5]  # the mean over two answers of their means
