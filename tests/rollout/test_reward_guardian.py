"""The guardian of a scoring process is killed, or finds the scorer outside of the control group that was made for it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from rollout.config import FunctionReward
from rollout.rewards import reward_guardian
from rollout.rewards.reward_cgroup import ControlGroup
from rollout.rewards.reward_guardian import MEMORY, WORKER, end_strays, mark_of
from rollout.rewards.rewards import RewardPool
from rollout.trajectory import FinishReason, Prompt, Trajectory, VersionSpan, ids_of, logprobs_of
from tests.failures.measured import REAL, Measured
from tests.rollout.reward_scene import is_running, pids_of, sleepers, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="guardians, control groups and environments of processes are Linux's")

SCORER = """
    import os, subprocess, sys, time

    def brood(completion, metadata):
        subprocess.Popen(["sleep", completion], start_new_session=True)
        if not os.fork():
            os.setsid()
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


@pytest.mark.parametrize("lists_children", [True, False], ids=["", "no list of children"])
def test_what_a_killed_guardian_was_to_guard_is_ended_by_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists_children: bool
) -> None:
    """A process in a session of its own, a mere fork and the control group, but not those of the other guardian. The fork holds the socket
    on which the answer would come, and doesn't hide that none will. Not every kernel lists a process's children."""
    if not lists_children:
        monkeypatch.setattr(reward_guardian, "_children", lambda _: [])
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(SCORER))
    monkeypatch.syspath_prepend(str(tmp_path))

    async def run() -> None:
        pool = RewardPool(FunctionReward(path="user_rewards:brood", deadline_s=50.0, processes=2))
        await pool.check()
        names = ("66.5", "67.5")
        scoring = [asyncio.create_task(score(pool, name, tmp_path)) for name in names]
        try:
            assert await asyncio.to_thread(wait_until, lambda: all((tmp_path / name).is_file() for name in names))
            forks = [int((tmp_path / name).read_text()) for name in names]
            below = {pid: {child.pid for child in psutil.Process(pid).children(recursive=True)} for pid in pids_of(pool)}
            (guardian,) = (pid for pid, its in below.items() if forks[0] in its)
            os.kill(guardian, signal.SIGKILL)
            assert "died at one completion (signal SIGKILL)" in await scoring[0]
            assert await asyncio.to_thread(wait_until, lambda: not is_running(forks[0]) and not sleepers("66.5"))
            assert await asyncio.to_thread(wait_until, lambda: not ControlGroup.of(guardian)._folders)
            assert is_running(forks[1]) and sleepers("67.5")
        finally:
            await pool.close()
            await asyncio.wait(scoring)

    asyncio.run(run())
    assert wait_until(lambda: not sleepers("67.5"))


NEXT_TO_DIE = """
    import asyncio, sys
    from pathlib import Path
    from rollout.config import FunctionReward
    from rollout.rewards.rewards import RewardPool
    from tests.rollout.reward_scene import pids_of
    from tests.rollout.test_reward_guardian import score

    async def main():
        pool = RewardPool(FunctionReward(path="user_rewards:brood", deadline_s=50.0, processes=1))
        await pool.check()
        print(*pids_of(pool), flush=True)
        await score(pool, "69.5", Path(sys.argv[1]))

    asyncio.run(main())
"""


def test_what_worker_and_guardian_leave_that_die_together_is_ended_by_the_next_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(SCORER))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("rollout.rewards.rewards.end_strays", partial(end_strays, 0.0))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", textwrap.dedent(NEXT_TO_DIE), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as worker:
        assert worker.stdout is not None
        guardian = int(worker.stdout.readline())
        assert wait_until((tmp_path / "69.5").is_file)
        os.kill(guardian, signal.SIGSTOP)  # it does nothing between the two deaths
        worker.kill()
    os.kill(guardian, signal.SIGKILL)
    assert wait_until(lambda: not is_running(guardian))
    fork = int((tmp_path / "69.5").read_text())
    try:
        assert is_running(fork) and sleepers("69.5")

        async def start() -> None:
            pool = RewardPool(FunctionReward(path="user_rewards:brood", processes=1))
            await pool.check()
            await pool.close()

        asyncio.run(start())
        assert wait_until(lambda: not is_running(fork) and not sleepers("69.5"))
        follows = "the scorer ends with them; what it has forked is ended after the next worker's start"
        Measured("rollout worker and its scorer's guardian killed together", follows, None, "as for a kill of the worker", REAL).write()
    finally:
        for pid in (fork, *sleepers("69.5")):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def sleeping() -> Iterator[Callable[[str, str], subprocess.Popen[bytes]]]:
    """Starts a `sleep` of so many seconds with a mark."""
    with contextlib.ExitStack() as started:

        def start(seconds: str, mark: str) -> subprocess.Popen[bytes]:
            process = started.enter_context(subprocess.Popen(["sleep", seconds], env=os.environ | {WORKER: mark}))
            started.callback(process.kill)
            return process

        yield start


