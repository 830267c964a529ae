"""Rewards in processes that can be killed: values, failures, and what is wrong at the start."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from evenkeel.correction.errors import ConfigError
from evenkeel.rollout.rewards.reward_process import build_extraction, components
from evenkeel.rollout.rewards.rewards import RewardError, RewardPool, _as_reply
from evenkeel.rollout.trajectory import FailureKind, FinishReason, Prompt, Trajectory, ids_of, logprobs_of
from tests.failures.measured import REAL, Measured
from tests.rollout.reward_scene import answered, asked, pids_of, reward, scored, scored_each, user_reward
from tests.rollout.reward_scene import user_module as user_module


def test_exact_match() -> None:
    assert [t.reward for t in scored(reward(kind="exact_match"), " 3\n", "3.0", "")] == [1.0, 0.0, 0.0]
    (any_case, of_several) = scored_each(
        reward(kind="exact_match", ignore_case=True), (("YES",), asked("yes")), (("lutece", "Rome"), asked(("Paris", "Lutece")))
    )
    assert [t.reward for t in (*any_case, *of_several)] == [1.0, 1.0, 0.0], "any of several accepted answers is right"


def test_the_reasoning_gym_scorer_is_the_data_sets_own() -> None:
    """chain_sum takes "3.0" for 3, and gives length of answer over length of text when the text merely contains it."""
    entry = {"question": "1 + 2 =", "answer": "3", "metadata": {}}
    prompt = Prompt("train/0/0", "1 + 2 =", (1,), "3", entry)
    values = [t.reward for t in scored(reward(kind="reasoning_gym"), "3", "3.0", "it is 3", "4", prompt=prompt)]
    assert values == [1.0, 1.0, pytest.approx(1 / 7), 0.0]


def test_math_verify_compares_as_mathematics_and_its_time_out_is_ours() -> None:
    """math-verify itself calls a comparison that takes five seconds "unequal", which would train as a wrong answer."""
    worked = "He had 4 / 2 = <<4/2=2>>2 of them.\n#### 1,002"  # as GSM8K's answers end
    (half, wrong), (at_the_end, on_the_way), (price, no_price), (either,), (unreadable,) = scored_each(
        reward(kind="math_verify", deadline_s=60),
        ((r"so $\boxed{0.5}$", "$2$"), asked(r"\frac{1}{2}")),
        ((r"\boxed{1002}", r"\boxed{2}"), asked(worked)),
        ((r"\boxed{18.90}", r"\boxed{18}"), asked(r"\$18.90")),  # an escaped dollar begins no formula
        (("$3$",), asked(("$2$", "3"))),
        (("1",), asked(" ")),
    )
    assert (half.reward, wrong.reward) == (1.0, 0.0)
    assert (at_the_end.reward, on_the_way.reward) == (1.0, 0.0)
    assert (price.reward, no_price.reward, either.reward) == (1.0, 0.0, 1.0)
    assert unreadable.error is not None and "can't read the reference answer" in unreadable.error
    assert unreadable.failure is FailureKind.REWARD
    (power,) = scored(reward(kind="math_verify", deadline_s=1.5), "$5^{5^{5^5}}$", prompt=asked(r"\frac{1}{2}"))
    assert power.reward is None and power.error is not None and "more than 1.5 s" in power.error
    assert power.failure is FailureKind.REWARD_TIMEOUT


def test_own_functions_take_what_they_name_and_may_be_async_or_return_parts() -> None:
    assert scored(user_reward("length"), "four")[0].reward == 4.0
    assert scored(user_reward("slowly"), "four")[0].reward == 7 + 4
    assert scored(user_reward("loud"), "x")[0].reward == 1.0
    (parts,) = scored(user_reward("parts"), "3", prompt=asked(bonus=0.25))
    assert (parts.reward, parts.reward_components) == (1.25, {"right": 1.0, "bonus": 0.25})
    assert parts.is_valid


@pytest.mark.parametrize(
    ("spec", "text", "expected"),
    [
        ({"kind": "whole"}, " a\nb ", " a\nb "),
        ({"kind": "last_line"}, "so\n 42 \n\n", "42"),
        ({"kind": "last_line"}, " \n", ""),
        ({"kind": "after", "marker": "####"}, "1 #### 2 #### 3\n", "3"),
        ({"kind": "after", "marker": "####"}, "3", ""),
        ({"kind": "regex", "pattern": "<answer>(.*?)</answer>"}, "<answer>1</answer> no: <answer>2\n</answer>", "2"),
        ({"kind": "regex", "pattern": r"-?\d+"}, "1, then -2", "-2"),
        ({"kind": "regex", "pattern": r"(x)|\d"}, "1", ""),
        ({"kind": "regex", "pattern": r"\d"}, "none", ""),
    ],
)
def test_extraction(spec: dict[str, Any], text: str, expected: str) -> None:
    assert build_extraction(spec)(text) == expected


def test_the_scorer_sees_the_extracted_answer_and_the_trajectory_keeps_its_text() -> None:
    (t,) = scored(reward(kind="exact_match", extraction={"kind": "after", "marker": "="}), "1 + 2 = 3")
    assert (t.reward, t.text) == (1.0, "1 + 2 = 3")


@pytest.mark.parametrize("value", [None, "1", {}, {"a": "1"}, math.nan, {"a": math.inf}, [1.0]])
def test_what_is_no_finite_number_is_no_reward(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        components(value)


@pytest.mark.parametrize("value", [1e39, {"a": 1e308, "b": 1e308}, {"a": 1e308, "b": -1e308}, {"a": 6e17, "b": 6e17}])
def test_a_reward_has_a_square_in_float32(value: Any) -> None:
    """A larger one is finite here, and neither as a float32 nor in the sums of a step's report."""
    with pytest.raises(ValueError, match=r"too large: a reward is at most 1e\+18, above or below 0"):
        components(value)
    assert components({"a": 1e18, "b": -1e18}) == {"a": 1e18, "b": -1e18}


