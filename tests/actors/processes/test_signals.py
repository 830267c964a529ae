"""SIGTERM and Ctrl-C end a process within the grace wherever its main thread is, with the exit code of shells and nothing left behind."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import queue
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from evenkeel.actors.driver.controller import RunSummary
from evenkeel.actors.processes import signals

ROOT = Path(__file__).parents[3]
BEGIN = """
import ctypes, os, subprocess, sys, time
from evenkeel.actors.processes import signals
with signals.guarded(grace_s=0.5):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
"""
PATIENT = BEGIN.replace("grace_s=0.5", "grace_s=60")
"""For programs that unwind: on a busy machine that may take more than half a second."""
ORDERLY = """
    try:
        print(child.pid, flush=True)
        time.sleep(300)
    finally:
        child.kill()
        child.wait()
        print("unwound", flush=True)
"""
LOST = (
    ORDERLY
    + """
        print("to nobody", file=sys.stderr, flush=True)
        open(sys.argv[1], "w").write("unwound")
"""
)
SWALLOWED = """
    class Finalizer:
        def __del__(self):
            print(child.pid, flush=True)
            time.sleep(300)    # the exception is raised in here, and Python ignores it
    finalizer = Finalizer()
    del finalizer
    try:
        time.sleep(300)
    finally:
        child.kill()
        child.wait()
        time.sleep(0.2)        # it is raised again once
        print("unwound", flush=True)
"""
BESIDE = (
    """
    import signal, threading
    def get_one():    # the kernel gives this thread a signal, which ends no call of the main thread
        time.sleep(0.5)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    threading.Thread(target=get_one).start()
"""
    + ORDERLY
)
SWALLOWED_TWICE = SWALLOWED.replace("    del finalizer", "    second = Finalizer()\n    del finalizer, second")
IN_C = """
    mutex = ctypes.create_string_buffer(128)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    print(child.pid, flush=True)
    libc.pthread_mutex_lock(mutex)    # no signal ends this wait
"""
CHECKED = """
    class Finalizer:
        def __del__(self):
            print(child.pid, flush=True)
            time.sleep(300)
    finalizer = Finalizer()
    del finalizer
    try:
        signals.check()
    finally:
        child.kill()
        child.wait()
        time.sleep(0.2)        # it isn't raised again
        print("unwound", flush=True)
"""
TAKEN_OVER = (
    """
    import asyncio, signal
    async def run():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: None)    # whoever handles signals itself ...
        loop.remove_signal_handler(signal.SIGTERM)
    asyncio.run(run())
    signals.rearm()                                           # ... hands them back
"""
    + IN_C
)

DONE = (
    """
    signals.all_is_done(3)
"""
    + IN_C
)


def ended(
    program: str, *numbers: int, begin: str = BEGIN, hangup: signal.Handlers = signal.SIG_DFL
) -> tuple[subprocess.CompletedProcess[str], int]:
    """The program after it has got these signals, and the process id of its child. Args: hangup: what SIGHUP does to it as it starts."""
    process = subprocess.Popen(
        [sys.executable, "-c", begin + program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),  # that of these tests may be inherited from nohup
    )
    assert process.stdout is not None
    try:
        child = int(process.stdout.readline())
        time.sleep(0.5)  # for its next line: the wait that no signal ends
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.2)
        out, err = process.communicate(timeout=60.0)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err), child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_main_thread_unwinds(number: int) -> None:
    process, child = ended(ORDERLY, number, begin=PATIENT)
    assert process.returncode == 128 + number
    assert process.stdout == "unwound\n" and process.stderr == ""
    assert not psutil.pid_exists(child)


def test_a_signal_that_another_thread_gets_wakes_the_main_thread() -> None:
    """So it is with one that comes just before the main thread begins to sleep: a hung-up terminal's did in one of a hundred cases."""
    process, child = ended(BESIDE, begin=PATIENT)
    assert process.returncode == 128 + signal.SIGTERM
    assert process.stdout == "unwound\n" and process.stderr == "", "unwound, not ended by the thread after its grace"
    assert not psutil.pid_exists(child)


def test_who_is_started_with_nohup_outlives_its_terminal() -> None:
    process, child = ended(ORDERLY, signal.SIGHUP, signal.SIGTERM, begin=PATIENT, hangup=signal.SIG_IGN)
    assert process.returncode == 128 + signal.SIGTERM, "not 129: the first signal is ignored, and stays so"
    assert process.stdout == "unwound\n" and not psutil.pid_exists(child)


