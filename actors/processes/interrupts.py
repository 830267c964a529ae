"""SIGTERM, Ctrl-C and the loss of the terminal end this process within seconds wherever it is: in an import, in Ray's start, in a wait.

A signal's handler raises in the main thread, which unwinds as for any error. That alone is not enough. An exception raised inside a fork
hook or a finalizer is swallowed: Python hands it to `sys.unraisablehook`, which raises it again a moment later. And a call into C may not
come back for half a minute: so the signal is seen by a thread as well, through a wakeup descriptor, which the kernel's own handler writes
to; when the process is still there after `GRACE_S`, or at a second signal, the thread ends it together with all that it has started.
And a signal that the kernel gives to another thread, or gives just before the main thread begins to sleep, does not end that sleep: the
thread wakes the main thread, by SIGALRM, until the handler has run.

An event loop that handles signals itself (the controller's) takes the descriptor over; `rearm` takes it back.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

GRACE_S = 10.0
"""How long the main thread may take to unwind."""
SAME_S = 2.0
"""SIGTERMs within this time count as one: if a whole process tree gets the signal, a child gets it once more from its parent. So do
SIGHUPs: when a terminal is lost, its shell sends one to its jobs, and the kernel sends another as that shell ends."""
# If SIGHUP is ignored at the start (nohup), so that the process outlives its terminal, it stays ignored.
_HANGUP = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else ()
SIGNALS = (signal.SIGINT, signal.SIGTERM, *_HANGUP)
_AGAIN_S = 0.05
"""Seconds after which a swallowed exception is raised again: the hook or finalizer that swallowed it has ended by then."""
_WAKE_S = 0.2
"""Seconds after which the main thread is woken if the handler has not run in it."""
_LAST_S = 2.0
_ENDS = threading.RLock()
NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class Interrupted(SystemExit):
    """Raised in the main thread by a signal. A SystemExit, because event loops and frameworks let that pass; its code is that of shells."""

    def __init__(self, number: int) -> None:
        super().__init__(exit_code(number))
        self.number = number

    def __str__(self) -> str:
        return NAMES[self.number]


def exit_code(number: int) -> int:
    """Exit code of a process that a signal has ended, as shells count: 129 after SIGHUP, 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + number


class _SignalTimes:
    """When the last signal of each kind came that counted: another one within SAME_S is the same signal. Each Ctrl-C counts."""

    def __init__(self, before: _SignalTimes | None = None) -> None:
        """Args: before: those of another receiver, which has got all until now."""
        self._last: dict[int, float] = {signal.SIGTERM: -math.inf, signal.SIGHUP: -math.inf}
        if before is not None:
            self._last |= before._last

    def is_repeat(self, number: int) -> bool:
        """Whether this signal, which comes now, counts as one with the one before it."""
        if number not in self._last or (now := time.monotonic()) - self._last[number] < SAME_S:
            return number in self._last
        self._last[number] = now
        return False


class _Guard:
    """Handlers, hook, descriptor and thread, while `guarded` lasts."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.raised: int | None = None
        """The signal whose handler has raised."""
        self._is_swallowed = False
        self.done_code: int | None = None
        """Exit code of what this process was to do, once all of it is done."""
        self.received = _SignalTimes()
        """By the main thread, in an event loop or not."""
        self._received_by_thread = _SignalTimes()
        self._before: dict[int, Any] = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)}
        self._hook_before = sys.unraisablehook
        sys.unraisablehook = self._swallowed
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._is_over = threading.Event()
        self._wakeup_before = -1
        self._thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)
        self._thread.start()

    def tell_thread(self) -> None:
        """What an event loop has received, which has not come to the thread."""
        self._received_by_thread = _SignalTimes(self.received)

    def arm(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._raise)
        signal.signal(signal.SIGALRM, self._woken)
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._wakeup_before = before if before != self._writer.fileno() else self._wakeup_before

    def close(self) -> None:
        self.forget_alarm()
        sys.unraisablehook = self._hook_before
        for number in SIGNALS:
            signal.signal(number, self._before[number])
        signal.set_wakeup_fd(self._wakeup_before)
        self._is_over.set()
        self._writer.send(b"\0")  # ends the wait of the thread
        self._thread.join()
        signal.signal(signal.SIGALRM, self._before[signal.SIGALRM])  # by which it woke this one: a default handler would end the process
        self._reader.close()
        self._writer.close()

    def _raise(self, number: int, frame: FrameType | None) -> None:
        leave_terminal(number)
        is_again = self.received.is_repeat(number)
        if self.raised is None and not is_again:  # raise once: unwinding must not be interrupted; the thread limits its time
            self.raised = number
            raise Interrupted(number)

    def _swallowed(self, unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, Interrupted):
            self._is_swallowed = True
            signal.signal(signal.SIGALRM, self._woken)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            self._hook_before(unraisable)

    def _woken(self, number: int, frame: FrameType | None) -> None:
        if self.raised is not None and self._is_swallowed:
            self._is_swallowed = False
            raise Interrupted(self.raised)

    def forget_alarm(self) -> None:
        """Cancel the alarm: the swallowed exception is raised elsewhere."""
        if self._is_swallowed:
            self._is_swallowed = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _watch(self) -> None:
        number = self._next_signal(None)
        if number is None:
            return
        again = self._wake_and_wait()
        if not self._is_over.is_set():
            why = "again" if again is not None else f"still busy after {self._grace_s:g} s"
            end_all(f"ended by {NAMES[number]} ({why})", code_after(number))

    def _wake_and_wait(self) -> int | None:
        """Wake the main thread until the handler has run in it, and wait for the next signal, for `_grace_s` at most."""
        until, again = time.monotonic() + self._grace_s, None
        while again is None and not self._is_over.is_set() and (left_s := until - time.monotonic()) > 0.0:
            again = self._next_signal(left_s if self.raised is not None else min(_WAKE_S, left_s))
            if self.raised is None and not self._is_over.is_set() and signal.getsignal(signal.SIGALRM) == self._woken:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        return again

    def _next_signal(self, timeout_s: float | None) -> int | None:
        """Wait for the next signal that doesn't count as one with the last. Returns: its number; None when the guard is closed, or after
        timeout_s."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_over.is_set():
            left_s = until - time.monotonic()
            if left_s <= 0.0:
                return None
            self._reader.settimeout(left_s if timeout_s is not None else None)
            try:
                number = self._reader.recv(1)[0]
            except TimeoutError:
                return None
            if number in SIGNALS and not self._received_by_thread.is_repeat(number):
                return number
        return None


