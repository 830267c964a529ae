"""Training in bfloat16 and float16: float32 master weights, the loss scale, updates that overflow, a head in float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evenkeel.correction.correct import correct, defer
from evenkeel.correction.errors import ConfigError
from evenkeel.learner.results import SkipReason
from evenkeel.learner.training.logprobs import head_logprobs
from tests.learner.learner_cases import (
    TIS,
    hf_model,
    learner_on,
    masters,
    off_policy_batch,
    poisoned,
    random_batch,
    save_model,
    weights,
)


def test_half_precision_trains_with_float32_master_weights(tmp_path: Path) -> None:
    """Steps far below its resolution add up: after 40 of them the weights have moved, as float32 training moves them."""
    folder = save_model(tmp_path / "m")
    batch = random_batch(groups=2)
    moved = {}
    for dtype in ("float32", "bfloat16", "float16"):
        with learner_on(folder, dtype=dtype, learning_rate=2e-5) as learner:
            losses = [learner.supervised_step(batch.token_ids, batch.offsets, batch.loss_mask) for _ in range(40)]
            moved[dtype] = losses[0] - losses[-1]
            assert {str(tensor.dtype) for tensor in weights(learner).values()} == {f"torch.{dtype}"}
    assert moved["bfloat16"] == pytest.approx(moved["float32"], rel=0.3)
    assert moved["float16"] == pytest.approx(moved["float32"], rel=0.03), "three bits more, so an eighth of the error"


@pytest.mark.parametrize(("of_folder", "dtype"), [("float32", "bfloat16"), ("float32", "float16"), ("float16", "bfloat16")])
def test_masters_begin_with_the_folders_own_weights(tmp_path: Path, of_folder: str, dtype: str) -> None:
    """Not with what rounding leaves of them: then no weight would change before its updates had added up to half of a rounding step."""
    folder = save_model(tmp_path / "m")
    hf_model(folder).to(getattr(torch, of_folder)).save_pretrained(folder)
    with learner_on(folder) as learner:
        expected = weights(learner)
    with learner_on(folder, dtype=dtype) as learner:
        found = masters(learner)
        rounded = weights(learner)
    assert all(torch.equal(found[name], value.float()) for name, value in expected.items() if name in found)
    assert not all(torch.equal(found[name], rounded[name].float()) for name in found), "the folder's weights are finer"


def test_the_loss_scale_of_float16_leaves_the_gradient(tmp_path: Path) -> None:
    """Whatever the scale, the norm is the float32 learner's, as far as float16's 11 bits go; without one what is below 6e-8 would be 0."""
    folder, norms = save_model(tmp_path / "m"), {}
    for dtype, scale in (("float32", 1.0), ("float16", 2.0**8), ("float16", 2.0**16)):
        with learner_on(folder, dtype=dtype, initial_loss_scale=scale) as learner:
            result = learner.step(correct(off_policy_batch(learner), TIS), TIS, step=0)
            assert result.loss_scale == (scale if dtype == "float16" else None) and result.optimizer_steps == 1
            norms[dtype, scale] = result.group_norms
    expected = norms.pop(("float32", 1.0))
    for found in norms.values():
        assert found == pytest.approx(expected, rel=0.01)


def test_an_update_that_overflows_in_float16_is_left_out_and_the_scale_halved(tmp_path: Path) -> None:
    """By Megatron's rule: the second overflow halves the scale, and each one after it. The weights stay, bit for bit, and so do Adam's
    averages: training then goes on as if it had begun with the scale that fits."""
    folder, ends = save_model(tmp_path / "m"), []
    with learner_on(folder, dtype="float16", learning_rate=1e-3, warmup_steps=3, initial_loss_scale=2.0**32) as learner:
        batch = off_policy_batch(learner)
        corrected, before = correct(batch, TIS), weights(learner)
        scale, results = 2.0**32, [learner.step(correct(batch, TIS), TIS, step=0)]
        while results[-1].overflowed_steps:
            assert (results[-1].optimizer_steps, results[-1].skipped, results[-1].loss_scale) == (0, (SkipReason.OVERFLOW,), scale)
            assert results[-1].grad_norm is None and results[-1].group_norms == {} and math.isfinite(results[-1].loss)
            assert all(torch.equal(before[name], after) for name, after in weights(learner).items())
            results.append(learner.step(corrected, TIS, step=0))
            scale /= 2
        assert len(results) > 5 and results[-1].optimizer_steps == 1
        scale = results[-1].loss_scale
        results.append(learner.step(corrected, TIS, step=1))
        assert learner.optimizer.steps == 2
        ends.append(weights(learner))
    with learner_on(folder, dtype="float16", learning_rate=1e-3, warmup_steps=3, initial_loss_scale=scale) as learner:
        for step in range(2):
            learner.step(corrected, TIS, step=step)
        ends.append(weights(learner))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_what_is_not_finite_without_a_loss_scale_is_no_overflow(tmp_path: Path) -> None:
    """A fault of the batch is told as such, in float16 too: a loss that is not finite, or a gradient that isn't at the smallest scale."""
    with learner_on(save_model(tmp_path / "m"), dtype="float16", initial_loss_scale=1.0) as learner:
        corrected = correct(off_policy_batch(learner), TIS)
        for value in (math.nan, 1e38):
            result = learner.step(poisoned(corrected, value), TIS, step=0)
            assert result.skipped == (SkipReason.NOT_FINITE,) and not math.isfinite(result.loss + (result.grad_norm or 0.0))


@pytest.mark.parametrize(("family", "settings"), [("qwen3_moe", {}), ("qwen3", {"batch_invariant": True})])
def test_float16_refuses_experts_and_true_on_policy(tmp_path: Path, family: str, settings: dict[str, bool]) -> None:
    folder = save_model(tmp_path / "m", family)
    with pytest.raises((ConfigError, ValueError), match="dtype = float16"), learner_on(folder, dtype="float16", **settings):
        pass


@pytest.mark.parametrize("float32_head", [False, True])
def test_a_head_in_float32_rounds_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, float32_head: bool) -> None:
    """Against the product in float64 of the same hidden states and weights; a logit of 2 to 4 has steps of 2^-6 in bfloat16."""
    errors = []

    def compared(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        logprobs, entropies = head_logprobs(hidden, weight, targets, **options)
        exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1).gather(-1, targets)
        errors.append(float((logprobs - exact).detach().abs().max()))
        return logprobs, entropies

    monkeypatch.setattr("evenkeel.learner.training.step.head_logprobs", compared)
    with learner_on(save_model(tmp_path / "m"), dtype="bfloat16", float32_head=float32_head) as learner:
        assert math.isfinite(learner.step(defer(random_batch(), TIS), TIS, step=0).grad_norm)
    assert (max(errors) < 1e-5) if float32_head else (max(errors) > 1e-3)
