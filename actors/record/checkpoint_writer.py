"""Checkpoints: taken between two steps, written beside the next ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from actors.config import CheckpointConfig, DeadlinesConfig
from actors.learner_group import LearnerGroup
from actors.record.observer import Observer
from actors.record.run_folder import Checkpoint, RunFolder
from actors.resume import TrainingState
from actors.supervision import abandon
from correction.errors import DataError

T = TypeVar("T")


@contextlib.asynccontextmanager
async def _in_threads(context: contextlib.AbstractContextManager[T]) -> AsyncIterator[T]:
    """The context, entered and left in threads: it waits for the disk, and the event loop has more to do."""
    content = await asyncio.to_thread(context.__enter__)
    try:
        yield content
    except BaseException as error:
        await asyncio.to_thread(context.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(context.__exit__, None, None, None)


class CheckpointWriter:
    """One checkpoint is under way at a time. Its files are written, synced and removed beside the event loop."""

    def __init__(self, folder: RunFolder, observer: Observer, settings: CheckpointConfig, deadlines: DeadlinesConfig) -> None:
        self._folder, self._observer, self._keep = folder, observer, settings.keep
        self._deadline_s = deadlines.checkpoint_s
        """For the copy, and again for writing it."""
        self._writing: asyncio.Task[None] | None = None

    async def begin(self, step: int, learner: LearnerGroup, state: Callable[[], Awaitable[TrainingState]]) -> None:
        """Copy all that a resume needs; it is written when this has returned. Nothing may be under way, see `finished`.

        Args:
            learner: idle.
            state: of everything else; asked when the learner has its copy.
        """
        began = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            checkpoint = await stack.enter_async_context(_in_threads(self._folder.checkpoint(step)))
            # Absolute: on a cluster an actor's working directory is its node's own. The folder has to be on a file system that both see.
            folders = (checkpoint.state / "learner").resolve(), checkpoint.hf.resolve()
            await learner.begin_save(*folders, deadline_s=self._deadline_s)
            await asyncio.to_thread((await state()).save, checkpoint.state)
            self._writing = asyncio.create_task(self._write(checkpoint, learner, stack.pop_all(), began))

    async def _write(self, checkpoint: Checkpoint, learner: LearnerGroup, folder: contextlib.AsyncExitStack, began: float) -> None:
        async with folder:
            await learner.saved(deadline_s=self._deadline_s)
            if not (checkpoint.hf / "config.json").is_file():
                raise DataError(
                    f"{checkpoint.path}: the learner's node wrote elsewhere; run_dir has to be on a file system that all nodes share"
                )
        await asyncio.to_thread(self._folder.prune_checkpoints, self._keep)
        self._observer.saved(self._folder.path / "checkpoints" / f"step_{checkpoint.step:06d}", time.monotonic() - began)

    async def finished(self, *, at_once: bool = False) -> None:
        """Wait until the checkpoint under way is written, if there is one. Raises: what went wrong with it.

        Args: at_once: don't wait; only raise if it has gone wrong already.
        """
        if self._writing is None or (at_once and not self._writing.done()):
            return
        await asyncio.shield(self._writing)  # an error elsewhere doesn't take it along
        self._writing = None

    def abandon(self) -> None:
        """Leave what is under way; nobody asks how it ended any more."""
        if self._writing is not None:
            abandon(self._writing)
