"""Why a run can't learn: each cause by its name, once; nothing of a run that learns.

The healthy runs are drawn from what real ones showed: the nano recipe begins with half of its answers right and ends with groups of which
70 % have no gradient; SmolLM2-135M-Instruct begins with 19 % right on sums, and 40 to 75 % of its answers are cut.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.no_learning import CAUSES, NoLearning, Sample
from evenkeel.recipe import load_config
from evenkeel.rollout.trajectory import AnswerFacts, FailureKind, FinishReason, GroupFacts, VersionSpan

NANO = Path(__file__).parents[3] / "recipes" / "nano_spell_backward.yaml"
G = 8
Answer = tuple[float | None, bool]
"""Reward (None: the reward failed), and whether it was cut."""


def config(**settings: Any) -> RunConfig:
    return load_config(RunConfig, NANO, [f"{key}={value}" for key, value in ({"groups_per_step": 16} | settings).items()])


def watch(**settings: Any) -> NoLearning:
    return NoLearning(config(**settings))


def group(number: int, answers: list[Answer]) -> GroupFacts:
    def facts(reward: float | None, is_cut: bool) -> AnswerFacts:
        failed = (None, None) if reward is not None else ("the reward raised", FailureKind.REWARD)
        return AnswerFacts(5, (VersionSpan(0, 0, 5),), FinishReason.LENGTH if is_cut else FinishReason.STOP, reward, {}, *failed)

    return GroupFacts(number, f"train/0/{number}", tuple(facts(*one) for one in answers), 0)


def sample(text: str = "cba", *, seen: str | None = None, reward: float | None = 0.0, differs: bool = True) -> Sample:
    error = None if reward is not None else "the reward raised ValueError"
    return Sample(f"spell {text}", "cba", text, text if seen is None else seen, reward, error, differs)


def said_of(
    judge: NoLearning, groups: Iterator[list[Answer]], samples: list[Sample], *, step: int = 16, filtered: bool = False
) -> list[str]:
    """What is said over these groups, of which each step trains the first ones, whatever they are."""
    said = []
    for number, answers in enumerate(groups):
        facts = group(number, answers)
        if judge.finished(facts, is_discarded=filtered and facts.is_uniform(by_turn=False)):
            said.append(judge.said(samples))
        if number % step == step - 1:
            judge.trained()
    return [one for one in said if one]


def steady(*answers: Answer, groups: int = 160) -> Iterator[list[Answer]]:
    yield from ([*answers] * (G // len(answers)) for _ in range(groups))


def in_turn(*kinds: list[Answer], groups: int = 160) -> Iterator[list[Answer]]:
    yield from (kinds[number % len(kinds)] for number in range(groups))


WRONG = sample("abc")
PLANTED: list[tuple[str, dict[str, Any], Iterator[list[Answer]], list[Sample], str]] = [
    ("unscored", {}, steady((1.0, False), (None, False)), [sample(reward=1.0), sample("x", reward=None)], "(rollout.reward)"),
    (
        "extraction",
        {"rollout.reward.extraction": "{kind: after, marker: '####'}"},
        steady((0.0, False)), [sample("it is cba", seen="")], "rollout.reward.extraction finds nothing",
    ),
    ("no_end", {}, steady((0.0, True)), [sample("cba. And then"), WRONG], "evenkeel doctor MODEL"),
    ("cut", {}, in_turn([(0.0, True)] * 15 + [(1.0, False)]), [sample("c"), WRONG], "rollout.sampling.max_tokens = 10"),
    ("all_right", {}, steady((1.0, False)), [sample(reward=1.0)], "evenkeel filter"),
    ("constant", {}, steady((1.0, False)), [sample(reward=1.0), sample("abc", reward=1.0)], "whatever it says"),
    ("blind", {}, steady((0.0, False)), [WRONG, sample("CBA\n")], "the expected ones among them"),
    ("never_right", {}, steady((0.0, False)), [WRONG], "rollout.task.prompt_template"),
    (
        "one_answer", {"rollout.sampling.temperature": 0.01}, in_turn([(1.0, False)] * G, [(0.0, False)] * G),
        [sample("abc", differs=False), sample(reward=1.0, differs=False)], "rollout.sampling.temperature = 0.01",
    ),
    ("no_gradient", {}, in_turn([(1.0, False)] * G, [(0.0, False)] * G), [WRONG, sample(reward=1.0)], "samples_per_group"),
    ("below", {}, steady((0.9, False), (0.0, False)), [WRONG, sample(reward=0.9)], "set evaluation.correct_at: 0.9"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "groups", "samples", "remedy"), PLANTED, ids=[one[0] for one in PLANTED])
def test_each_cause_is_named_once_with_samples_and_the_setting_to_change(
    name: str, settings: dict[str, Any], groups: Iterator[list[Answer]], samples: list[Sample], remedy: str
) -> None:
    (said,) = said_of(watch(**settings), groups, samples)
    cause = next(one for one in CAUSES if one.name == name)
    assert said.startswith(cause.sentence.partition("{")[0]) and remedy in said
    assert said.count("question 'spell") == min(2, len(samples)) and repr(samples[-1].text) in said
    assert f"reward {samples[-1].reward:g}" in said if samples[-1].reward is not None else "no score (the reward raised" in said


def test_a_run_by_turn_is_not_given_up_for_sums_that_are_alike() -> None:
    """What 1 answer earns in its first turn another earns in its second: 400 such groups would end the run, were only sums compared."""
    settings = ["dynamic_sampling=true", "correction.advantage.level=turn"]
    judge = NoLearning(load_config(RunConfig, NANO.parent / "nano_calculator.yaml", settings))
    alike = group(0, [(1.0, False), (1.0, False)])
    turns = zip(alike.trajectories, ((1.0, 0.0), (0.0, 1.0)), strict=True)
    differing = replace(alike, trajectories=tuple(replace(one, turn_rewards=of) for one, of in turns))
    for _ in range(400):
        judge.finished(differing)
    assert not judge.is_short


def test_an_answer_is_right_by_its_own_task() -> None:
    """A reward of 0.9 is right in one of two tasks: nothing is wrong with a run whose best answers get it, unless they are the other's."""
    task = "{name: %s, task: {kind: reasoning_gym, dataset: spell_backward}, reward: {kind: reasoning_gym}, correct_at: %s}"
    tasks = f"[{task % ('a', 0.9)}, {task % ('b', 1.0)}]"
    for name, said in (("a", 0), ("b", 1)):
        judge = watch(**{"rollout.task": "null", "rollout.reward": "null", "rollout.tasks": tasks})
        facts = (replace(group(i, one), prompt_id=f"{name}/train/0/{i}") for i, one in enumerate(steady((0.9, False), (0.0, False))))
        assert len([told for one in facts if judge.finished(one) and (told := judge.said([WRONG, sample(reward=0.9)]))]) == said


