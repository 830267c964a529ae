"""The guardian of a scoring process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from evenkeel.rollout.config import FunctionReward
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.trajectory import FinishReason, Prompt, Trajectory, VersionSpan, ids_of, logprobs_of
from tests.rollout.reward_scene import is_running, pids_of, sleepers, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="guardians are Linux's")

SCORER = """
    import os, subprocess, sys, time

    def brood(completion, metadata):
        subprocess.Popen(["sleep", completion])
        if not os.fork():
            path = metadata["path"] + completion
            with open(path + ".part", "w") as file: file.write(str(os.getpid()))
            os.rename(path + ".part", path)
        time.sleep(60)
"""


async def score(pool: RewardPool, seconds: str, folder: Path) -> str:
    """Returns: why the completion has no reward."""
    trajectory = Trajectory("p", ids_of((1,)), ids_of((2,)), logprobs_of((-1.0,)), (VersionSpan(0, 0, 1),), FinishReason.STOP, text=seconds)
    (scored,) = await pool.score((trajectory,), Prompt("p", "", (1,), "", {"path": f"{folder}/"}))
    return str(scored.error)


def test_what_a_killed_guardian_was_to_guard_is_ended_by_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process and a mere fork of the scorer's, but not those of the other guardian. The fork holds the socket on which the answer would
    come, and doesn't hide that none will."""
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(SCORER))
    monkeypatch.syspath_prepend(str(tmp_path))

    async def run() -> None:
        pool = RewardPool(FunctionReward(path="user_rewards:brood", deadline_s=50.0, processes=2))
        await pool.check()
        names = ("70.5", "71.5")
        scoring = [asyncio.create_task(score(pool, name, tmp_path)) for name in names]
        try:
            assert await asyncio.to_thread(wait_until, lambda: all((tmp_path / name).is_file() for name in names))
            forks = [int((tmp_path / name).read_text()) for name in names]
            below = {pid: {child.pid for child in psutil.Process(pid).children(recursive=True)} for pid in pids_of(pool)}
            (guardian,) = (pid for pid, its in below.items() if forks[0] in its)
            os.kill(guardian, signal.SIGKILL)
            assert "died at one completion (signal SIGKILL)" in await scoring[0]
            assert await asyncio.to_thread(wait_until, lambda: not is_running(forks[0]) and not sleepers("70.5"))
            assert is_running(forks[1]) and sleepers("71.5")
        finally:
            await pool.close()
            await asyncio.wait(scoring)

    asyncio.run(run())
    assert wait_until(lambda: not sleepers("71.5"))