@pytest.mark.parametrize("name", ["", "a/b", "a\n", "\ud83d"])
def test_what_can_not_stand_in_a_metrics_name_names_no_part(name: str) -> None:
    with pytest.raises(ValueError, match="names a part, which becomes part of a metric"):
        components({name: 1.0})


def test_a_bad_pattern_is_named_as_the_recipe_is_read() -> None:
    with pytest.raises(ValidationError, match="no regular expression: missing \\), unterminated subpattern at position 0"):
        reward(kind="exact_match", extraction={"kind": "regex", "pattern": "("})


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_failure_costs_its_own_trajectory_alone() -> None:
    """One process for all calls: each that kills it is followed by one that a fresh process answers."""
    config = user_reward("moody", deadline_s=2.0, memory_gib=1.0)
    texts = (
        *("raise", "surrogate", "nested", "name", "slash", "nan", "text", "none", "exit", "ok", "die", "ok", "hang", "ok"),
        *("real-time", "ok", "memory", "ok", "spin", "ok", "power", "large", "large sum", "many", "long name", "essay", "mute"),
    )
    results = scored(config, *texts)
    by_text = {text: t.error for text, t in zip(texts, results, strict=True)}
    expected = {
        "raise": "raised KeyError: 'no such thing'", "nan": "reward = nan is not finite", "text": "'1.0' is no number",
        "surrogate": r"raised ValueError: half \ud83d", "nested": "raised RecursionError",
        "name": r"'\ud83d' names a part", "slash": "'a/b' names a part",
        "none": "None is no number", "exit": "exit code 3", "die": "signal SIGSEGV", "real-time": "signal SIG40",
        "memory": "ran out of memory", "large": "reward = -1.1e+18 is too large", "large sum": "the sum of its parts, 2e+18, is too large",
        "many": "a reward of 100000 parts", "long name": "aaa'... names a part with 257 characters, and may have 256",
        "essay": "xxx ... (9999512 more characters are cut off)", "mute": "raised Mute, whose text raised OSError",
        "hang": "more than 2 s", "spin": "more than 2 s", "power": "more than 2 s",
    }  # fmt: skip
    assert all(part in (by_text[text] or "") for text, part in expected.items()), by_text
    assert all(len(text or "") < 600 for text in by_text.values())
    assert not any(t.is_valid for text, t in zip(texts, results, strict=True) if text != "ok")
    answering = [t.reward for text, t in zip(texts, results, strict=True) if text == "ok"]
    assert len(set(answering)) == 5 and answering[3] == answering[4]  # one pid for each life, the memory error keeps its process


