"""What a short run decides without engine or learner: which way its batches go, by the learner's own settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.correction.config import CorrectionConfig
from evenkeel.learner.config import LearnerConfig
from lab.kept_engines import KeptRun, RunSettings


@pytest.mark.parametrize(("coefficient", "is_deferred"), [(0.0, True), (0.01, False)])
def test_a_balancing_loss_is_not_scaled_with_the_policys(coefficient: float, is_deferred: bool) -> None:
    """With one, the mean weight has to be known before training: the proximal logprobs come of a forward of their own."""
    learner: Any = SimpleNamespace(config=LearnerConfig(moe_aux_loss_coefficient=coefficient))
    correction = CorrectionConfig.model_validate({"preset": "tis-token", "normalize": {"population": "all"}})
    run = KeptRun(None, learner, correction, 0, RunSettings())  # type: ignore[arg-type]
    assert (run._defers, run._needs_forward) == (is_deferred, not is_deferred)
