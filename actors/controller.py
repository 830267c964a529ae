"""The controller: starts the parts, turns the loop, ends cleanly. It knows every part; no part knows it.

The loop is `_train`; what runs beside it (sampling, weight sync, the next batch, evaluations) lives in the parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray

from actors import interrupts
from actors.alarms import AlarmResponse
from actors.carriers import ForwardRequest, PreparedBatch, Ticket
from actors.cluster import beside_the_driver, lower_priority
from actors.config import RunConfig
from actors.correction_service import CorrectionService, ServiceConfig
from actors.evaluation import Evaluation, Evaluations
from actors.forwards import next_batch
from actors.learner_group import LearnerGroup
from actors.payloads import whole_snapshot
from actors.pool import RolloutPool
from actors.record.checkpoint_writer import CheckpointWriter
from actors.record.observer import Observer
from actors.record.run_folder import Checkpoint, RunFolder
from actors.record.step_teller import StepTeller
from actors.resume import TrainingState, open_ledger
from actors.rollout_worker import WorkerSettings
from actors.supervision import Stopwatch, abandon, counted, unless_failed, wait_for
from actors.trajectory_queue import TrajectoryQueueActor
from actors.true_on_policy import checked, describe, metrics_of
from actors.weight_sync import WeightSync
from correction.errors import EvenkeelError
from correction.schedule import needs_topk
from rollout.tasks import Task
from rollout.trajectory import Prompt, SyncReceipt

_BATCH_IS_LATE_S = 0.1
"""The last step is told while the learner waits for a batch, if it waits longer than that."""
_END_S = 30.0
"""For each of the things that are still to be done when a run ends."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended."""

    steps: int
    before: Evaluation | None
    after: Evaluation | None
    seconds: float
    stopped_early: bool
    alarm: str = ""
    """Why the monitor ended it; empty: it didn't."""
    ended_by: int | None = None
    """The signal that ended it before its last step."""


