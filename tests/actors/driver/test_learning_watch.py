"""From finished groups to one warning with two answers, and to the end of a run whose batch never comes together."""

from __future__ import annotations

import asyncio
import itertools
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.carriers import StoredGroup
from evenkeel.actors.driver.evaluation import evaluate
from evenkeel.actors.driver.no_learning import LearningWatch, refuse_unscored
from evenkeel.actors.groups.book import GroupBook
from evenkeel.correction.errors import DataError
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.trajectory import FailureKind, Group
from tests.actors.cases import at_hand, prompt, prompts, stored, trajectory
from tests.actors.driver.controller_cases import EventsRecorder, controller, nothing
from tests.actors.driver.test_no_learning import config


def group(number: int, *texts: str) -> Group:
    asked = prompt(number)
    answers = tuple(replace(trajectory(asked, reward=0.0), text=text) for text in texts)
    return Group(number, asked, answers, 0)


async def _all(groups: list[StoredGroup], told: LearningWatch) -> None:
    for one in groups:
        told.finished(one)
        for _ in range(8):  # so many turns of the loop a look at groups that are here takes at most
            await asyncio.sleep(0)


def unexpected(text: str) -> None:
    raise AssertionError(text)


def test_the_warning_shows_what_the_scorer_saw_of_two_answers() -> None:
    said: list[tuple[str, str]] = []
    told = LearningWatch(config(**{"rollout.reward.extraction": "{kind: last_line}"}), lambda *event: said.append(event), unexpected)
    asyncio.run(_all([at_hand(group(number, "so:\nIt is A.\n", "so:\nIt is B.\n")) for number in range(200)], told))
    ((level, text),) = said
    assert level == "warning" and text.startswith("none of the last 208 answers is right: each got the reward 0. ")
    assert text.count("expected 'answer ") == text.count(", of which the reward saw 'It is ") == text.count(".': reward 0") == 2


def test_tokens_that_are_gone_cost_the_samples_alone() -> None:
    said: list[str] = []
    told = LearningWatch(config(), lambda _, text: said.append(text), unexpected)

    async def gone() -> None:
        groups = [group(number, "A", "B") for number in range(200)]
        await _all(stored(*groups, lost=range(200)), told)

    asyncio.run(gone())
    (text,) = said
    assert text.startswith("none of the last 208 answers is right") and text.endswith("or give partial rewards")


@pytest.mark.parametrize("goes_on", ["stop", "train"])
def test_a_batch_that_never_comes_together_ends_the_run_or_the_filter(goes_on: str) -> None:
    """Without either, 28,838 groups were discarded in 8 minutes for a reward that is always 1, and as many more would have been."""
    recorder = EventsRecorder()
    run = controller(recorder)
    settings = {"dynamic_sampling": True, "dynamic_sampling_on_shortage": goes_on}
    run._config = run._config.model_copy(update=settings)
    run._learning = LearningWatch(config(**settings), recorder.event, run._short_of_groups)
    book = GroupBook(groups_per_step=1000, max_staleness=0, dynamic_sampling=True)
    run._source = SimpleNamespace(book=book)  # type: ignore[assignment]
    run._checkpoints = SimpleNamespace(finished=nothing)  # type: ignore[assignment]

    async def next_batch() -> None:
        for number in itertools.count():
            book.admit([group(number, "A", "B").prompt], now=0.0)
            finished = book.finish(at_hand(group(number, "A", "B")), now=0.0)
            assert finished is not None
            if finished.reason is None:
                raise DataError(f"group {number} was trained on")
            run._learning.finished(finished)
            await asyncio.sleep(0)

    run._next_batch = next_batch  # type: ignore[assignment, method-assign]
    (event,) = ended(run, recorder) if goes_on == "stop" else trained_on(run, recorder)
    assert re.search(r"dynamic sampling has discarded 30\d groups since the last step, and kept 0", event) and event.count(", answer ") == 2


def ended(run: Any, recorder: EventsRecorder) -> list[str]:
    asyncio.run(asyncio.wait_for(run._train(), 20.0))
    assert run._alarm and run._ends_early
    return [event for event in recorder.events if event.startswith("[ending] no batch comes together: ")]


def trained_on(run: Any, recorder: EventsRecorder) -> list[str]:
    with pytest.raises(DataError, match=r"group 30\d was trained on"):
        asyncio.run(asyncio.wait_for(run._train(), 20.0))
    assert not run._alarm and not run._source.book.filters
    asyncio.run(nothing_is_read(run))
    return [event for event in recorder.events if "From here on the run trains on all groups" in event]


async def nothing_is_read(run: Any) -> None:
    """What the shortage meant has been said: the groups that come before the next step are not looked at for it."""
    read = []

    class Tokens:
        def __await__(self) -> Any:
            read.append(self)
            return asyncio.sleep(0).__await__()

    for number in range(3):
        run._learning.finished(StoredGroup(group(number, "A", "B").facts, Tokens()))
        await asyncio.sleep(0.01)
    assert read == []


@pytest.mark.parametrize(
    ("rewards", "kind", "is_refused"),
    [
        ([None, None], FailureKind.REWARD, True),
        ([None, None], FailureKind.ENGINE, False),
        ([None, None], FailureKind.REWARD_TIMEOUT, False),
        ([None, 0.0], FailureKind.REWARD, False),
    ],
)
def test_a_run_whose_first_evaluation_scores_nothing_does_not_train(
    rewards: list[float | None], kind: FailureKind, is_refused: bool
) -> None:
    """It would go on for half an hour, a group a minute. What an engine could not
    answer says nothing of the reward, and a judge that is late comes back."""

    class Answers:
        async def answer(self, asked: Any, how: Any) -> list[Any]:
            failed = [None if reward is not None else kind for reward in rewards]
            made = zip(asked, rewards, failed, strict=True)
            return [(replace(trajectory(one, reward=reward), failure=failure),) for one, reward, failure in made]

    first = asyncio.run(evaluate(Answers(), prompts(0, 2), AnswerSampling(), step=0, correct_at={"": 1.0}))
    with pytest.raises(DataError, match="none of 2 held-out answers before training got a score") if is_refused else nullcontext():
        refuse_unscored(first)
