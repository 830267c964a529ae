"""What a reward is tried on before a run, and what its scores say of what counts as right. No processes: rewards.py scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evenkeel.rollout.config import AfterMarker, Extraction, RegexMatch
from evenkeel.rollout.rewards.reward_process import accepted

WRONG = ("I don't know.", "")
"""Answers that are right to hardly any question: one in words, one without any. Models give both kinds."""


def in_its_form(extraction: Extraction, answer: str | Sequence[str]) -> str:
    """A reference answer, of several the first, as a completion in which the extraction finds it, where that form is known."""
    return f"{extraction.marker} {accepted(answer)[0]}" if isinstance(extraction, AfterMarker) else accepted(answer)[0]


def trial_notes(scores: Sequence[float | str], *, has_answer: bool, extraction: Extraction, correct_at: float) -> Iterator[str]:
    """Sentences on what a user may not have meant.

    Args:
        scores: for the reference answer and each of WRONG its reward, or why it has none.
        has_answer: there is a reference answer.
        correct_at: reward of a right answer.
    """
    own, *others = scores
    wrong = [one for one in others if not isinstance(one, str)]
    if unscored := [(text, one) for text, one in zip(WRONG, others, strict=True) if isinstance(one, str)]:
        texts = " and ".join(repr(text) for text, _ in unscored)
        yield (
            f"the reward gives no score to the answer {texts}: {unscored[0][1]}. What has no score is left out of baseline, loss and "
            "accuracy, and nothing is learned from it; return 0.0 where that is the score of a wrong answer"
        )
    is_known = has_answer and bool(wrong) and not isinstance(own, str) and not isinstance(extraction, RegexMatch)
    if is_known and {own} == set(wrong):
        yield (
            f"the reward gives {own:g} to the reference answer, to a wrong and to an empty one: it tells them apart in another form "
            "(a marker, a sentence round the answer), or not at all"
        )
    elif wrong and max(wrong) >= correct_at:
        yield (
            f"the reward gives {max(wrong):g} to a wrong answer, and right is a reward of evaluation.correct_at = {correct_at:g} or more: "
            "accuracy would count such answers. Raise evaluation.correct_at above what a wrong answer can get"
        )
    if is_known and max(wrong) < float(own) < correct_at:
        yield (
            f"the reward gives {own:g} to the reference answer itself, and right is a reward of evaluation.correct_at = {correct_at:g} or "
            f"more. If no answer can get more, set evaluation.correct_at: {own:g}; accuracy would stay 0"
        )
