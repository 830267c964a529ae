"""The thread that writes into the run folder: a disk that refuses, or hangs for minutes, neither stops the training nor costs a line.

A write that fails is reported once and counted; lines wait in memory, at most 100,000, and are tried again, in order. Files that can be
done without (samples as text) are left out. When much waits for a slow disk, the run itself waits for it (`room`).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
# Lines kept in memory while their writes fail; the oldest are dropped beyond that. A step has about six.
_MOST = 100_000
# Most jobs that may wait before a file is left out, and before a step is delayed: the jobs of tens and of hundreds of steps.
_MOST_BEFORE_A_FILE, _MOST_BEFORE_A_STEP = 100, 1000
_LOOK_S = 0.1
# From a refusal to the next attempt, unless a flush asks for one: a disk may take seconds to refuse.
_PAUSE_S = 1.0


class FileThread:
    """Does an event loop's file work: runs jobs one after the other, in the order in which they were added, from any thread."""

    def __init__(self, name: str = "run folder") -> None:
        """Args: name: of the thread."""
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_ending, self._is_over = False, threading.Event()
        self._error: Exception | None = None
        # A daemon: a disk that hangs for good must not keep the process from its end.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of jobs that have not begun."""
        return self._jobs.qsize()

    @property
    def is_under_way(self) -> bool:
        """Whether some jobs are still not done after `end`."""
        return not self._is_over.is_set()

    def do(self, job: Callable[[], object]) -> None:
        """Add a job. Once the thread has ended, the job runs here, at once."""
        if self._is_over.is_set():
            job()
        else:
            self._jobs.put(job)

    async def result(self, job: Callable[[], T]) -> T:
        """Add a job and wait for its result. Raises: as the job."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if answer.done():  # whoever waited has given it up
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]

        def run() -> None:
            value, failure = None, None
            try:
                value = job()
            except BaseException as error:
                failure = error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, value, failure)

        self.do(run)
        return await answer

    async def done(self) -> None:
        """Wait until all earlier jobs are done. Raises: the error of the first job that failed, once."""
        await self.result(lambda: None)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def end(self, *, within_s: float) -> bool:
        """Do the remaining jobs and end. Returns: whether all were done in time."""
        if not self._is_ending:
            self._is_ending = True
            self._jobs.put(lambda: None)  # wakes it
        self._thread.join(within_s)
        return self._is_over.is_set()

    def _work(self) -> None:
        while not (self._is_ending and self._jobs.empty()):
            job = self._jobs.get()
            try:
                job()
            except BaseException as error:  # also a package's SystemExit: callers wait for the remaining jobs
                self._error = self._error or (error if isinstance(error, Exception) else RuntimeError(repr(error)))
        self._is_over.set()


class _Line(NamedTuple):
    step: int
    append: Callable[..., object]
    """A method of the file's object. Lines with the same one are written in their order."""
    arguments: tuple[Any, ...]


