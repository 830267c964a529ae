"""The recorder of a run: it is told what happens, and writes it down for people, step by step. It decides nothing about the run.

An event goes to the terminal and to events.log at once. What belongs to a step is kept until the step ends; its line is made a moment
later, when loads and diagnostics are there, and goes to metrics.jsonl, TensorBoard, Prometheus and the terminal, while the loop goes on.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ray.exceptions import RayError

from evenkeel.actors.carriers import (
    ActorInfo,
    DiscardedGroup,
    EventLevel,
    LaneReport,
    Observation,
    PoolFailure,
    PreparedBatch,
    ScalingDecision,
    ScatterSample,
    Ticket,
    WaitNotice,
)
from evenkeel.actors.config import RunConfig
from evenkeel.actors.metrics.catalogue import CATALOGUE, COUNTERS
from evenkeel.actors.metrics.exporter import DriverEndpoint
from evenkeel.actors.metrics.held_out import Evaluation, cut_remark
from evenkeel.actors.metrics.step_metrics import DISCARD_COUNTERS, StepMetrics, shown
from evenkeel.actors.processes.lane import worker_lane
from evenkeel.actors.processes.pacing import LoopClock
from evenkeel.actors.processes.supervision import abandon, unless_set, wait_for
from evenkeel.actors.record.disk_waits import wait_for_disk
from evenkeel.actors.record.disk_writer import DiskWriter
from evenkeel.actors.record.kept_tokens import group_rows, held_out_tokens
from evenkeel.actors.record.metric_views import open_views, views_from_an_earlier_step
from evenkeel.actors.record.run_folder import LEVEL_OF_STATE, SLOWEST_FILE, EventKind, RunEvent, RunFolder, SlowPrompt
from evenkeel.actors.record.skipped_batches import keep_and_describe
from evenkeel.actors.record.step_numbers import (
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
from evenkeel.actors.record.terminal import TerminalView
from evenkeel.actors.record.timeline import Timeline
from evenkeel.actors.settings.deadlines import flush_s
from evenkeel.actors.settings.probe_limits import ProbeLimits
from evenkeel.correction.early_warning.monitor import Event, State
from evenkeel.correction.errors import EvenkeelError, counted
from evenkeel.learner.results import SkipReason
from evenkeel.rollout.trajectory import GroupFacts, Prompt, SyncReceipt, WorkerLoad

if TYPE_CHECKING:
    from evenkeel.actors.weights.weight_sync import SyncTarget
    from evenkeel.learner.results import StepResult

    Observe = Callable[[int, int, StepResult], Awaitable[Observation | None]]
    """Asks the service for a step's diagnostics: its number, the version of its batch, the learner's result."""

_RETURNS = "steps/returns_total"
# Families that count the monitor's events, by symptom.
_OF_STATE = {State.WATCH: "monitor/watches_total/", State.ALARM: "monitor/alarms_total/"}
_PART = "reward/component/"
MOST_PARTS = 128
"""Parts of the reward that have a metric in one run, from its start or resume. Each is a column, a curve and a value of the endpoint until
the end, whatever names a reward function makes up."""
_DIFFERENCE = CATALOGUE["sync/probe_max_abs_difference"]
_KEPT_SLOWEST = 10
# From a step's end until its numbers are made, which takes driver and service as long as the way of the next batch to the learner: that
# goes first.
_LATER_S = 0.1


@dataclass(frozen=True, slots=True)
class _EndedStep:
    """What is known of a step at its end, and belongs to it."""

    batch: PreparedBatch
    result: StepResult
    metrics: StepMetrics
    """Metrics that are known without a look at the batch."""
    phases: Mapping[str, float]
    loads: Awaitable[dict[str, WorkerLoad]]
    groups: Mapping[str, Sequence[GroupFacts]]
    """What each worker, by name, has finished since the step before."""
    observe: Observe


class Recorder:
    """Is told what happens, and takes stock at the end of each step."""

    def __init__(self, config: RunConfig, folder: RunFolder, view: TerminalView, totals: Mapping[str, float] | None = None) -> None:
        """Args: totals: running totals of an earlier part of the run, see `totals()`."""
        self._config, self._folder, self._view = config, folder, view
        self._began = self._step_ended = time.monotonic()
        self._clock = LoopClock()
        self._endpoint = DriverEndpoint()
        self.disk = DiskWriter(partial(self.event, "warning"))
        """Made and ended here; the driver's ledger writes by it, too."""
        self._timeline = Timeline(partial(self.disk.file, folder.append_spans))

        # For the whole run.
        self._totals = dict(totals or {})  # by name of the catalogue
        self._repeated, self._probes = RepeatedWarnings(), ProbeWatch(ProbeLimits.of_run(config))
        self._slowest = folder.read_slowest()
        self._reward_parts = set[str]()
        self._has_said_parts = self._has_slower = False
        self._loads: dict[str, WorkerLoad] | None = None  # of each worker, as it answered last; None before the first

        # For the step under way.
        self._finished: dict[str, list[GroupFacts]] = {}
        self._receipts: list[SyncReceipt] = []
        self._versions: dict[str, int] = {}  # of each worker, as the step's training ended
        self._extra: dict[str, float] = {}

        # From a step's end to its line.
        self._ended: tuple[_EndedStep, asyncio.TimerHandle] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._written_at = 0.0  # the newest line of a step, by the event loop's time
        self._no_waiting = asyncio.Event()
        self._views = open_views(folder, config.metrics, partial(self.event, "warning"))  # last: a view that fails at once reports an event

    # -- actors ------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Open the run's endpoint and the service discovery; needs a running Ray."""
        self._clock.start()
        url = self._endpoint.serve(self._config.metrics.bind, self._config.metrics.discovery_port, self._folder.path.name)
        self._endpoint.publish(dict.fromkeys(COUNTERS, 0.0) | self._totals)
        self.event("info", f"Prometheus service discovery at {url}")

    def joined(self, info: ActorInfo) -> None:
        self._endpoint.joined(info)
        self._show_workers()
        self.event("info", f"{info.role} {info.name} is up (process {info.pid}{info.detail and f', {info.detail}'})")

    def left(self, worker: str) -> None:
        """A rollout worker is gone."""
        self._endpoint.left(worker)
        self._timeline.forget(worker_lane(worker))
        (self._loads or {}).pop(worker, None)
        self._show_workers()

    def _show_workers(self) -> None:
        """At the endpoint at once: with too few of them the end of a step, which brings the other numbers, may be far."""
        self._endpoint.publish({"pool/workers": len(self._endpoint.workers)})

    # -- events ------------------------------------------------------------------------------------------------------

    def event(self, level: EventLevel, text: str | WaitNotice, kind: EventKind = EventKind.NONE) -> None:
        self.keep_event(level, text, kind)
        self._view.event(level, str(text))

    def keep_event(self, level: EventLevel, text: str | WaitNotice, kind: EventKind = EventKind.NONE) -> None:
        """Keep an event in events.log alone."""
        self.disk.do(partial(self._folder.write_event, RunEvent.now(level, text, kind)))

    def phase(self, text: str) -> None:
        self.keep_event("info", text)
        self._view.phase(text)

    def doing(self, text: str) -> None:
        """Like `phase`, for what only a live panel has room for."""
        self._view.waiting(text)

    def waiting(self, notice: WaitNotice) -> None:
        self.event("warning", notice)

    def admitted(self, tickets: Sequence[Ticket]) -> None:
        self._count("groups/admitted_total", len(tickets))

    def group_finished(self, group: GroupFacts, worker: str) -> None:
        """Args: worker: name of the one that sampled it."""
        self._finished.setdefault(worker, []).append(group)
        self._add_slow(SlowPrompt(group.reward_s, group.generate_s, group.response_tokens, group.prompt_id, worker, len(group.failures)))
        self._count("rollout/generated_tokens_total", group.response_tokens)
        self._count("rollout/finished_groups_total")
        for kind, error in group.failures:
            counter, words = FAILED_TRAJECTORIES[kind]
            self._count(counter)
            if line := self._repeated.add(words, f"group {group.group_id}: a trajectory failed: {error}"):
                self.event("warning", line)

    def handed_back(self, groups: int, tokens: int) -> None:
        """A worker has handed back groups, which others will finish. Args: tokens: sampled for them so far."""
        self._count("pool/handed_back_total", groups)
        self._count("pool/handed_back_tokens_total", tokens)

    def scaled(self, decision: ScalingDecision) -> None:
        self._count(f"pool/scaled_total/{decision.cause}")
        self.event("info", f"the pool goes to {counted(decision.target, 'rollout worker')} ({decision.cause}): {decision.reason}")

    def lost(self, tickets: Sequence[Ticket]) -> None:
        """The tokens of finished groups went with a node, or with a worker that had them still, or did not come in time."""
        self._count("groups/lost_total", len(tickets))
        line = f"{counted(len(tickets), 'finished group')} could not be read (gone with a node or a worker, or late) and are sampled again"
        self.event("warning", f"{line}: {', '.join(ticket.prompt.prompt_id for ticket in tickets[:4])}{' ...' * (len(tickets) > 4)}")

    def receipt(self, receipt: SyncReceipt) -> None:
        self._receipts.append(receipt)
        self.did(receipt.load.told if receipt.load is not None else None)

    def did(self, report: LaneReport | None) -> None:
        """Called with what a process has done, in the moment in which its answer comes; None: it has told nothing."""
        if report is not None:
            self._timeline.take(report)

    def probed(self, target: SyncTarget, version: int, differences: Sequence[float]) -> None:
        """The probe prompt's logprobs of an engine differ by so much from the learner's at the same weights, token by token."""
        if line := self._probes.add(target.name, version, differences):
            self.event("warning", line)

    def dirty(self, target: SyncTarget, reason: str) -> None:
        self._count("sync/failures_total")
        self.event("warning", f"rollout worker {target.name} gets no work until a full weight sync has succeeded: {reason}")

    def failed(self, kind: PoolFailure) -> None:
        """Something has failed in the pool, which goes on."""
        self._count(f"pool/failures_total/{kind}")

    def replaced_service(self) -> None:
        self._timeline.forget("service")
        self._count("service/replaced_total")

    def note(self, numbers: dict[str, float]) -> None:
        """Further numbers of the step under way, by name of the catalogue."""
        self._extra.update(numbers)

    def trained(self, versions: dict[str, int], workers: int, current: int, target: int) -> None:
        """The step's training has ended. Its weights go out next, so the versions that workers hold now are those they sampled with.

        Args:
            versions: of each worker, by name.
            workers, current, target: how many there are, hold the newest weights, and are wanted.
        """
        self._versions = versions
        self.note({"pool/workers": workers, "pool/current_workers": current, "pool/target_workers": target})

    def saved(self, path: Path, step: int, seconds: float) -> None:
        self.note({"time/checkpoint_s": seconds, "checkpoint/last_step": step, "checkpoint/last_time_s": time.time()})
        self.event("info", f"checkpoint {path} in {shown(self._extra, 'time/checkpoint_s')}", EventKind.SAVED)

    def evaluated(self, result: Evaluation, prompts: Sequence[Prompt]) -> None:
        metrics = StepMetrics(result.step, result.metrics())
        self.disk.line(metrics.step, self._folder.append_evaluation, metrics)
        self._publish(metrics)
        self._view.evaluation(metrics)
        self.disk.file(self._folder.write_trajectories, result.step, result.text(prompts), "held_out")
        if self._config.metrics.trajectories_per_step:
            self.disk.file(self._folder.write_tokens, result.step, lambda path: held_out_tokens(result, prompts).save(path), "held_out")
        self.keep_event("info", f"held-out accuracy after {result.step} steps: {result} (95% Wilson), {shown(metrics, 'held_out/seconds')}")
        if (cut := cut_remark(result.trajectories, self._config.rollout.limit_of_answers)) is not None:
            self.event("warning", f"held-out questions after {result.step} steps: {cut}")
        if result.failed:
            failed = f"{result.failed} of {len(result.trajectories)} held-out answers could not be scored, and are left out of the accuracy"
            self.event("warning", f"{failed}; the first: {result.first_failure}")

    def keep_scatter(self, sample: ScatterSample | None) -> None:
        """Write what the report draws pi_prox against mu from."""
        if sample is not None:
            self.disk.file(self._folder.write_file, self._folder.scatter_path.name, sample.save)

    # -- steps -------------------------------------------------------------------------------------------------------

    def training_begins(self, elapsed_s: float) -> None:
        """The clock of the first step starts here, that of the run `elapsed_s` ago."""
        self._step_ended = time.monotonic()
        self._began = time.monotonic() - elapsed_s

    def end_step(
        self,
        number: int,
        version: int,
        batch: PreparedBatch,
        result: StepResult,
        phases: Mapping[str, float],
        counts: Mapping[str, int],
        discarded: Sequence[DiscardedGroup],
        loads: Awaitable[dict[str, WorkerLoad]],
        observe: Observe,
    ) -> None:
        """Take stock of a step that ends now; what is noted from here on belongs to the next one. Its line is written a moment later.

        Args:
            number: from 1.
            version: of the weights after it.
            phases: seconds by phase of the loop.
            counts: of the book.
            discarded: groups given up since the step before.
            loads: of the workers, as they answer now.
            observe: called at the latest when the next step ends.
        """
        self._begin_line()  # of the step before, if it was so short
        now = time.monotonic()
        seconds, self._step_ended = now - self._step_ended, now
        metrics = StepMetrics(number, {"weight_version": version, "time/elapsed_s": now - self._began, "time/step_s": seconds})
        differences, beyond = self._probes.take()
        for line in [*self._repeated.take(), *beyond]:
            self.event("warning", f"step {number}: {line}")
        for group in discarded:
            self._count(DISCARD_COUNTERS[group.reason])
        self._count("steps/skipped_total", result.skipped_steps - result.overflowed_steps)
        if result.loss_scale is not None:
            self._count("steps/overflowed_total", result.overflowed_steps)
        self._totals |= {f"groups/{name}_total": counts[name] for name in ("admitted", "trained", "discarded")}
        outstanding = counts["in_flight"] + counts["finished"] + counts["drawn"]
        metrics.update({"groups/finished": counts["finished"], "groups/outstanding": outstanding})
        metrics.update(self._extra | {"time/driver_late_s": self._clock.read()})
        metrics.update({name: total for name, total in self._totals.items() if not name.startswith("monitor/")})
        metrics.update(sync_metrics(self._receipts, differences) | worker_metrics(self._finished, self._versions))
        step = _EndedStep(batch, result, metrics, phases, loads, self._finished, observe)
        self._ended = step, asyncio.get_running_loop().call_later(_LATER_S, self._begin_line)
        self._finished, self._receipts, self._extra = {}, [], {}

    async def flush(self) -> None:
        """Wait until all ended steps are written (a cancelled wait stops no writing). Raises: DeadlineExceeded if one never is."""
        self._begin_line()
        self._timeline.flush()
        deadlines = self._config.deadlines
        if self._writing is not None:
            wait, limit_s = asyncio.shield(self._writing), flush_s(deadlines.step_s)
            await wait_for(wait, "numbers of the last steps", deadline_s=limit_s, counts_from=lambda: self._written_at)
        await wait_for_disk(self.disk.done(), "lines of the last steps", deadline_s=deadlines.disk_s, notice=self.waiting)

    def stop_waiting(self) -> None:
        """Write steps' lines from now on without waiting for loads and diagnostics: the process may have only seconds left."""
        self._no_waiting.set()

    def abandon(self) -> None:
        """Give up the steps whose diagnostics are still awaited: they get no line. A flush has waited for them long enough."""
        if self._writing is not None:
            abandon(self._writing)
        self._writing = None

    def roll_back(self, totals: Mapping[str, float], step: int) -> None:
        """Called when the run goes back to an earlier step, with that step's totals; the folder has been cut back."""
        self._totals = {**totals, _RETURNS: self._totals.get(_RETURNS, 0.0) + 1}
        self._finished, self._receipts, self._extra = {}, [], {}
        self._timeline.forget()  # ranks and service begin anew, perhaps on other nodes
        self._probes.forget()
        self._views = views_from_an_earlier_step(self._views, self._folder, step)

    def totals(self) -> dict[str, float]:
        """Running totals, for a checkpoint."""
        return dict(self._totals)

    def _begin_line(self) -> None:
        """Have the line of the step that has ended written, after that of the step before."""
        if self._ended is not None:
            (step, later), self._ended = self._ended, None
            later.cancel()
            observed = asyncio.ensure_future(step.observe(step.metrics.step, step.batch.version, step.result))
            self._writing = asyncio.create_task(self._write(step, observed, self._writing))

    async def _write(self, step: _EndedStep, observed: Awaitable[Observation | None], previous: asyncio.Task[None] | None) -> None:
        batch, result, metrics = step.batch, step.result, step.metrics
        number = metrics.step
        if previous is not None:
            await previous
        await self._tell_skipped(number, batch, result)
        has_tools = any(one.environment is not None and one.environment.tool_parser is not None for one in self._config.rollout.entries)
        metrics.update(self._bounded(batch_metrics(batch, correct_at=self._config.correct_at, has_tools=has_tools)))
        metrics.update(learner_metrics(result) | learner_share(step.phases, batch.tokens, metrics["time/step_s"]))
        self.disk.line(number, self._folder.append_answer_lengths, number, first_lengths(batch.groups))
        if self._config.metrics.trajectories_per_step:
            self.disk.file(self._folder.write_trajectories, number, trajectories_text(batch.groups, batch.examples, step=number))
        loads = await unless_set(self._no_waiting, step.loads) or {}
        by_turn = self._config.correction.advantage.is_by_turn
        metrics.update(rollout_metrics(step.groups, loads, self._loads, metrics["time/step_s"], by_turn=by_turn))
        are_up = self._endpoint.workers  # some may have left
        self._loads = {name: load for name, load in ((self._loads or {}) | loads).items() if name in are_up}
        await self._take_observation(metrics, observed, batch)
        metrics.update({name: value for name, value in undiagnosed(result).items() if name not in metrics})
        metrics.update({name: total for name, total in self._totals.items() if name.startswith("monitor/")})
        metrics.update({"files/failures_total": self.disk.failures} if self.disk.failures else {})
        self.disk.line(number, self._folder.append_metrics, metrics)
        self._write_slowest()
        self._publish(metrics)
        self._view.step(metrics)
        self._written_at = asyncio.get_running_loop().time()

    async def _tell_skipped(self, step: int, batch: PreparedBatch, result: StepResult) -> None:
        """Say of what the learner has left updates out; a batch that was not finite is kept for study."""
        if result.overflowed_steps and result.loss_scale is not None:
            what = f"step {step}: {counted(result.overflowed_steps, 'update')} left out: the gradient overflowed in float16"
            what += "; the loss scale is {} now"
            self.event("info", shown({"learner/loss_scale": result.loss_scale}, "learner/loss_scale", what))
        if SkipReason.NOT_FINITE in result.skipped:
            said = await unless_set(self._no_waiting, keep_and_describe(self._folder.keep_skipped_batch, step, batch, result))
            self.event("warning", said or f"step {step}: updates left out; its batch is not kept any more")

    async def _take_observation(self, metrics: StepMetrics, observed: Awaitable[Observation | None], batch: PreparedBatch) -> None:
        """Add the diagnostics, once they are there, and say what the monitor has seen."""
        step = metrics.step
        try:
            what = f"diagnostics of step {step} <- correction service"
            found = await wait_for(unless_set(self._no_waiting, observed), what, deadline_s=self._config.deadlines.step_s)
        except (EvenkeelError, RayError) as error:  # the step's other numbers must not be lost with them
            self.event("warning", f"no diagnostics of step {step}: {error}")
            return
        if found is None:
            self._count("monitor/left_out_total")
            return
        self.did(found.told)
        if found.info is not None:  # again and again: one that was replaced has another port
            self._endpoint.joined(found.info)
        metrics.update(diagnostic_metrics(found.diagnostics))
        metrics.update({"time/diagnose_s": found.seconds, "time/service_late_s": found.late_s, "monitor/level": found.state.rank})
        self.disk.line(step, self._folder.append_clipped_tokens, step, found.clipped)
        if (tokens := found.tokens) is not None:
            self.disk.file(self._folder.write_tokens, step, lambda path: tokens.save(path, group_rows(batch.groups)))
        for event in found.events:
            self._warned(event)

    def _warned(self, event: Event) -> None:
        """The monitor has seen a symptom come, grow or go."""
        self.disk.line(event.step, self._folder.append_monitor_event, event)
        self.event(LEVEL_OF_STATE[event.state], f"step {event.step}: {event.message}")
        if family := _OF_STATE.get(event.state):
            self._count(family + event.name)

    def _publish(self, metrics: StepMetrics) -> None:
        for view in self._views:
            self.disk.line(metrics.step, view.write, metrics)
        self._endpoint.publish(metrics)

    def _bounded(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """A step's numbers, without those of parts of the reward that came after the first MOST_PARTS."""
        new = [name for name in numbers if name.startswith(_PART) and name not in self._reward_parts]
        self._reward_parts.update(new[: MOST_PARTS - len(self._reward_parts)])
        too_many = [name for name in new if name not in self._reward_parts]
        if too_many and not self._has_said_parts:
            self._has_said_parts = True
            others = f"{too_many[0].removeprefix(_PART)!a} and other new ones train as before, but have no metric"
            self.event("warning", f"the reward function has named more than {MOST_PARTS} parts: {others}")
        return {name: value for name, value in numbers.items() if name not in too_many}

    def _add_slow(self, one: SlowPrompt) -> None:
        if len(self._slowest) < _KEPT_SLOWEST or one > self._slowest[-1]:
            self._slowest = sorted([*self._slowest, one], reverse=True)[:_KEPT_SLOWEST]
            self._has_slower = True

    def _write_slowest(self) -> None:
        if self._has_slower:
            self._has_slower = False
            self.disk.file(self._folder.write_text, SLOWEST_FILE, json.dumps([asdict(one) for one in self._slowest], indent=1))

    def _count(self, name: str, amount: float = 1) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + amount

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, *, within_s: float = 30.0) -> None:
        """Args: within_s: time for the disk to take what is left; what it doesn't take is reported."""
        for line in self._repeated.take():
            self.event("warning", f"after the last step: {line}")
        self._clock.stop()
        self._endpoint.close()
        self._timeline.flush()
        if lost := self.disk.close(within_s=within_s, last=self._close_views):
            self._view.event("warning", lost)

    def hangs(self) -> bool:
        """Whether, after `close`, the disk or a view is in a call that has not come back."""
        return self.disk.hangs or any(view.hangs for view in self._views)

    def _close_views(self) -> None:
        for view in self._views:
            try:
                view.close()
            except Exception as error:  # a package's own: what is drawn of a run must not end it, nor stand in place of how it ended
                self.event("warning", f"{type(view).__name__} was not closed in order: {error}")


