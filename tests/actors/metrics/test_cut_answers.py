"""What is said of answers that are nearly all cut."""

from __future__ import annotations

import pytest

from evenkeel.actors.metrics.held_out import cut_remark
from evenkeel.rollout.trajectory import FinishReason, Trajectory, ids_of, logprobs_of


@pytest.mark.parametrize(("cut", "ended", "is_said"), [(8, 0, True), (18, 2, True), (17, 3, False), (7, 0, False), (0, 9, False)])
def test_nine_in_ten_of_some_answers_are_told(cut: int, ended: int, is_said: bool) -> None:
    reasons = [FinishReason.LENGTH] * cut + [FinishReason.STOP] * ended
    answers = [Trajectory("p", ids_of([1]), ids_of([2]), logprobs_of([-1.0]), (), reason) for reason in reasons]
    said = cut_remark(answers, "rollout.sampling.max_tokens = 32")
    assert (said is not None) == is_said
    assert said is None or f"{cut} of {cut + ended} answers were cut at rollout.sampling.max_tokens = 32" in said
