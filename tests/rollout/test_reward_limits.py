"""What a reward starts and uses is bounded: deadlines end all of it, and no scoring process outlives its parent."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import rollout.rewards.rewards
from rollout.rewards.reward_cgroup import ControlGroup
from rollout.rewards.reward_usage import WrittenBytes, _is_in_memory
from rollout.rewards.rewards import RewardError, RewardPool
from rollout.trajectory import FailureKind, Trajectory
from tests.failures.measured import REAL, Measured
from tests.rollout.reward_scene import asked, is_running, scored, scored_at_once, sleepers, user_reward, wait_until, write_user_module
from tests.rollout.reward_scene import user_module as user_module

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel hands orphans to their guardian on Linux")
def test_whatever_a_reward_has_started_is_ended() -> None:
    """At the deadline, also what left its session; and what lost its parent."""
    offspring, daemon, left_behind = scored(user_reward("moody", deadline_s=1.5), "offspring", "daemon", "left behind")
    for answer in (offspring, daemon):
        assert answer.error is not None and "more than 1.5 s" in answer.error
    assert left_behind.error is not None and "signal SIGKILL" in left_behind.error
    assert wait_until(lambda: not any(map(sleepers, ("61.25", "62.5", "63.5"))))


@pytest.fixture(scope="module", params=[False, True], ids=["looked after", "control group"])
def is_kept_by_kernel(request: pytest.FixtureRequest) -> bool:
    """Whether the kernel keeps a tree's limits. Where a control group can't be made, that half is skipped."""
    has_group: bool = request.param
    if has_group and (group := ControlGroup.make(1 << 30, 10)) is None:
        pytest.skip("this process may make no control group")
    elif has_group:
        group.remove()
    return has_group


@pytest.fixture
def has_group(is_kept_by_kernel: bool) -> Iterator[bool]:
    with specified(control_group=is_kept_by_kernel):
        yield is_kept_by_kernel


@contextmanager
def specified(**changes: Any) -> Iterator[pytest.MonkeyPatch]:
    """Scoring processes are told this, whatever their settings say."""
    specification = rollout.rewards.rewards.reward_specification
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout.rewards.rewards, "reward_specification", lambda *of: specification(*of) | changes)
        yield patch


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_the_whole_tree_has_the_limits(has_group: bool) -> None:
    """400 processes, and four of 300 MiB each under a limit of 1 GiB, which each of them keeps. The next completion is scored."""
    began = time.monotonic()
    results = scored(user_reward("moody", deadline_s=60.0, memory_gib=1.0), "forks", "ok", "spreads", "ok")
    seconds = time.monotonic() - began
    errors = [str(t.error) for t in results]
    assert ("ran out of memory" if has_group else "more than 128 processes") in errors[0]
    assert "took more than 1 GiB together" in errors[2]
    assert [t.is_valid for t in results] == [False, True, False, True]
    assert wait_until(lambda: not sleepers("64.5"))
    follows = "all that it has started is ended, that answer counts as failed, with the reason; the next one is scored"
    Measured("scorer that forks 400 processes, then one that takes 1.2 GiB (memory_gib 1)", follows, seconds, "nothing", REAL).write()


BROOD = """
    import os, subprocess, time
    from pathlib import Path
    from rollout.rewards.reward_guardian import clear_leftovers
    if os.fork() == 0:    # the scorer, below its guardian
        brood = [subprocess.Popen(["sleep", "68.5"]) for _ in range(70)]
        clear_leftovers()
        print(sum(Path("/proc", str(one.pid)).exists() for one in brood), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_what_a_failed_scorer_has_started_no_longer_counts_when_the_next_completion_is_scored() -> None:
    """A killed process counts in its control group until its parent has heard of its end: the next one's fork would fail with EAGAIN."""
    command = [sys.executable, "-c", textwrap.dedent(BROOD)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60.0, check=True)
    assert done.stdout == "0\n"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_shared_memory_counts_and_a_page_that_several_have_mapped_once(has_group: bool) -> None:
    """A limit of 256 MiB: one process may not map 400 MiB of them; four may map the same 100 MiB, of which each has 100 MiB resident."""
    maps, shares = scored(user_reward("moody", deadline_s=20.0, memory_gib=0.25), "maps", "shares")
    assert maps.error is not None and "took more than 0.25 GiB together" in maps.error
    assert shares.error is None and shares.is_valid


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_no_file_grows_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (t,) = scored(user_reward("moody", deadline_s=20.0), "file")
    assert t.error is not None and ("File too large" in t.error or "SIGXFSZ" in t.error)


WAYS = ("at once", "one after the other", "grandchildren", "orphans", "unheard of", "mapped")
FILES = ("some files", "many files", "shared files")
ANEW = ("little", "little", "little", "pipes", "little")
FEW_BYTES = 1 / 16
"""GiB that may be written for a completion, instead of 8."""


@pytest.fixture(scope="module")
def busy(is_kept_by_kernel: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trajectory]]:
    """Completions that wait for seconds, so that their guardians look at them. All are scored at the same time, each row in a tree of its
    own: by the way in which the last one writes, or what the row is about."""
    folder = tmp_path_factory.mktemp("busy")
    with specified(control_group=is_kept_by_kernel, written_gib=FEW_BYTES) as patch:
        write_user_module(folder, patch)
        patch.chdir(folder)
        rows = {way: ("little", way) for way in WAYS} | {"files": FILES, "anew": ANEW}
        return dict(zip(rows, scored_at_once(user_reward("busy", deadline_s=60.0), *rows.values()), strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_open_files_of_the_whole_tree_are_limited(busy: dict[str, list[Trajectory]]) -> None:
    """Five processes with 4000 each, of which each keeps its own limit. With two of them it may; or with 300 that 60 have inherited."""
    some, many, shared = busy["files"]
    assert some.error is None and shared.error is None
    assert many.error is not None and "had more than 16384 open files together" in many.error


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
@pytest.mark.parametrize("way", WAYS)
def test_what_the_whole_tree_writes_is_limited(busy: dict[str, list[Trajectory]], way: str) -> None:
    """Three files of 30 MiB, by processes that live on, or have ended: waited for, without a parent, or by one that never hears of it."""
    before, written = busy[way]
    assert before.error is None
    assert written.error is not None and "wrote more than 0.0625 GiB of files for one answer" in written.error


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_what_is_written_to_a_temporary_folder_in_memory_counts(has_group: bool, tmp_path: Path) -> None:
    if not _is_in_memory("/dev/shm"):
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, specified(written_gib=FEW_BYTES) as patch:
        patch.setenv("TMPDIR", folder)
        patch.chdir(tmp_path)
        (written,) = scored(user_reward("busy", deadline_s=60.0), "in memory")
        piped, little = scored(user_reward("busy", deadline_s=60.0), "pipes", "little")
    assert written.error is not None and "wrote more than 0.0625 GiB of files for one answer" in written.error
    assert piped.error is None and little.error is None


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a tree are Linux's")
def test_each_completion_may_write_anew_and_pipes_are_no_files(busy: dict[str, list[Trajectory]]) -> None:
    assert [t.error for t in busy["anew"]] == [None] * 5 and len({t.reward for t in busy["anew"]}) == 1, "by one process"


class Numbers:
    """In the place of /proc/PID/io: write_bytes, cancelled_write_bytes and wchar of processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of = {1: (0, 0, 0)}
        self.others: list[dict[int, tuple[int, int, int]]] = []
        """What looks see first."""
        self.fuller = 0
        monkeypatch.setattr("rollout.rewards.reward_usage._written_by", lambda pid: self._looked_at.get(pid, (0, 0, 0)))
        monkeypatch.setattr("rollout.rewards.reward_usage._used_bytes", lambda _: self.fuller)

    def find(self) -> list[int]:
        self._looked_at = self.others.pop(0) if self.others else self.of
        return list(self._looked_at)


def test_what_counts_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's numbers, look by look."""
    numbers = Numbers(monkeypatch)
    written = WrittenBytes(numbers.find)
    numbers.of = {1: (0, 0, 0), 2: (900, 0, 900)}
    assert written.bytes(has_begun=False) == 0, "as it was set up"
    numbers.of = {1: (0, 0, 0), 2: (950, 0, 950)}
    assert written.bytes(has_begun=True) == 50
    numbers.of = {1: (0, 0, 0), 2: (1050, 80, 1050)}
    assert written.bytes(has_begun=False) == 70, "80 were gone before they reached the disk"
    numbers.of = {1: (0, 0, 0), 2: (1050, 180, 1050)}
    assert written.bytes(has_begun=False) == 0
    numbers.of = {1: (0, 0, 0), 2: (1090, 180, 1090)}
    assert written.bytes(has_begun=False) == 40, "since there was least"
    numbers.of = {1: (0, 0, 0), 2: (1090, 180, 1090), 3: (5, 0, 5)}
    assert written.bytes(has_begun=True) == 5
    numbers.of = {1: (0, 0, 0), 2: (1095, 180, 1095)}
    numbers.others = [{1: (0, 0, 0), 2: (1090, 180, 1090)}]
    assert written.bytes(has_begun=False) == 5, "3 was just being waited for by 2"
    numbers.of = {1: (0, 0, 0), 2: (1095, 180, 1095), 4: (60, 50, 60)}
    assert written.bytes(has_begun=False) == 15
    numbers.of = {1: (0, 0, 0), 2: (1096, 180, 1096)}
    assert written.bytes(has_begun=False) == 15, "what 4 has written is nobody's, and at least what is missing now counts on"
    numbers.of = {1: (0, 0, 0), 2: (1096, 180, 5096)}
    assert written.bytes(has_begun=False) == 15, "through a pipe"
    numbers.fuller = 300
    assert written.bytes(has_begun=False) == 315, "into a temporary folder in memory"


PARENT = """
    import asyncio, sys
    from pydantic import TypeAdapter
    from rollout.config import FunctionReward
    from rollout.rewards.rewards import RewardPool
    from rollout.trajectory import *

    async def main():
        pool = RewardPool(FunctionReward(path="user_rewards:moody", processes=2, deadline_s=60))
        await pool.check()
        print(*(process._child.pid for process in pool._processes), flush=True)
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
    monkeypatch.setattr("rollout.rewards.rewards.subprocess.Popen", Refusing(*refused))
    for found, reason in zip(scored(user_reward("moody"), *texts), expected, strict=True):
        assert (found.error is None and found.reward is not None) if reason is None else (reason in str(found.error))
        assert reason is None or (found.reward is None and found.failure is FailureKind.REWARD)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_worker_that_starts_without_a_process_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.rewards.rewards.subprocess.Popen", Refusing(0))

    async def run() -> None:
        await RewardPool(user_reward("length")).check(asked())

    with pytest.raises(RewardError, match=r"the machine lets no scoring process start \(\[Errno 11\]") as caught:
        asyncio.run(run())
    assert caught.value.is_set_up, "another moment may let it"