class RepeatedWarnings:
    """Warnings that may come by the hundred: the first of a kind goes out at once, the others together, counted and with one example."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._waiting: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, example: str) -> str | None:
        """Add a warning. Returns: the text to report at once; None if it is only counted.

        Args:
            kind: in words, in the plural, such as "trajectories without a reward".
            example: this one, in words.
        """
        if kind not in self._known:
            self._known.add(kind)
            return f"{example} (further {kind} are counted, and reported once a step)"
        count, first = self._waiting.get(kind, (0, example))
        self._waiting[kind] = (count + 1, first)
        return None

    def take(self) -> list[str]:
        """One line for each kind with counted warnings; the counts start anew."""
        waiting, self._waiting = self._waiting, {}
        return [f"{kind}: {count} more, the first: {first}" for kind, (count, first) in waiting.items()]


class ProbeWatch:
    """The probe of each weight sync against what its type of numbers allows at the model's depth.

    A cause is reported once, not at each version. The first probe of an engine is of weights that checksums have compared, so a
    difference there means other kernels. A much larger one later means that weights haven't arrived.
    """

    def __init__(self, limits: ProbeLimits) -> None:
        self._limits = limits
        self._differences: list[float] = []
        # Engines that were probed: their first weights had been compared by checksums.
        self._verified: set[str] = set()
        # Largest difference and median at such weights, of the engines that differ most; None: none was probed yet.
        self._equal: tuple[float, float] | None = None
        # Engines that were beyond the limits when they were last probed.
        self._beyond: set[str] = set()
        # Newest version with a warning.
        self._reported = -1
        # Version -> further engines beyond the limits, with their largest difference.
        self._more: dict[int, list[tuple[float, str]]] = {}

    def forget(self) -> None:
        """Start anew, after a return to a checkpoint: the present versions are withdrawn."""
        self._differences, self._reported, self._more = [], -1, {}
        self._beyond.clear()

    def add(self, worker: str, version: int, differences: Sequence[float]) -> str | None:
        """Add a probe's result. Returns: a warning, if this engine is the first of its version that has come to be beyond the limits.

        Args:
            differences: of each token's logprob, nats.
        """
        is_verified, was_beyond = worker not in self._verified, worker in self._beyond
        largest = max(differences) if not any(map(math.isnan, differences)) else math.inf
        median = statistics.median(differences) if math.isfinite(largest) else math.inf
        self._differences.append(largest)
        after = self._limits.after(*self._equal) if self._equal else self._limits
        limits = self._limits if is_verified else after
        if is_verified:
            self._verified.add(worker)
            if math.isfinite(largest):
                self._equal = (max(largest, self._equal[0]), max(median, self._equal[1])) if self._equal else (largest, median)
        if limits.are_kept(largest, median) or after.are_kept(largest, median):
            self._beyond.discard(worker)
            return None
        self._beyond.add(worker)
        if was_beyond:
            return None
        if version <= self._reported:
            self._more.setdefault(version, []).append((largest, worker))
            return None
        self._reported = version
        allowed = f"{limits.largest:.2g}" + (f", median {limits.median:.2g}" if math.isfinite(limits.median) else "")
        why = (
            "checksums agree, so the engines compute otherwise at equal weights: evenkeel diff-engines MODEL names the operator"
            if is_verified
            else "the engine doesn't have the learner's weights"
        )
        return (
            f"weights v{version} on rollout worker {worker}: the probe prompt's logprobs differ from the learner's by up to "
            f"{_DIFFERENCE.text(largest)}, median {_DIFFERENCE.number(median)} (allowed: {allowed}; "
            f"weight_sync.max_probe_difference): {why}"
        )

    def take(self) -> tuple[list[float], list[str]]:
        """The largest difference of each probe, and a line for each version with further engines beyond the limits. Both start anew."""
        lines = []
        for version, found in self._more.items():
            largest, worker = max(found)
            engines = counted(len(found), "further rollout worker")
            lines.append(f"weights v{version} are beyond the probe's limits on {engines}, most on {worker}, by {_DIFFERENCE.text(largest)}")
        differences, self._differences, self._more = self._differences, [], {}
        return differences, lines
