"""What is tried again after a child's end, and what its parent passes on to it. Whole runs: tests/failures/test_driver_killed.py."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from evenkeel import retries
from evenkeel.actors.record.stack_summary import newest_stack_summary
from tests.actors.processes.test_output import Disk, stream_on
from tests.e2e.launch import ROOT, environment

KILLED, HUNG = -signal.SIGKILL, -1000


class Attempts:
    """Children that end by these codes, after these steps, the next one each time."""

    def __init__(self, run_dir: Path, ends: Sequence[tuple[int, int | None]], *, is_asked: bool = False) -> None:
        self._run_dir, self._ends, self._is_asked = run_dir, iter(ends), is_asked
        self.arguments: list[list[str]] = []

    def __call__(self, arguments: Sequence[str], **_: Any) -> tuple[int, bool, float]:
        self.arguments.append(list(arguments))
        code, step = next(self._ends)
        if step is not None:  # it has come as far as a folder
            self._run_dir.mkdir(exist_ok=True)
            (self._run_dir / "config.yaml").touch()
        if step:
            (self._run_dir / "ledger.jsonl").write_text(json.dumps({"step": step}) + "\n" + '{"step": 9')  # the last line is torn
        return (KILLED, self._is_asked, 600.0) if code == HUNG else (code, self._is_asked, 0.0)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(retries, "_PAUSE_S", 0.0)
    monkeypatch.setattr(retries, "_end_leftovers", lambda: None)  # pytest's own children are none
    yield tmp_path / "run"


Ends = Sequence[tuple[int, int | None]]


def tried(monkeypatch: pytest.MonkeyPatch, run_dir: Path, ends: Ends, *, is_asked: bool = False) -> tuple[int, int]:
    """(exit code, attempts)."""
    attempts = Attempts(run_dir, ends, is_asked=is_asked)
    monkeypatch.setattr(retries, "_attempt", attempts)
    return retries.run_with_retries(Path("recipe.yaml"), ["steps=9"], run_dir, retries=3), len(attempts.arguments)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        pytest.param([(0, 9)], (0, 1), id="done"),
        pytest.param([(KILLED, 3), (1, 5), (-signal.SIGSEGV, 6), (0, 9)], (0, 4), id="killed, an error, crashed"),
        pytest.param([(KILLED, None), (KILLED, 0), (0, 9)], (0, 3), id="before there was a folder, and before a step"),
        pytest.param([(HUNG, 3), (HUNG, None), (0, 9)], (0, 3), id="hung"),
        pytest.param([(1, None)], (1, 1), id="what it was given is wrong"),
        pytest.param([(1, 0)], (1, 1), id="wrong, seen when there was a folder"),
        pytest.param([(KILLED, 0), (1, None)], (1, 2), id="no step was made with it"),
        pytest.param([(KILLED, 3), (1, None), (1, None), (0, 9)], (0, 4), id="a judge, a disk, its data, a node, the head is away"),
        pytest.param([(1, 3), (1, None), (1, None), (1, None)], (1, 4), id="away for good"),
        pytest.param([(3, 4)], (3, 1), id="alarm"),
        pytest.param([(143, 4)], (143, 1), id="SIGTERM"),
        pytest.param([(-signal.SIGTERM, 4)], (143, 1), id="SIGTERM, early"),
        pytest.param([(KILLED, 1), (KILLED, 2), (KILLED, 3), (KILLED, 4)], (137, 4), id="used up"),
    ],
)
def test_what_is_tried_again(monkeypatch: pytest.MonkeyPatch, run_dir: Path, ends: Ends, expected: tuple[int, int]) -> None:
    assert tried(monkeypatch, run_dir, ends) == expected


@pytest.mark.parametrize("recipe", [None, Path("recipe.yaml")], ids=["resume", "in another run's folder"])
def test_steps_of_an_earlier_run_are_no_sign_that_the_settings_are_right(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, recipe: Path | None
) -> None:
    """The words are new; and a recipe that is refused an earlier run's folder must not go on with that run."""
    run_dir.mkdir()
    (run_dir / "config.yaml").touch()
    (run_dir / "ledger.jsonl").write_text(json.dumps({"step": 5}) + "\n")
    attempts = Attempts(run_dir, [(1, None), (0, 9)])
    monkeypatch.setattr(retries, "_attempt", attempts)
    assert retries.run_with_retries(recipe, ["steps=9"], run_dir, retries=3) == 1 and len(attempts.arguments) == 1