def test_where_a_task_has_a_limit_of_its_own_that_is_named() -> None:
    """Its answers are cut at 4 tokens: who raises rollout.sampling.max_tokens changes nothing."""
    tasks = "[{name: a, task: {kind: reasoning_gym, dataset: spell_backward}, reward: {kind: reasoning_gym}, sampling: {max_tokens: 4}}]"
    judge = watch(**{"rollout.task": "null", "rollout.reward": "null", "rollout.tasks": tasks})
    facts = (replace(group(i, one), prompt_id=f"a/train/0/{i}") for i, one in enumerate(steady((0.0, True))))
    (said,) = [told for one in facts if judge.finished(one) and (told := judge.said([sample("c"), WRONG]))]
    assert "were cut at rollout.sampling.max_tokens = 10 (task a: 4). Raise it" in said


def test_every_cause_is_planted() -> None:
    assert [one[0] for one in PLANTED] == [cause.name for cause in CAUSES]


def drawn(accuracy: Callable[[int], float], *, spread: float = 3.0, cut: float = 0.0, seed: int = 0) -> Iterator[list[Answer]]:
    """60 steps of 16 questions, some easy and some hard (a beta distribution of their shares of right answers); a cut answer is wrong."""
    chance = random.Random(seed)
    for number in range(960):
        mean = min(max(accuracy(number // 16), 0.01), 0.99)
        share = chance.betavariate(mean * spread, (1 - mean) * spread)
        cuts = [chance.random() < cut for _ in range(G)]
        yield [(float(not is_cut and chance.random() < share / (1 - cut)), is_cut) for is_cut in cuts]


HEALTHY: list[tuple[str, bool, Callable[[int], Iterator[list[Answer]]]]] = [
    ("the nano recipe", False, lambda seed: drawn(lambda step: 0.5 + step / 150, seed=seed)),
    ("late, 8 of 10 groups alike", False, lambda seed: drawn(lambda _: 0.9, spread=0.7, seed=seed)),
    ("a small chat model, 4 of 10 answers cut", False, lambda seed: drawn(lambda step: 0.19 + step / 300, cut=0.4, seed=seed)),
    ("the same, 3 of 4 cut", False, lambda seed: drawn(lambda step: 0.19, cut=0.75, seed=seed)),
    ("1 answer in 20 right, filtered", True, lambda seed: drawn(lambda _: 0.05, seed=seed)),
    ("partial rewards, the first right one in step 6", False, lambda seed: (
        [(reward / 2 if number < 96 else reward, is_cut) for reward, is_cut in one]
        for number, one in enumerate(drawn(lambda _: 0.3, seed=seed))
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "filtered", "groups"), HEALTHY, ids=[one[0] for one in HEALTHY])
def test_nothing_is_said_of_a_run_that_learns(name: str, filtered: bool, groups: Callable[[int], Iterator[list[Answer]]]) -> None:
    for seed in range(2):
        judge = watch()
        # Under the filter a step takes until 16 groups had a gradient; here ten times as many, which is more than these take.
        assert said_of(judge, groups(seed), [sample("cba. Next"), WRONG], step=160, filtered=filtered) == [] and not judge.is_short


def test_a_later_cause_is_silent_while_an_earlier_one_explains_it() -> None:
    """Cut answers are never right: that is one trouble. Once they end, what is left of it is another."""
    judge = watch()
    (said,) = said_of(judge, steady((0.0, True)), [WRONG])
    assert "were cut at rollout.sampling.max_tokens" in said
    (said,) = said_of(judge, steady((0.0, False), groups=400), [WRONG])
    assert said.startswith("none of the last 1008 answers is right")


def test_a_suspicion_stands_until_samples_were_looked_at() -> None:
    """While one look is under way the watch begins no other: a suspicion of that time must come again."""
    judge = watch()
    wrong: list[Answer] = [(0.0, False)] * G
    assert sum(judge.finished(group(number, wrong)) for number in range(160)) > 1
    assert judge.said([WRONG])
    assert not any(judge.finished(group(number, wrong)) for number in range(160))


def test_a_batch_is_given_up_when_fewer_than_one_group_in_a_hundred_has_a_gradient() -> None:
    """The rule of three: with none in n the share is below 3 / n with 95 % confidence, so n is 300; each that comes allows 100 more."""
    alike, mixed = [(1.0, False)] * G, [(1.0, False), (0.0, False)] * (G // 2)
    for usable in (0, 1, 15):
        judge = watch()
        for number in range(usable):
            judge.finished(group(number, mixed))
        for number in range(100 * (usable + 3)):
            judge.finished(group(number, alike), is_discarded=True)
            assert not judge.is_short
        assert judge.finished(group(0, alike), is_discarded=True) and judge.is_short
        assert f"discarded {100 * (usable + 3) + 1} groups since the last step, and kept {usable}" in judge.shortage
        judge.trained()
        assert not judge.is_short, "each step counts anew"
    judge = watch()
    assert not any(judge.finished(group(number, alike)) and judge.is_short for number in range(1000))