def test_the_loss_of_the_terminal_is_a_signal_and_no_error_of_each_line_after_it(tmp_path: Path) -> None:
    """The terminal's window is closed: the kernel tells whoever leads its session, and every write to it fails from then on."""
    mine, its = pty.openpty()

    def lead_a_session_there() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.setsid()
        fcntl.ioctl(its, termios.TIOCSCTTY, 0)

    script, written = PATIENT + LOST, tmp_path / "written"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(written)], cwd=ROOT, stdin=its, stdout=its, stderr=its, preexec_fn=lead_a_session_there
    )
    os.close(its)
    try:
        while b"\n" not in os.read(mine, 100):
            pass
        os.close(mine)
        assert process.wait(timeout=60.0) == 128 + signal.SIGHUP
    finally:
        process.kill()
        process.wait()
    assert written.read_text() == "unwound", "what was printed before it did not raise"


@pytest.mark.parametrize("program", [IN_C, TAKEN_OVER], ids=["in a call of C", "after an event loop"])
def test_a_main_thread_that_does_not_end_is_ended_with_its_children(program: str) -> None:
    process, child = ended(program, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert process.stderr.endswith("evenkeel: ended by SIGTERM (still busy after 0.5 s)\n")
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("again", [False, True], ids=["it hangs", "a second signal"])
def test_what_is_done_stays_done_whatever_ends_the_process(again: bool) -> None:
    """All was saved, and Ray's end hangs, or a person presses Ctrl-C, too: the exit code is that of what was done."""
    process, child = ended(DONE, *(signal.SIGTERM, signal.SIGINT)[: 1 + again])
    assert process.returncode == 3
    assert "evenkeel: ended by SIGTERM (" in process.stderr
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("program", [SWALLOWED, SWALLOWED_TWICE], ids=["once", "twice"])
def test_a_swallowed_signal_is_raised_again_and_nothing_is_said_of_it(program: str) -> None:
    """Python would print "Exception ignored in" with a traceback, and the process would go on until the thread ends it."""
    process, child = ended(program, signal.SIGTERM, begin=PATIENT)
    assert process.returncode == 128 + signal.SIGTERM
    assert process.stdout.splitlines()[-1] == "unwound" and process.stderr == ""
    assert not psutil.pid_exists(child)


def test_what_else_is_raised_in_a_finalizer_is_still_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[object]()
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: said.append(unraisable.exc_value))
    before = sys.unraisablehook

    class Fails:
        def __del__(self) -> None:
            raise ValueError("of the user's")

    with signals.guarded():
        Fails()
    assert [str(one) for one in said] == ["of the user's"] and sys.unraisablehook is before