_guard: _Guard | None = None  # signal handlers belong to the whole process, and so does this


@contextlib.contextmanager
def guarded(*, grace_s: float = GRACE_S) -> Iterator[None]:
    """While this lasts, SIGTERM and Ctrl-C end the process within seconds. Only in the main thread, where Python runs handlers."""
    global _guard
    if _guard is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _guard = _Guard(grace_s)
    _guard.arm()
    try:
        yield
    finally:
        guard, _guard = _guard, None
        guard.close()


def rearm() -> None:
    """Take signals back from whoever has handled them meanwhile (an event loop, a library); nothing to do outside `guarded`."""
    if _guard is not None and threading.current_thread() is threading.main_thread():
        _guard.arm()


@contextlib.contextmanager
def handled_in(loop: AbstractEventLoop, handle: Callable[[int], None]) -> Iterator[None]:
    """An event loop gets the signals, by `handle`, for a while; of those that count as one (SAME_S) the first."""
    received = _guard.received if _guard is not None else _SignalTimes()

    def handled(number: int) -> None:
        if not received.is_repeat(number):
            leave_terminal(number)
            handle(number)

    for number in SIGNALS:
        loop.add_signal_handler(number, handled, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        if _guard is not None:
            _guard.tell_thread()
        rearm()


@contextlib.contextmanager
def passed_on(to: Callable[[int], None]) -> Iterator[None]:
    """Within the block signals are passed to `to`, and none ends this process. To be used in the main thread."""
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}

    def handled(number: int, frame: FrameType | None) -> None:
        leave_terminal(number)
        to(number)

    for number in SIGNALS:
        signal.signal(number, handled)
    signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        for number in SIGNALS:
            signal.signal(number, before[number])
        rearm()


def leave_terminal(number: int) -> None:
    """After SIGHUP replace the terminal by /dev/null: it is gone, and each write to it would fail."""
    if number != signal.SIGHUP:
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):  # isatty is False for a terminal that has hung up
                os.dup2(nowhere, descriptor)
    os.close(nowhere)


def check() -> None:
    """Raises: Interrupted if a signal has come and its exception was swallowed."""
    if _guard is not None and _guard.raised is not None:
        _guard.forget_alarm()
        raise Interrupted(_guard.raised)


def is_ending() -> bool:
    """Whether a signal has come, after which the process has `GRACE_S` to end."""
    return _guard is not None and _guard.raised is not None


def all_is_done(code: int | None) -> None:
    """This process has done all that it was to do: from now on it ends with this exit code, even if a signal ends it. None: it hasn't,
    after all."""
    if _guard is not None:
        _guard.done_code = code


def code_after(number: int) -> int:
    """Exit code of this process when a signal has ended it."""
    done = _guard.done_code if _guard is not None else None
    return exit_code(number) if done is None else done


def end_all(why: str, code: int, *, last: Callable[[], object] | None = None) -> NoReturn:
    """End this process and its descendants, without the help of the main thread.

    Args:
        why: printed on the terminal.
        code: exit code.
        last: called after that, in a thread, for at most two seconds: it may hang, or fail.
    """
    from evenkeel.actors.processes.children import adopted_orphans, end_new

    _ENDS.acquire()  # never released: if two threads end this process, only the first says why
    with contextlib.suppress(OSError):
        if sys.stdout.isatty():
            os.write(1, b"\x1b[?25h\n")  # the cursor, which a live panel hides
        os.write(2, f"evenkeel: {why}\n".encode(errors="backslashreplace"))
    if last is not None:
        thread = threading.Thread(target=_tried, args=(last,), daemon=True)
        thread.start()
        thread.join(_LAST_S)
    with adopted_orphans():
        end_new()
    os._exit(code)


def end_within(seconds: float, code: int, hangs: Callable[[], bool]) -> None:
    """End this process after so many seconds if it still runs and `hangs` returns true: a package's shutdown, or a disk, may hang for
    ever."""

    def leave() -> None:
        time.sleep(seconds)
        if hangs():
            end_all(f"something still hangs {seconds:g} s after the run's end; the process ends without it", code)

    threading.Thread(target=leave, name="last resort", daemon=True).start()


def _tried(work: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        work()
