"""The step that the learner is training, as a task, while the loop does other things."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from actors.carriers import PreparedBatch
from actors.processes.supervision import abandon, argument_gone
from correction.errors import StepAborted


class StepUnderWay:
    """A step from the moment in which the learner gets its batch until ledger and book have recorded it."""

    def __init__(self, batch: PreparedBatch, learn: Callable[[PreparedBatch], Coroutine[Any, Any, Any]]) -> None:
        """Args: learn: trains on the batch, and returns the learner's result; it goes on if the service dies meanwhile."""
        self.batch = batch
        self._learning = asyncio.create_task(learn(batch))

    @property
    def has_lost_its_batch(self) -> bool:
        """Whether no rank has begun with it, because the batch was gone with the service."""
        return self._learning.done() and not self._learning.cancelled() and bool(argument_gone(self._learning.exception() or Exception()))

    async def result(self) -> Any:
        """Wait for the learner's result; None if the step was aborted. Raises: the error that the step failed with."""
        await asyncio.wait({self._learning})
        return None if self._is_aborted else self._learning.result()

    def drop(self) -> None:
        """Cancel the wait for the step; its result or error is dropped."""
        abandon(self._learning)

    @property
    def _is_aborted(self) -> bool:
        return not self._learning.cancelled() and isinstance(self._learning.exception(), StepAborted)
