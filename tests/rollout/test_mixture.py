"""Several tasks of a run: shares within their bounds, an order that follows from weights and positions alone, and a resume that repeats
nothing and leaves nothing out."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.actors.carriers import Ticket
from evenkeel.rollout.prompt_place import PromptPlace, task_of
from evenkeel.rollout.tasks.mixture import Mixture, Turns, first_of_each
from evenkeel.rollout.trajectory import GroupFacts, Prompt
from tests.actors.cases import group, prompt

WEIGHTS = st.lists(st.lists(st.floats(0.01, 100), min_size=4, max_size=4), min_size=1, max_size=60)


def stream(name: str, per_epoch: int | None = None) -> Any:
    """A task of numbered questions."""

    def prompt(position: int) -> Prompt:
        return Prompt(str(PromptPlace("train", 0, position, name)), f"{name} {position}", (1,), "")

    return SimpleNamespace(name=name, fingerprint=name, questions_per_epoch=per_epoch, train_prompt=prompt)


def mixed(weights: dict[str, dict[int, float]], **how: Any) -> Mixture:
    def weight_at(name: str, step: int) -> float:
        return weights[name][max(first for first in weights[name] if first <= step)]

    return Mixture({name: stream(name) for name in weights}, weight_at, **how)


def ids(of: Mixture, positions: range) -> list[str]:
    return [of.train_prompt(position).prompt_id for position in positions]


@settings(deadline=None)
@given(st.integers(2, 4), WEIGHTS, st.integers(1, 20))
def test_no_task_is_far_from_the_sum_of_its_shares(tasks: int, weights: list[list[float]], repeated: int) -> None:
    """Whatever the weights, and however they change: at most 1 - 1/n ahead, since the one chosen has at least the mean credit, 1/n; and at
    most (n - 1) times as much behind, since the credits add up to 0."""
    turns, due = Turns(tasks), [0.0] * tasks
    for row in weights * repeated:
        row = row[:tasks]
        turns.add(row)
        due = [owed + weight / sum(row) for owed, weight in zip(due, row, strict=True)]
        ahead = [taken - owed for taken, owed in zip(turns.taken, due, strict=True)]
        most = 1 - 1 / tasks
        assert max(ahead) <= most + 1e-9 and min(ahead) >= -(tasks - 1) * most - 1e-9


@settings(deadline=None)
@given(WEIGHTS, st.data())
def test_a_task_of_weight_0_has_no_turn(weights: list[list[float]], data: st.DataObject) -> None:
    turns = Turns(4)
    for row in weights:
        off = data.draw(st.sets(st.integers(0, 3), max_size=3))
        turns.add([0.0 if number in off else weight for number, weight in enumerate(row)])
        number, place = turns[len(turns) - 1]
        assert number not in off and place == turns.taken[number] - 1


def test_equal_weights_take_turns_and_each_task_goes_through_its_own_questions() -> None:
    both = mixed({"a": {0: 1.0}, "b": {0: 2.0}})
    found = ids(both, range(6))
    assert found == ["b/train/0/0", "a/train/0/0", "b/train/0/1", "b/train/0/2", "a/train/0/1", "b/train/0/3"]
    assert [task_of(one) for one in found].count("b") == 4 and task_of("train/0/3") == ""
    assert both.shares() == {"a": pytest.approx(1 / 3), "b": pytest.approx(2 / 3)} and both.passes() == {}


def test_weights_by_step_hold_from_the_prompts_of_that_step_on() -> None:
    found = mixed({"a": {0: 1.0, 2: 0.0}, "b": {0: 0.0, 2: 1.0}}, groups_per_step=4)
    assert [task_of(one) for one in ids(found, range(12))] == ["a"] * 8 + ["b"] * 4


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=3), st.integers(0, 60), st.integers(0, 12), st.floats(0.01, 1), st.randoms())
def test_a_resume_repeats_and_leaves_out_nothing(weights: list[int], at: int, ahead: int, floor: float, draw: Any) -> None:
    """From any position. The driver holds some prompts that it has not admitted yet. Solve rates, which nobody can foresee, change between
    any two prompts; the state goes through JSON, as in a checkpoint."""
    names = {f"t{number}": {0: float(weight), 3: float(1 + weight % 4)} for number, weight in enumerate(weights)}
    how = {"groups_per_step": 5, "floor": floor}
    first = mixed(names, **how)
    before = []
    for position in range(at + ahead):
        before += ids(first, range(position, position + 1))
        first.finished(finished(draw.choice(list(names)), draw.choice([0.0, 0.5, 1.0])))
    second = mixed(names, **how)
    second.restore(json.loads(json.dumps(first.state)))
    again = ids(second, range(at + ahead))
    assert again == before, "those under way are the same, and those that were held come again"
    for of in (first, second):
        of.finished(finished("t0", 1.0))
    later = ids(second, range(at, at + 40))
    assert later == ids(first, range(at, at + 40))
    places = [PromptPlace.parse(one) for one in before[:at] + later]
    for name in names:
        assert [one.position for one in places if one and one.task == name] == list(range(sum(one.task == name for one in places if one)))


def test_other_weights_after_a_resume_change_nothing_before_it() -> None:
    first = mixed({"a": {0: 1.0}, "b": {0: 1.0}}, groups_per_step=4)
    before = ids(first, range(10))
    second = mixed({"a": {0: 0.0}, "b": {0: 1.0}}, groups_per_step=4)
    second.restore(first.state)
    assert ids(second, range(10)) == before and {task_of(one) for one in ids(second, range(12, 30))} == {"b"}
    first.restore(None)
    assert ids(first, range(10)) == before, "a run that goes back to its beginning"


def finished(task: str, share: float) -> GroupFacts:
    """A group of four, of which this share is right."""
    rewards = [float(number < 4 * share) for number in range(4)]
    asked = replace(prompt(0), prompt_id=f"{task}/train/0/0")
    return group(Ticket(0, asked, 0), rewards=rewards).facts


def test_a_task_that_is_half_solved_gets_more_prompts_than_one_that_is_solved() -> None:
    """Rates of 1/2, 1 and 1/4: 4 p (1 - p) is 1, 0 and 3/4, of which 0 is raised to the floor."""
    mix = mixed({"half": {0: 1.0}, "solved": {0: 1.0}, "hard": {0: 1.0}}, groups_per_step=3, floor=0.25)
    ids(mix, range(3))
    assert set(mix.shares().values()) == {1 / 3}, "nothing is known yet"
    for task, share in (("half", 0.5), ("solved", 1.0), ("hard", 0.25)):
        for _ in range(40):
            mix.finished(finished(task, share))
    ids(mix, range(303))
    assert mix.shares() == {"half": 0.5, "solved": 0.125, "hard": 0.375}
    counts = [sum(task_of(one) == task for one in ids(mix, range(3, 303))) for task in ("half", "solved", "hard")]
    assert counts == pytest.approx([150, 37.5, 112.5], abs=2)


def test_each_task_says_what_is_right() -> None:
    """Half of the answers get 1, which is right in one task and not in the other: rates of 1/2 and 0, of which that is raised to the
    floor."""
    mix = mixed({"a": {0: 1.0}, "b": {0: 1.0}}, groups_per_step=1, floor=0.25, correct_at={"a": 1.0, "b": 2.0})
    for task in ("a", "b"):
        mix.finished(finished(task, 0.5))
    ids(mix, range(1))
    assert mix.shares() == {"a": 0.8, "b": 0.2}


def test_rates_forget_what_was_long_ago() -> None:
    mix = mixed({"a": {0: 1.0}, "b": {0: 1.0}}, groups_per_step=1, floor=0.01)
    for share in [0.0] * 100 + [0.5] * 150:
        mix.finished(finished("a", share))
    ids(mix, range(1))
    assert mix.shares()["a"] == pytest.approx(0.5, abs=0.01)


def test_the_first_questions_of_each_task_and_passes_over_them() -> None:
    asked = [stream(name).train_prompt(number) for name in ("a", "b") for number in range(5)]
    assert [one.prompt_id for one in first_of_each(asked, 2)] == ["a/train/0/0", "a/train/0/1", "b/train/0/0", "b/train/0/1"]
    both = Mixture({"a": stream("a", per_epoch=4), "b": stream("b")})
    ids(both, range(6))
    assert both.passes() == {"a": 0.75}
