"""Rewards in processes that can be killed: values, failures, deadlines, and no process that outlives its parent."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter, ValidationError

import rollout.rewards
from correction.errors import ConfigError
from rollout.config import ReasoningGymTask, RewardConfig
from rollout.reward_cgroup import ControlGroup
from rollout.reward_process import RewardLoadError, build_extraction, components
from rollout.rewards import RewardPool
from rollout.trajectory import FailureKind, FinishReason, Prompt, Trajectory, VersionSpan, ids_of, logprobs_of
from tests.failures.measured import REAL, Measured

CHAIN_SUM = ReasoningGymTask(dataset="chain_sum")
USER_REWARDS = """
    import asyncio, json, os, pickle, signal, struct, subprocess, sys, time

    class Touch:
        def __init__(self, path): self.path = path
        def __reduce__(self): return os.mkdir, (self.path,)
    def forged(completion, metadata):
        payload = {"pickle": pickle.dumps(Touch(metadata["path"])), "list": b"[1]", "nan": b'{"components": {"reward": NaN}}'}
        payload |= {"text": b'{"components": {"reward": "1"}}', "none": b'{"components": {}}'}
        if completion == "long": os.write(int(sys.argv[1]), struct.pack("!Q", 1 << 40))
        elif completion != "ok": os.write(int(sys.argv[1]), struct.pack("!Q", len(payload[completion])) + payload[completion])
        return 1.0

    def length(completion): return len(completion)
    def parts(*, completion, answer, metadata): return {"right": float(completion == answer), "bonus": metadata["bonus"]}
    async def slowly(prompt, completion, **rest):
        await asyncio.sleep(0.01)
        return len(prompt) + len(completion)
    def loud(completion):
        print("noise on stdout")
        return 1.0
    def wasteful(metadata):
        return len(metadata.pop("tests"))

    def moody(completion):
        if completion == "raise": raise KeyError("no such thing")
        if completion == "nan": return float("nan")
        if completion == "text": return "1.0"
        if completion == "none": return None
        if completion == "hang": time.sleep(60)
        if completion == "spin": sum(1 for _ in iter(int, 1))
        if completion == "power": 5 ** 5 ** 5 ** 5
        if completion == "die": os.kill(os.getpid(), signal.SIGSEGV)
        if completion == "exit": sys.exit(3)
        if completion == "memory": bytearray(2 << 30)
        if completion == "offspring":
            subprocess.Popen(["sleep", "61.25"])
            time.sleep(60)
        if completion == "daemon":
            subprocess.Popen(["sleep", "62.5"], start_new_session=True)
            time.sleep(60)
        if completion == "left behind":
            subprocess.Popen(["sh", "-c", "setsid sleep 63.5 & exit 0"]).wait()
            os.kill(os.getpid(), signal.SIGKILL)
        if completion == "forks":
            try: children = [subprocess.Popen(["sleep", "64.5"]) for _ in range(400)]
            except BlockingIOError: raise MemoryError("no more processes")
            time.sleep(60)
        if completion == "spreads":
            command = [sys.executable, "-c", "import time; kept = b'x' * (300 << 20); time.sleep(65.5)"]
            children = [subprocess.Popen(command) for _ in range(4)]
            time.sleep(60)
        if completion == "file":
            with open("large", "wb") as file: file.truncate(5 << 30)
        return os.getpid()
    def modules(completion): return float("torch" in sys.modules or "sglang" in sys.modules or "ray" in sys.modules)
    def wants_more(completion, tokenizer): return 0.0
    not_a_function = 3
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(USER_REWARDS))
    monkeypatch.syspath_prepend(str(tmp_path))


def reward(**settings: Any) -> RewardConfig:
    adapter: TypeAdapter[RewardConfig] = TypeAdapter(RewardConfig)
    return adapter.validate_python({"processes": 1, **settings})


def user_reward(name: str, **settings: Any) -> RewardConfig:
    return reward(kind="function", path=f"user_rewards:{name}", **settings)


