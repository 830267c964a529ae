"""Finished steps on their way to all that shows numbers: metrics.jsonl, TensorBoard, Prometheus and the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ray.exceptions import RayError

from evenkeel.actors.carriers import Observation, PreparedBatch, WaitNotice
from evenkeel.actors.config import RunConfig
from evenkeel.actors.metrics.driver_endpoint import DriverEndpoint
from evenkeel.actors.metrics.step_metrics import StepMetrics, shown
from evenkeel.actors.processes.event_level import EventLevel
from evenkeel.actors.processes.supervision import abandon, unless_set, wait_for
from evenkeel.actors.record.disk_waits import wait_for_disk
from evenkeel.actors.record.finished_step import FinishedStep
from evenkeel.actors.record.metric_views import open_views, views_from_an_earlier_step
from evenkeel.actors.record.retrying_writer import RetryingWriter
from evenkeel.actors.record.reward_parts import RewardParts
from evenkeel.actors.record.run_event import LEVEL_OF_STATE
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.skipped_batches import keep_and_describe
from evenkeel.actors.record.slowest import FILE, SlowestPrompts
from evenkeel.actors.record.step_sources import (
    batch_metrics,
    diagnostic_metrics,
    first_lengths,
    learner_metrics,
    learner_share,
    rollout_metrics,
    sync_metrics,
    trajectories_text,
    undiagnosed,
    worker_metrics,
)
from evenkeel.actors.record.terminal import TerminalView
from evenkeel.actors.record.totals import RunTotals
from evenkeel.actors.settings.deadlines import flush_s
from evenkeel.correction.early_warning.monitor import Event
from evenkeel.correction.errors import EvenkeelError, counted
from evenkeel.learner.results import SkipReason
from evenkeel.rollout.trajectory import GroupFacts, WorkerLoad

if TYPE_CHECKING:
    from evenkeel.learner.results import StepResult


class StepWriter:
    """Writes each step once its loads and its diagnostics are there, in the order of the steps, while the loop goes on."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        view: TerminalView,
        disk: RetryingWriter,
        endpoint: DriverEndpoint,
        totals: RunTotals,
        notify: Callable[[EventLevel, str | WaitNotice], None],
    ) -> None:
        """Args: notify: takes level and sentence."""
        self._config, self._folder, self._view, self._disk = config, folder, view, disk
        self._endpoint, self._totals, self._notify = endpoint, totals, notify
        self.slowest, self._parts = SlowestPrompts(folder), RewardParts(notify)
        self._loads: dict[str, WorkerLoad] | None = None
        """Load of each worker, as it answered last."""
        self._writing: asyncio.Task[None] | None = None
        self._written_at = 0.0  # the newest line of a step, by the event loop's time
        self._no_waiting = asyncio.Event()
        self._views = open_views(folder, config.metrics, partial(notify, "warning"))  # last: a view that fails at once reports an event

    def report(self, step: FinishedStep, observed: Awaitable[Observation | None]) -> None:
        """Make a step's numbers known, while the loop goes on: loads, diagnostics and warnings come later; steps are written in order."""
        batch, result = step.batch, step.result
        if SkipReason.NOT_FINITE in result.skipped:
            self._writing = asyncio.create_task(self._keep_skipped(step.number, batch, result, self._writing))
        if result.overflowed_steps and result.loss_scale is not None:
            what = f"step {step.number}: {counted(result.overflowed_steps, 'update')} left out: the gradient overflowed in float16"
            what += "; the loss scale is {} now"
            self._notify("info", shown({"learner/loss_scale": result.loss_scale}, "learner/loss_scale", what))
        metrics = StepMetrics(step.number, {"weight_version": step.version, "time/elapsed_s": step.elapsed_s, "time/step_s": step.seconds})
        told = batch_metrics(batch, correct_at=self._config.evaluation.correct_at)
        metrics.update(self._parts.bounded(told))
        metrics.update(sync_metrics(step.receipts, step.differences) | worker_metrics(step.groups, step.versions))
        metrics.update(learner_metrics(result) | learner_share(step.phases, batch.tokens, step.seconds))
        metrics.update(step.noted)
        self._disk.line(step.number, self._folder.append_answer_lengths, step.number, first_lengths(batch.groups))
        if self._config.metrics.trajectories_per_step:
            text = trajectories_text(batch.groups, batch.examples, step=step.number)
            self._disk.file(self._folder.write_trajectories, step.number, text)
        own = undiagnosed(result)
        self._writing = asyncio.create_task(self._write_when_known(metrics, own, step.groups, step.loads, observed, self._writing))

    def evaluated(self, metrics: StepMetrics) -> None:
        """Write the numbers of a held-out evaluation."""
        self._disk.line(metrics.step, self._folder.append_evaluation, metrics)
        self._show(metrics)
        self._endpoint.publish(metrics)
        self._view.evaluation(metrics)

    async def flush(self) -> None:
        """Wait until all reported steps are written (a cancelled wait stops no writing). Raises: DeadlineExceeded if one never is."""
        if self._writing is not None:
            wait, limit_s = asyncio.shield(self._writing), flush_s(self._config.deadlines.step_s)
            await wait_for(wait, "numbers of the last steps", deadline_s=limit_s, counts_from=lambda: self._written_at)
        limit_s = self._config.deadlines.disk_s
        await wait_for_disk(self._disk.done(), "lines of the last steps", deadline_s=limit_s, notice=partial(self._notify, "warning"))

    def stop_waiting(self) -> None:
        """Write steps' lines from now on without waiting for loads and diagnostics: the process may have only seconds left."""
        self._no_waiting.set()

    def abandon(self) -> None:
        """Give up the steps whose diagnostics are still awaited: they get no line. A flush has waited for them long enough."""
        if self._writing is not None:
            abandon(self._writing)
        self._writing = None

    def roll_back(self, step: int) -> None:
        """Called when the run goes back to an earlier step; the folder has been cut back."""
        self._views = views_from_an_earlier_step(self._views, self._folder, step)

    def left(self, worker: str) -> None:
        """A rollout worker is gone."""
        (self._loads or {}).pop(worker, None)

    @property
    def hangs(self) -> bool:
        """After `close_views`: a view is in a call that has not come back."""
        return any(view.hangs for view in self._views)

    def close_views(self) -> None:
        for view in self._views:
            try:
                view.close()
            except Exception as error:  # a package's own: what is drawn of a run must not end it, nor stand in place of how it ended
                self._notify("warning", f"{type(view).__name__} was not closed in order: {error}")

    async def _keep_skipped(
        self, step: int, batch: PreparedBatch, result: StepResult, previous: asyncio.Task[None] | None = None
    ) -> None:
        """Say what the guard did, and keep the batch for study."""
        if previous is not None:
            await previous
        keeping = keep_and_describe(self._folder.keep_skipped_batch, step, batch, result)
        said = await unless_set(self._no_waiting, keeping)
        self._notify("warning", said or f"step {step}: updates left out; its batch is not kept any more")

    async def _write_when_known(
        self,
        metrics: StepMetrics,
        own: Mapping[str, float],
        finished: Mapping[str, Sequence[GroupFacts]],
        loads: Awaitable[dict[str, WorkerLoad]],
        observed: Awaitable[Observation | None],
        previous: asyncio.Task[None] | None,
    ) -> None:
        """Write a step's line once the workers' loads and the diagnostics, else its `own`, are there, after the line of the step before."""
        if previous is not None:
            await previous
        now = await unless_set(self._no_waiting, loads) or {}
        metrics.update(rollout_metrics(finished, now, self._loads, metrics["time/step_s"]))
        are_up = self._endpoint.workers  # some may have left
        self._loads = {name: load for name, load in ((self._loads or {}) | now).items() if name in are_up}
        try:
            what = f"diagnostics of step {metrics.step} <- correction service"
            found = await wait_for(unless_set(self._no_waiting, observed), what, deadline_s=self._config.deadlines.step_s)
            if found is None:
                self._totals.count("monitor/left_out_total")
            else:
                self._take_observation(metrics, found)
        except (EvenkeelError, RayError) as error:  # the step's other numbers must not be lost with them
            self._notify("warning", f"no diagnostics of step {metrics.step}: {error}")
        metrics.update({name: value for name, value in own.items() if name not in metrics})
        metrics.update(self._totals.of_monitor | ({"files/failures_total": failures} if (failures := self._disk.failures) else {}))
        self._disk.line(metrics.step, self._folder.append_metrics, metrics)
        if (slowest := self.slowest.changed()) is not None:
            self._disk.file(self._folder.write_text, FILE, slowest)
        self._show(metrics)
        self._endpoint.publish(metrics)
        self._view.step(metrics)
        self._written_at = asyncio.get_running_loop().time()

    def _take_observation(self, metrics: StepMetrics, found: Observation) -> None:
        metrics.update(diagnostic_metrics(found.diagnostics))
        metrics.update({"time/diagnose_s": found.seconds, "time/service_late_s": found.late_s, "monitor/level": found.state.rank})
        self._disk.line(metrics.step, self._folder.append_clipped_tokens, metrics.step, found.clipped)
        for event in found.events:
            self._warned(event)

    def _warned(self, event: Event) -> None:
        """The monitor has seen a symptom come, grow or go."""
        self._disk.line(event.step, self._folder.append_monitor_event, event)
        self._notify(LEVEL_OF_STATE[event.state], f"step {event.step}: {event.message}")
        self._totals.warned(event)

    def _show(self, metrics: StepMetrics) -> None:
        for view in self._views:
            self._disk.line(metrics.step, view.write, metrics)