def test_what_a_reward_writes_to_the_socket_itself_is_not_run(tmp_path: Path) -> None:
    """It may run what a model has written. A pickle from there would make a folder here; other forgeries are no rewards either."""
    shapes = ("pickle", "ok", "list", "nan", "text", "none", "nested", "ready", "name", "long", "ok")
    texts = (*shapes, "large", "large sum", "many", "surrogate")
    results = scored(user_reward("forged", deadline_s=5.0), *texts, prompt=asked(path=str(tmp_path / "made")))
    assert not (tmp_path / "made").exists()
    for text, result in zip(texts, results, strict=True):
        if text == "ok":
            assert result.reward == 1.0
        elif text == "surrogate":
            assert result.error == r"\ud83d", "it has the form of an error; what can't be written down is escaped"
        else:
            assert "sent no reply at one completion, but something else" in str(result.error), text


def test_a_long_error_is_cut() -> None:
    """What a scorer raises is cut where it scores; this one has written it to the socket itself."""
    reply = _as_reply(json.dumps({"error": "x" * 1_000_000}).encode())
    assert reply == {"error": "x" * 2000 + " ... (998000 more characters are cut off)"}


def test_calls_on_other_processes_do_not_wait_for_a_hanging_one() -> None:
    async def run() -> tuple[bool, str | None, int, float]:
        pool = RewardPool(user_reward("moody", deadline_s=5, processes=2))
        await pool.check()
        before, began = set(pids_of(pool)), time.monotonic()
        hanging = asyncio.create_task(pool.score((answered("hang"),), asked()))
        await asyncio.sleep(0)
        await pool.score(tuple(answered("ok") for _ in range(20)), asked())
        is_first = hanging.done()
        (late,) = await hanging
        seconds, kept = time.monotonic() - began, before & set(pids_of(pool))
        await pool.close()
        return is_first, late.error, len(kept), seconds

    is_first, error, kept, seconds = asyncio.run(run())
    assert not is_first, "twenty answers took longer than the deadline of the one before them"
    assert error is not None and "took more than 5 s" in error and kept == 1
    follows = "its process and whatever that started are ended, the answer counts as failed; other answers are scored meanwhile"
    Measured("scorer that never answers (deadline_s 5)", follows, seconds, "nothing", REAL).write()


def test_a_cancelled_call_does_not_leave_its_answer_to_the_next_one() -> None:
    async def run() -> list[Trajectory]:
        pool = RewardPool(user_reward("length"))
        await pool.check()
        request = asyncio.create_task(pool.score((answered("four"),), asked()))
        for _ in range(3):  # until the request is on its way
            await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        results = [(await pool.score((answered("x" * n),), asked()))[0] for n in (1, 2)]
        await pool.close()
        return results

    assert [t.reward for t in asyncio.run(run())] == [1.0, 2.0]


def test_a_reward_that_changes_the_metadata_changes_them_for_itself_alone() -> None:
    """All completions of a group travel in one message."""
    question = replace(asked(), metadata={"tests": [3, 1, 2]})
    assert [t.reward for t in scored(user_reward("wasteful"), "a", "b", "c", prompt=question)] == [3.0, 3.0, 3.0]


def test_what_has_failed_already_is_not_scored() -> None:
    async def run() -> tuple[tuple[Trajectory, ...], tuple[int, ...]]:
        pool = RewardPool(reward(kind="exact_match"))
        group = (
            answered("3", error="the engine aborted the request"),
            answered("3", finish_reason=FinishReason.ABORT),
            answered("", response_ids=ids_of(()), behavior_logprobs=logprobs_of(()), version_spans=()),
        )
        return await pool.score(group, asked()), pids_of(pool)

    results, started = asyncio.run(run())
    assert started == ()
    assert all(t.error and t.reward is None for t in results)


# --- start-up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "message", "is_set_up"),
    [
        ("user_reward:length", "No module named 'user_reward'", False),
        ("user_rewards:lenght", "did you mean length?", False),
        ("user_rewards:not_a_function", "is int, not a function", False),
        ("user_rewards:wants_more", "asks for tokenizer; it can have prompt, completion, answer, metadata", False),
        ("user_rewards:parts", "KeyError: 'bonus'", True),
    ],
)
def test_the_check_names_the_mistake(path: str, message: str, is_set_up: bool) -> None:
    """And whether it may be none: what a sample gets no score by can be a judge that is down. The error crosses processes."""
    with pytest.raises(RewardError) as caught:
        asyncio.run(RewardPool(reward(kind="function", path=path)).check(asked()))
    assert message in str(caught.value) and path in str(caught.value) and isinstance(caught.value, ConfigError)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert caught.value.is_set_up == copied.is_set_up == is_set_up and str(copied) == str(caught.value)


