"""Which scored answers are left out of a batch. Asked where the batch is packed, and where trained answers are counted."""

from __future__ import annotations

from rollout.config import MaskOverlong, OverlongConfig
from rollout.trajectory import AnswerFacts, FinishReason, Trajectory


def is_left_out(answer: AnswerFacts | Trajectory, overlong: OverlongConfig) -> bool:
    """Whether an answer counts in its group's baseline only, and is not trained."""
    return isinstance(overlong, MaskOverlong) and answer.finish_reason is FinishReason.LENGTH