def test_a_swallowed_signal_is_found_at_the_next_check() -> None:
    process, child = ended(CHECKED, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert process.stdout == "unwound\n", "in order, not by the thread that ends it otherwise"
    assert not psutil.pid_exists(child)


def test_handlers_are_given_back() -> None:
    from evenkeel.actors.processes import signals

    numbers = (*signals.SIGNALS, signals._WAKE)
    before = [signal.getsignal(number) for number in numbers]
    with signals.guarded():
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_same_signal_twice_is_one(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """`ray job stop` tells every process of a job: one whose parent passes the signal on gets it twice, and must not end at once. A lost
    terminal tells a job of bash's twice."""
    monkeypatch.setattr(signals, "SIGNALS", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))  # also where these tests run with nohup
    monkeypatch.setattr(signals, "leave_terminal", lambda _: None)
    assert signals_seen([number, number, signal.SIGINT, signal.SIGINT]) == [number, signal.SIGINT, signal.SIGINT]
    assert signals_seen([signal.SIGTERM, signal.SIGHUP]) == [signal.SIGTERM, signal.SIGHUP], "each by itself"
    monkeypatch.setattr(signals, "SAME_S", 0.0)
    assert signals_seen([number, number]) == [number, number], "later ones count"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_same_signal_twice_is_one_without_an_event_loop_too(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """In an import, in Ray's start, as the run ends: the second one of a lost terminal took the time to unwind. Any other ends at once."""
    monkeypatch.setattr(signals, "SAME_S", 60.0)
    for second, grace_s, why in ((number, 0.3, "still busy after 0.3 s"), (signal.SIGINT, 60.0, "again")):
        with guarded_here(monkeypatch, grace_s=grace_s) as told:
            with pytest.raises(signals.Interrupted):
                send(number)
            signal.raise_signal(second)
            assert told.get(timeout=60.0) == f"ended by {signals.NAMES[number]} ({why})"


def test_a_signal_that_an_event_loop_has_had_is_the_same_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends at once, and the second one of a lost terminal comes as it unwinds: neither does that raise, nor begin a grace."""
    monkeypatch.setattr(signals, "SAME_S", 60.0)
    with guarded_here(monkeypatch, grace_s=0.1) as told:
        assert signals_seen([signal.SIGHUP]) == [signal.SIGHUP]
        signals.rearm()
        signal.raise_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert told.empty() and not signals.is_ending()
        with pytest.raises(signals.Interrupted):
            send(signal.SIGTERM)
        assert told.get(timeout=60.0).startswith("ended by SIGTERM ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_a_library_gives_back_as_all_unwinds_have_their_grace(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """As Ray's start does. The thread that limits the time wakes after that; several times, as it might be quicker."""
    for _ in range(5):
        with guarded_here(monkeypatch, grace_s=0.05) as told:
            with pytest.raises(signals.Interrupted):
                try:
                    send(number)
                finally:
                    signals.rearm()
            assert told.get(timeout=60.0) == f"ended by {signals.NAMES[number]} (still busy after 0.05 s)"


def test_signals_that_go_on_count_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who sends SIGTERM each second until the process is gone."""
    monkeypatch.setattr(signals, "SAME_S", 0.5)
    assert len(signals_seen([signal.SIGTERM] * 6, apart_s=0.2)) >= 2


def send(number: int) -> None:
    """To this process, which waits for what that does."""
    signal.raise_signal(number)
    time.sleep(60.0)


@contextmanager
def guarded_here(monkeypatch: pytest.MonkeyPatch, *, grace_s: float) -> Iterator[queue.SimpleQueue[str]]:
    """This process under guard, whose end is told and not made."""
    told = queue.SimpleQueue[str]()
    monkeypatch.setattr(signals, "SIGNALS", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))  # also where these tests run with nohup
    monkeypatch.setattr(signals, "leave_terminal", lambda _: None)
    monkeypatch.setattr(signals, "end_all", lambda why, code: told.put(why))
    with signals.guarded(grace_s=grace_s):
        yield told


def signals_seen(sent: list[int], *, apart_s: float = 0.05) -> list[int]:
    """Those that an event loop is told of, each sent when the loop has seen to the one before."""
    seen: list[int] = []

    async def send() -> None:
        with signals.handled_in(asyncio.get_running_loop(), seen.append):
            for number in sent:
                signal.raise_signal(number)
                await asyncio.sleep(apart_s)

    before = signal.getsignal(signal.SIGHUP)
    try:
        asyncio.run(send())
    finally:
        signal.signal(signal.SIGHUP, before)
    return seen


NEVER_ENDS = """
import atexit, time
from evenkeel.actors.processes import signals
atexit.register(time.sleep, 1000)    # as a package does whose service doesn't answer
signals.end_within(0.2, 3, lambda: True)
"""


def test_a_process_whose_own_end_hangs_is_ended_with_its_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", NEVER_ENDS], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (3, "evenkeel: something still hangs 0.2 s after the run's end; the process ends without it\n")


def test_a_reason_with_half_a_surrogate_pair_keeps_no_process_from_its_end() -> None:
    program = "from evenkeel.actors.processes import signals; signals.end_all('no room in /data/\\udce9', 3)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (3, "evenkeel: no room in /data/\\udce9\n")


def test_a_process_goes_on_when_what_hung_has_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that has more to do than this run."""
    ended = list[int]()
    monkeypatch.setattr(signals, "end_all", lambda text, code: ended.append(code))
    for code, hangs in ((3, True), (4, False)):
        before = set(threading.enumerate())
        signals.end_within(0.01, code, lambda hangs=hangs: hangs)
        for thread in set(threading.enumerate()) - before:
            thread.join(10.0)
    assert ended == [3]


@pytest.mark.parametrize(
    ("alarm", "number", "code"),
    [("", None, 0), ("", signal.SIGINT, 0), ("", signal.SIGTERM, 143), ("", signal.SIGHUP, 129), ("reward fell", None, 3)],
)
def test_exit_code_of_a_run(alarm: str, number: int | None, code: int) -> None:
    """One rule for the command line and for the end of a process that hangs: a scheduler resumes on 143."""
    assert RunSummary(3, None, None, 1.0, stopped_early=True, alarm=alarm, ended_by=number).exit_code == code
