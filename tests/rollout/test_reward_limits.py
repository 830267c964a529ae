"""What a reward starts and uses is bounded: deadlines end all of it, and no scoring process outlives its parent."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from evenkeel.rollout.rewards.rewards import RewardError, RewardPool
from evenkeel.rollout.trajectory import FailureKind
from tests.failures.measured import REAL, Measured
from tests.rollout.reward_scene import asked, is_running, scored, sleepers, user_reward, wait_until
from tests.rollout.reward_scene import user_module as user_module


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel hands orphans to their guardian on Linux")
def test_whatever_a_reward_has_started_is_ended() -> None:
    """At the deadline, also what left its session; and what lost its parent."""
    offspring, daemon, left_behind = scored(user_reward("moody", deadline_s=1.5), "offspring", "daemon", "left behind")
    for answer in (offspring, daemon):
        assert answer.error is not None and "more than 1.5 s" in answer.error
    assert left_behind.error is not None and "signal SIGKILL" in left_behind.error
    assert wait_until(lambda: not any(map(sleepers, ("61.25", "62.5", "63.5"))))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_the_whole_tree_has_the_limits() -> None:
    """400 processes, and four of 300 MiB each under a limit of 1 GiB, which each of them keeps. The next completion is scored."""
    began = time.monotonic()
    results = scored(user_reward("moody", deadline_s=60.0, memory_gib=1.0), "forks", "ok", "spreads", "ok")
    seconds = time.monotonic() - began
    errors = [str(t.error) for t in results]
    assert "more than 128 processes" in errors[0]
    assert "took more than 1 GiB together" in errors[2]
    assert [t.is_valid for t in results] == [False, True, False, True]
    assert wait_until(lambda: not sleepers("64.5"))
    follows = "all that it has started is ended, that answer counts as failed, with the reason; the next one is scored"
    Measured("scorer that forks 400 processes, then one that takes 1.2 GiB (memory_gib 1)", follows, seconds, "nothing", REAL).write()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_shared_memory_counts_and_a_page_that_several_have_mapped_once() -> None:
    """A limit of 256 MiB: one process may not map 400 MiB of them, nor have them in a file in memory that it hasn't mapped; four may map
    the same 100 MiB, of which each has 100 MiB resident."""
    maps, file, shares = scored(user_reward("moody", deadline_s=20.0, memory_gib=0.25), "maps", "in a file", "shares")
    for one in (maps, file):
        assert one.error is not None and "took more than 0.25 GiB together" in one.error
    assert shares.error is None and shares.is_valid


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_no_file_grows_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (t,) = scored(user_reward("moody", deadline_s=20.0), "file")
    assert t.error is not None and ("File too large" in t.error or "SIGXFSZ" in t.error)


def test_temporary_files_end_with_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those too that only root could still enter, as caches of modules without a right to write are."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (one,) = scored(user_reward("moody"), "locks")
    assert one.error is None and wait_until(lambda: not any((tmp_path / "scratch").iterdir()))


PARENT = """
    import asyncio, sys
    from pydantic import TypeAdapter
    from evenkeel.rollout.config import FunctionReward
    from evenkeel.rollout.rewards.rewards import RewardPool
    from evenkeel.rollout.trajectory import *

    async def main():
        pool = RewardPool(FunctionReward(path="user_rewards:moody", processes=2, deadline_s=60))
        await pool.check()
        print(*(process._child.pid for process in pool._scorers.processes), flush=True)
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
    assert wait_until(lambda: max(sum(psutil.Process(pid).cpu_times()[:2]) for pid in scorers) > 0.3)  # one computes 5^5^5^5
    assert wait_until(lambda: bool(sleepers("62.5")))  # the other has started one in a session of its own
    assert all(is_running(pid) for pid in pids + scorers)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert wait_until(lambda: not any(is_running(pid) for pid in pids + scorers) and not sleepers("62.5"))


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
        ((0,), ("four", "three"), ("lets no process of the reward start ([Errno 11] Resource temporarily unavailable)", None)),
        (range(9), ("four", "three"), ("lets no process of the reward start", "lets no process of the reward start")),
        ((1,), ("die", "three"), ("signal SIGSEGV", None)),
    ],
    ids=["once", "for good", "at a restart"],
)
def test_a_machine_without_a_process_left_fails_one_answer_after_the_other(
    refused: tuple[int, ...], texts: tuple[str, ...], expected: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more than that: not the worker, whose engine is well. No descriptor stays open."""
    open_before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("evenkeel.rollout.limited_processes.parent.subprocess.Popen", Refusing(*refused))
    for found, reason in zip(scored(user_reward("moody"), *texts), expected, strict=True):
        assert (found.error is None and found.reward is not None) if reason is None else (reason in str(found.error))
        assert reason is None or (found.reward is None and found.failure is FailureKind.REWARD)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_worker_that_starts_without_a_process_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenkeel.rollout.limited_processes.parent.subprocess.Popen", Refusing(0))

    async def run() -> None:
        await RewardPool(user_reward("length")).check(asked())

    with pytest.raises(RewardError, match=r"the machine lets no process of the reward start \(\[Errno 11\]") as caught:
        asyncio.run(run())
    assert caught.value.is_set_up, "another moment may let it"
