"""How long an evaluation may take, against one that is played: the pool's own dispatch, and engines that sample what came first, first."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.pool.dispatch import Questions, WaitingWork
from evenkeel.actors.settings.evaluation_places import evaluation_answers_at_once, evaluation_waves, questions_of_a_call
from evenkeel.rollout.config import AnswerSampling


def played(questions: int, samples: int, *, workers: int, slots: int, samples_per_group: int, running: int, is_fed: bool) -> int:
    """Answers one after the other until all questions are answered; each takes as long. Engines have all their groups before the first
    question comes; if they are fed, another answer of a group for each that ends."""
    book = GroupBook(groups_per_step=1, max_staleness=0)
    work, how = WaitingWork(slots, samples_per_group), AnswerSampling(samples=samples, temperature=float(samples > 1))
    work.is_fed = is_fed
    size = questions_of_a_call(evaluation_answers_at_once(slots, samples_per_group), samples)
    pending: Any = SimpleNamespace(done=lambda: False)
    parts = [Questions([object()] * min(size, questions - i), how, pending) for i in range(0, questions, size)]  # type: ignore[list-item]
    work.add_questions(parts)
    left, waves = {part: part.size for part in parts}, 0
    takers: list[Any] = [
        SimpleNamespace(name="0", groups=set(), in_slots=set(), questions=0, queue=deque([None] * slots * samples_per_group))
        for _ in range(workers)
    ]
    while any(left.values()):
        for taker, part in work.take(book, takers, takers):
            taker.queue.extend([part] * part.size)
        waves += 1
        for taker in takers:
            for part in [taker.queue.popleft() for _ in range(min(running, len(taker.queue)))]:
                if part is None:
                    taker.queue.extend([None] * is_fed)
                    continue
                left[part] -= 1
                if not left[part]:
                    taker.questions -= part.size
    return waves


SIZES = [
    {"workers": 1, "slots": 16, "samples_per_group": 8, "running": 64},
    {"workers": 3, "slots": 16, "samples_per_group": 8, "running": 64},
    {"workers": 2, "slots": 3, "samples_per_group": 4, "running": 64},
    {"workers": 2, "slots": 1, "samples_per_group": 2, "running": 1},
    {"workers": 4, "slots": 64, "samples_per_group": 16, "running": 256},
]


@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize("samples", [1, 5, 8, 100])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_no_evaluation_takes_longer_than_is_said(sizes: dict[str, int], samples: int, is_fed: bool) -> None:
    """Nor is much more said: an engine that is fed may have its groups all before each call's answers, or sample them in between."""
    for questions in (1, 128, 500):
        asked: dict[str, Any] = {"questions": questions, "samples": samples, **sizes, "is_fed": is_fed}
        took, said = played(**asked), evaluation_waves(**asked)
        assert took <= said <= 2 * took + 3, asked


def test_during_training_an_evaluation_has_a_quarter_of_the_places_behind_all_groups() -> None:
    """128 questions on one worker of 64 places, in calls of 32: each waits for the 128 answers of groups before it. After training two
    waves of the whole engine do, when the last groups are done."""
    asked: dict[str, Any] = {"questions": 128, "samples": 1, **SIZES[0]}
    assert (played(**asked, is_fed=True), evaluation_waves(**asked, is_fed=True)) == (12, 13)
    assert (played(**asked, is_fed=False), evaluation_waves(**asked, is_fed=False)) == (4, 4)
