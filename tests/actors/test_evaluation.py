"""Held-out accuracy: what is counted, and what is left out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from actors.evaluation import Evaluation, evaluate, wilson
from actors.metrics import StepMetrics
from rollout.trajectory import Prompt, Trajectory
from tests.actors.cases import prompts, trajectory


class Answers:
    """Answers with given rewards; None is one whose reward raised."""

    def __init__(self, rewards: Sequence[float | None]) -> None:
        self._rewards = rewards

    async def answer(self, prompts: Sequence[Prompt], temperature: float) -> list[Trajectory]:
        return [trajectory(prompt, reward=reward, version=3) for prompt, reward in zip(prompts, self._rewards, strict=True)]


def evaluated(rewards: Sequence[float | None]) -> Evaluation:
    asked = prompts(0, len(rewards))
    return asyncio.run(evaluate(Answers(rewards), asked, step=7, temperature=0.0, correct_at=1.0))


def test_answers_without_a_score_are_counted_beside_the_accuracy_and_left_out_of_it() -> None:
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
