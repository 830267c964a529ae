"""What is said of a reward's scores of a reference answer, a wrong one and none, before a run."""

from __future__ import annotations

import pytest

from evenkeel.rollout.config import AfterMarker, Extraction, RegexMatch, WholeText
from evenkeel.rollout.rewards.reward_process import build_extraction
from evenkeel.rollout.rewards.reward_trial import in_its_form, trial_notes

WHOLE = WholeText()


@pytest.mark.parametrize(
    ("scores", "correct_at", "said"),
    [
        ((1.0, 0.0, 0.0), 1.0, []),
        ((1.1, 0.0, -0.1), 1.0, []),
        ((0.9, 0.0, 0.0), 0.9, []),
        ((0.9, 0.1, 0.0), 1.0, ["set evaluation.correct_at: 0.9"]),
        ((5.0, 2.0, 0.0), 1.0, ["gives 2 to a wrong answer"]),
        ((1.0, 1.0, 0.0), 1.0, ["gives 1 to a wrong answer"]),
        ((1.0, 1.0, 1.0), 1.0, ["to the reference answer, to a wrong and to an empty one"]),
        ((0.0, 0.0, 0.0), 1.0, ["to the reference answer, to a wrong and to an empty one"]),
        ((1.0, "raised E", 0.0), 1.0, ['no score to the answer "I don\'t know.": raised E']),
        ((1.0, "raised E", "raised F"), 1.0, ["no score to the answer \"I don't know.\" and '': raised E"]),
        ((0.9, "raised E", 0.0), 1.0, ["no score to the answer", "set evaluation.correct_at: 0.9"]),
    ],
)
def test_what_is_said_of_a_rewards_scores(scores: tuple[float | str, ...], correct_at: float, said: list[str]) -> None:
    """A sound reward needs no word; each mistake is one sentence. Where the best that is known is below what counts as right, its value
    is the one to set."""
    notes = list(trial_notes(scores, has_answer=True, extraction=WHOLE, correct_at=correct_at))
    assert len(notes) == len(said) and all(part in note for part, note in zip(said, notes, strict=True)), notes


@pytest.mark.parametrize(("has_answer", "extraction"), [(False, WHOLE), (True, RegexMatch(pattern="<a>(.*)</a>"))])
def test_nothing_is_said_of_a_reference_answer_that_was_not_tried(has_answer: bool, extraction: Extraction) -> None:
    """A question without one, and one whose completion would need a form that a pattern doesn't tell."""
    assert list(trial_notes((0.0, 0.0, 0.0), has_answer=has_answer, extraction=extraction, correct_at=1.0)) == []


def test_a_reference_answer_is_tried_in_the_form_in_which_it_is_found() -> None:
    extraction = AfterMarker(marker="####")
    completion = in_its_form(extraction, ("72", "seventy-two"))
    assert build_extraction(extraction.model_dump())(completion) == "72"
