"""SIGTERM, Ctrl-C and the loss of the terminal: what each does, once, twice, three times.

* Wherever the process is (an import, Ray's start, a wait, its end), the first one raises `Interrupted` in the main thread, which unwinds as
  for any error. If it is still there after `GRACE_S`, or at a second signal, the process is ended together with all that it has started.
* In a run (`ShutdownSignals`) the first one ends training with a checkpoint; the second one ends the run at once, by unwinding; the third
  is the first of the point above.
* In the parent of `--retries` each goes to the child, which does all that.

A thread receives the signals, through the wakeup descriptor, to which the kernel's own handler writes: so they are seen while the main
thread is in a call of C that doesn't come back. It passes each on to who has asked for them (`received_by`), or else wakes the main thread
until that has raised. An exception that is raised inside a fork hook or a finalizer is swallowed: Python hands it to `sys.unraisablehook`,
after which the main thread is woken again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
GRACE_S = 10.0
"""How long the main thread may take to unwind."""
SAME_S = 2.0
"""SIGTERMs within this time count as one: if a whole process tree gets the signal, a child gets it once more from its parent. So do
SIGHUPs: when a terminal is lost, its shell sends one to its jobs, and the kernel sends another as that shell ends. Each Ctrl-C counts."""
# If SIGHUP is ignored at the start (nohup), so that the process outlives its terminal, it stays ignored.
_HANGUP = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else ()
SIGNALS = (signal.SIGINT, signal.SIGTERM, *_HANGUP)
NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
_WAKE = signal.SIGURG  # without a handler it does nothing
_WAKE_S = 0.1
_LAST_S = 2.0
_ENDS = threading.RLock()


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


class _Guard:
    """Handlers, hook, descriptor and thread, while `guarded` lasts."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s, self._pid = grace_s, os.getpid()
        self.receive: Callable[[int], object] | None = None
        """Who takes the signals, in the thread; None: the first one ends this process."""
        self.pending: int | None = None
        """The signal that ends this process."""
        self._just_seen: int | None = None  # by the handler in the main thread; the thread may hear of it a moment later
        self._is_raised = False
        self.done_code: int | None = None
        """Exit code of what this process was to do, once all of it is done."""
        self._last_s: dict[int, float] = {}
        self._before: dict[int, Any] = {number: signal.getsignal(number) for number in (*SIGNALS, _WAKE)}
        self._hook_before = sys.unraisablehook
        sys.unraisablehook = self._swallowed
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()

    def arm(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._seen)
        signal.signal(_WAKE, self._woken)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        sys.unraisablehook = self._hook_before
        self._is_over.set()
        self._writer.send(b"\0")  # ends the wait of the thread
        self._thread.join()
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def check(self) -> None:
        """Raises: Interrupted if a signal ends this process."""
        number = self.pending if self.pending is not None or self.receive is not None else self._just_seen
        if number is not None:
            self._is_raised = True
            raise Interrupted(number)

    def _seen(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process that was forked has no such thread
            raise Interrupted(number)
        self._just_seen = number

    def _woken(self, number: int, frame: FrameType | None) -> None:
        if not self._is_raised:  # raise once: unwinding must not be interrupted; the thread limits its time
            self.check()

    def _swallowed(self, unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, Interrupted):
            self._is_raised = False
        else:
            self._hook_before(unraisable)

    def _watch(self) -> None:
        while (number := self._next(math.inf)) is not None:
            if self.receive is not None:
                self.receive(number)
            else:
                self._end(number)
                return

    def _end(self, number: int) -> None:
        """Have the main thread unwind, and end this process if that takes too long, or at the next signal."""
        self.pending, until, again = number, time.monotonic() + self._grace_s, None
        while again is None and not self._is_over.is_set() and (left_s := until - time.monotonic()) > 0.0:
            if not self._is_raised:
                signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
            again = self._next(min(_WAKE_S, left_s))
        if not self._is_over.is_set():
            why = "again" if again is not None else f"still busy after {self._grace_s:g} s"
            end_all(f"ended by {NAMES[number]} ({why})", code_after(number))

    def _next(self, timeout_s: float) -> int | None:
        """Wait for the next signal that doesn't count as one with the last. Returns: its number; None when the guard is closed, or after
        timeout_s."""
        until = time.monotonic() + timeout_s
        while not self._is_over.is_set() and (left_s := until - time.monotonic()) > 0.0:
            self._reader.settimeout(left_s if left_s < math.inf else None)
            try:
                number = self._reader.recv(1)[0]
            except TimeoutError:
                return None
            if number in SIGNALS and not self._is_repeat(number):
                leave_terminal(number)
                return number
        return None

    def _is_repeat(self, number: int) -> bool:
        now = time.monotonic()
        if number != signal.SIGINT and now - self._last_s.get(number, -math.inf) < SAME_S:
            return True
        self._last_s[number] = now
        return False


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
    """Take signals back from a library that has set handlers meanwhile; nothing to do outside `guarded`."""
    if _guard is not None and threading.current_thread() is threading.main_thread():
        _guard.arm()


@contextlib.contextmanager
def received_by(receive: Callable[[int], object]) -> Iterator[None]:
    """A block within which `receive` gets the signals, in a thread, and none ends this process; of those that count as one (SAME_S) the
    first."""
    with guarded():
        if (guard := _guard) is None:
            yield
            return
        guard.receive = receive
        try:
            yield
        finally:
            guard.receive = guard._just_seen = None


@contextlib.contextmanager
def handled_in(loop: asyncio.AbstractEventLoop, handle: Callable[[int], object]) -> Iterator[None]:
    """The block of received_by, in an event loop."""

    def receive(number: int) -> None:
        with contextlib.suppress(RuntimeError):  # it has just been closed
            loop.call_soon_threadsafe(handle, number)

    with received_by(receive):
        yield


class ShutdownSignals:
    """What signals do to one run. The first one during training ends it with a checkpoint: Ctrl-C after the step under way, SIGTERM without
    it. The first one during the last evaluation cancels that evaluation, and one after it changes nothing. A second signal, or one
    while the run starts or returns to a checkpoint, ends it at once, without a further checkpoint."""

    def __init__(self, notify: Callable[[str], object], on_sigterm: Callable[[], object], saved_step: Callable[[], int]) -> None:
        """
        Args:
            notify: takes a sentence: that the end is asked for, by what, and how it comes.
            on_sigterm: called at SIGTERM during training. Whoever sends it may kill the process a few seconds later.
            saved_step: returns the step of the newest checkpoint on disk; 0: there is none.
        """
        self._notify, self._on_sigterm, self._saved_step = notify, on_sigterm, saved_step
        self.by: int | None = None
        """The signal that asked the run to end; None: there was none."""
        self.is_asked = asyncio.Event()
        self.is_hurried = asyncio.Event()
        """Set by SIGTERM during training."""
        self.is_at_once = False
        self.is_training = False
        """All parts are up, so that a checkpoint can be saved."""
        self.last_evaluation: asyncio.Task[Any] | None = None
        self.is_done = False
        """All that the run had to do is done and saved; its parts are being stopped."""

    def done(self, code: int) -> None:
        """Have a signal end nothing but the end itself from now on. Args: code: the run's exit code, which no signal changes any more."""
        self.is_done = True
        all_is_done(code)

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals in this context. One that ends the run at once cancels the task that has entered it."""
        main = asyncio.current_task()
        assert main is not None
        with handled_in(asyncio.get_running_loop(), lambda number: self._take(number, main)):
            yield

    async def unless_interrupted(self, evaluation: Coroutine[Any, Any, T]) -> T | None:
        """Result of the evaluation after training, when the last checkpoint is on disk; None if a signal has cancelled it."""
        self.last_evaluation = task = asyncio.create_task(evaluation)
        try:
            await asyncio.wait({task})
            return None if task.cancelled() else task.result()
        finally:
            if not task.cancel() and not task.cancelled():
                task.exception()  # which asyncio would log if nobody had asked for it

    def _take(self, number: int, main: asyncio.Task[Any]) -> None:
        is_first, name = self.by is None, NAMES[number]
        self.by = number
        self.is_asked.set()
        on_disk = f"a resume goes on from step {self._saved_step()}" if self._saved_step() else "there is no checkpoint yet"
        on_disk = "all is done and saved" if self.is_done else on_disk
        if self.is_training and is_first:
            which = "after the step under way, if there is one"
            if number == signal.SIGTERM:
                self.is_hurried.set()
                self._on_sigterm()
                which = "of the last finished step, or of the one under way if it can't be aborted"
            self._notify(f"interrupted ({name}): ending with a checkpoint {which} (next time: at once); until that is on disk, {on_disk}")
        elif self.last_evaluation is not None and not self.last_evaluation.done() and is_first:
            self._notify(f"interrupted ({name}): leaving out the evaluation after training")
            self.last_evaluation.cancel()
        elif self.is_done and is_first:
            self._notify(f"interrupted ({name}): all is done and saved, and the run is ending (next time: at once)")
        else:
            self._notify(f"interrupted ({name}): ending at once; {on_disk}")
            self.is_at_once = True
            main.cancel()


def leave_terminal(number: int) -> None:
    """Replace the terminal by /dev/null, after SIGHUP: it is gone, and each write to it would fail."""
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
    if _guard is not None:
        _guard.check()


def is_ending() -> bool:
    """Whether a signal has come, after which the process has `GRACE_S` to end."""
    return _guard is not None and _guard.pending is not None


def all_is_done(code: int | None) -> None:
    """Say that this process has done all that it was to do: from now on it ends with this exit code, even if a signal ends it. None: it
    hasn't, after all."""
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
