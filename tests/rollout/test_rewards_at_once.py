"""Many calls of an asynchronous reward in one process: they wait side by side, each has its own deadline, and one that hangs, blocks or
dies costs no other its score."""

from __future__ import annotations

import asyncio
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evenkeel.rollout.config import FunctionReward
from evenkeel.rollout.limited_processes import many_calls
from evenkeel.rollout.rewards.rewards import RewardError, RewardPool
from evenkeel.rollout.trajectory import FailureKind, Trajectory
from tests.rollout.reward_scene import answered, asked

JUDGES = """
    import asyncio, os, time

    now, most = 0, 0
    everybody = asyncio.Event()

    async def meeting(completion, metadata):
        "Goes on once as many are there as are invited."
        global now
        now += 1
        if now == metadata["invited"]:
            everybody.set()
        await everybody.wait()
        return len(completion)

    async def counted(completion):
        global now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.05)
        now -= 1
        return {"most": most, "pid": os.getpid() % 1000}

    async def moody(completion, metadata):
        await asyncio.sleep(0.01)
        if completion == "hang": await asyncio.sleep(60)
        if completion == "block": time.sleep(60)
        if completion == "die": os._exit(7)
        if completion == "raise": raise KeyError("no such judge")
        if completion == "none": return None
        if completion == "forget": metadata.clear()
        await asyncio.sleep(0.2)
        return metadata["worth"]

    def plain(completion): return 1.0
"""


@pytest.fixture(autouse=True)
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judges.py").write_text(textwrap.dedent(JUDGES))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(many_calls, "_LATER_S", 2.0)


def scored(name: str, texts: list[str], groups: int = 1, *, metadata: dict[str, Any] | None = None, **settings: Any) -> list[Trajectory]:
    """The texts as a group's answers, of so many groups at a time."""

    async def run() -> list[Trajectory]:
        pool = RewardPool(FunctionReward(path=f"judges:{name}", **{"processes": 1, "at_once": 64, **settings}))
        answers = tuple(answered(text) for text in texts)
        try:
            await pool.check()
            found = await asyncio.gather(*(pool.score(answers, asked(**metadata or {})) for _ in range(groups)))
            return [one for group in found for one in group]
        finally:
            await pool.close()

    return asyncio.run(run())


def test_calls_of_one_process_wait_side_by_side() -> None:
    """48 calls of six groups, none of which can end before all have begun."""
    found = scored("meeting", ["a" * n for n in range(8)], groups=6, metadata={"invited": 48})
    assert [one.reward for one in found] == [float(n) for n in range(8)] * 6


def test_no_more_than_allowed_are_under_way() -> None:
    found = scored("counted", ["x"] * 30, at_once=5)
    assert max(one.reward_components["most"] for one in found) == 5


def test_calls_are_spread_over_the_processes() -> None:
    found = scored("counted", ["x"] * 12, at_once=6, processes=3)
    assert Counter(Counter(one.reward_components["pid"] for one in found).values()) == Counter({4: 3}), "four in each"


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("hang", FailureKind.REWARD_TIMEOUT, "the reward took more than 1 s (rollout.reward.deadline_s)"),
        ("block", FailureKind.REWARD_TIMEOUT, "took more than 1 s (rollout.reward.deadline_s) and awaited nothing; it was killed"),
        ("die", FailureKind.REWARD, "the process of the reward died at one completion (exit code 7)"),
        ("raise", FailureKind.REWARD, "the reward raised KeyError: 'no such judge'"),
        ("none", FailureKind.REWARD, "the reward gave no score: reward = None is no number"),
    ],
)
def test_one_bad_call_costs_no_other_its_score(text: str, kind: FailureKind, why: str) -> None:
    """Nine wait beside it in the same process. Where that is lost they are repeated, each in a process of its own."""
    found = scored("moody", [*["fine"] * 5, text, *["fine"] * 4], metadata={"worth": 0.5}, deadline_s=1.0)
    assert [one.reward for one in found] == [*[0.5] * 5, None, *[0.5] * 4]
    assert found[5].failure is kind and why in str(found[5].error)


def test_each_call_meets_the_metadata_as_they_came() -> None:
    found = scored("moody", ["forget", "fine", "fine"], metadata={"worth": 0.5})
    assert [one.reward for one in found] == [None, 0.5, 0.5] and "KeyError: 'worth'" in str(found[0].error)


def test_a_function_that_awaits_nothing_is_refused_before_the_run() -> None:
    with pytest.raises(RewardError, match=r"rollout.reward.at_once = 64: judges:plain is no `async def`.* raise rollout.reward.processes"):
        scored("plain", ["x"])
