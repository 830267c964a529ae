"""What a run shows and keeps: every event and number goes through here to the terminal, the run folder, TensorBoard and Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from actors.carriers import ActorInfo, DiscardReason, Observation, PreparedBatch, ScatterSample, Ticket
from actors.config import RunConfig
from actors.metrics.exporter import DiscoveryServer, MetricsEndpoint, listen_address
from actors.metrics.held_out import Evaluation
from actors.metrics.step_metrics import DISCARD_COUNTERS, StepMetrics, listed_today, members, shown
from actors.pool.scaling import ScalingDecision
from actors.processes.event_level import EventLevel
from actors.processes.loop_clock import LoopClock
from actors.processes.repeated import Repeated
from actors.processes.supervision import abandon, unless_set, wait_for
from actors.processes.wait_notice import WaitNotice
from actors.record.finished_step import FinishedStep
from actors.record.metric_views import open_views, views_from_an_earlier_step
from actors.record.part_names import PartNames
from actors.record.patience import PatientWriter, wait_for_disk
from actors.record.probe_watch import ProbeWatch
from actors.record.run_event import LEVEL_OF_STATE, EventKind, RunEvent
from actors.record.run_folder import RunFolder
from actors.record.skipped_batches import keep_and_describe
from actors.record.slowest import FILE, SlowestPrompts
from actors.record.step_report import (
    FAILED_TRAJECTORIES,
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
from actors.record.terminal import TerminalView
from actors.settings.deadlines import flush_s
from actors.settings.probe_limits import ProbeLimits
from correction.errors import EvenkeelError, counted
from correction.monitor import Event, State
from learner.results import SkipReason
from rollout.trajectory import GroupFacts, Prompt, SyncReceipt, WorkerLoad

if TYPE_CHECKING:
    from actors.pool.pool import RolloutPool
    from actors.ranks.learner_group import LearnerGroup
    from actors.weights.weight_sync import SyncTarget
    from learner.results import StepResult

_RETURNS = "steps/returns_total"
_EVENT_COUNTERS = {State.WATCH: "monitor/watches_total/", State.ALARM: "monitor/alarms_total/"}
"""Families that count the monitor's events, by symptom."""


