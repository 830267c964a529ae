"""Reports finished steps during the next one, so that neither the learner nor the loop waits for their lines to be written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from actors.carriers import Observation
from actors.record.finished_step import FinishedStep
from actors.record.step_writer import StepWriter

T = TypeVar("T")


class StepReporter:
    """Holds the last finished step until there is time to report it: while the next one is waited for or trained, or at a flush."""

    def __init__(self, writer: StepWriter, *, service: Callable[[], Any], on_observed: Callable[[Observation], None]) -> None:
        """Args:
        service: the present correction service, which diagnoses the steps; it may be replaced.
        on_observed: called with a step's Observation when it is ready; that may be after the next step has begun.
        """
        self._writer, self._service, self._on_observed = writer, service, on_observed
        self._unreported: FinishedStep | None = None

    def end_step(self, finished: Callable[[], FinishedStep]) -> None:
        """Keep the step that ends now; report the one before, if that has not been done. Args: finished: Observer.end_step."""
        self._report()
        self._unreported = finished()

    async def report_during(self, work: Awaitable[T], *, after_s: float) -> T:
        """The result of `work`. If it takes longer than `after_s`, the last step is reported meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task}, timeout=after_s)
            if not task.done():
                self._report()
            return await task
        finally:
            task.cancel()

    async def flush(self) -> None:
        """Have the lines of all finished steps written."""
        self._report()
        await self._writer.flush()

    def stop_waiting(self) -> None:
        """As StepWriter's."""
        self._writer.stop_waiting()

    def abandon(self) -> None:
        """As StepWriter's."""
        self._writer.abandon()

    def _report(self) -> None:
        step, self._unreported = self._unreported, None
        if step is not None:
            self._writer.report(step, asyncio.ensure_future(self._observed(step)))

    def _observed(self, step: FinishedStep) -> Awaitable[Observation | None]:
        """Diagnostics of a step's batch, to be awaited. The service is called now, because it holds the batch for only one more step."""
        reference = self._service().observe.remote(step.number, step.batch.version, step.result)

        async def reported() -> Observation | None:
            observation: Observation | None = await reference
            if observation is not None:
                self._on_observed(observation)
            return observation

        return reported()