def answered(text: str, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "prompt_id": "train/0/0", "prompt_ids": ids_of((1,)), "response_ids": ids_of((2, 3)),
        "behavior_logprobs": logprobs_of((-1.0, -1.0)),
        "version_spans": (VersionSpan(0, 0, 2),), "finish_reason": FinishReason.STOP, "text": text,
    }  # fmt: skip
    return Trajectory(**(values | changes))


def asked(answer: str = "3", **metadata: Any) -> Prompt:
    return Prompt("train/0/0", "1 + 2 =", (1,), answer, metadata)


def scored(config: RewardConfig, *texts: str, prompt: Prompt | None = None) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        pool = RewardPool(config, CHAIN_SUM)
        try:
            return list(await pool.score(tuple(answered(text) for text in texts), prompt or asked()))
        finally:
            await pool.close()

    return asyncio.run(run())


class Refusing:
    """In the place of subprocess.Popen: the machine has no process left for these calls, counted from 0."""

    def __init__(self, *calls: int) -> None:
        self._calls, self._number = calls, 0

    def __call__(self, *words: Any, **named: Any) -> Any:
        self._number += 1
        if self._number - 1 in self._calls:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return POPEN(*words, **named)


POPEN = subprocess.Popen


@pytest.mark.parametrize(
    ("refused", "texts", "expected"),
    [
        ((0,), ("four", "three"), ("lets no scoring process start ([Errno 11] Resource temporarily unavailable)", None)),
        (range(9), ("four", "three"), ("lets no scoring process start", "lets no scoring process start")),
        ((1,), ("die", "three"), ("signal SIGSEGV", None)),
    ],
    ids=["once", "for good", "at a restart"],
)
def test_a_machine_without_a_process_left_fails_one_answer_after_the_other(
    refused: tuple[int, ...], texts: tuple[str, ...], expected: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more than that: not the worker, whose engine is well. No descriptor stays open."""
    open_before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("rollout.rewards.subprocess.Popen", Refusing(*refused))
    for found, reason in zip(scored(user_reward("moody"), *texts), expected, strict=True):
        assert (found.error is None and found.reward is not None) if reason is None else (reason in str(found.error))
        assert reason is None or (found.reward is None and found.failure is FailureKind.REWARD)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_worker_that_starts_without_a_process_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.rewards.subprocess.Popen", Refusing(0))

    async def run() -> None:
        await RewardPool(user_reward("length")).check(asked())

    with pytest.raises(ConfigError, match=r"the machine lets no scoring process start \(\[Errno 11\]"):
        asyncio.run(run())


# --- values ---------------------------------------------------------------------------------------------------------


def test_exact_match() -> None:
    assert [t.reward for t in scored(reward(kind="exact_match"), " 3\n", "3.0", "")] == [1.0, 0.0, 0.0]
    assert [t.reward for t in scored(reward(kind="exact_match", ignore_case=True), "YES", prompt=asked("yes"))] == [1.0]


def test_the_reasoning_gym_scorer_is_the_data_sets_own() -> None:
    """chain_sum takes "3.0" for 3, and gives length of answer over length of text when the text merely contains it."""
    entry = {"question": "1 + 2 =", "answer": "3", "metadata": {}}
    prompt = Prompt("train/0/0", "1 + 2 =", (1,), "3", entry)
    values = [t.reward for t in scored(reward(kind="reasoning_gym"), "3", "3.0", "it is 3", "4", prompt=prompt)]
    assert values == [1.0, 1.0, pytest.approx(1 / 7), 0.0]


def test_math_verify_compares_as_mathematics_and_its_time_out_is_ours() -> None:
    """math-verify itself calls a comparison that takes five seconds "unequal", which would train as a wrong answer."""
    half, wrong = scored(reward(kind="math_verify", deadline_s=60), r"so $\boxed{0.5}$", "$2$", prompt=asked(r"\frac{1}{2}"))
    assert (half.reward, wrong.reward) == (1.0, 0.0)
    worked = "He had 4 / 2 = <<4/2=2>>2 of them.\n#### 1,002"  # as GSM8K's answers end
    at_the_end, on_the_way = scored(reward(kind="math_verify", deadline_s=60), r"\boxed{1002}", r"\boxed{2}", prompt=asked(worked))
    assert (at_the_end.reward, on_the_way.reward) == (1.0, 0.0)
    (power,) = scored(reward(kind="math_verify", deadline_s=1.5), "$5^{5^{5^5}}$", prompt=asked(r"\frac{1}{2}"))
    assert power.reward is None and power.error is not None and "more than 1.5 s" in power.error
    assert power.failure is FailureKind.REWARD_TIMEOUT
    (unreadable,) = scored(reward(kind="math_verify", deadline_s=60), "1", prompt=asked(" "))
    assert unreadable.error is not None and "can't read the reference answer" in unreadable.error
    assert unreadable.failure is FailureKind.REWARD


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


def test_a_bad_pattern_is_named() -> None:
    with pytest.raises(RewardLoadError, match="no regular expression"):
        build_extraction({"kind": "regex", "pattern": "("})


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_failure_costs_its_own_trajectory_alone() -> None:
    """One process for all calls: each that kills it is followed by one that a fresh process answers."""
    config = user_reward("moody", deadline_s=1.0, memory_gib=1.0)
    texts = ("raise", "nan", "text", "none", "exit", "ok", "die", "ok", "hang", "ok", "memory", "ok", "spin", "ok", "power")
    results = scored(config, *texts)
    by_text = {text: t.error for text, t in zip(texts, results, strict=True)}
    expected = {
        "raise": "raised KeyError: 'no such thing'", "nan": "reward = nan is not finite", "text": "'1.0' is no number",
        "none": "None is no number", "exit": "exit code 3", "die": "signal SIGSEGV", "memory": "ran out of memory",
        "hang": "more than 1 s", "spin": "more than 1 s", "power": "more than 1 s",
    }  # fmt: skip
    assert all(part in (by_text[text] or "") for text, part in expected.items()), by_text
    assert not any(t.is_valid for text, t in zip(texts, results, strict=True) if text != "ok")
    answering = [t.reward for text, t in zip(texts, results, strict=True) if text == "ok"]
    assert len(set(answering)) == 4 and answering[2] == answering[2]      # one pid for each life, the memory error keeps its process


def test_what_a_reward_writes_to_the_socket_itself_is_not_run(tmp_path: Path) -> None:
    """It may run what a model has written. A pickle from there would make a folder here; other forgeries are no rewards either."""
    texts = ("pickle", "ok", "list", "nan", "text", "none", "long", "ok")
    results = scored(user_reward("forged", deadline_s=5.0), *texts, prompt=asked(path=str(tmp_path / "made")))
    assert not (tmp_path / "made").exists()
    for text, result in zip(texts, results, strict=True):
        if text == "ok":
            assert result.reward == 1.0
        else:
            assert "sent no reply at one completion, but something else" in str(result.error), text


def test_calls_on_other_processes_do_not_wait_for_a_hanging_one() -> None:
    async def run() -> tuple[bool, str | None, int, float]:
        pool = RewardPool(user_reward("moody", deadline_s=5, processes=2))
        await pool.check()
        before, began = set(pool.pids), time.monotonic()
        hanging = asyncio.create_task(pool.score((answered("hang"),), asked()))
        await asyncio.sleep(0)
        await pool.score(tuple(answered("ok") for _ in range(20)), asked())
        is_first = hanging.done()
        (late,) = await hanging
        seconds, kept = time.monotonic() - began, before & set(pool.pids)
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
        for _ in range(3):      # until the request is on its way
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
        return await pool.score(group, asked()), pool.pids

    results, started = asyncio.run(run())
    assert started == ()
    assert all(t.error and t.reward is None for t in results)


# --- start-up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("user_reward:length", "No module named 'user_reward'"),
        ("user_rewards:lenght", "did you mean length?"),
        ("user_rewards:not_a_function", "is int, not a function"),
        ("user_rewards:wants_more", "asks for tokenizer; it can have prompt, completion, answer, metadata"),
        ("user_rewards:parts", "KeyError: 'bonus'"),
    ],
)
def test_the_check_names_the_mistake(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        asyncio.run(RewardPool(reward(kind="function", path=path)).check(asked()))
    assert message in str(caught.value) and path in str(caught.value)


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


# --- no orphans -----------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool], deadline_s: float = 30.0) -> bool:
    end = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_deadline_kills_what_the_reward_started_too() -> None:
    def sleepers() -> list[int]:
        return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "61.25"]]

    (t,) = scored(user_reward("moody", deadline_s=1.0), "offspring")
    assert t.error is not None
    assert wait_until(lambda: not sleepers())


def sleepers(seconds: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", seconds]]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel hands orphans to their guardian on Linux")
@pytest.mark.parametrize(("text", "seconds", "said"), [("daemon", "62.5", "more than 3 s"), ("left behind", "63.5", "signal SIGKILL")])
def test_what_left_its_session_or_lost_its_parent_is_ended_too(text: str, seconds: str, said: str) -> None:
    (t,) = scored(user_reward("moody", deadline_s=3.0), text)
    assert t.error is not None and said in t.error
    assert wait_until(lambda: not sleepers(seconds))


@pytest.fixture(params=[False, True], ids=["looked after", "control group"])
def has_group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Where a control group can't be made, that half is skipped."""
    has_group: bool = request.param
    if has_group and (group := ControlGroup.make(1 << 30, 10)) is None:
        pytest.skip("this process may make no control group")
    elif has_group:
        group.remove()
    specification = rollout.rewards.reward_specification
    monkeypatch.setattr(rollout.rewards, "reward_specification", lambda *of: specification(*of) | {"control_group": has_group})
    return has_group


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_the_whole_tree_has_the_limits(has_group: bool) -> None:
    """400 processes, and four of 300 MiB each under a limit of 1 GiB, which each of them keeps. The next completion is scored."""
    results = scored(user_reward("moody", deadline_s=20.0, memory_gib=1.0), "forks", "ok", "spreads", "ok")
    errors = [str(t.error) for t in results]
    assert ("ran out of memory" if has_group else "more than 128 processes") in errors[0]
    assert "took more than 1 GiB together" in errors[2]
    assert [t.is_valid for t in results] == [False, True, False, True]
    assert wait_until(lambda: not sleepers("64.5"))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_no_file_grows_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (t,) = scored(user_reward("moody", deadline_s=20.0), "file")
    assert t.error is not None and ("File too large" in t.error or "SIGXFSZ" in t.error)


PARENT = """
    import asyncio, sys
    from pydantic import TypeAdapter
    from rollout.config import FunctionReward
    from rollout.rewards import RewardPool
    from rollout.trajectory import *

    async def main():
        pool = RewardPool(FunctionReward(path="user_rewards:moody", processes=2, deadline_s=60))
        await pool.check()
        print(*pool.pids, flush=True)
        busy, daemon = (
            Trajectory("p", (1,), (2,), (-1.0,), (VersionSpan(0, 0, 1),), FinishReason.STOP, text=text) for text in ("power", "daemon")
        )
        await pool.score((busy, daemon), Prompt("p", "", (1,), ""))

    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_scoring_processes_die_with_their_parent_idle_or_deep_in_a_c_function(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PARENT)], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    scorers = [child.pid for pid in pids for child in psutil.Process(pid).children()]
    assert wait_until(lambda: max(sum(psutil.Process(pid).cpu_times()[:2]) for pid in scorers) > 0.3)      # one computes 5^5^5^5
    assert wait_until(lambda: bool(sleepers("62.5")))      # the other has started one in a session of its own
    assert all(is_running(pid) for pid in pids + scorers)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert wait_until(lambda: not any(is_running(pid) for pid in pids + scorers) and not sleepers("62.5"))