def marks() -> tuple[str, dict[str, str]]:
    """A dead worker's, and those that are none for sure."""
    _, began, counting = mark_of(os.getpid()).split(" ", 2)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as gone:
        pass
    others = {"this process": mark_of(os.getpid()), "another container": f"{gone.pid} {began} pid:[1] time:[1]", "no start": str(gone.pid)}
    return f"{gone.pid} {began} {counting}", others | {"no number": f"x {began} {counting}", "empty": "", "huge": f"{1 << 80} 1 {counting}"}


def test_only_what_is_surely_a_dead_workers_is_ended(sleeping: Callable[[str, str], subprocess.Popen[bytes]]) -> None:
    """A process id that came again is told by the start. Another container's ids are other ones': its worker may live."""
    dead, others = marks()
    _, _, counting = dead.split(" ", 2)
    strays = [sleeping("70.5", mark) for mark in (dead, f"{os.getpid()} 1 {counting}")]
    left = [sleeping("71.5", mark) for mark in others.values()]
    end_strays(0.0)
    assert [process.wait(40.0) for process in strays] == [-signal.SIGKILL] * 2
    assert [psutil.Process(process.pid).status() for process in left] == [psutil.STATUS_SLEEPING] * len(others)


def test_guardians_have_time_to_end_their_own(sleeping: Callable[[str, str], subprocess.Popen[bytes]]) -> None:
    dead, _ = marks()
    process = sleeping("1.25", dead)
    end_strays(40.0)
    assert process.wait(40.0) == 0, "it has ended by itself"


def test_below_a_scorer_nothing_is_ended(
    sleeping: Callable[[str, str], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What starts workers there may be a stray itself, and so is this process then."""
    dead, _ = marks()
    process = sleeping("72.5", dead)
    monkeypatch.setenv(WORKER, dead)
    end_strays(0.0)
    assert process.poll() is None


def test_a_group_whose_guardian_and_worker_are_gone_is_removed_at_the_next_start() -> None:
    """And no other: not that of a process that is there, nor one that still has a member."""
    if (own := ControlGroup.make(1 << 30, 10)) is None:
        pytest.skip("this process may make no control group")
    with subprocess.Popen(["sleep", "68.5"]) as member, subprocess.Popen([sys.executable, "-c", "pass"]) as gone:
        gone.wait()
        places = [folder.parent for folder in own._folders]
        own.remove()
        left, used, kept = ([place / f"evenkeel-reward-{of}" for place in places] for of in (gone.pid, "unseen", member.pid))
        try:
            for folder in (*left, *kept):
                folder.mkdir()
            for folder in used:
                _join(folder, member.pid)
            again = ControlGroup.make(1 << 30, 10)
            assert again is not None
            again.remove()
            assert not any(folder.exists() for folder in left)
            assert all(folder.exists() for folder in (*used, *kept))
        finally:
            member.kill()
            member.wait()
            for folder in (*left, *used, *kept):
                assert wait_until(lambda folder=folder: not _occupied(folder))
                with contextlib.suppress(FileNotFoundError):
                    folder.rmdir()


def _join(folder: Path, pid: int) -> None:
    """Put a process into a new group. As long as it is empty, a start in another test process may remove it."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            (folder / "cgroup.procs").write_text(str(pid))
            return
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise


def _occupied(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # it may be removed meanwhile
        return bool((folder / "cgroup.procs").read_text())
    return False


UNJOINED = """
    import os, subprocess, sys, time
    from pathlib import Path
    from rollout.parent_death import adopt_orphans
    from rollout.rewards.reward_cgroup import ControlGroup
    from rollout.rewards.reward_guardian import guard

    leash, held = os.pipe()
    adopt_orphans()
    scorer = os.fork()
    if not scorer:
        subprocess.Popen([sys.executable, "-c", "import time; kept = b'x' * (80 << 20); time.sleep(60)"])
        time.sleep(30)
        os._exit(0)
    sys.exit(guard(scorer, leash, os.getppid(), 60 << 20, ControlGroup([Path(sys.argv[1])], True)))
"""


def test_limits_are_looked_after_where_the_scorer_is_not_in_its_control_group(tmp_path: Path) -> None:
    """One was made, but the scorer could not join it; there are two processes, of 80 MiB and more under a limit of 60."""
    (tmp_path / "cgroup.procs").write_text("")
    (tmp_path / "memory.events").write_text("oom_kill 0\n")
    command = [sys.executable, "-c", textwrap.dedent(UNJOINED), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run(command, env=environment, timeout=100, check=False).returncode == MEMORY
