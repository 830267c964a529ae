"""How a run ends when a signal asks it to: Ctrl-C, SIGTERM, or the loss of its terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from evenkeel.actors.processes import signals
from evenkeel.actors.processes.supervision import abandon

T = TypeVar("T")


class ShutdownSignals:
    """What signals do to one run. The first one during training ends it with a checkpoint: Ctrl-C after the step under way, SIGTERM without
    it. The first one during the last evaluation cancels that evaluation, and one after it changes nothing. A second signal, or one
    while the run starts or returns to a checkpoint, ends it at once, without a further checkpoint."""

    def __init__(self, notify: Callable[[str], object], on_sigterm: Callable[[], object], saved_step: Callable[[], int]) -> None:
        """
        Args:
            notify: takes a sentence: that the end is asked for, by what, and how it comes.
            on_sigterm: called at SIGTERM during training. Whoever sends it may kill the process a few seconds later.
            saved_step: returns the step of the newest checkpoint on disk; 0: there is none.
        """
        self._notify, self._on_sigterm, self._saved_step = notify, on_sigterm, saved_step
        self.by: int | None = None
        """The signal that asked the run to end; None: there was none."""
        self.is_asked = asyncio.Event()
        self.is_hurried = asyncio.Event()
        """By SIGTERM during training."""
        self.is_at_once = False
        self.is_training = False
        """All parts are up, so that a checkpoint can be saved."""
        self.last_evaluation: asyncio.Task[Any] | None = None
        self.is_done = False
        """All that the run had to do is done and saved; its parts are being stopped."""

    def done(self, code: int) -> None:
        """From now on a signal ends nothing but the end itself. Args: code: the run's exit code, which no signal changes any more."""
        self.is_done = True
        signals.all_is_done(code)

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals in this context. One that ends the run at once cancels the task that has entered it."""
        main = asyncio.current_task()
        assert main is not None
        with signals.handled_in(asyncio.get_running_loop(), lambda number: self._take(number, main)):
            yield

    async def unless_interrupted(self, evaluation: Coroutine[Any, Any, T]) -> T | None:
        """Result of the evaluation after training, when the last checkpoint is on disk; None if a signal has cancelled it."""
        self.last_evaluation = task = asyncio.create_task(evaluation)
        try:
            await asyncio.wait({task})
            return None if task.cancelled() else task.result()
        finally:
            abandon(task)

    def _take(self, number: int, main: asyncio.Task[Any]) -> None:
        is_first, name = self.by is None, signals.NAMES[number]
        self.by = number
        self.is_asked.set()
        on_disk = f"a resume goes on from step {self._saved_step()}" if self._saved_step() else "there is no checkpoint yet"
        on_disk = "all is done and saved" if self.is_done else on_disk
        if self.is_training and is_first:
            which = "after the step under way, if there is one"
            if number == signal.SIGTERM:
                self.is_hurried.set()
                self._on_sigterm()
                which = "of the last finished step, or of the one under way if it can't be aborted"
            self._notify(f"interrupted ({name}): ending with a checkpoint {which} (next time: at once); until that is on disk, {on_disk}")
        elif self.last_evaluation is not None and not self.last_evaluation.done() and is_first:
            self._notify(f"interrupted ({name}): leaving out the evaluation after training")
            self.last_evaluation.cancel()
        elif self.is_done and is_first:
            self._notify(f"interrupted ({name}): all is done and saved, and the run is ending (next time: at once)")
        else:
            self._notify(f"interrupted ({name}): ending at once; {on_disk}")
            self.is_at_once = True
            main.cancel()