class Observer:
    """Collects numbers between two steps, and writes them at each step. It decides nothing about the run."""

    def __init__(self, config: RunConfig, folder: RunFolder, view: TerminalView, totals: dict[str, float] | None = None) -> None:
        """Args: totals: running totals of an earlier part of the run, see `totals()`."""
        self._config, self._folder, self._view = config, folder, view
        self._take_totals(totals or {})
        self._finished: dict[str, list[GroupFacts]] = {}
        self._slowest, self._parts = SlowestPrompts(folder), PartNames(self.event)
        self._receipts: list[SyncReceipt] = []
        self._probes = ProbeWatch(ProbeLimits.of_run(config))
        self._versions: dict[str, int] = {}
        self._workers: dict[str, str] = {}
        """Rollout workers that are up: name -> key in the service discovery."""
        self._loads: dict[str, WorkerLoad] | None = None
        """Load of each worker, as it answered last."""
        self._step_ended = self._began = time.monotonic()
        self._extra: dict[str, float] = {}
        self._repeated, self._clock = Repeated(), LoopClock()
        self._writing: asyncio.Task[None] | None = None
        self._written_at = 0.0  # the newest line of a step, by the event loop's time
        self._no_waiting = asyncio.Event()
        self.disk = PatientWriter(lambda text: self.event("warning", text))
        """Writes all files of the run's folder, except checkpoints."""
        self._views = open_views(folder, config.metrics, partial(self.event, "warning"))  # last: a view that fails at once reports an event

    def _take_totals(self, totals: Mapping[str, float]) -> None:
        self._totals = listed_today(totals)
        # Kept apart: they grow when a step is diagnosed, which may be after the next step has begun.
        self._raised = {kind + it: self._totals.pop(kind + it) for kind in _EVENT_COUNTERS.values() for it in members(self._totals, kind)}

    def go_back(self, totals: Mapping[str, float], step: int) -> None:
        """Called when the run goes back to an earlier step, with that step's totals; the folder has been cut back."""
        returns = self._totals.get(_RETURNS, 0.0) + 1
        self._take_totals({**totals, _RETURNS: returns})
        self._finished, self._receipts, self._extra = {}, [], {}
        self._probes.forget()
        self._views = views_from_an_earlier_step(self._views, self._folder, step)

    def replaced_queue(self) -> None:
        self._count("queue/replaced_total", 1)

    # -- actors ------------------------------------------------------------------------------------------------------

    def follow(self, pool: RolloutPool, learner: LearnerGroup) -> None:
        """Set the parts whose load is asked for at each step."""
        self._pool, self._learner = pool, learner

    def serve(self) -> None:
        """Open the controller's own endpoint and the service discovery; needs a running Ray."""
        self._clock.start()
        address = listen_address(self._config.metrics.bind)
        self._discovery = DiscoveryServer(address, self._config.metrics.discovery_port)
        self._endpoint = MetricsEndpoint("controller", "0", bind=address)
        self._discovery.register("controller-0", self._endpoint.target, self._endpoint.labels)
        self.event("info", f"Prometheus service discovery at {self._discovery.url}")

    def joined(self, info: ActorInfo) -> None:
        self._discovery.register(info.key, info.target, {"role": info.role, "name": info.name})
        if info.role == "rollout":
            self._workers[info.name] = info.key
        self.event("info", f"{info.role} {info.name} is up (process {info.pid}{info.detail and f', {info.detail}'})")

    def left(self, worker: str) -> None:
        """A rollout worker is gone."""
        self._discovery.deregister(self._workers.pop(worker, ""))
        (self._loads or {}).pop(worker, None)
        self._endpoint.keep_only("worker", self._workers)

    # -- events ------------------------------------------------------------------------------------------------------

    def event(self, level: EventLevel, text: str | WaitNotice, kind: EventKind = EventKind.NONE) -> None:
        self.keep_event(level, text, kind)
        self._view.event(level, str(text))

    def keep_event(self, level: EventLevel, text: str | WaitNotice, kind: EventKind = EventKind.NONE) -> None:
        """In events.log alone."""
        self.disk.do(partial(self._folder.write_event, RunEvent.now(level, text, kind)))

    def phase(self, text: str) -> None:
        self.keep_event("info", text)
        self._view.phase(text)

    def doing(self, text: str) -> None:
        """Like `phase`, for what only a live panel has room for."""
        self._view.waiting(text)

    def waiting(self, notice: WaitNotice) -> None:
        self.event("warning", notice)

    def warned(self, event: Event) -> None:
        """The monitor has seen a symptom come, grow or go."""
        self.disk.line(event.step, self._folder.append_monitor_event, event)
        self.event(LEVEL_OF_STATE[event.state], f"step {event.step}: {event.message}")
        if family := _EVENT_COUNTERS.get(event.state):
            self._raised[family + event.name] = self._raised.get(family + event.name, 0.0) + 1

    def admitted(self, tickets: Sequence[Ticket]) -> None:
        self._count("groups/admitted_total", len(tickets))

    def group_finished(self, group: GroupFacts, worker: str) -> None:
        """Args: worker: name of the one that sampled it."""
        self._finished.setdefault(worker, []).append(group)
        self._slowest.add(group, worker)
        self._count("rollout/generated_tokens_total", group.response_tokens)
        self._count("rollout/finished_groups_total", 1)
        for kind, error in group.failures:
            counter, words = FAILED_TRAJECTORIES[kind]
            self._count(counter, 1)
            if line := self._repeated.add(words, f"group {group.group_id}: a trajectory failed: {error}"):
                self.event("warning", line)

    def handed_back(self, groups: int, tokens: int) -> None:
        self._count("pool/handed_back_total", groups)
        self._count("pool/handed_back_tokens_total", tokens)

    def scaled(self, decision: ScalingDecision) -> None:
        self._count(f"pool/scaled_total/{decision.cause}", 1)
        self.event("info", f"the pool goes to {counted(decision.target, 'rollout worker')} ({decision.cause}): {decision.reason}")

    def lost(self, tickets: Sequence[Ticket]) -> None:
        """The tokens of finished groups went with a node, or with a worker that had them still, or did not come in time."""
        self._count("groups/lost_total", len(tickets))
        line = f"{counted(len(tickets), 'finished group')} could not be read (gone with a node or a worker, or late) and are sampled again"
        self.event("warning", f"{line}: {', '.join(ticket.prompt.prompt_id for ticket in tickets[:4])}{' ...' * (len(tickets) > 4)}")

    def receipt(self, receipt: SyncReceipt) -> None:
        self._receipts.append(receipt)

    def probed(self, target: SyncTarget, version: int, differences: Sequence[float]) -> None:
        """The probe prompt's logprobs of an engine differ by so much from the learner's at the same weights, token by token."""
        if line := self._probes.add(target.name, version, differences):
            self.event("warning", line)

    def dirty(self, target: SyncTarget, reason: str) -> None:
        self._count("sync/failures_total", 1)
        self.event("warning", f"rollout worker {target.name} gets no work until a full weight sync has succeeded: {reason}")

    def note(self, numbers: dict[str, float]) -> None:
        """Further numbers of the step under way, by name of the catalogue."""
        self._extra.update(numbers)

    def trained(self) -> None:
        """The step's training has ended. Its weights go out next, so the versions that workers hold now are those they sampled with."""
        self._versions = self._pool.versions()
        joined, current = self._pool.counts()
        self.note({"pool/workers": joined, "pool/current_workers": current, "pool/target_workers": self._pool.target})

    def saved(self, path: Path, seconds: float) -> None:
        self._extra["time/checkpoint_s"] = seconds
        self.event("info", f"checkpoint {path} in {shown(self._extra, 'time/checkpoint_s')}", EventKind.SAVED)

    def evaluated(self, result: Evaluation, prompts: Sequence[Prompt]) -> None:
        metrics = StepMetrics(result.step, result.metrics())
        self.disk.line(result.step, self._folder.append_evaluation, metrics)
        self.disk.file(self._folder.write_trajectories, result.step, result.text(prompts), "held_out")
        self._show(metrics)
        self._endpoint.publish(dict(metrics))
        self._view.evaluation(metrics)
        self.keep_event("info", f"held-out accuracy after {result.step} steps: {result} (95% Wilson), {shown(metrics, 'held_out/seconds')}")
        if result.failed:
            failed = f"{result.failed} of {len(result.trajectories)} held-out answers could not be scored, and are left out of the accuracy"
            self.event("warning", f"{failed}; the first: {result.first_failure}")

    def training_begins(self, elapsed_s: float) -> None:
        """The clock of the first step starts here, that of the run `elapsed_s` ago."""
        self._step_ended = time.monotonic()
        self._began = time.monotonic() - elapsed_s

    # -- steps -------------------------------------------------------------------------------------------------------

    def end_step(
        self,
        number: int,
        version: int,
        batch: PreparedBatch,
        result: StepResult,
        phases: dict[str, float],
        counts: dict[str, int],
        discarded: Sequence[tuple[str, DiscardReason]],
    ) -> FinishedStep:
        """Take stock of a step that ends now; what is noted from here on belongs to the next one.

        Args:
            phases: seconds of the loop.
            counts: of the queue.
            discarded: groups given up since the step before, as (prompt id, reason).
        """
        now = time.monotonic()
        seconds, self._step_ended = now - self._step_ended, now
        loads = asyncio.create_task(self._pool.loads(version))
        differences, beyond = self._probes.take()
        for line in [*self._repeated.take(), *beyond]:
            self.event("warning", f"step {number}: {line}")
        for _, reason in discarded:
            self._count(DISCARD_COUNTERS[reason], 1)
        self._count("steps/skipped_total", result.skipped_steps - result.overflowed_steps)
        if result.loss_scale is not None:
            self._count("steps/overflowed_total", result.overflowed_steps)
        noted = self._extra | {"time/driver_late_s": self._clock.read()} | self._queue_numbers(counts) | self._totals
        elapsed_s, groups, receipts = now - self._began, self._finished, self._receipts
        self._finished, self._receipts, self._extra = {}, [], {}
        return FinishedStep(
            number, version, batch, result, elapsed_s, seconds, phases, loads, groups, self._versions, receipts, differences, noted
        )

    def report(self, step: FinishedStep, observed: Awaitable[Observation | None]) -> None:
        """Make a step's numbers known, while the loop goes on: loads, diagnostics and warnings come later; steps are written in order."""
        batch, result = step.batch, step.result
        if SkipReason.NOT_FINITE in result.skipped:
            self._writing = asyncio.create_task(self._keep_skipped(step.number, batch, result, self._writing))
        if result.overflowed_steps and result.loss_scale is not None:
            what = f"step {step.number}: {counted(result.overflowed_steps, 'update')} left out: the gradient overflowed in float16"
            self.event("info", shown({"learner/loss_scale": result.loss_scale}, "learner/loss_scale", what + "; the loss scale is {} now"))
        metrics = StepMetrics(step.number, {"weight_version": step.version, "time/elapsed_s": step.elapsed_s, "time/step_s": step.seconds})
        told = batch_metrics(batch, correct_at=self._config.evaluation.correct_at, overlong=self._config.rollout.overlong)
        metrics.update(self._parts.bounded(told))
        metrics.update(sync_metrics(step.receipts, step.differences) | worker_metrics(step.groups, step.versions))
        metrics.update(learner_metrics(result) | learner_share(step.phases, batch.tokens, step.seconds))
        metrics.update(step.noted)
        self.disk.line(step.number, self._folder.append_answer_lengths, step.number, first_lengths(batch.groups))
        if self._config.metrics.trajectories_per_step:
            text = trajectories_text(batch.groups, batch.examples, step=step.number)
            self.disk.file(self._folder.write_trajectories, step.number, text)
        own = undiagnosed(result)
        self._writing = asyncio.create_task(self._write_when_known(metrics, own, step.groups, step.loads, observed, self._writing))

    async def _keep_skipped(self, step: int, batch: PreparedBatch, result: Any, previous: asyncio.Task[None] | None = None) -> None:
        """Say what the guard did, and keep the batch for study."""
        if previous is not None:
            await previous
        said = keep_and_describe(self._folder.keep_skipped_batch, step, batch, result)
        self.event("warning", await unless_set(self._no_waiting, said) or f"step {step}: updates left out; its batch is not kept any more")

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
        self._loads = {name: load for name, load in ((self._loads or {}) | now).items() if name in self._workers}  # some may have left
        try:
            what = f"diagnostics of step {metrics.step} <- correction service"
            found = await wait_for(unless_set(self._no_waiting, observed), what, deadline_s=self._config.deadlines.step_s)
            if found is None:
                self._count("monitor/left_out_total", 1)
            else:
                self._take_observation(metrics, found)
        except (EvenkeelError, RayError) as error:  # the step's other numbers must not be lost with them
            self.event("warning", f"no diagnostics of step {metrics.step}: {error}")
        metrics.update({name: value for name, value in own.items() if name not in metrics})
        metrics.update(self._raised | ({"files/failures_total": failures} if (failures := self.disk.failures) else {}))
        self.disk.line(metrics.step, self._folder.append_metrics, metrics)
        if (slowest := self._slowest.changed()) is not None:
            self.disk.file(self._folder.write_text, FILE, slowest)
        self._show(metrics)
        self._endpoint.publish(dict(metrics))
        self._endpoint.keep_only("worker", self._workers)
        self._view.step(metrics)
        self._written_at = asyncio.get_running_loop().time()

    def _take_observation(self, metrics: StepMetrics, found: Observation) -> None:
        metrics.update(diagnostic_metrics(found.diagnostics))
        metrics.update({"time/diagnose_s": found.seconds, "time/service_late_s": found.late_s, "monitor/level": found.state.rank})
        self.disk.line(metrics.step, self._folder.append_clipped_tokens, metrics.step, found.clipped)
        for event in found.events:
            self.warned(event)

    async def flush(self) -> None:
        """Wait until all reported steps are written (a cancelled wait stops no writing). Raises: DeadlineExceeded if one never is."""
        if self._writing is not None:
            wait, limit_s = asyncio.shield(self._writing), flush_s(self._config.deadlines.step_s)
            await wait_for(wait, "numbers of the last steps", deadline_s=limit_s, counts_from=lambda: self._written_at)
        limit_s = self._config.deadlines.disk_s
        await wait_for_disk(self.disk.done(), "lines of the last steps", deadline_s=limit_s, notice=self.waiting)

    def stop_waiting(self) -> None:
        """Write steps' lines from now on without waiting for loads and diagnostics: the process may have only seconds left."""
        self._no_waiting.set()

    def abandon(self) -> None:
        """Give up the steps whose diagnostics are still awaited: they get no line. A flush has waited for them long enough."""
        if self._writing is not None:
            abandon(self._writing)
        self._writing = None

    def keep_scatter(self, sample: ScatterSample | None) -> None:
        """Write what the report draws pi_prox against mu from."""
        if sample is not None:
            self.disk.file(self._folder.write_file, self._folder.scatter_path.name, sample.save)

    def totals(self) -> dict[str, float]:
        """Running totals, for a checkpoint."""
        return self._totals | self._raised

    def hangs(self) -> bool:
        """After `close`: the disk or a view is in a call that has not come back."""
        return self.disk.hangs or any(view.hangs for view in self._views)

    def close(self, *, within_s: float = 30.0) -> None:
        """Args: within_s: time for the disk to take what is left; what it doesn't take is reported."""
        for line in self._repeated.take():
            self.event("warning", f"after the last step: {line}")
        self._clock.stop()
        for name in self.__dict__.keys() & {"_endpoint", "_discovery"}:
            getattr(self, name).close()
        if lost := self.disk.close(within_s=within_s, last=self._close_views):
            self._view.event("warning", lost)

    def _show(self, metrics: StepMetrics) -> None:
        for view in self._views:
            self.disk.line(metrics.step, view.write, metrics)

    def _close_views(self) -> None:
        for view in self._views:
            try:
                view.close()
            except Exception as error:  # a package's own: what is drawn of a run must not end it, nor stand in place of how it ended
                self.event("warning", f"{type(view).__name__} was not closed in order: {error}")

    def _count(self, name: str, amount: float) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + amount

    def _queue_numbers(self, counts: dict[str, int]) -> dict[str, float]:
        self._totals |= {f"groups/{name}_total": counts[name] for name in ("admitted", "trained", "discarded")}
        return {"queue/groups": counts["finished"], "queue/outstanding": counts["in_flight"] + counts["finished"] + counts["drawn"]}
