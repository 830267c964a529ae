"""A warning for held-out answers that are nearly all cut: few can be right. driver/no_learning.py says it of those in training."""

from __future__ import annotations

from collections.abc import Sequence

from evenkeel.rollout.trajectory import FinishReason, Trajectory

NEARLY_ALL = 0.9
"""Share of answers from which something is said. A small chat model with answers of 256 tokens has 40 to 75 % cut, and learns."""
_FEWEST = 8
"""Number of answers below which nothing is said."""


def cut_remark(answers: Sequence[Trajectory], max_tokens: int) -> str | None:
    """A sentence if nearly all of the answers were cut, else None. Args: max_tokens: of rollout.sampling."""
    cut = sum(one.finish_reason is FinishReason.LENGTH for one in answers)
    if len(answers) < _FEWEST or cut < NEARLY_ALL * len(answers):
        return None
    return (
        f"{cut} of {len(answers)} answers were cut at rollout.sampling.max_tokens = {max_tokens}. Raise it if they were going to be right; "
        "if they had ended by then, and the model went on, `evenkeel doctor MODEL` shows the tokens at which answers end"
    )
