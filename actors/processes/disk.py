"""Work on a disk, which may hang: in a thread that doesn't keep the process from ending, with a name and a deadline.

There are no imports of Ray here: a start reads much before that is there.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

from evenkeel.actors.carriers import WaitNotice
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.processes.output import put
from evenkeel.correction.errors import DeadlineExceeded

T = TypeVar("T")
ON_DISK, MODEL_OR_RUN = "the run folder's disk", "the disk of the model or that of the run"
_HANGS_AT_START = "When that disk answers again, do the same once more. The deadline follows from deadlines.bytes_per_s"
_NOTICE_S = 30.0
# Least deadline, seconds, of work that also imports packages, or draws.
_COMPUTES_S = 300.0
# Longest wait for running calls when the loop closes.
_END_S = 2.0


class DaemonThreads(ThreadPoolExecutor):
    """Threads that don't keep the process from ending: a daemon thread for each call; there are few calls.

    The standard library's executor, whose class asyncio wants, waits for its threads without a limit when the loop closes, and again when
    the process ends. A call to a disk or a cluster that hangs for good would keep the process alive for good, before it printed its last
    sentence.
    """

    def __init__(self) -> None:
        super().__init__()
        self._under_way: set[threading.Thread] = set()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        thread = threading.Thread(target=self._run, args=(future, partial(fn, *args, **kwargs)), name="off the event loop", daemon=True)
        self._under_way.add(thread)
        thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Args: wait: two seconds at most."""
        until_s = time.monotonic() + _END_S
        for thread in list(self._under_way) if wait else ():
            thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self, future: Future[T], work: Callable[[], T]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            self._under_way.discard(threading.current_thread())


class DiskLate(DeadlineExceeded):
    """A disk, the run folder's or the model's, has not done in time what it was waited for."""


def by_disk_at_start(
    work: Callable[[], T],
    what: str,
    *,
    disk: str = ON_DISK,
    computes: bool = False,
    remedy: str = _HANGS_AT_START,
    limit_s: Callable[[], float] = lambda: DeadlinesConfig().disk_s,
    counts_from: Callable[[], float] = lambda: 0.0,
    detail: Callable[[], str] = lambda: "",
    say: Callable[[WaitNotice], object] = lambda notice: put(f"evenkeel: {notice}\n", sys.stderr),
) -> T:
    """As `by_disk` of disk_waits.py, where there is no event loop: a thread does the work, or this one if the machine has none left.

    Args:
        disk: which one may be late, in words.
        computes: the work also imports packages, or draws, so it has some minutes at least.
        remedy: what to do if it is late.
        limit_s: returns the deadline; it may become known as the work goes on.
        counts_from: returns the time (time.monotonic) from which it counts, if that is later than the call.
        detail: returns a clause on how far the work has come, for each notice and for the error.
        say: takes a notice every half minute.
    Raises: as the work; DiskLate, with what to do. The thread is left to its disk then.
    """
    named, began = f"{what} -> {disk}", time.monotonic()
    try:
        doing = DaemonThreads().submit(work)
    except RuntimeError:  # no thread can be started
        return work()
    while True:
        deadline_s = max(limit_s(), _COMPUTES_S if computes else 0.0)
        left_s = max(began, counts_from()) + deadline_s - time.monotonic()
        if wait({doing}, max(0.0, min(_NOTICE_S, left_s))).done:
            return doing.result()
        waited_s, clause = time.monotonic() - began, detail()
        if time.monotonic() >= max(began, counts_from()) + deadline_s:
            so_far = f" ({clause})" if clause else ""
            error = DiskLate(f"{named}: not done in {waited_s:.0f} s{so_far}", what=named, seconds=waited_s)
            error.remedy = remedy
            raise error
        say(WaitNotice(named, round(waited_s), clause))


def is_disk_late(error: BaseException) -> bool:
    """Whether this error, or its cause, is a deadline that the disk has missed."""
    return any(isinstance(one, DiskLate) for one in (error, error.__cause__))
