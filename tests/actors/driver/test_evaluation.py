"""Held-out accuracy: what is counted, and what is left out of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from pydantic import ValidationError

from evenkeel.actors.config import EvaluationConfig
from evenkeel.actors.driver.evaluation import evaluate
from evenkeel.actors.metrics.held_out import Evaluation
from evenkeel.actors.metrics.step_metrics import StepMetrics, accuracies_of_tasks
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.trajectory import Prompt, Trajectory
from tests.actors.cases import prompts, trajectory
from tests.actors.metrics.test_statistics import wilson


class Answers:
    """Answers with given rewards, to each prompt in turn; None is one whose reward raised."""

    def __init__(self, rewards: Sequence[float | None]) -> None:
        self._rewards = rewards

    async def answer(self, prompts: Sequence[Prompt], how: AnswerSampling) -> list[tuple[Trajectory, ...]]:
        assert len(self._rewards) == len(prompts) * how.samples
        rewards = iter(self._rewards)
        return [tuple(trajectory(prompt, reward=next(rewards), version=3) for _ in range(how.samples)) for prompt in prompts]


def evaluated(rewards: Sequence[float | None], samples: int = 1) -> Evaluation:
    asked = prompts(0, len(rewards) // samples)
    how = AnswerSampling(samples=samples, temperature=0.7)
    return asyncio.run(evaluate(Answers(rewards), asked, how, step=7, correct_at={"": 1.0}))


def test_answers_without_a_score_are_counted_and_left_out_of_the_accuracy() -> None:
    """Half of what was scored is right; had the third that raised counted as wrong, it would be a third."""
    result = evaluated([1.0, 0.0, None] * 20)
    assert result.accuracy == wilson(20, 40) and result.failed == 20
    numbers = StepMetrics(7, result.metrics())
    assert (numbers["held_out/accuracy"], numbers["held_out/problems"], numbers["held_out/unscored"]) == (0.5, 60, 20)
    assert numbers["held_out/wilson_low"] == wilson(20, 40).low, "the interval is that of 40 answers"
    assert str(result).endswith("n = 40, 20 answers could not be scored")
    assert result.first_failure == "train/0/2: the reward raised ValueError: no"
    text = result.text(prompts(0, 60))
    assert text.startswith(f"held-out accuracy {result} after 7 steps") and "the reward raised ValueError: no)" in text


def test_nothing_is_said_where_all_were_scored() -> None:
    result = evaluated([1.0, 0.0])
    assert str(result) == str(wilson(1, 2)) and result.first_failure == "" and result.metrics()["held_out/unscored"] == 0


def test_without_any_score_the_accuracy_is_unknown_and_not_zero() -> None:
    result = evaluated([None, None])
    assert str(result) == "unknown, n = 0, 2 answers could not be scored"
    numbers = StepMetrics(7, result.metrics())
    assert not any(name in numbers for name in ("held_out/accuracy", "held_out/wilson_low", "held_out/wilson_high"))
    assert (numbers["held_out/problems"], numbers["held_out/unscored"], numbers["held_out/weight_version"]) == (2, 2, 3)


@pytest.mark.parametrize(("reward", "right"), [(0.99, 0), (1.0, 1), (1.5, 1), (-1.0, 0)])
def test_right_is_a_reward_of_at_least_correct_at(reward: float, right: int) -> None:
    assert evaluated([reward]).accuracy.value == right


def test_several_answers_give_the_mean_over_questions_and_pass_at_k() -> None:
    """Right answers of 4: 4, 2, 1, 0 and 0. Mean 7/20. pass@2: 1, 1 - 1/6, 1 - 3/6, 0, 0. pass@4: three of five."""
    rewards = [1.0] * 4 + [1.0, 0.0, 0.0, 1.0] + [0.0, 0.0, 1.0, 0.0] + [0.0] * 8
    result = evaluated(rewards, samples=4)
    numbers = StepMetrics(7, result.metrics())
    assert numbers["held_out/accuracy"] == pytest.approx(7 / 20)
    assert numbers["held_out/pass_at/2"] == pytest.approx((1 + 5 / 6 + 1 / 2) / 5)
    assert result.pass_at[4] == wilson(3, 5), "of k = n answers each question has one choice: right or wrong"
    assert (numbers["held_out/problems"], numbers["held_out/samples"], list(result.pass_at)) == (5, 4, [2, 4])
    between = result.accuracy
    assert wilson(7, 20).low > between.low > wilson(7 / 4, 5).low, "wider than of 20 independent answers, narrower than of 5"
    assert str(result).startswith("0.350 [") and "n = 5 x 4 answers, pass@4 0.600 [" in str(result)
    assert result.text(prompts(0, 5)).count("question 1") == 4


@pytest.mark.parametrize(("samples", "ks"), [(1, []), (2, [2]), (5, [2, 4, 5]), (8, [2, 4, 8]), (32, [2, 4, 8, 16, 32])])
def test_pass_at_is_told_for_powers_of_two_and_the_number_of_answers(samples: int, ks: list[int]) -> None:
    assert list(evaluated([1.0] * samples * 2, samples).pass_at) == ks


def test_a_question_counts_where_it_has_enough_scored_answers() -> None:
    """The first has both, the second one (right), the third none: the mean is that of two questions, pass@2 that of the first."""
    result = evaluated([1.0, 0.0, None, 1.0, None, None], samples=2)
    assert (result.accuracy.value, result.accuracy.n, result.failed) == (0.75, 2, 3)
    assert (result.pass_at[2].value, result.pass_at[2].n) == (1.0, 1)
    assert evaluated([1.0, None], samples=2).pass_at == {}, "nothing is said of pass@2"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"samples": 8}, r"samples = 8 with temperature = 0: greedy answers to a question are all the same"),
        ({"top_p": 0.95}, r"top_p = 0.95 with temperature = 0: the likeliest token is taken"),
        ({"samples": 0, "temperature": 1.0}, "samples"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p"),
        ({"top_p": 1.01, "temperature": 1.0}, "top_p"),
        ({"top_p": math.nan, "temperature": 1.0}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_can_not_be_sampled_is_refused(settings: dict[str, float], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        EvaluationConfig.model_validate(settings)


def test_the_words_for_how_it_was_sampled() -> None:
    assert EvaluationConfig().description == "greedy"
    assert EvaluationConfig(samples=8, temperature=0.7, top_p=0.95).description == "8 answers each, sampled at temperature 0.7, top-p 0.95"
    assert EvaluationConfig(temperature=1.0).description == "sampled at temperature 1"


def test_each_of_several_tasks_has_its_own_accuracy() -> None:
    """Of 6 words 3 are right, of 4 sums 1, whose right answers get 0.5: the whole has 4 of 10, and each task the interval of its own
    questions."""
    asked = [replace(one, prompt_id=f"{task}/{one.prompt_id}") for task, count in (("words", 6), ("sums", 4)) for one in prompts(0, count)]
    rewards = [1.0, 0.5] * 3 + [0.0, 0.5, 0.0, None]
    result = asyncio.run(evaluate(Answers(rewards), asked, AnswerSampling(), step=7, correct_at={"words": 1.0, "sums": 0.5}))
    numbers = StepMetrics(7, result.metrics())
    assert (result.accuracy, result.by_task["words"].accuracy, result.by_task["sums"].accuracy) == (
        wilson(4, 9),
        wilson(3, 6),
        wilson(1, 3),
    )
    assert accuracies_of_tasks(numbers)["sums"] == (1 / 3, wilson(1, 3).low, wilson(1, 3).high)
    assert numbers["held_out/task_reward/words"] == 0.75
    assert str(result).endswith(f"; words: {wilson(3, 6)}; sums: {wilson(1, 3)}, 1 answer could not be scored")
    assert evaluated([1.0, 0.0]).by_task == {}, "one task is the whole"
