"""Writing into the run folder on a disk that fails or is slow, without ending the run.

A write that fails is reported once and counted; lines are kept in memory and tried again, in order. All writes happen in a thread, so that
a slow disk delays no step. What may wait is bounded: samples as text are left out first, and when much more waits, the run itself waits for
the disk (`room`), and says so.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from evenkeel.actors.record.file_thread import FileThread

T = TypeVar("T")
_MOST = 100_000
"""Lines kept in memory for one kind of file whose writes fail; the oldest are dropped beyond that."""
_MOST_BEFORE_A_FILE, _MOST_BEFORE_A_STEP = 100, 1000
"""Most jobs that may wait before a file is left out, and before a step is delayed: the jobs of tens and of hundreds of steps."""
_LOOK_S = 0.1


class _Line(NamedTuple):
    step: int
    append: Callable[[], object]


class RetryingWriter:
    """Writes into the run's folder, in one thread and in the order in which it is told, and puts up with a disk that fails or is slow.

    A run has one: the observer makes it and ends it, the driver's ledger writes by it, too. Checkpoints have threads of their own.
    """

    def __init__(self, notify: Callable[[str], object]) -> None:
        """Args: notify: takes a sentence, in any thread, when writes begin to fail or to lag behind, and when that is over."""
        self._notify = notify
        self._thread = FileThread()
        self._waiting: dict[str, deque[_Line]] = defaultdict(deque)
        self._dropped = 0
        """Number of lines dropped, because more than _MOST waited, since the disk began to refuse."""
        self._refused: set[str] = set()
        """Kinds of files whose last attempt failed. A failure is reported only while this is empty."""
        self._why = ""
        """Error of the last attempt that failed."""
        self._is_behind = False
        self.failures = 0
        """Failed attempts so far, and files that were left out because the disk lags behind."""

    # -- from the event loop -----------------------------------------------------------------------------------------

    def line(self, step: int, append: Callable[..., object], *arguments: Any) -> None:
        """Append a step's line by append(*arguments), a method, after all lines of that kind that wait; these are tried again first."""
        self._thread.do(partial(self._append, append.__qualname__, _Line(step, partial(append, *arguments))))

    def file(self, write: Callable[..., object], *arguments: Any) -> None:
        """Write a file by write(*arguments), a method. It is left out if the write fails, or if too much waits for the disk."""
        if self._thread.waiting > _MOST_BEFORE_A_FILE:
            self.failures += 1
            self._falls_behind("samples as text are left out")
            return
        self._thread.do(partial(self._attempt, write.__qualname__, partial(write, *arguments)))

    def do(self, job: Callable[[], object]) -> None:
        """Run a job in the thread, after all jobs before; it has to handle errors of the disk itself."""
        self._thread.do(job)

    async def result(self, job: Callable[[], T]) -> T:
        """Run a job in the thread, after all jobs before. Returns: what it returns. Raises: what it raises."""
        return await self._thread.result(job)

    async def taken_back(self, take_back: Callable[[], T], step_of: Callable[[T], int]) -> T:
        """Run `take_back` in the thread, after all jobs before, and drop waiting lines of steps after the one that it goes back to.

        Args: step_of: the step, of what `take_back` returns.
        Returns: what `take_back` returns. Raises: what it raises.
        """

        def job() -> T:
            found = take_back()
            step = step_of(found)
            for kind, waiting in self._waiting.items():  # what the disk has refused so far
                self._waiting[kind] = deque(line for line in waiting if line.step <= step)
            return found

        return await self.result(job)

    async def done(self) -> None:
        """Wait until every job has been tried, and lines that the disk has refused once more.

        Raises: the error of a job, if it was none of the disk.
        """
        self._thread.do(self._retry)
        await self._thread.done()
        self._catches_up()

    async def room(self) -> None:
        """Wait until at most _MOST_BEFORE_A_STEP jobs wait for the disk."""
        while self._thread.waiting > _MOST_BEFORE_A_STEP:
            self._falls_behind("the run waits for it")
            await asyncio.sleep(_LOOK_S)
        self._catches_up()

    def close(self, *, within_s: float, last: Callable[[], object] = lambda: None) -> str:
        """Try once more what waits, and end the thread.

        Args:
            within_s: longest time for that.
            last: a job to run after all others.
        Returns: what is lost, in a sentence; empty: nothing.
        """
        are_tried = threading.Event()
        for job in (self._retry, are_tried.set, last):
            self._thread.do(job)
        if not self._thread.end(within_s=within_s):
            if are_tried.is_set():
                return f"the run folder is written, but what else shows the run was not closed in {within_s:.0f} s"
            return f"{max(1, self._thread.waiting - 3)} writes into the run folder are lost: its disk did not take them in {within_s:.0f} s"
        lost = self._dropped + sum(map(len, self._waiting.values()))
        why = f": its disk refuses them ({self._why})" if self._why else ""
        return f"{lost} lines of the run folder's files are lost{why}" if lost else ""

    @property
    def hangs(self) -> bool:
        """Whether, after `close`, some writes are still under way."""
        return self._thread.is_under_way

    def _falls_behind(self, what: str) -> None:
        if not self._is_behind:
            self._is_behind = True
            self._notify(f"the disk is slow: {self._thread.waiting} writes into the run folder wait for it; {what} meanwhile")

    def _catches_up(self) -> None:
        if self._is_behind and not self._thread.waiting:
            self._is_behind = False
            self._notify("the disk has caught up with what the run writes")

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _append(self, kind: str, line: _Line) -> None:
        waiting = self._waiting[kind]
        if len(waiting) == _MOST:
            waiting.popleft()
            self._dropped += 1
            if self._dropped == 1:
                self._say(f"{_MOST:,} lines of one kind wait for the disk, as many as may: from now on the oldest are lost")
        waiting.append(line)
        self._retry()

    def _retry(self) -> None:
        for kind, waiting in self._waiting.items():
            while waiting:
                try:
                    if not self._attempt(kind, waiting[0].append):
                        break
                except Exception:  # the line's own error, which must not block the lines after it
                    waiting.popleft()
                    raise
                waiting.popleft()

    def _attempt(self, kind: str, write: Callable[[], object]) -> bool:
        try:
            write()
        except OSError as error:
            self.failures += 1
            self._why = str(error)
            if not self._refused:
                self._say(f"the disk does not take what the run writes ({error}): lines wait in memory, samples as text are left out")
            self._refused.add(kind)
            return False
        if self._refused:
            self._refused.discard(kind)
            if not self._refused:
                lost, self._dropped = self._dropped, 0
                what = f"the oldest {lost} of the lines that waited are lost" if lost else "no line is lost"
                self._say(f"the disk takes what the run writes again; {what}")
        return True

    def _say(self, text: str) -> None:
        with suppress(Exception):  # else its error would be taken for that of the line being written, which would be dropped
            self._notify(text)