def test_the_check_tries_wrong_answers_too() -> None:
    """A function that forgets `return 0.0` scores the reference answer alone. One that raises may mean it: that is said, and goes on."""

    def checked(*also: str) -> list[float | str]:
        return asyncio.run(RewardPool(user_reward("moody")).check(asked("ok"), also))

    with pytest.raises(RewardError, match=r"None is no number; return one for every answer.*with the answer 'none'\)") as caught:
        checked("ok", "none")
    assert caught.value.is_set_up
    pid, why = checked("raise")
    assert isinstance(pid, float) and "no such thing" in str(why)


@pytest.mark.parametrize(
    ("module", "remedy", "not_said"),
    [
        (None, "start the run where the module lies, or install it", "mend"),
        ("def score(completion) return 1", "mend the module", "where the module lies"),
        ("import no_such_library", "install no_such_library, which it imports", "where the module lies"),
        ("1 / 0", "raised ZeroDivisionError: division by zero; mend the module", "install"),
    ],
)
def test_a_module_that_does_not_load_is_named_once_with_its_remedy(tmp_path: Path, module: str | None, remedy: str, not_said: str) -> None:
    if module is not None:
        (tmp_path / "broken_rewards.py").write_text(module)
    with pytest.raises(ConfigError) as caught:
        asyncio.run(RewardPool(reward(kind="function", path="broken_rewards:score")).check(asked()))
    said = str(caught.value)
    assert said.startswith("rollout.reward.path = broken_rewards:score: ") and said.count("broken_rewards:score") == 1
    assert remedy in said and not_said not in said and "tried on" not in said, "nothing was tried"


def test_files_where_the_run_starts_take_the_place_of_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their names: of evenkeel's packages, of the standard library. A reward there and its neighbours are found all the same, and
    what the reward starts finds modules as it would without evenkeel."""
    (there := tmp_path / "start").mkdir()
    for name in ("rollout", "learner", "correction", "socket", "struct", "select", "token", "json", "pickle", "asyncio"):
        (there / f"{name}.py").write_text("raise RuntimeError(f'{__file__} was imported')")
    (there / "neighbour.py").write_text("def same(one, other): return float(one == other)")
    tells = "import os, sys; print(sys.path[0] == '', os.environ.get('PYTHONPATH'))"
    (there / "mine.py").write_text(
        f"import sys, subprocess, json, neighbour\n"
        f"def score(completion, answer): return neighbour.same(completion, answer)\n"
        f"def told(): return float(subprocess.check_output([sys.executable, '-c', {tells!r}], cwd='/') == b'True /of/users\\n')\n"
    )
    monkeypatch.chdir(there)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("PYTHONPATH", "/of/users")
    assert [one.reward for one in scored(reward(kind="function", path="mine:score"), "3", "4")] == [1.0, 0.0]
    assert scored(reward(kind="function", path="mine:told"), "3")[0].reward == 1.0


@pytest.mark.parametrize("name", ["socket", "rollout", "time"])
def test_a_reward_by_another_module_s_name_is_told_to_take_its_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (there := tmp_path / "start").mkdir()
    (there / f"{name}.py").write_text("def score(completion): return 1.0")
    monkeypatch.chdir(there)
    with pytest.raises(ConfigError) as caught:
        asyncio.run(RewardPool(reward(kind="function", path=f"{name}:score", processes=1)).check(asked()))
    where = "a module of its own" if name == "time" else rf"\S+/{name}(/__init__)?\.py"
    wanted = rf"rollout\.reward\.path = {name}:score: by the name {name} Python imports {where}, and never {there}/{name}\.py; rename"
    assert re.match(wanted, str(caught.value))


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("./rewards/my-rewards.py:length", "e.g. my_rewards:length for the function length in my_rewards.py"),
        ("my_rewards.py", "e.g. my_rewards:score for"),
        ("my_rewards", "e.g. my_rewards:score for"),
        ("", "e.g. my_rewards:score for"),
    ],
)
def test_a_file_in_the_place_of_a_function(path: str, instead: str) -> None:
    with pytest.raises(ValidationError) as caught:
        reward(kind="function", path=path)
    assert "it takes MODULE:FUNCTION" in str(caught.value) and instead in str(caught.value)


def test_a_reasoning_gym_reward_needs_its_task() -> None:
    with pytest.raises(ConfigError, match=r"needs rollout\.task\.kind = reasoning_gym"):
        RewardPool(reward(kind="reasoning_gym"))


def test_a_scoring_process_imports_no_engine() -> None:
    assert scored(user_reward("modules"), "x")[0].reward == 0.0