def test_retries_come_after_longer_and_longer_pauses(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(retries, "_PAUSE_S", 1.0)
    # Its own alone: other threads of this process sleep, too.
    monkeypatch.setattr(retries, "time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(retries, "_attempt", Attempts(run_dir, [(KILLED, 3), *[(1, None)] * 8]))
    assert retries.run_with_retries(Path("recipe.yaml"), ["steps=9"], run_dir, retries=8) == 1
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    said = "evenkeel: the run's process ended with exit code 1 after step 3"
    assert f"{said}; it goes on from its newest checkpoint in 2 s (retry 2 of 8)\n" in capsys.readouterr().err
    assert f"{said.removeprefix('evenkeel: ')}, and --retries 8 have been used up" in (run_dir / "events.log").read_text()


def test_an_end_that_was_asked_for_is_the_end(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    """Whatever the child's exit code: a second Ctrl-C kills it."""
    assert tried(monkeypatch, run_dir, [(KILLED, 3)], is_asked=True) == (137, 1)


def test_one_that_hangs_when_its_end_is_asked_for_is_told(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tried(monkeypatch, run_dir, [(HUNG, 3)], is_asked=True) == (137, 1)
    reason = "the run's process hung, without a sign of life for 600 s, and was killed"
    assert f"evenkeel: {reason}; it had been asked to end, and is not tried again\n" in capsys.readouterr().err


def test_each_retry_is_a_line_and_an_event(monkeypatch: pytest.MonkeyPatch, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempts = Attempts(run_dir, [(KILLED, None), (KILLED, 2), (1, 4), (1, 4)])
    monkeypatch.setattr(retries, "_attempt", attempts)
    assert retries.run_with_retries(Path("recipe.yaml"), ["steps=9"], run_dir, retries=3) == 1
    anew, resume = ["recipe.yaml", "steps=9", f"run_dir={run_dir}"], ["--resume", str(run_dir), "steps=9"]
    assert attempts.arguments == [anew, anew, resume, resume]
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    goes_on = "it goes on from its newest checkpoint in 0 s"
    assert said == [
        f"evenkeel: the run's process was killed by SIGKILL after step 0; {goes_on} (retry 1 of 3)",
        f"evenkeel: the run's process was killed by SIGKILL after step 2; {goes_on} (retry 2 of 3)",
        f"evenkeel: the run's process ended with exit code 1 after step 4; {goes_on} (retry 3 of 3)",
        "evenkeel: the run's process ended with exit code 1 after step 4, and --retries 3 have been used up",
    ]
    events = (run_dir / "events.log").read_text().splitlines()
    told = [line.removeprefix("evenkeel: ") for line in said]
    assert [event.split(None, 2)[2] for event in events] == told[1:], "without a folder: no event"


@pytest.mark.parametrize("how", ["refuses", "hangs", "has no thread"])
def test_a_disk_that_tells_the_parent_nothing_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """How far the run has come is not known: what may be progress is tried again, as often as --retries says. Nor does what still waits
    for the disk keep the process from its end: no thread is left that Python would wait for. A machine that has no thread left to look
    there is the same."""
    is_back = threading.Event()

    def look(_: Path) -> Any:
        if how == "hangs":
            is_back.wait(60.0)
        raise OSError(errno.ESTALE, "Stale file handle")

    def no_thread(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    if how == "has no thread":
        monkeypatch.setattr(retries.DaemonThreads, "submit", no_thread)
    monkeypatch.setattr(retries, "last_step", look)
    monkeypatch.setattr(retries, "_LOOK_S", 0.1 if how == "hangs" else 60.0)
    before = set(threading.enumerate())
    assert tried(monkeypatch, run_dir, [(1, 3), (1, None), (1, None), (1, None)]) == (1, 4)
    left = set(threading.enumerate()) - before
    assert all(thread.daemon for thread in left) and (len(left) >= 4 or how != "hangs")
    is_back.set()
    said = "ended with exit code 1 after a step that its disk does not tell"
    told = capsys.readouterr().err
    assert told.count(f"{said}; it goes on from its newest checkpoint in ") == 3 and f"{said}, and --retries 3 have been used up" in told


def test_a_folder_whose_disk_refuses_counts_as_there(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    """Not as a run that has never begun, after whose error nothing is tried again."""

    def is_file(_: Path) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    attempts = Attempts(run_dir, [(1, 3), (0, 9)])
    monkeypatch.setattr(retries, "_attempt", attempts)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", is_file)
        assert retries.run_with_retries(Path("recipe.yaml"), [], run_dir, retries=1) == 0
    assert attempts.arguments[1][:2] == ["--resume", str(run_dir)]


def test_a_parent_that_can_not_print_goes_on(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    monkeypatch.setattr("sys.stderr", stream_on(Disk()))
    assert tried(monkeypatch, run_dir, [(KILLED, 3), (0, 9)]) == (0, 2)
    assert "killed by SIGKILL after step 3" in (run_dir / "events.log").read_text()


PARENT = """
import sys
from pathlib import Path
from evenkeel.actors.processes import signals
from evenkeel import retries
assert not {"ray", "torch"} & sys.modules.keys(), "a small parent, in which little could die"
retries._COMMAND = (sys.executable, "-c", sys.argv[1])
retries._PAUSE_S = 0.0
with signals.guarded(grace_s=0.5):
    sys.exit(retries.run_with_retries(Path("recipe.yaml"), [], Path(sys.argv[2]), retries=1))
"""
COUNTS_SIGNALS = """
import signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: got.append(number))
print("ready", flush=True)
while not got:
    time.sleep(0.01)
time.sleep(1.0)    # longer than the grace of the parent, and time for a second one
print("got", [int(number) for number in got], flush=True)
sys.exit(5)
"""
LEAVES_A_CHILD = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); print('left', os.getpid(), flush=True); time.sleep(300)"],
                         stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), end="", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


LIMIT_S = 8.0
BEATS = """
import asyncio, os, subprocess, sys, time
from pathlib import Path
from evenkeel.actors.processes import children
from evenkeel.rollout.stacks import register_stack_dump
if "--resume" in sys.argv:
    print("goes on", flush=True)
    sys.exit(0)
Path(sys.argv[-1].removeprefix("run_dir=")).joinpath("config.yaml").touch()
children.inherit()
register_stack_dump()
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
async def train():
    with children.beating(%s):
        await asyncio.sleep(0.1)
        print(os.getpid(), left.pid, flush=True)
        %s
asyncio.run(train())
%s
"""
"""One attempt, whose event loop does something; then what comes after it."""


def parent(script: str, run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT, script, str(run_dir)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **pipes, env=environment(), cwd=ROOT, start_new_session=True)  # type: ignore[call-overload,no-any-return]


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_the_child_gets_a_signal_once(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C goes to the terminal's whole foreground group, as here; the child must not take it for two, the second of which ends at once.
    And it has the time that it needs: the parent's own grace is shorter."""
    process = parent(COUNTS_SIGNALS, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.killpg(process.pid, number)
    said, _ = process.communicate(timeout=60.0)
    assert said == f"got [{int(number)}]\n"
    assert process.returncode == 5


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_CHILD_SUBREAPER is Linux's")
def test_what_a_dead_child_leaves_is_ended_before_the_next(tmp_path: Path) -> None:
    """Engines hold the memory that the next attempt needs, and sessions of their own hide them from a killpg."""
    process = parent(LEAVES_A_CHILD, tmp_path)
    assert process.stdout is not None
    left = []
    for line in process.stdout:
        if line.startswith("left"):
            left.append(int(line.split()[1]))
            assert not any(psutil.pid_exists(pid) for pid in left[:-1])
    assert process.wait(60.0) == 137
    assert len(left) == 2 and not any(psutil.pid_exists(pid) for pid in left)


@dataclass(frozen=True)
class Hung:
    """An attempt that gives no sign of life from now on."""

    run_dir: Path
    pids: list[int]
    """Of the child, and of what it has started."""
    process: subprocess.Popen[str]
    since: float
    """Monotonic."""


BUSY_S = LIMIT_S + 2.0
"""Longer than a child may go without a sign of life."""
TOO, AFTER = "stopped with its parent", "busy after its loop"
ATTEMPTS = {
    "stopped": ("await asyncio.sleep(300)", ""),
    "blocked": ("time.sleep(300)", ""),
    TOO: (f"await asyncio.sleep({BUSY_S + 3.0})", "left.kill()"),
    AFTER: ("", f"left.kill(); time.sleep({BUSY_S})"),
}


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Hung]:
    """All at once: each waits for seconds."""
    folders = {how: tmp_path_factory.mktemp("attempt") for how in ATTEMPTS}
    processes = {how: parent(BEATS % (LIMIT_S, *lines), folders[how]) for how, lines in ATTEMPTS.items()}
    pids = {how: [int(pid) for pid in first_line(one).split()] for how, one in processes.items()}
    for pid in (pids["stopped"][0], pids[TOO][0], processes[TOO].pid):
        os.kill(pid, signal.SIGSTOP)
    return {how: Hung(folders[how], pids[how], one, time.monotonic()) for how, one in processes.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_CHILD_SUBREAPER is Linux's")
@pytest.mark.parametrize("how", ["stopped", "blocked"])
def test_a_child_that_hangs_is_killed_and_resumed(hung: dict[str, Hung], how: str) -> None:
    """With all that it has started. Before that its stacks are written down."""
    one = hung[how]
    said, _ = one.process.communicate(timeout=60.0)
    assert said.splitlines() == [
        f"evenkeel: the run's process has given no sign of life for 8 s, and is killed; where it stands is in {one.run_dir}/stacks/01.txt",
        "evenkeel: the run's process hung, without a sign of life for 8 s, and was killed after step 0; it goes on from its newest "
        "checkpoint in 0 s (retry 1 of 1)",
        "goes on",
    ]
    assert one.process.returncode == 0 and not any(psutil.pid_exists(pid) for pid in one.pids)
    assert len((one.run_dir / "events.log").read_text().splitlines()) == 2
    what, stands = newest_stack_summary(one.run_dir)
    assert what.endswith("(the run's process has given no sign of life for 8 s):")
    where = "<string>:17 train < " if how == "blocked" else "says nothing; state T"
    assert stands.startswith(f"evenkeel train (process {one.pids[0]}): {where}")


def test_time_in_which_the_parent_is_stopped_too_is_no_silence(hung: dict[str, Hung]) -> None:
    """Longer than the time that the child has for a sign of life. Nor is what a child does after its event loop's end: another one does
    so meanwhile."""
    stopped, after = hung[TOO], hung[AFTER]
    time.sleep(max(0.0, stopped.since + BUSY_S - time.monotonic()))
    for pid in (stopped.process.pid, stopped.pids[0]):
        os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
    for one in (stopped, after):
        said, _ = one.process.communicate(timeout=60.0)
        assert (said, one.process.returncode) == ("", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_ends_in_order_when_its_parent_is_killed(tmp_path: Path) -> None:
    """By the signal after which a run ends with a checkpoint. The kernel may send it again while the parent's threads end one after the
    other; a run takes those for one (signals.SAME_S)."""
    script = f"from evenkeel.actors.processes import children\nchildren.inherit()\nexec({COUNTS_SIGNALS!r}, {{}})"
    process = parent(script, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.kill()
    said = process.stdout.readline()
    assert said.startswith("got ") and set(json.loads(said.removeprefix("got "))) == {int(signal.SIGTERM)}, said


def test_wrong_settings_are_said_once(tmp_path: Path) -> None:
    """Those that only the child sees: nothing of the folder is there yet, and the parent says nothing of its own."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((ROOT / "tests" / "e2e" / "small.yaml").read_text().replace("set-by-the-test", str(tmp_path / "none")))
    command = [sys.executable, "-m", "evenkeel.cli", "train", str(recipe), "--retries", "3", f"run_dir={tmp_path / 'run'}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120.0, env=environment(), cwd=tmp_path, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"evenkeel: model = {tmp_path / 'none'}: no such folder"), line
