"""A mixture of experts is trained as Hugging Face and autograd would train it.

1. Its gradient equals autograd's, with and without the balancing loss, and whichever of softmax and top-k comes first.
2. The balancing loss does not depend on how the loss of the policy is scaled, and is refused where it would be.
3. What it can't be combined with is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import correct, defer
from evenkeel.correction.errors import ConfigError
from tests.learner.learner_cases import (
    TIS,
    gradients,
    grouped_batch,
    hf_model,
    largest_difference,
    learner_on,
    off_policy_batch,
    save_model,
)
from tests.learner.moe_cases import expert_gradients, router_logits, save_moe
from tests.learner.test_learner_step import ppo_with_truncated_weights


@pytest.mark.parametrize(("dtype", "of_router"), [("float32", torch.float32), ("bfloat16", torch.float32)])
def test_experts_are_weighed_in_float32_whatever_the_weights_are(tmp_path: Path, dtype: str, of_router: torch.dtype) -> None:
    """As the engines do. In bfloat16 a weight of an expert would be rounded by up to 0.4 %."""
    weights: list[Tensor] = []
    with learner_on(save_moe(tmp_path / "m"), dtype=dtype) as learner:
        for layer in learner._policies[0].decoder.layers:
            layer.mlp.router.register_forward_hook(lambda _module, _inputs, outputs: weights.append(outputs[0].detach()))
        learner.logprobs(off_policy_batch(learner))
    assert weights and {one.dtype for one in weights} == {of_router}
    assert not all(torch.equal(one, one.bfloat16().to(one.dtype)) for one in weights)


def balancing_loss(logits: list[Tensor], topk: int) -> Tensor:
    """Of each layer's [R, E] router logits: E times the sum over experts of its share of the routes and its mean probability; summed.

    Source: Fedus et al. (2021), Switch Transformer, equations 4 to 6; over k, for k experts a token.
    """
    total = torch.zeros(())
    for layer in logits:
        probability = layer.softmax(-1)
        chosen = torch.zeros_like(probability).scatter(1, probability.topk(topk).indices, 1.0)
        total = total + layer.shape[1] * (chosen.mean(0) / topk * probability.mean(0)).sum()
    return total


@pytest.mark.parametrize(("coefficient", "norm_topk"), [(0.0, True), (0.0, False), (0.3, True)])
def test_gradient_equals_hugging_face_and_autograd(tmp_path: Path, coefficient: float, norm_topk: bool) -> None:
    """Experts included, of which some see no token in some micro-batch. The balancing loss is that of one micro-batch."""
    folder = save_moe(tmp_path / "m", norm_topk_prob=norm_topk)
    reference = hf_model(folder)
    settings: dict[str, Any] = {"learning_rate": 0.0, "clip_grad": 0.0, "moe_aux_loss_coefficient": coefficient}
    with learner_on(folder, **settings, tokens_per_microbatch=10_000 if coefficient else 60) as learner:
        batch = off_policy_batch(learner)
        result = learner.step(correct(batch, TIS), TIS, step=0)
        ours = gradients(learner)
    loss, _ = ppo_with_truncated_weights(reference, batch)
    last_trained = [int(batch.loss_mask[a:b].nonzero().max()) for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]
    logits = router_logits(reference, batch, last_trained)  # of the rows that are read: up to the one before the last trained token
    (loss + coefficient * balancing_loss(logits, topk=2)).backward()
    theirs = expert_gradients(reference)
    assert result.loss == pytest.approx(loss.item(), abs=1e-6)
    assert largest_difference(ours, theirs) < 2e-5
    assert all(gradient.abs().max() > 0 for name, gradient in theirs.items() if ".gate.weight" in name)


def test_balancing_loss_is_a_mean_over_the_rows_computed(tmp_path: Path) -> None:
    """Also where micro-batches read a prompt again: its rows are then in several of the sums."""
    settings: dict[str, Any] = {"moe_aux_loss_coefficient": 0.3, "tokens_per_microbatch": 30}
    rows: list[int] = []
    with learner_on(save_moe(tmp_path / "m"), **settings) as learner:
        batch = grouped_batch([([20] * 4, [5, 2, 8, 7])])
        batch = replace(batch, behavior_logprobs=learner.logprobs(batch), proximal_logprobs=learner.logprobs(batch))
        learner._policies[0].decoder.layers[0].mlp.router.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
        learner.step(correct(batch, TIS), TIS, step=0)
        coefficient = learner._require().chunks[0].config.moe_aux_loss_coeff
    assert len(rows) > 1 and sum(rows) > 20 + 5 + 2 + 8 + 7
    assert coefficient * sum(rows) == pytest.approx(0.3)


def test_balancing_loss_with_a_late_factor_is_refused(tmp_path: Path) -> None:
    """Where the mean weight is known only after the forward, it would scale the balancing loss too."""
    normalised = CorrectionConfig(preset="tis-token", normalize={"population": "all"})
    with learner_on(save_moe(tmp_path / "m"), moe_aux_loss_coefficient=0.01) as learner:
        batch = off_policy_batch(learner)
        with pytest.raises(ConfigError, match=r"moe_aux_loss_coefficient = 0\.01.*scale.*auxiliary"):
            learner.step(defer(batch, normalised), normalised, step=0)
        learner.step(correct(batch, normalised), normalised, step=0)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen3", {"moe_aux_loss_coefficient": 0.01}, "moe_aux_loss_coefficient.*qwen3 has no experts"),
        ("qwen3_moe", {"batch_invariant": True}, "batch_invariant.*not batch-invariant"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, family: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), learner_on(save_model(tmp_path / "m", family), **settings):
        pass
