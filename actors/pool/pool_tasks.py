"""What runs in a pool at the same time: its tasks, the error that one of them has ended with, and waits for a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# Longest time between two looks, seconds, in case a change was not announced.
_LOOK_S = 5.0


class PoolTasks:
    """The tasks of one pool. An error of any of them is the pool's. One event loop uses it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self.is_stopping = False
        self.renew()

    def renew(self) -> None:
        """Clear the failure, if there was one; later ones count."""
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure.add_done_callback(lambda failure: failure.cancelled() or failure.exception())  # it may come when nobody listens

    @property
    def has_failed(self) -> bool:
        return self._failure.done()

    def fail(self, error: BaseException) -> None:
        """Record an error with which the run can't go on. `raise_on_failure` raises the first one."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self.changed()

    async def raise_on_failure(self) -> None:
        """Never returns; raises when the pool can't go on."""
        await asyncio.shield(self._failure)

    def spawn(self, work: Any, *, name: str | None = None) -> None:
        """Have a task of the pool."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def changed(self) -> None:
        """A worker, a receipt or the work has changed: whoever waits with `until` looks again."""
        self._changed.set()

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait for a change that makes it true. Raises: what the pool has failed with."""
        while not ready():
            if self._failure.done():
                self._failure.result()
            self._changed.clear()
            with suppress(TimeoutError):  # asyncio.wait_for would swallow a cancellation that comes together with a change
                async with asyncio.timeout(_LOOK_S):
                    await self._changed.wait()

    async def cancel(self, name: str) -> None:
        """Cancel the tasks of this name, and wait until they have settled what they have counted."""
        tasks = [task for task in self._tasks if task.get_name() == name]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """Cancel all: the pool ends."""
        self.is_stopping = True
        for task in list(self._tasks):
            task.cancel()

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)
