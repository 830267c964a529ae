"""What a disk doesn't take does not end a run: it is told once, counted, and lines are tried again, in their order.

A slow disk delays no step either: a thread of its own waits for it. What there is to write is bounded: samples as text are left out when
much waits already, and in the end a run waits for its disk (`room`), and says so.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from actors.record.file_thread import FileThread

T = TypeVar("T")
_MOST = 100_000
"""Lines that wait in memory for a file that refuses them; older ones are given up."""
_MOST_BEFORE_A_FILE, _MOST_BEFORE_A_STEP = 100, 1000
"""Jobs that may wait when a file is to be written, and when a step is to begin: some ten and some hundred steps."""
_LOOK_S = 0.1


class _Line(NamedTuple):
    step: int
    append: Callable[[], object]


class PatientWriter:
    """All that the observer writes into a run's folder goes through one of these."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        """Args: tell: takes a sentence, in whatever thread, when the disk begins to refuse or to lag behind, and when that is over."""
        self._tell = tell
        self._thread = FileThread()
        self._waiting: dict[str, deque[_Line]] = defaultdict(lambda: deque(maxlen=_MOST))
        self._refused: set[str] = set()
        """Kinds of files whose last attempt failed: one folder that can't be written is no news at each step, and keeps nothing else."""
        self._is_behind = False
        self.failures = 0
        """Attempts so far that the disk has refused, and files that were left out because it lags behind."""

    # -- from the event loop -----------------------------------------------------------------------------------------

    def line(self, step: int, append: Callable[..., object], *arguments: Any) -> None:
        """Append a step's line by append(*arguments), a method, after those that wait for it; whatever waits is tried again."""
        self._thread.do(partial(self._append, append.__qualname__, _Line(step, partial(append, *arguments))))

    def file(self, write: Callable[..., object], *arguments: Any) -> None:
        """Write a file by write(*arguments), a method; one that the disk doesn't take, or has no time for, is left out."""
        if self._thread.waiting > _MOST_BEFORE_A_FILE:
            self.failures += 1
            self._falls_behind("samples as text are left out")
            return
        self._thread.do(partial(self._attempt, write.__qualname__, partial(write, *arguments)))

    def do(self, job: Callable[[], object]) -> None:
        """Have a job done after what came before; an error of the disk is its own affair."""
        self._thread.do(job)

    async def taken_back(self, take_back: Callable[[], T], step_of: Callable[[T], int]) -> T:
        """What `take_back` finds and does, after what came before; no line of a step after the one that it returns comes later.

        Args: step_of: of what it returns. Raises: as `take_back`.
        """

        def job() -> T:
            found = take_back()
            step = step_of(found)
            for kind, waiting in self._waiting.items():  # what the disk has refused so far
                self._waiting[kind] = deque((line for line in waiting if line.step <= step), maxlen=_MOST)
            return found

        return await self._thread.result(job)

    async def done(self) -> None:
        """Wait until all of it has been tried, lines that the disk has refused once more.

        Raises: what went wrong, if that was no error of the disk.
        """
        self._thread.do(self._retry)
        await self._thread.done()
        self._catches_up()

    async def room(self) -> None:
        """Wait until there is room for what a step has to write."""
        while self._thread.waiting > _MOST_BEFORE_A_STEP:
            self._falls_behind("the run waits for it")
            await asyncio.sleep(_LOOK_S)
        self._catches_up()

    def close(self, *, within_s: float, last: Callable[[], object] = lambda: None) -> str:
        """Try once more what waits, and end.

        Args: last: is done when all that was handed over has been tried.
        Returns: what is lost, in a sentence; empty: nothing.
        """
        are_tried = threading.Event()
        for job in (self._retry, are_tried.set, last):
            self._thread.do(job)
        if not self._thread.end(within_s=within_s):
            if are_tried.is_set():
                return f"the run folder is written, but what else shows the run was not closed in {within_s:.0f} s"
            return f"{max(1, self._thread.waiting - 3)} writes into the run folder are lost: its disk did not take them in {within_s:.0f} s"
        lost = sum(map(len, self._waiting.values()))
        return f"{lost} lines of the run folder's files are lost: its disk is full" if lost else ""

    @property
    def hangs(self) -> bool:
        """After `close`: some of it is still under way."""
        return self._thread.is_under_way

    def _falls_behind(self, what: str) -> None:
        if not self._is_behind:
            self._is_behind = True
            self._tell(f"the disk is slow: {self._thread.waiting} writes into the run folder wait for it; {what} meanwhile")

    def _catches_up(self) -> None:
        if self._is_behind and not self._thread.waiting:
            self._is_behind = False
            self._tell("the disk has caught up with what the run writes")

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _append(self, kind: str, line: _Line) -> None:
        self._waiting[kind].append(line)
        self._retry()

    def _retry(self) -> None:
        for kind, waiting in self._waiting.items():
            while waiting:
                try:
                    if not self._attempt(kind, waiting[0].append):
                        break
                except Exception:  # of the line itself, which must not keep the others
                    waiting.popleft()
                    raise
                waiting.popleft()

    def _attempt(self, kind: str, write: Callable[[], object]) -> bool:
        try:
            write()
        except OSError as error:
            self.failures += 1
            if not self._refused:
                self._tell(f"the disk does not take what the run writes ({error}): lines wait in memory, samples as text are left out")
            self._refused.add(kind)
            return False
        if self._refused:
            self._refused.discard(kind)
            if not self._refused:
                self._tell("the disk takes what the run writes again; no line is lost")
        return True
