"""The run folder's disk, which may be slow or full, or hang, for a while, and what stands in place of the thread that writes to it."""

from __future__ import annotations

import asyncio
import inspect
import math
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import Any
from unittest import mock

_USUAL_S = 0.002
# What the driver has done in threads that isn't for the disk, by name.
_NO_FILES = {"wait", "_draining_nodes"}


class Disk:
    """Every file below a folder is written to it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.is_full = self.is_slow = False
        self.was_full_until = self.hangs_until = -math.inf
        self.delay: Callable[[str, float, float], float] = lambda what, least_s, most_s: least_s
        """Of the present driver's cluster."""

    def fill(self) -> None:
        self.is_full, self.was_full_until = True, math.inf

    def make_room(self) -> None:
        if self.is_full:
            self.is_full, self.was_full_until = False, self._now()

    def takes_s(self) -> float:
        """For the next piece of work."""
        if self.hangs_until > self._now():
            return self.hangs_until - self._now()
        return self.delay("the disk", 0.1, 60.0) if self.is_slow else _USUAL_S

    def in_thread_s(self, function: Callable[..., Any]) -> float:
        """What a thread of the driver waits for it."""
        return (
            self.takes_s()
            if (self.is_slow or self.hangs_until > self._now()) and getattr(function, "__name__", "") not in _NO_FILES
            else 0.0
        )

    @contextmanager
    def in_place(self, root: Path) -> Iterator[None]:
        opened, usage = Path.open, shutil.disk_usage
        prefix = str(root)

        def open_here(path: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
            if self.is_full and set(mode) & set("wax+") and str(path).startswith(prefix):
                file = opened(path, mode, *args, **named)
                return _FullFile(file) if "b" in mode and "a" in mode else _refuse(file)
            return opened(path, mode, *args, **named)

        def free(path: Any) -> Any:
            found = usage(path)
            return found._replace(free=0) if self.is_full else found

        with mock.patch.object(Path, "open", open_here), mock.patch.object(shutil, "disk_usage", free):
            yield

    @contextmanager
    def not_full(self) -> Iterator[None]:
        """For what no run writes."""
        is_full, self.is_full = self.is_full, False
        try:
            yield
        finally:
            self.is_full = is_full


def _refuse(file: Any) -> Any:
    file.close()
    raise OSError(ENOSPC, "No space left on device", file.name)


class _FullFile:
    """Takes a part of what is written, as a file does whose disk becomes full."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> _FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        written: int = self._file.write(data[: len(data) // 2])
        if not written:
            raise OSError(ENOSPC, "No space left on device")
        return written


class SimulatedFileThread:
    """In place of FileThread (actors/record/disk_writer.py): a job is done when the disk has had time for it. It dies with its driver."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._jobs: deque[Callable[[], object]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def do(self, job: Callable[[], object]) -> None:
        self._jobs.append(job)
        if self._working is None or self._working.done():
            self._working = asyncio.get_running_loop().create_task(self._work())

    async def result(self, job: Callable[[], Any]) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                value, error = job(), None
            except Exception as failure:
                value, error = None, failure
            if not answer.done():
                answer.set_result(value) if error is None else answer.set_exception(error)

        self.do(run)
        return await answer

    async def done(self) -> None:
        await self.result(lambda: None)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def end(self, *, within_s: float) -> bool:
        """The driver waits for it."""
        while self._jobs:
            self._do(self._jobs.popleft())
        return True

    async def _work(self) -> None:
        while self._jobs:
            await asyncio.sleep(self._disk.takes_s())
            if self._jobs:
                self._do(self._jobs.popleft())

    def _do(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception as error:
            self._error = self._error or error


def in_thread(disk: Disk, is_driver: Callable[[], bool]) -> Callable[..., Any]:
    """In place of asyncio.to_thread: a moment later, whole; the driver's when the disk has had its time for it."""

    async def to_thread(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        await asyncio.sleep(_USUAL_S + (disk.in_thread_s(function) if is_driver() else 0.0))
        result = function(*args, **named)
        return await result if inspect.isawaitable(result) else result

    return to_thread