class Controller:
    """One run, from the start of its actors to the last checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        task: Task,
        observer: Observer,
        *,
        resume_from: tuple[Checkpoint, TrainingState] | None = None,
    ) -> None:
        self._folder, self._task, self._observer = folder, task, observer
        self._reference = config.model
        self._resume_from = resume_from[0] if resume_from else None
        self._state = resume_from[1] if resume_from else None
        self._weights = (self._resume_from.hf if self._resume_from else config.model).resolve()
        self._config = config
        self._step = self._state.step if self._state else 0
        self._version = self._state.weight_version if self._state else 0
        self._began = time.monotonic() - (self._state.elapsed_s if self._state else 0.0)
        self._is_training = False
        self.ended_by: int | None = None
        """The signal that has asked for the end."""
        self._alarms = AlarmResponse(config, self._state.replacement if self._state else None)
        self._alarm = ""
        """Why an alarm ends the run; empty: none does."""
        self._last_evaluation: asyncio.Task[Evaluation | None] | None = None
        self._steps = StepTeller(observer, on_events=lambda events: self._alarms.take(events))
        self._checkpoints = CheckpointWriter(folder, observer, config.checkpoint, config.deadlines)
        self._ends_at_once = False
        self._watch = Stopwatch()

    async def run(self) -> RunSummary:
        """Train to the configured number of steps, until Ctrl-C, or until an alarm that is to end the run; needs a running Ray.

        Raises: EvenkeelError kinds, with what to change.
        """
        with self._handled_interrupts():
            self._observer.serve()
            try:
                await self._start()
                summary: RunSummary = await unless_failed(self._whole_run(), self._pool.raise_on_failure())
                return summary
            finally:
                await self._end()

    async def _whole_run(self) -> RunSummary:
        before = None
        if self._step == 0:
            before = await self._evaluate_now("before training")
        gc.freeze()  # a full garbage collection need not walk through all that the imports made
        self._observer.training_begins(time.monotonic() - self._began)
        feeding = asyncio.create_task(self._pool.feed(self._prompts(), self._unfinished, self._observer.admitted))
        feeding.add_done_callback(self._pool.note_end)
        self._is_training = True
        self._observer.phase("training")
        try:
            await self._train()
        finally:
            feeding.cancel()
        await self._checkpoints.insist(self._step, self._save)
        await asyncio.to_thread(self._ledger.flush)
        self._is_training = False
        after = None if self._ends_early else await self._evaluate_last()
        await self._steps.flush()
        self._observer.keep_scatter(await self._ask(self._service.scatter))
        ended_by = self.ended_by if self._step < self._config.steps else None
        return RunSummary(self._step, before, after, time.monotonic() - self._began, self._ends_early, self._alarm, ended_by)

    @property
    def _ends_early(self) -> bool:
        return self.ended_by is not None or bool(self._alarm)

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        config = self._config
        while self._step < config.steps and not self._ends_early:
            await self._checkpoints.finished(at_once=True)
            batch = await self._next_batch()
            result = await self._learn(batch)
            await self._compare_bits(batch, result)
            await self._publish()  # engines take it while we go on
            discarded, counts, outstanding = await self._ask(self._queue.advance, self._version, [group.group_id for group in batch.groups])
            self._step += 1
            trained = [group.prompt_id for group in batch.groups]
            self._ledger.settle(self._step, trained=trained, discarded=discarded, outstanding=outstanding, counts=counts)
            self._steps.end_step(self._step, self._version, batch, result, self._watch.read(), counts, discarded)
            if self._checkpoints.is_due(self._step):
                await self._save()
            await self._answer_alarms()
            self._evaluations.begin_if_due(self._step, self._version)

    async def _publish(self) -> None:
        """The new weights, as the next version."""
        self._version += 1
        self._observer.trained()
        with self._watch.phase("publish"):
            await self._sync.publish()

    async def _ask(self, method: Any, *arguments: Any) -> Any:
        """A short call to the queue or the service."""
        what = f"{method._method_name} at v{self._version} <- queue or service"
        return await wait_for(method.remote(*arguments), what, deadline_s=self._config.deadlines.sync_s)

    async def _next_batch(self) -> PreparedBatch:
        self._observer.doing(f"step {self._step + 1}: waiting for its batch; rollouts go on")
        with self._watch.phase("wait_learner"):
            sync_s, is_moving = self._config.deadlines.sync_s, self._pool.is_moving
            batch = next_batch(self._ask_for_batch, self._service, self._learner, deadline_s=sync_s, is_moving=is_moving)
            return await self._steps.beside(batch, after_s=_BATCH_IS_LATE_S)

    async def _ask_for_batch(self) -> PreparedBatch | ForwardRequest:
        deadlines = self._config.deadlines
        return await wait_for(
            self._service.next_batch.remote(self._version),
            f"batch of version {self._version} <- correction service",
            deadline_s=deadlines.batch_s + 30.0,
            counts_from=self._pool.last_progress,
            notice_s=deadlines.notice_s,
            notice=self._observer.waiting,
            detail=lambda: self._queue.waiting_for.remote(self._version),
        )

    async def _learn(self, batch: PreparedBatch) -> Any:
        self._observer.doing(f"step {self._step + 1} in training; rollouts go on")
        with self._watch.phase("train"):
            # Told as soon as the learner has its work: a step's books take the driver and the service as long as a batch's way to it.
            return await self._steps.beside(self._learner.step(batch.corrected, batch.correction, step=self._step), after_s=0.0)

    async def _answer_alarms(self) -> None:
        """Do what is configured about the alarms that have come."""
        action = self._alarms.decide()
        if action is None or self._alarm:
            return
        await self._steps.flush()  # the alarm is told before what it leads to
        if action.replacement is not None:
            self._observer.event("warning", action.text)
            await self._ask(self._service.switch, action.replacement.correction)
        elif self._step < self._config.steps:
            self._observer.event("warning", action.text)
            self._alarm = action.text

    async def _compare_bits(self, batch: PreparedBatch, result: Any) -> None:
        """True on-policy: before the new weights go anywhere. Raises: EngineError at the first difference, if that ends the run."""
        if self._config.true_on_policy:
            agreement = checked(self._config, await self._ask(self._service.compared, batch.version, (result.values,)), step=self._step + 1)
            if agreement.first is not None:
                self._observer.event("warning", f"step {self._step + 1}: {describe(agreement)}")
            self._observer.note(metrics_of(agreement))

    # -- evaluation and checkpoints ----------------------------------------------------------------------------------

    async def _evaluate_now(self, when: str) -> Evaluation | None:
        """Evaluate on all held-out problems with the published weights in every engine, and wait for it."""
        await self._evaluations.finished()
        self._observer.phase(f"evaluating {when} on {counted(len(self._held_out), 'held-out problem')}")
        await self._sync.receipts(self._version, deadline_s=self._config.deadlines.receipts_s)
        return await self._evaluations.whole(when, self._step, self._version)

    async def _evaluate_last(self) -> Evaluation | None:
        """None if an interrupt leaves it out: the last checkpoint is on disk, and whoever wants the run to end has waited for that."""
        self._last_evaluation = asyncio.create_task(self._evaluate_now("after training"))
        await asyncio.wait({self._last_evaluation})
        return None if self._last_evaluation.cancelled() else self._last_evaluation.result()

    async def _save(self) -> None:
        """Take a checkpoint of everything. The learner is idle, and nothing of the queue is between two places."""
        await self._checkpoints.finished()
        self._observer.doing(f"checkpoint of step {self._step}")
        await self._steps.flush()  # a resume goes on after this step: its line and counts have to be there by then
        await self._answer_alarms()  # and what its diagnostics have set off
        await self._checkpoints.begin(self._step, self._learner, self._training_state)

    async def _training_state(self) -> TrainingState:
        queue = await whole_snapshot(self._queue, deadline_s=self._config.deadlines.checkpoint_s)
        elapsed_s = time.monotonic() - self._began
        monitor = await self._ask(self._service.monitor_state)
        totals = self._observer.totals()
        mark, replacement = await asyncio.to_thread(self._ledger.flush, queue), self._alarms.replacement
        return TrainingState(self._step, self._version, elapsed_s, queue, totals, monitor, replacement, mark, self._task.fingerprint)

    # -- start and end -----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        config, observer = self._config, self._observer
        self._checkpoints.saved_step = self._step
        self._ledger = open_ledger(self._folder.path / "ledger.jsonl", self._state, observer.event)
        self._held_out = self._task.held_out_prompts()[: config.evaluation.problems]
        self._folder.keep_model_files(self._weights)
        workers, ranks = config.rollout.workers, config.learner.world_size
        observer.phase(f"starting {counted(workers, 'rollout worker')} and {counted(ranks, 'learner rank')}")
        await self._start_queue()
        self._start_pool()
        await self._start_learner()
        self._start_service()
        for actor in (self._queue, self._service):
            lower_priority(actor)
        self._sync = WeightSync(
            config.weight_sync,
            self._learner,
            probe_ids=self._held_out[0].token_ids,
            sync_s=config.deadlines.sync_s,
            on_receipt=self._receipt,
            on_probe=observer.probed,
            on_dirty=observer.dirty,
            on_failure=self._pool.report_unsyncable,
        )
        observer.follow(self._pool, self._learner)
        await unless_failed(self._first_sync(), self._pool.raise_on_failure())

    async def _start_queue(self) -> None:
        config = self._config
        self._queue: Any = beside_the_driver(TrajectoryQueueActor, max_concurrency=4096).remote(
            groups_per_step=config.groups_per_step, max_staleness=config.max_staleness
        )
        self._unfinished: list[Ticket] = []
        if self._state:
            self._unfinished = await self._ask(self._queue.restore, self._state.queue)

    def _start_pool(self) -> None:
        config = self._config
        settings = WorkerSettings(
            rollout=config.rollout,
            model=self._folder.model_path.resolve(),
            sample=self._held_out[0],
            bind=config.metrics.bind,
            resource=config.ray.rollout_resource,
            seed=config.seed,
            topk=needs_topk(config.correction),
        )
        self._pool = RolloutPool(settings, config.deadlines, self._queue, self._observer)
        self._evaluations = Evaluations(config.evaluation, config.deadlines, self._pool, self._held_out, self._observer, steps=config.steps)
        self._evaluations.counts_from = self._pool.attended_since
        self._pool.start()

    async def _start_learner(self) -> None:
        config, deadlines = self._config, self._config.deadlines
        limits = {"start_s": deadlines.start_s, "step_s": deadlines.step_s}
        started = await LearnerGroup.start(config.learner, self._weights, version=self._version, bind=config.metrics.bind, **limits)
        self._learner, infos = started
        for info in infos:
            self._observer.joined(info)
        if self._resume_from:
            await self._learner.restore((self._resume_from.state / "learner").resolve(), self._version, deadline_s=deadlines.checkpoint_s)
        if config.needs_reference:
            await self._learner.load_reference(self._reference.resolve())

    def _start_service(self) -> None:
        for note in self._alarms.notes():
            self._observer.event("info", note)
        monitor = self._state.monitor if self._state else None
        self._service: Any = beside_the_driver(CorrectionService, max_concurrency=64).remote(self._service_config(), self._queue, monitor)
        self._steps.follow(self._service)

    async def _first_sync(self) -> None:
        await self._pool.first_worker()
        self._observer.doing("sending the first weights to the engines")
        await self._sync.publish()
        self._pool.follow(self._sync)
        await self._sync.receipts(self._version, deadline_s=self._config.deadlines.receipts_s)

    def _service_config(self) -> ServiceConfig:
        config = self._config
        return ServiceConfig(
            correction=self._alarms.correction,
            has_reference=config.correction.kl.coefficient > 0,
            groups_per_step=config.groups_per_step,
            max_staleness=config.max_staleness,
            dynamic_sampling=config.dynamic_sampling,
            rollout=config.rollout,
            learner=config.learner,
            deadlines=config.deadlines,
            monitor=config.monitor,
            examples=config.metrics.trajectories_per_step,
        )

    def _prompts(self) -> Iterator[Prompt]:
        start = self._state.prompt_position if self._state else 0
        return (self._task.train_prompt(position) for position in itertools.count(start))

    def _receipt(self, receipt: SyncReceipt) -> None:
        self._pool.wake()
        self._observer.receipt(receipt)

    async def _end(self) -> None:
        """Stop what was started, whatever state it is in. What ended the run need not cost the checkpoint that is being written."""
        self._observer.doing("ending")
        if not self._ends_at_once:
            with contextlib.suppress(EvenkeelError, ray.exceptions.RayError, OSError):
                await wait_for(self._checkpoints.finished(), "checkpoint under way", deadline_s=self._config.deadlines.checkpoint_s)
        try:
            await wait_for(self._steps.flush(), "lines of the last steps", deadline_s=1.0 if self._ends_at_once else _END_S)
        except Exception as error:  # must not stand in place of what ended the run
            self._observer.event("warning", f"the last step's numbers may be incomplete: {error}")
        self._checkpoints.abandon()
        if self._last_evaluation is not None:
            abandon(self._last_evaluation)
        endings: dict[str, Callable[[], Any]] = {
            "_evaluations": lambda: self._evaluations.abandon(),
            "_service": lambda: self._service.stop.remote(),
            "_sync": lambda: self._sync.close(),
            "_pool": lambda: self._pool.stop(),
        }
        for part, end in endings.items():
            if hasattr(self, part):
                with contextlib.suppress(EvenkeelError, ray.exceptions.RayError):
                    await wait_for(end(), f"end of {part.strip('_')}", deadline_s=_END_S)
        if hasattr(self, "_learner"):
            self._learner.kill()

    @contextlib.contextmanager
    def _handled_interrupts(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run after the step under way, with a checkpoint.

        The second, or one before training, ends it at once. One during the last evaluation leaves that out.
        """
        main = asyncio.current_task()

        def interrupt(number: int) -> None:
            is_first, name = self.ended_by is None, interrupts.NAMES[number]
            self.ended_by = number
            if self._is_training and is_first:
                self._observer.event("warning", f"interrupted ({name}): ending after this step with a checkpoint (once more: at once)")
            elif self._last_evaluation is not None and is_first:
                self._observer.event("warning", f"interrupted ({name}): leaving out the evaluation after training")
                self._last_evaluation.cancel()
            elif main is not None:
                self._observer.event("warning", f"interrupted ({name}): ending at once")
                self._ends_at_once = True
                main.cancel()

        with interrupts.handled_in(asyncio.get_running_loop(), interrupt):
            yield
