"""A thread that does an event loop's file work, in order: a network file system that takes seconds for an fsync delays nobody else."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class FileThread:
    """Runs jobs one after the other, in the order in which they were added, from any thread."""

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
