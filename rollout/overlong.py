"""Which scored answers are no part of a batch: asked where it is packed, and where it is told what was trained."""

from __future__ import annotations

from rollout.config import MaskOverlong, OverlongConfig
from rollout.trajectory import AnswerFacts, FinishReason, Trajectory


def is_left_out(answer: AnswerFacts | Trajectory, overlong: OverlongConfig) -> bool:
    """Whether an answer is in its group's baseline alone."""
    return isinstance(overlong, MaskOverlong) and answer.finish_reason is FinishReason.LENGTH
