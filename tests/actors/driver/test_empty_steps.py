"""A batch of which nothing is left: a skipped step that says why, and the end of the run when it doesn't stop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.carriers import Ticket
from evenkeel.actors.driver.no_learning import EmptySteps
from evenkeel.correction.errors import DataError
from evenkeel.rollout.trajectory import FinishReason
from tests.actors.cases import group, prompt


def batch(finish_reason: FinishReason = FinishReason.LENGTH) -> Any:
    facts = group(Ticket(0, prompt(0), 0)).facts
    answers = tuple(SimpleNamespace(finish_reason=finish_reason) for _ in facts.trajectories)
    return SimpleNamespace(groups=[SimpleNamespace(valid=answers)])


CUT = SimpleNamespace(trained_tokens=0, kept_tokens=0)
REJECTED = SimpleNamespace(trained_tokens=27, kept_tokens=0)
LEARNED = SimpleNamespace(trained_tokens=27, kept_tokens=1)
ALL_ALIKE = SimpleNamespace(trained_tokens=27, kept_tokens=27)
"""Every group's answers have one reward: no gradient, which the next batch may have."""


def test_each_is_told_with_its_reason_and_its_remedy() -> None:
    told: list[tuple[str, str]] = []
    steps = EmptySteps(1, lambda *event: told.append(event))
    steps.note(3, batch(), CUT)  # type: ignore[arg-type]
    steps.note(4, batch(), REJECTED)  # type: ignore[arg-type]
    (level, cut), (_, rejected) = told
    assert level == "warning" and cut.startswith("step 3 is skipped (1 of 4 in a row end the run): 2 of its 2 answers were cut at")
    assert "Raise max_tokens, or set rollout.overlong.kind" in cut
    assert "(2 of 4 in a row end the run): the correction rejected all 27 tokens" in rejected and "correction.rejection" in rejected


@pytest.mark.parametrize(("max_staleness", "most"), [(0, 3), (2, 5)])
def test_too_many_in_a_row_end_the_run_and_one_that_teaches_something_forgives_them(max_staleness: int, most: int) -> None:
    """Three beyond those in which the tokens of older weights are used up."""
    told: list[str] = []
    steps = EmptySteps(max_staleness, lambda _, text: told.append(text))
    for round_ in (LEARNED, ALL_ALIKE):
        for number in range(most - 1):
            steps.note(number, batch(), REJECTED)  # type: ignore[arg-type]
        steps.note(most, batch(), round_)  # type: ignore[arg-type]
    assert len(told) == 2 * (most - 1)
    for number in range(most - 1):
        steps.note(number, batch(), CUT)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=rf"^nothing was learned in {most} steps in a row, up to step 9: 2 of its 2 answers were cut"):
        steps.note(9, batch(), CUT)  # type: ignore[arg-type]
