"""What leaves no trace in training, to the last bit: a batch that is not finite or has no token left, and forwards of a reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import correct
from evenkeel.correction.errors import ConfigError, DataError
from tests.learner.learner_cases import (
    TIS,
    hf_model,
    hf_values,
    learner_on,
    off_policy_batch,
    poisoned,
    random_batch,
    save_model,
    weights,
)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_non_finite_step_leaves_no_trace(tmp_path: Path, value: float) -> None:
    """A run with a poisoned batch in between ends bit for bit where the run without it ends; 1e38 is finite, its gradient is not."""
    folder = save_model(tmp_path / "m")
    ends, results = [], []
    for is_poisoned in (False, True):
        with learner_on(folder, learning_rate=1e-3, warmup_steps=3) as learner:
            batch = off_policy_batch(learner)
            corrected = correct(batch, TIS)
            learner.step(corrected, TIS, step=0)
            if is_poisoned:
                before = weights(learner)
                results.append(learner.step(poisoned(corrected, value), TIS, step=1))
                assert all(torch.equal(before[name], after) for name, after in weights(learner).items())
            learner.step(corrected, TIS, step=2)
            ends.append(weights(learner))
    assert (results[0].optimizer_steps, results[0].skipped_steps) == (0, 1)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_batch_rejected_to_the_last_token_leaves_no_trace(tmp_path: Path) -> None:
    """Loss and gradient are 0. Adam has averages from the step before, which would move the weights by about a learning rate."""
    with learner_on(save_model(tmp_path / "m"), learning_rate=1e-3) as learner:
        batch = off_policy_batch(learner)
        learner.step(correct(batch, TIS), TIS, step=0)
        before = weights(learner)
        vetoed = CorrectionConfig(preset="tis-token", veto={"lower": 1e6})
        with pytest.warns(UserWarning, match="every token of the batch was rejected"):
            corrected = correct(batch, vetoed)
        result = learner.step(corrected, vetoed, step=1)
        assert (result.loss, result.grad_norm, result.optimizer_steps, result.skipped_steps) == (0.0, 0.0, 0, 1)
        assert all(torch.equal(before[name], after) for name, after in weights(learner).items())
        with pytest.raises(DataError, match="nothing to learn"):
            learner.supervised_step(batch.token_ids, batch.offsets, torch.zeros_like(batch.loss_mask))
        result = learner.step(corrected.select([]), TIS, step=2)  # every answer was cut, and cut ones are masked
        assert (result.loss, result.grad_norm, result.trained_tokens, result.optimizer_steps, result.skipped_steps) == (0.0, 0.0, 0, 0, 1)
        assert all(torch.equal(before[name], after) for name, after in weights(learner).items())


def test_reference_logprobs_come_from_the_other_weights_and_leave_ours_alone(tmp_path: Path) -> None:
    folder, other = save_model(tmp_path / "m"), save_model(tmp_path / "r", seed=1)
    batch = random_batch()
    with learner_on(folder) as learner:
        with pytest.raises(ConfigError, match="load_reference"):
            learner.reference_logprobs(batch)
        own = learner.logprobs(batch)
        learner.load_reference(other)
        reference = learner.reference_logprobs(batch)
        assert torch.equal(learner.logprobs(batch), own)
        learner.step(correct(off_policy_batch(learner), TIS), TIS, step=0)
        assert torch.equal(learner.reference_logprobs(batch), reference)
        with pytest.raises(DataError, match="other shapes"):
            learner.load_reference(save_model(tmp_path / "untied", tie=False))
    with torch.no_grad():
        torch.testing.assert_close(reference, hf_values(hf_model(other), batch)[0], rtol=0, atol=1e-5)


def test_a_forward_of_the_reference_leaves_no_trace_in_training(tmp_path: Path) -> None:
    """As where the KL is told during training: loss, gradient and weights are those of training without it, bit for bit."""
    folder, other = save_model(tmp_path / "m"), save_model(tmp_path / "other", seed=1)
    ends = []
    for is_told in (False, True):
        with learner_on(folder, learning_rate=1e-3) as learner:
            learner.load_reference(other)
            batch = off_policy_batch(learner)
            results = []
            for step in range(2):
                if is_told:
                    assert not torch.equal(learner.reference_logprobs(batch), learner.logprobs(batch))
                results.append(learner.step(correct(batch, TIS), TIS, step=step))
            ends.append((weights(learner), [(one.loss, one.grad_norm, one.metrics) for one in results], results[-1].target_logprobs))
    (ours, numbers, logprobs), (theirs, their_numbers, their_logprobs) = ends
    assert numbers == their_numbers and torch.equal(logprobs, their_logprobs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
