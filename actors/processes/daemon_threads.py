"""Threads for an event loop's `asyncio.to_thread` that don't keep the process from ending.

The standard library's executor waits for its threads without a limit when the loop closes, and again when the process ends. A call to a
disk or a cluster that hangs for good would keep the process alive for good, before it printed its last sentence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_END_S = 2.0
"""Longest wait for running calls when the loop closes."""


class DaemonThreads(ThreadPoolExecutor):
    """A default executor (asyncio wants the standard library's class) that starts a daemon thread for each call; there are few calls."""

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