class DiskWriter:
    """Writes into the run's folder, in one thread and in the order in which it is told.

    A run has one: the recorder makes it and ends it, the driver's ledger writes by it, too. Checkpoints have threads of their own.
    """

    def __init__(self, notify: Callable[[str], object]) -> None:
        """Args: notify: takes a sentence, in any thread, when writes begin to fail or to lag behind, and when they are taken again."""
        self._notify = notify
        self._thread = FileThread()
        self._waiting: deque[_Line] = deque()
        self._again_at = 0.0
        self._dropped = 0  # lines, because more than _MOST waited, since the disk began to refuse
        self._refused: set[Callable[..., object]] = set()  # whose last attempt failed; a failure is reported only while there are none
        self._why = ""  # error of the last attempt that failed
        self._is_behind = False
        self.failures = 0
        """Failed attempts so far, and files that were left out because the disk lags behind."""

    # -- from the event loop -----------------------------------------------------------------------------------------

    def line(self, step: int, append: Callable[..., object], *arguments: Any) -> None:
        """Append a step's line by append(*arguments), a method, after all lines of that file that wait."""
        self._thread.do(partial(self._append, _Line(step, append, arguments)))

    def file(self, write: Callable[..., object], *arguments: Any) -> None:
        """Write a file by write(*arguments), a method. It is left out if the write fails, or if too much waits for the disk."""
        was_behind, self._is_behind = self._is_behind, self._thread.waiting > _MOST_BEFORE_A_FILE
        if not self._is_behind:
            self._thread.do(partial(self._is_taken, write, *arguments))
            return
        self.failures += 1
        if not was_behind:
            slow = f"the disk is slow: {self._thread.waiting} writes into the run folder wait for it"
            self._notify(f"{slow}; samples as text are left out meanwhile")

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
            self._waiting = deque(line for line in self._waiting if line.step <= step)  # what the disk has refused so far
            self._refused = {line.append for line in self._waiting}
            return found

        return await self.result(job)

    async def done(self) -> None:
        """Wait until every job has been tried, and lines that the disk has refused once more.

        Raises: the error of a job, if it was none of the disk.
        """
        self._thread.do(self._try_lines)
        await self._thread.done()

    async def room(self) -> None:
        """Wait until at most _MOST_BEFORE_A_STEP jobs wait for the disk."""
        while self._thread.waiting > _MOST_BEFORE_A_STEP:
            await asyncio.sleep(_LOOK_S)

    def close(self, *, within_s: float, last: Callable[[], object] = lambda: None) -> str:
        """Try once more what waits, and end the thread.

        Args:
            within_s: longest time for that.
            last: a job to run after all others.
        Returns: what is lost, in a sentence; empty: nothing.
        """
        are_tried = threading.Event()
        for job in (self._try_lines, are_tried.set, last):
            self._thread.do(job)
        if not self._thread.end(within_s=within_s):
            if are_tried.is_set():
                return f"the run folder is written, but what else shows the run was not closed in {within_s:.0f} s"
            return f"{max(1, self._thread.waiting - 3)} writes into the run folder are lost: its disk did not take them in {within_s:.0f} s"
        lost = self._dropped + len(self._waiting)
        why = f": its disk refuses them ({self._why})" if self._why else ""
        return f"{lost} lines of the run folder's files are lost{why}" if lost else ""

    @property
    def hangs(self) -> bool:
        """Whether, after `close`, some writes are still under way."""
        return self._thread.is_under_way

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _append(self, line: _Line) -> None:
        if line.append in self._refused or not self._is_taken(line.append, *line.arguments):
            self._waiting.append(line)
        if len(self._waiting) > _MOST:
            self._waiting.popleft()
            self._dropped += 1
            if self._dropped == 1:
                self._say(f"{_MOST:,} lines wait for the disk, as many as may: from now on the oldest are lost")
        if self._waiting and time.monotonic() >= self._again_at:
            self._try_lines()

    def _try_lines(self) -> None:
        """Each file's, from its oldest on, until the disk refuses one."""
        refused, still = set[Callable[..., object]](), list[_Line]()
        try:
            while self._waiting:
                line = self._waiting.popleft()
                if line.append in refused or not self._is_taken(line.append, *line.arguments):  # its own error keeps none after it
                    refused.add(line.append)
                    still.append(line)
        finally:
            self._waiting.extendleft(reversed(still))
            self._refused.update(line.append for line in self._waiting)  # no later line goes before these, also after an error

    def _is_taken(self, write: Callable[..., object], *arguments: Any) -> bool:
        try:
            write(*arguments)
        except OSError as error:
            self.failures += 1
            self._why = str(error)
            if not self._refused:
                self._say(f"the disk does not take what the run writes ({error}): lines wait in memory, samples as text are left out")
            self._refused.add(write)
            self._again_at = time.monotonic() + _PAUSE_S
            return False
        if self._refused:
            self._refused.discard(write)
            if not self._refused:
                lost, self._dropped = self._dropped, 0
                what = f"the oldest {lost} of the lines that waited are lost" if lost else "no line is lost"
                self._say(f"the disk takes what the run writes again; {what}")
        return True

    def _say(self, text: str) -> None:
        with suppress(Exception):  # else its error would be taken for that of the line being written, which would be dropped
            self._notify(text)
