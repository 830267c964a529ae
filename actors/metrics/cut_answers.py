"""A warning for held-out answers that are nearly all cut: few can be right. Of those in training driver/no_learning.py says it."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.trajectory import FinishReason, Trajectory

_NEARLY_ALL, _FEWEST = 0.9, 8
"""Share of answers from which, and number of answers below which, nothing is said."""


def cut_remark(answers: Sequence[Trajectory], max_tokens: int) -> str | None:
    """A sentence if nearly all of the answers were cut, else None. Args: max_tokens: of rollout.sampling."""
    cut = sum(one.finish_reason is FinishReason.LENGTH for one in answers)
    if len(answers) < _FEWEST or cut < _NEARLY_ALL * len(answers):
        return None
    return (
        f"{cut} of {len(answers)} answers were cut at rollout.sampling.max_tokens = {max_tokens}. Raise it if they were going to be right; "
        "if they had ended by then, and the model went on, `evenkeel doctor MODEL` shows the tokens at which answers end"
    )
