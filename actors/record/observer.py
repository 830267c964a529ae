"""Receives the run's events: prints and logs them, counts them, and keeps what belongs to a step until the step ends.

Then step_writer.py takes over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from evenkeel.actors.carriers import ActorInfo, DiscardedGroup, PreparedBatch, ScatterSample, Ticket, WaitNotice
from evenkeel.actors.config import RunConfig
from evenkeel.actors.metrics.cut_answers import cut_remark
from evenkeel.actors.metrics.driver_endpoint import DriverEndpoint
from evenkeel.actors.metrics.held_out import Evaluation
from evenkeel.actors.metrics.step_metrics import DISCARD_COUNTERS, StepMetrics, shown
from evenkeel.actors.pool.scaling import ScalingDecision
from evenkeel.actors.processes.event_level import EventLevel
from evenkeel.actors.processes.loop_clock import LoopClock
from evenkeel.actors.record.finished_step import FinishedStep
from evenkeel.actors.record.probe_watch import ProbeWatch
from evenkeel.actors.record.repeated_warnings import RepeatedWarnings
from evenkeel.actors.record.retrying_writer import RetryingWriter
from evenkeel.actors.record.run_event import EventKind, RunEvent
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.step_sources import FAILED_TRAJECTORIES
from evenkeel.actors.record.step_writer import StepWriter
from evenkeel.actors.record.terminal import TerminalView
from evenkeel.actors.record.totals import RunTotals
from evenkeel.actors.settings.probe_limits import ProbeLimits
from evenkeel.correction.errors import counted
from evenkeel.rollout.trajectory import GroupFacts, Prompt, SyncReceipt

if TYPE_CHECKING:
    from evenkeel.actors.pool.pool import RolloutPool
    from evenkeel.actors.weights.weight_sync import SyncTarget
    from evenkeel.learner.results import StepResult

_RETURNS = "steps/returns_total"


class Observer:
    """Is told what happens, and takes stock at the end of each step. It decides nothing about the run."""

    def __init__(self, config: RunConfig, folder: RunFolder, view: TerminalView, totals: dict[str, float] | None = None) -> None:
        """Args: totals: running totals of an earlier part of the run, see `totals()`."""
        self._config, self._folder, self._view = config, folder, view
        self._totals, self._repeated, self._clock = RunTotals(totals), RepeatedWarnings(), LoopClock()
        self._finished: dict[str, list[GroupFacts]] = {}
        self._receipts: list[SyncReceipt] = []
        self._probes = ProbeWatch(ProbeLimits.of_run(config))
        self._versions: dict[str, int] = {}
        self._extra: dict[str, float] = {}
        self._step_ended = self._began = time.monotonic()
        self._endpoint = DriverEndpoint()
        self.disk = RetryingWriter(lambda text: self.event("warning", text))
        """Made and ended here; the driver's ledger writes by it, too."""
        self.steps = StepWriter(config, folder, view, self.disk, self._endpoint, self._totals, self.event)

    def roll_back(self, totals: Mapping[str, float], step: int) -> None:
        """Called when the run goes back to an earlier step, with that step's totals; the folder has been cut back."""
        self._totals.go_on_from({**totals, _RETURNS: self._totals[_RETURNS] + 1})
        self._finished, self._receipts, self._extra = {}, [], {}
        self._probes.forget()
        self.steps.roll_back(step)

    def replaced_service(self) -> None:
        self._totals.count("service/replaced_total")

    # -- actors ------------------------------------------------------------------------------------------------------

    def follow(self, pool: RolloutPool) -> None:
        """Set the rollout workers, which are asked for their loads at each step."""
        self._pool = pool

    def serve(self) -> None:
        """Open the run's endpoint and the service discovery; needs a running Ray."""
        self._clock.start()
        url = self._endpoint.serve(self._config.metrics.bind, self._config.metrics.discovery_port)
        self.event("info", f"Prometheus service discovery at {url}")

    def joined(self, info: ActorInfo) -> None:
        self._endpoint.joined(info)
        self.event("info", f"{info.role} {info.name} is up (process {info.pid}{info.detail and f', {info.detail}'})")

    def left(self, worker: str) -> None:
        """A rollout worker is gone."""
        self._endpoint.left(worker)
        self.steps.left(worker)

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

    def admitted(self, tickets: Sequence[Ticket]) -> None:
        self._totals.count("groups/admitted_total", len(tickets))

    def group_finished(self, group: GroupFacts, worker: str) -> None:
        """Args: worker: name of the one that sampled it."""
        self._finished.setdefault(worker, []).append(group)
        self.steps.slowest.add(group, worker)
        self._totals.count("rollout/generated_tokens_total", group.response_tokens)
        self._totals.count("rollout/finished_groups_total")
        for kind, error in group.failures:
            counter, words = FAILED_TRAJECTORIES[kind]
            self._totals.count(counter)
            if line := self._repeated.add(words, f"group {group.group_id}: a trajectory failed: {error}"):
                self.event("warning", line)

    def handed_back(self, groups: int, tokens: int) -> None:
        self._totals.count("pool/handed_back_total", groups)
        self._totals.count("pool/handed_back_tokens_total", tokens)

    def scaled(self, decision: ScalingDecision) -> None:
        self._totals.count(f"pool/scaled_total/{decision.cause}")
        self.event("info", f"the pool goes to {counted(decision.target, 'rollout worker')} ({decision.cause}): {decision.reason}")

    def lost(self, tickets: Sequence[Ticket]) -> None:
        """The tokens of finished groups went with a node, or with a worker that had them still, or did not come in time."""
        self._totals.count("groups/lost_total", len(tickets))
        line = f"{counted(len(tickets), 'finished group')} could not be read (gone with a node or a worker, or late) and are sampled again"
        self.event("warning", f"{line}: {', '.join(ticket.prompt.prompt_id for ticket in tickets[:4])}{' ...' * (len(tickets) > 4)}")

    def receipt(self, receipt: SyncReceipt) -> None:
        self._receipts.append(receipt)

    def probed(self, target: SyncTarget, version: int, differences: Sequence[float]) -> None:
        """The probe prompt's logprobs of an engine differ by so much from the learner's at the same weights, token by token."""
        if line := self._probes.add(target.name, version, differences):
            self.event("warning", line)

    def dirty(self, target: SyncTarget, reason: str) -> None:
        self._totals.count("sync/failures_total")
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
        self.steps.evaluated(metrics)
        self.disk.file(self._folder.write_trajectories, result.step, result.text(prompts), "held_out")
        self.keep_event("info", f"held-out accuracy after {result.step} steps: {result} (95% Wilson), {shown(metrics, 'held_out/seconds')}")
        if (cut := cut_remark(result.trajectories, self._config.rollout.sampling.max_tokens)) is not None:
            self.event("warning", f"held-out questions after {result.step} steps: {cut}")
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
        discarded: Sequence[DiscardedGroup],
    ) -> FinishedStep:
        """Take stock of a step that ends now; what is noted from here on belongs to the next one.

        Args:
            phases: seconds of the loop.
            counts: of the queue.
            discarded: groups given up since the step before.
        """
        now = time.monotonic()
        seconds, self._step_ended = now - self._step_ended, now
        loads = asyncio.create_task(self._pool.loads(version))
        differences, beyond = self._probes.take()
        for line in [*self._repeated.take(), *beyond]:
            self.event("warning", f"step {number}: {line}")
        for group in discarded:
            self._totals.count(DISCARD_COUNTERS[group.reason])
        self._totals.count("steps/skipped_total", result.skipped_steps - result.overflowed_steps)
        if result.loss_scale is not None:
            self._totals.count("steps/overflowed_total", result.overflowed_steps)
        noted = self._extra | {"time/driver_late_s": self._clock.read()} | self._queue_numbers(counts) | self._totals.counted
        elapsed_s, groups, receipts = now - self._began, self._finished, self._receipts
        self._finished, self._receipts, self._extra = {}, [], {}
        return FinishedStep(
            number, version, batch, result, elapsed_s, seconds, phases, loads, groups, self._versions, receipts, differences, noted
        )

    def keep_scatter(self, sample: ScatterSample | None) -> None:
        """Write what the report draws pi_prox against mu from."""
        if sample is not None:
            self.disk.file(self._folder.write_file, self._folder.scatter_path.name, sample.save)

    def totals(self) -> dict[str, float]:
        """Running totals, for a checkpoint."""
        return self._totals.all()

    def hangs(self) -> bool:
        """After `close`: the disk or a view is in a call that has not come back."""
        return self.disk.hangs or self.steps.hangs

    def close(self, *, within_s: float = 30.0) -> None:
        """Args: within_s: time for the disk to take what is left; what it doesn't take is reported."""
        for line in self._repeated.take():
            self.event("warning", f"after the last step: {line}")
        self._clock.stop()
        self._endpoint.close()
        if lost := self.disk.close(within_s=within_s, last=self.steps.close_views):
            self._view.event("warning", lost)

    def _queue_numbers(self, counts: dict[str, int]) -> dict[str, float]:
        self._totals.put({f"groups/{name}_total": counts[name] for name in ("admitted", "trained", "discarded")})
        return {"queue/groups": counts["finished"], "queue/outstanding": counts["in_flight"] + counts["finished"] + counts["drawn"]}
