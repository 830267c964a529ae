"""Processes that say where they stand: one that holds Python's lock in C, one that sleeps, one that is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evenkeel.rollout.stacks import stacks_of

_CHILD = """
import ctypes, sys, time
from evenkeel.rollout.stacks import register_stack_dump

def sleeps_in_c_with_the_lock():
    print("ready", flush=True)
    while True:  # a signal ends one
        ctypes.PyDLL(None).sleep(60)

def sleeps():
    print("ready", flush=True)
    time.sleep(60)

if "silent" not in sys.argv:
    register_stack_dump()
    register_stack_dump()
globals()[sys.argv[1]]()
"""


@contextmanager
def child(*words: str, **variables: str) -> Iterator[int]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    process = subprocess.Popen([sys.executable, "-c", _CHILD, *words], stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait(30.0)


def test_a_process_says_where_it_stands_though_it_is_blocked_in_c() -> None:
    with child("sleeps_in_c_with_the_lock") as blocked, child("sleeps") as asleep:
        for _ in range(2):  # again: only what is new
            told = stacks_of([blocked, asleep])
            assert told.keys() == {blocked, asleep}
            for pid, function in ((blocked, "sleeps_in_c_with_the_lock"), (asleep, "sleeps")):
                assert told[pid].count("most recent call first") == 1
                assert told[pid].splitlines()[1].endswith(f" in {function}"), "the innermost function"


def test_a_file_that_is_closed_while_one_looks_hides_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy process opens and closes files all the time: one of its list may be gone when its name is read."""
    read, gone = os.readlink, []

    def readlink(link: Path) -> str:
        if not gone:
            gone.append(link)
            raise FileNotFoundError(link)
        return read(link)

    with child("sleeps") as asleep:
        monkeypatch.setattr(os, "readlink", readlink)
        assert stacks_of([asleep]).keys() == {asleep} and len(gone) == 1


def test_one_that_is_stopped_is_called_that_and_one_that_does_not_tell_is_left_alone() -> None:
    """The signal would end it."""
    with child("sleeps") as stopped, child("sleeps", "silent") as other:
        os.kill(stopped, signal.SIGSTOP)
        os.waitid(os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT)
        assert stacks_of([stopped, other]) == {stopped: "says nothing; state T (stopped)\n"}
        os.kill(other, 0)
        os.kill(stopped, signal.SIGCONT)
        assert "in sleeps" in stacks_of([stopped])[stopped]


def test_one_of_another_job_is_left_alone() -> None:
    """On a cluster: its node may have another run's processes."""
    with child("sleeps", RAY_JOB_ID="01000000") as ours, child("sleeps", RAY_JOB_ID="02000000") as theirs:
        assert stacks_of([ours, theirs], job="01000000").keys() == {ours}
        assert stacks_of([ours, theirs]).keys() == {ours, theirs}, "asked by who belongs to no job"
