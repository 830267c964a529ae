"""Checkpoints: taken between two steps, written during the next ones, tried again if that fails."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from evenkeel.actors.checkpoints.reader import KEPT, bytes_under, superseded, to_free
from evenkeel.actors.checkpoints.state import TrainingState
from evenkeel.actors.config import CheckpointConfig, DeadlinesConfig
from evenkeel.actors.processes.disk import DiskLate
from evenkeel.actors.processes.supervision import abandon
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.record.disk_waits import wait_for_disk
from evenkeel.actors.record.recorder import Recorder
from evenkeel.actors.record.run_folder import Checkpoint, RunFolder
from evenkeel.correction.errors import ActorLost, ActorUnavailable, DataError, DeadlineExceeded, EvenkeelError, LedgerError

T = TypeVar("T")
ATTEMPTS = 3
"""The run ends when so many checkpoints in a row have failed, or one has passed so many deadlines; until then it goes on: its weights are
good."""
# Longest wait for the removal of a failed checkpoint's files. A slower disk removes them when it answers again.
_REMOVAL_S = 10.0
# Ratio by which the next checkpoint may be larger than the last one, because it has other groups under way.
_GROWTH = 1.05


class CheckpointWriter:
    """One checkpoint is under way at a time. Its files are written, synced and removed off the event loop."""

    def __init__(
        self,
        folder: RunFolder,
        recorder: Recorder,
        settings: CheckpointConfig,
        deadlines: DeadlinesConfig,
        *,
        begins_at: int,
        pause_s: float = 10.0,
    ) -> None:
        """
        Args:
            begins_at: step from which the run goes on; 0: from its start, without a checkpoint.
            pause_s: seconds between two attempts at the run's end, where there is no step in between.
        """
        self._folder, self._recorder, self._settings = folder, recorder, settings
        # Most seconds for the copy, and as many again for writing it.
        self._deadline_s = deadlines.checkpoint_s
        self._disk_s = deadlines.disk_s
        # The last work that was handed to the disk. A thread can't be stopped, so the next one waits for it.
        self._on_disk: asyncio.Task[Any] | None = None
        # Set when the disk was late for the checkpoint under way: a thread that goes on later must not complete it.
        self._is_given_up = threading.Event()
        # Set by `abandon`: no checkpoint may be completed any more.
        self._is_abandoned = threading.Event()
        self._pause_s = pause_s
        self._writing: asyncio.Task[int] | None = None
        self._begun = 0
        self._failures = 0
        # True if a checkpoint was due and is missing: it failed, or the one before was still being written.
        self._is_owed = False
        # Size of the last checkpoint; 0: there is none yet.
        self._bytes = 0
        self._saved_step = begins_at

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint on disk, or from which the run went on; 0: there is none."""
        return self._saved_step

    def is_due(self, step: int) -> bool:
        """Whether to take a checkpoint after this step. While the one before is being written it is put off to the next step."""
        every = self._settings.every_steps
        self._is_owed = self._is_owed or bool(every and step % every == 0)
        return self._is_owed and self._writing is None

    async def begin(self, step: int, learner: LearnerGroup, state: Callable[[], Awaitable[TrainingState]]) -> None:
        """Copy all that a resume needs; it is written when this has returned. Nothing may be under way, see `finished`.

        Args:
            learner: idle.
            state: of everything else; asked when the learner has its copy.
        Raises: LedgerError; ActorLost: another attempt would meet the same loss; what else went wrong, if this is the last of ATTEMPTS.
            Before that it is reported, and `is_due` at the next step. ActorUnavailable is raised only of the ranks' copy, a
            collective call that one of them may have missed; whatever else can't be reached is asked again at the next step.
        """
        began, is_copying = time.monotonic(), False
        self._begun = step
        try:
            given_up = self._is_given_up = threading.Event()
            await self._check_space(learner)
            async with contextlib.AsyncExitStack() as stack:
                folder = self._folder.checkpoint(step, is_given_up=lambda: given_up.is_set() or self._is_abandoned.is_set())
                checkpoint = await stack.enter_async_context(self._in_threads(folder))
                # Absolute: on a cluster an actor's working directory is its node's own. The folder has to be where both see it.
                seen = Checkpoint(step, await self._by_disk("its path", checkpoint.path.resolve))
                folders = seen.state / "learner", seen.hf
                is_copying = True
                await learner.begin_save(*folders, deadline_s=self._deadline_s)
                is_copying = False
                await self._by_disk("its state", (await state()).save, checkpoint.state)
                self._writing = asyncio.create_task(self._write(checkpoint, learner, stack.pop_all(), began))
            self._is_owed = False
        except (EvenkeelError, OSError) as error:
            may_pass = isinstance(error, ActorUnavailable) and not is_copying
            if isinstance(error, LedgerError | ActorLost) and not may_pass:  # the next one would have lost the same
                raise
            self._note_failure(error)

    async def finished(self, *, at_once: bool = False) -> None:
        """Wait until the checkpoint under way is on disk, if there is one that isn't abandoned.

        Args: at_once: don't wait; only see how it has ended, if it has.
        Raises: as `begin`. A rank that can't be reached just now is one more failure: no other rank waits for it.
        """
        if self._writing is None or self._is_abandoned.is_set() or (at_once and not self._writing.done()):
            return
        try:
            self._bytes = await asyncio.shield(self._writing)  # an error elsewhere doesn't take it along
        except (EvenkeelError, OSError) as error:
            self._writing = None
            if isinstance(error, ActorLost) and not isinstance(error, ActorUnavailable):
                self._is_owed = True
                raise
            self._note_failure(error)
            return
        self._writing = None
        self._failures, self._saved_step = 0, self._begun

    async def save_with_retries(self, step: int, save: Callable[[], Awaitable[None]]) -> None:
        """Have a checkpoint of this step on disk, at the run's end. Raises: as `begin`."""
        await self.finished()
        while self.saved_step < step:
            await save()
            await self.finished()
            if self.saved_step < step:
                await asyncio.sleep(self._pause_s)

    def abandon(self) -> None:
        """Give up the checkpoint under way. It isn't completed, unless its thread is at the very end of it: wait for `off_disk` to know."""
        self._is_abandoned.set()
        if self._writing is not None:
            abandon(self._writing)

    async def off_disk(self) -> None:
        """Wait, after `abandon`, until no thread writes or removes a checkpoint any more, however long the disk takes."""
        while under_way := {task for task in (self._writing, self._on_disk) if task is not None and not task.done()}:
            await asyncio.wait(under_way)

    def _handed_to_disk(self, function: Callable[..., T], *arguments: Any) -> asyncio.Task[T]:
        """Start work on the run folder's disk in a thread, after all earlier work. It can't be stopped."""
        before = self._on_disk

        async def in_turn() -> T:
            if before is not None:
                await asyncio.wait({before})
            return await asyncio.to_thread(function, *arguments)

        work = self._on_disk = asyncio.create_task(in_turn())
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # read: nobody may be waiting for it any more
        return work

    async def _by_disk(self, part: str, function: Callable[..., T], *arguments: Any) -> T:
        """Do work on the run folder's disk. Raises: as the work; DiskLate, and the checkpoint is given up."""
        work, what = asyncio.shield(self._handed_to_disk(function, *arguments)), f"checkpoint of step {self._begun} ({part})"
        try:
            return await wait_for_disk(work, what, deadline_s=self._disk_s, notice=self._recorder.waiting)
        except DiskLate:
            self._is_given_up.set()
            raise

    @contextlib.asynccontextmanager
    async def _in_threads(self, context: contextlib.AbstractContextManager[Checkpoint]) -> AsyncIterator[Checkpoint]:
        """Enter and leave a context in threads, because it waits for the disk, and the event loop must go on."""
        content = await self._by_disk("its folder", context.__enter__)
        try:
            yield content
        except BaseException as error:
            removal = self._handed_to_disk(context.__exit__, type(error), error, error.__traceback__)
            await asyncio.wait({removal}, timeout=0.0 if self._is_given_up.is_set() else _REMOVAL_S)
            raise
        await self._by_disk("its manifest", context.__exit__, None, None, None)

    async def _check_space(self, learner: LearnerGroup) -> None:
        """Raises: DataError if the disk has no room for what is to come."""
        needed = self._bytes or await learner.checkpoint_bytes(deadline_s=self._deadline_s)
        free = await self._free()
        if free < needed * _GROWTH and await self._remove_damaged("the next checkpoint needs the room", to_free, needed * _GROWTH - free):
            free = await self._free()
        if free < needed * _GROWTH:
            raise DataError(
                f"{self._folder.path}: {_gib(free)} are free, but a checkpoint needs {_gib(int(needed * _GROWTH))}. Make room on that disk"
                + (f", or resume with fewer kept (checkpoint.keep = {self._settings.keep})" if self._settings.keep > 1 else "")
            )

    async def _free(self) -> int:
        """Bytes."""
        return (await self._by_disk("free space", shutil.disk_usage, self._folder.path)).free

    async def _remove_damaged(self, why: str, which: Callable[[RunFolder, T], list[Path]], how_far: T) -> bool:
        """Remove some of those that were set aside, and say so. Returns: whether there may be more room now. Raises: DiskLate.

        Args: which: `superseded` or `to_free` of reader.py, with its second argument.
        """
        try:
            chosen = await self._by_disk("sizes of damaged ones", which, self._folder, how_far)
            for path in chosen:
                await self._by_disk("removal of a damaged one", shutil.rmtree, path)
                self._recorder.event("info", f"{path.name}, a damaged checkpoint that was set aside, is removed: {why}")
        except DiskLate:  # an OSError, too
            raise
        except OSError as error:
            self._recorder.event("warning", f"damaged checkpoints that were set aside could not all be removed: {error}")
            return True
        return bool(chosen)

    async def _write(self, checkpoint: Checkpoint, learner: LearnerGroup, folder: contextlib.AsyncExitStack, began: float) -> int:
        """Returns: bytes of the checkpoint."""
        async with folder:
            await self._until_written(checkpoint, learner)
            if not await self._by_disk("its files", (checkpoint.hf / "config.json").is_file):
                raise DataError(
                    f"{checkpoint.path}: the learner's node wrote elsewhere; run_dir has to be on a file system that all nodes share"
                )
        final = self._folder.path / "checkpoints" / f"step_{checkpoint.step:06d}"
        size = await self._by_disk("its size", bytes_under, final)
        self._recorder.saved(final, checkpoint.step, time.monotonic() - began)
        try:
            await self._by_disk("removal of older ones", self._folder.prune_checkpoints, self._settings.keep)
            await self._remove_damaged("a newer one is kept to be looked at", superseded, KEPT)
        except (OSError, DeadlineExceeded) as error:  # the new one is there all the same
            self._recorder.event("warning", f"checkpoints that are no longer needed could not be removed: {error}")
        return size

    async def _until_written(self, checkpoint: Checkpoint, learner: LearnerGroup) -> None:
        """Wait for the ranks' disks, also while training goes on. Raises: DeadlineExceeded after ATTEMPTS deadlines; what a rank could not
        write."""
        what = f"checkpoint of step {checkpoint.step} (the ranks' parts)"
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await learner.saved(deadline_s=self._deadline_s, what=what, notice=self._recorder.waiting)
            except DeadlineExceeded as error:
                if attempt == ATTEMPTS:
                    raise
                self._recorder.event(
                    "warning",
                    f"the checkpoint of step {checkpoint.step} is still being written, and training goes on: {error}; "
                    f"after {ATTEMPTS - attempt} more such waits it counts as failed",
                )

    def _note_failure(self, error: Exception) -> None:
        """Report it, or raise it when it is enough."""
        self._failures += 1
        self._is_owed = True
        if self._failures >= ATTEMPTS:
            raise DataError(f"{ATTEMPTS} checkpoints in a row failed, the last after step {self._begun}: {error}") from error
        self._recorder.event(
            "warning",
            f"the checkpoint of step {self._begun} failed ({self._failures} of {ATTEMPTS} in a row end the run), and is tried again after "
            f"the next step: {error}",
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
