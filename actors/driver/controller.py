"""The controller: starts the parts, runs the training loop and shuts everything down. It knows every part; no part knows it.

The loop is `_train`; what runs at the same time (sampling, weight sync, the next batch, evaluations) lives in the parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from evenkeel.actors.carriers import Observation, PreparedBatch, StoredGroup
from evenkeel.actors.checkpoints.state import TrainingState
from evenkeel.actors.checkpoints.writer import CheckpointWriter
from evenkeel.actors.cluster.hub import outline_folder
from evenkeel.actors.cluster.placement import RankPlaces, reserve, still_there
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.alarms import AlarmResponse, after_batch
from evenkeel.actors.driver.batches import BatchSource
from evenkeel.actors.driver.evaluation import Evaluations
from evenkeel.actors.driver.no_learning import EmptySteps, LearningWatch, refuse_unscored
from evenkeel.actors.driver.parts import StartingPoint, make_sync, start_learner, worker_settings
from evenkeel.actors.driver.recovery import (
    Lost,
    Rollbacks,
    end_parts,
    lost_among,
    raise_when_lost,
    what_goes_on,
    what_is_done_again,
    what_is_lost,
)
from evenkeel.actors.metrics.held_out import Evaluation
from evenkeel.actors.pool.pool import RolloutPool
from evenkeel.actors.pool.scaling import first_workers
from evenkeel.actors.processes import signals
from evenkeel.actors.processes.children import beating
from evenkeel.actors.processes.disk import DaemonThreads
from evenkeel.actors.processes.lane import Lane
from evenkeel.actors.processes.pacing import Stopwatch
from evenkeel.actors.processes.signals import ShutdownSignals
from evenkeel.actors.processes.supervision import abandon, argument_gone, done_or_reported, kill, unless_failed, unless_set, wait_for
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.record.disk_waits import ByDisk, by_disk
from evenkeel.actors.record.recorder import Recorder
from evenkeel.actors.record.run_folder import Checkpoint, EventKind, RunFolder
from evenkeel.actors.record.step_numbers import mixture_metrics
from evenkeel.actors.settings.true_on_policy import check_batch, metrics_of
from evenkeel.actors.weights.weight_sync import WeightSync
from evenkeel.correction.errors import EvenkeelError, StepAborted, counted
from evenkeel.rollout.tasks.mixture import Mixture, first_of_each
from evenkeel.rollout.trajectory import Prompt, SyncReceipt

if TYPE_CHECKING:
    from evenkeel.learner.results import StepResult


T = TypeVar("T")
_END_S = 30.0  # for each of the things that are still to be done when a run ends


ENDED_BY_ALARM = 3
"""Exit code of a run that was ended with a checkpoint by monitor.on_alarm = stop, or because dynamic sampling found too few groups; 1 and
2 are errors."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended."""

    steps: int
    before: Evaluation | None
    after: Evaluation | None
    seconds: float
    stopped_early: bool
    alarm: str = ""
    """Why the monitor, or a want of groups, ended it; empty: neither did."""
    ended_by: int | None = None
    """The signal that ended it before its last step."""

    @property
    def exit_code(self) -> int:
        """Exit code of `evenkeel train`, whose --help lists them."""
        if self.alarm:
            return ENDED_BY_ALARM
        return 0 if self.ended_by in (None, signal.SIGINT) else signals.exit_code(self.ended_by)


class Controller:
    """One run, from the start of its actors to the last checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        task: Mixture,
        recorder: Recorder,
        *,
        resume_from: tuple[Checkpoint, TrainingState] | None = None,
    ) -> None:
        self._config, self._folder, self._task, self._recorder = config, folder, task, recorder
        self._warn = partial(recorder.event, "warning")
        self._by_disk: ByDisk = partial(by_disk, deadlines=config.deadlines, notice=recorder.waiting)

        # Where the run stands.
        self._point = StartingPoint(config.model, *(resume_from or ()))
        self._step, self._version = self._point.step, self._point.version
        self._generation = 0
        self._began = time.monotonic() - self._point.elapsed_s
        self._is_begun = self._step > 0  # the evaluation before training is over, or left out
        self._goes_on = False  # training is under way since this starting point
        self._is_trained = False  # all steps that there will be are done and saved
        self._first_evaluation: Evaluation | None = None
        self.summary: RunSummary | None = None  # of a run that has done and saved all that it had to

        # What ends it early.
        self._shutdown = ShutdownSignals(self._announce_end, self._abort_step, lambda: self._checkpoints.saved_step)
        self._alarm = ""  # why an alarm, or a want of groups, ends the run; empty: none does
        self._no_batch = asyncio.Event()
        self._learning = LearningWatch(config, recorder.event, self._short_of_groups)

        self._lane = Lane("driver")

        # Of the whole run. `_start` adds the rollout pool, its evaluations and the places of ranks.
        self._watch = Stopwatch()
        self._rollbacks = Rollbacks(folder, task)
        self._held_out: Sequence[Prompt]
        self._places: RankPlaces
        self._pool: RolloutPool
        self._evaluations: Evaluations
        self._ends = contextlib.AsyncExitStack()  # of what has been started

        # From one starting point on. `_open_book` and `_start_parts` add the book with the service, the learner and its weight sync.
        self._alarms = AlarmResponse(config.monitor, config.correction, self._point.replacement)
        self._lengths = self._point.lengths
        self._checkpoints = CheckpointWriter(folder, recorder, config.checkpoint, config.deadlines, begins_at=self._step)
        self._step_under_way: StepUnderWay | None = None
        self._ends_of_parts = contextlib.AsyncExitStack()
        self._parts: dict[str, Any] = {}  # actors without which the run can't go on, by name
        self._are_up = False  # all of them, with the first weights in an engine: from then on the service can be replaced
        self._source: BatchSource
        self._empty_steps: EmptySteps
        self._learner: LearnerGroup
        self._kept: LearnerGroup | None = None  # ranks that are up; they may stay when the run goes back to a checkpoint
        self._sync: WeightSync

    async def run(self) -> RunSummary:
        """Train to the configured number of steps, until Ctrl-C, or until an alarm that is to end the run; needs a running Ray.

        Raises: EvenkeelError kinds, with what to change.
        """
        with self._shutdown.handled():
            self._lane.add("start", self._lane.made_at, time.monotonic(), why="Ray")
            self._recorder.serve()
            try:
                with self._span("start", why="workers"):
                    await self._start()
                return await self._until_done()
            finally:
                with self._span("end"):
                    await self._end()

    async def _start(self) -> None:
        config, recorder = self._config, self._recorder
        self._held_out = first_of_each(self._task.held_out_prompts(), config.evaluation.problems)
        keep = partial(self._folder.keep_model_files, outline_folder(self._point.weights)[0])
        await self._by_disk(recorder.disk.result(keep), "config and tokenizer of the model")
        workers, ranks = first_workers(config.rollout, config.places), config.learner.world_size
        recorder.phase(f"starting {counted(workers, 'rollout worker')} and {counted(ranks, 'learner rank')}")
        await self._open_book()
        self._places = await reserve(config)  # before engines take the GPUs
        self._start_pool()

    async def _open_book(self, *, filters: bool | None = None) -> None:
        self._empty_steps = EmptySteps(self._config.max_staleness, self._recorder.event)
        self._source = await BatchSource.opened(self._config, self._point, self._folder, self._recorder, self._by_disk, filters=filters)

    def _start_pool(self) -> None:
        config = self._config
        self._pool = RolloutPool(
            worker_settings(config, self._folder.model_path.absolute(), first_of_each(self._held_out, 1)),
            config.deadlines,
            self._source.book,
            self._source.changes,
            self._recorder,
            config.places,
            self._finished,
        )
        self._ends.push_async_callback(self._ended, "pool", self._pool.stop)
        self._evaluations = Evaluations(
            config.evaluation,
            config.deadlines,
            self._pool,
            self._held_out,
            self._recorder,
            steps=config.steps,
            correct_at=config.correct_at,
            counts_from=self._pool.attended_since,
        )
        self._ends.push_async_callback(self._ended, "evaluations", self._evaluations.abandon)
        self._pool.start(has_scored=self._step > 0)

    def _finished(self, group: StoredGroup) -> None:
        """A worker has sampled and scored it."""
        self._task.finished(group.facts)
        self._learning.finished(group)

    async def _until_done(self) -> RunSummary:
        """The run from the start of its parts on. When one of them dies it is replaced, or the run goes back (recovery.py)."""
        prepare: Callable[[], Coroutine[Any, Any, None]] = self._start_parts
        after: Evaluation | None = None
        while True:
            try:
                await self._while_pool_works(prepare())
                await self._while_pool_works(self._while_parts_live(self._until_trained()))
                after = await self._while_pool_works(self._evaluate_last())
                break
            except (EvenkeelError, ray.exceptions.RayError) as error:
                failure = error
            lost = await lost_among(self._parts, failure)
            is_replaced = self._are_up and self._is_begun and lost.is_replaceable and not self._pool.has_failed
            if not self._goes_on_after(lost, failure, is_replaced=is_replaced):
                break
            if is_replaced:
                prepare = partial(self._replace, lost, failure)
            else:
                prepare = self._roll_back
                with self._span("restore", why=f"{lost} gone"):
                    await self._withdraw(lost, failure)  # until then the pool's failure is the one that takes the run back
        with self._span("end", why="last lines"):
            return await self._finish(after)

    @contextlib.contextmanager
    def _span(self, what: str, *, version: int | None = None, why: str | None = None) -> Iterator[None]:
        """A block that is a span of the driver's lane. Args: as the fields of Span."""
        try:
            with self._lane.span(what, version=version, why=why):
                yield
        finally:
            self._recorder.did(self._lane.report())

    async def _while_pool_works(self, work: Coroutine[Any, Any, T]) -> T:
        return await unless_failed(work, self._pool.raise_on_failure())

    async def _while_parts_live(self, work: Coroutine[Any, Any, T]) -> T:
        return await unless_failed(work, raise_when_lost(self._parts, self._config.deadlines.part_heartbeat_s, self._recorder.event))

    def _goes_on_after(self, lost: Lost, failure: BaseException, *, is_replaced: bool) -> bool:
        """Whether parts are replaced, or the run goes back. If not, all is trained and saved. Raises: what ends the run."""
        self._shutdown.is_training = self._shutdown.is_training and is_replaced
        if self._is_trained and self._ends_early:
            return False
        if self.ended_by is not None and lost and not is_replaced:  # would start all parts to save its last step
            self._warn(f"not saved: {failure}; a resume goes on from step {self._checkpoints.saved_step}")
            raise asyncio.CancelledError
        try:
            self._rollbacks.allow(lost, failure, saved=self._checkpoints.saved_step, step=self._step, is_replaced=is_replaced)
        except (EvenkeelError, ray.exceptions.RayError) as error:
            if not self._is_trained:
                raise
            self._warn(f"the evaluation after training is left out ({error}); `evenkeel eval` can make it")
            return False
        return True

    # -- parts -------------------------------------------------------------------------------------------------------

    async def _start_parts(self) -> None:
        """Start service and learner at the starting point; return when one engine holds the first weights. Book and pool are there."""
        with self._span("start", why="service and learner"):
            await self._start_state()
        with self._span("publish", version=self._version, why="first weights"):
            await self._start_weights()

    async def _start_state(self) -> None:
        config, recorder = self._config, self._recorder
        self._source.start(self._alarms.correction)
        self._ends_of_parts.callback(self._source.stop)
        self._parts |= self._source.parts
        if self._kept is None:
            self._places = await still_there(self._places, config)
        self._learner, infos = await start_learner(config, self._point, self._places, self._parts, self._kept)
        self._kept, self._learner.told = self._learner, recorder.did
        for info in infos:
            recorder.joined(info)
        for level, note in self._alarms.notes():
            recorder.event(level, note)

    async def _start_weights(self) -> None:
        config, recorder = self._config, self._recorder
        self._sync = make_sync(
            config,
            self._learner,
            self._held_out[0].token_ids,
            recorder,
            self._pool,
            generation=self._generation,
            on_receipt=self._receipt,
        )
        self._ends_of_parts.push_async_callback(self._ended, "weight sync", self._sync.close)
        await self._pool.first_worker()
        recorder.doing("sending the first weights to the engines")
        await self._sync.publish()
        self._pool.follow(self._sync)
        await self._sync.receipts(self._version, deadline_s=config.deadlines.receipts_s, is_one_enough=True)
        self._are_up = True

    def _receipt(self, receipt: SyncReceipt) -> None:
        self._pool.wake()
        self._recorder.receipt(receipt)

    async def _replace(self, lost: Lost, failure: BaseException) -> None:
        """Replace the service; learner and engines keep running."""
        self._recorder.doing(f"{lost} gone: new ones start, rollouts go on")
        await unless_set(self._shutdown.is_asked, self._rollbacks.pause(self._recorder.event))
        if self._step_under_way is not None and self._step_under_way.has_lost_its_batch:
            self._step_under_way = None
        under_way = self._step_under_way
        with self._span("start", why="a new service"):
            self._source.replace(self._alarms.correction, self._version if under_way is None else under_way.batch.version + 1)
            self._parts |= self._source.parts
            if under_way is None:  # it may have been asked for logprobs
                await self._learner.settled()
        self._recorder.replaced_service()
        self._warn(what_goes_on(lost, failure, step=self._step))

    async def _withdraw(self, lost: Lost, failure: BaseException) -> None:
        """End what holds the run's state, and what is under way with it. All steps that are finished are written."""
        self._warn(what_is_lost(lost, failure))
        self._recorder.doing(f"{lost} gone: going back to the last checkpoint")
        self._are_up = self._goes_on = False
        self._drop_step()
        await self._evaluations.abandon()
        await self._pool.withdraw()
        self._kept, self._parts = await end_parts(self._parts, self._kept, lost, self._recorder.waiting)
        await self._ends_of_parts.aclose()
        await done_or_reported(self._checkpoints.finished(), "checkpoint under way", _END_S, self._warn)
        await done_or_reported(self._recorder.flush(), "lines of the last steps", _END_S, self._warn)
        self._checkpoints.abandon()
        self._recorder.abandon()

    async def _roll_back(self) -> None:
        """Go back to the last checkpoint, when no part of the run is left that could still change something."""
        step, version = self._step, self._version
        with self._span("restore", why="the last checkpoint"):
            await self._by_disk(self._checkpoints.off_disk(), "what it still does for an abandoned checkpoint")
            self._point, said = await self._rollbacks.found(self._config.model, self._recorder.disk, self._recorder.event, self._by_disk)
        self._generation += 1
        self._warn(what_is_done_again(self._point, step=step, version=version, generation=self._generation))
        for level, sentence in said:
            self._recorder.event(level, sentence)
        self._step, self._version, self._is_trained = self._point.step, self._point.version, self._point.step >= self._config.steps
        self._recorder.roll_back(self._point.totals, self._step)
        config = self._config
        self._alarms = AlarmResponse(config.monitor, config.correction, self._point.replacement)
        self._lengths = self._point.lengths
        self._checkpoints = CheckpointWriter(self._folder, self._recorder, config.checkpoint, config.deadlines, begins_at=self._step)
        await self._open_book(filters=self._source.book.filters)  # a run that has given the filter up did so for what it would meet again
        self._pool.serve(self._source.book, self._source.changes, self._generation)
        await self._start_parts()

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def _until_trained(self) -> None:
        """Train to the last step, and save it; with replaced parts this goes on where it was."""
        if not self._is_begun:
            with self._span("evaluate", version=self._version, why="before training"):
                self._first_evaluation = await self._evaluations.whole("before training", self._step, self._version, self._sync)
            refuse_unscored(self._first_evaluation)
        if not self._goes_on:
            gc.freeze()  # a full garbage collection need not walk through all that the imports made
            self._recorder.phase("training")
            self._recorder.training_begins(time.monotonic() - self._began)
        self._is_begun = self._goes_on = self._shutdown.is_training = True
        prompts = map(self._task.train_prompt, itertools.count(self._source.book.admitted))
        feeding = self._pool.feed(prompts, self._source.take_unfinished(), self._source.ledger.hand_out, self._recorder.admitted)
        await unless_failed(self._train_and_save(), feeding)
        self._shutdown.is_training, self._is_trained = False, True

    async def _train_and_save(self) -> None:
        await self._train()
        with self._span("save", version=self._version):
            await self._checkpoints.save_with_retries(self._step, self._save)
        await self._by_disk(self._recorder.disk.result(self._source.ledger.flush), "the ledger's lines")

    async def _train(self) -> None:
        while self._step_under_way or (self._step < self._config.steps and not self._ends_early):
            await self._checkpoints.finished(at_once=True)
            if self._step_under_way is None:
                next_one = unless_set(self._no_batch, self._next_batch())
                if (batch := await unless_set(self._shutdown.is_asked, next_one)) is None:
                    break
                self._step_under_way = StepUnderWay(batch, self._learn_and_publish)
            if (result := await self._step_under_way.result()) is None:
                self._warn(f"step {self._step + 1} was aborted; a resume trains on its groups")
                break
            with self._span("settle", version=self._step_under_way.batch.version):
                await self._settle(self._step_under_way.batch, result)
            self._evaluations.begin_if_due(self._step, self._version)
            if self._checkpoints.is_due(self._step):
                with self._span("save", version=self._version):
                    await self._save()
            await self._answer_alarms()

    async def _next_batch(self) -> PreparedBatch:
        await self._by_disk(self._recorder.disk.room(), f"room for the lines of step {self._step + 1}")
        self._recorder.doing(f"step {self._step + 1}: waiting for its batch; rollouts go on")
        with self._watch.phase("wait_learner") as wait, self._span("wait", version=self._version, why="a batch"):
            self._pool.learner_waits(self._version, wait)
            batch = self._source.next(self._version, self._learner, self._pool, step=self._step)
            return await batch

    async def _learn_and_publish(self, batch: PreparedBatch) -> Any:
        result = await self._learn(batch)
        if (config := self._config).true_on_policy:
            with self._span("compare", version=batch.version):
                found = await self._source.compared(batch.version, result)
            if said := check_batch(found, config.true_on_policy_on_difference, step=self._step + 1):
                self._warn(said)
            if found is not None:
                self._recorder.note(metrics_of(found))
        with self._span("publish", version=self._version + 1):
            await self._publish()  # engines take it while we go on
        return result

    async def _learn(self, batch: PreparedBatch) -> Any:
        self._recorder.doing(f"step {self._step + 1} in training; rollouts go on")
        with self._watch.phase("train"), self._span("step", version=batch.version):
            scale = self._lengths.rate_scale if self._config.monitor.length_decay else 1.0
            return await self._learner.step(batch.corrected, batch.correction, step=self._step, rate_scale=scale)

    async def _publish(self) -> None:
        """The new weights, as the next version, if the engines are to have it."""
        self._version += 1
        self._recorder.trained(self._pool.versions(), *self._pool.counts(), self._pool.target)
        self._recorder.note(self._pool.occupancy())
        if self._version % self._config.weight_sync.every_steps == 0 or self._evaluations.is_due(self._step + 1):
            await self._sync.publish()

    async def _settle(self, batch: PreparedBatch, result: Any) -> None:
        """Record a finished step in book, ledger and metrics. Args: result: the learner's."""
        step, took = self._step + 1, self._watch.read()
        counts, discarded = self._source.settle(step, batch, version=self._version, published=self._sync.version)
        self._step, self._step_under_way = step, None
        self._follow_lengths(batch)
        loads = asyncio.create_task(self._pool.loads(self._version))
        self._recorder.note(mixture_metrics(self._task))
        self._recorder.end_step(step, self._version, batch, result, took, counts, discarded, loads, self._observe)
        self._learning.trained()
        self._empty_steps.note(step, batch, result)

    def _follow_lengths(self, batch: PreparedBatch) -> None:
        """Have the learning rate fall if answers grow long. Args: batch: trained just now."""
        tokens = [answer.response_tokens for group in batch.groups for answer in group.valid]
        if self._config.monitor.length_decay is None or not tokens:
            return
        self._recorder.note({"monitor/rate_scale": self._lengths.rate_scale})  # with which it was trained
        self._lengths, said = after_batch(self._lengths, statistics.fmean(tokens), self._config.monitor)
        if said:
            self._warn(said)

    async def _observe(self, step: int, version: int, result: StepResult) -> Observation | None:
        """Ask the service for the diagnostics of a step. Args: version: of its batch."""
        observation: Observation | None = await self._source.service.observe.remote(step, version, result)
        if observation is not None:
            self._alarms.take(observation.events)
            self._source.monitor = observation.monitor
        return observation

    async def _answer_alarms(self) -> None:
        """Do what is configured about the alarms that have come."""
        if self._alarm or not self._alarms.has_some:
            return
        await self._recorder.flush()  # the alarm is reported before what it leads to
        if (action := self._alarms.decide()) is not None and action.replacement is not None:
            self._warn(action.text)
            await unless_set(self._shutdown.is_hurried, self._source.switch(action.replacement.correction))
        elif action is not None and self._step < self._config.steps:
            self._announce_end(action.text)
            self._alarm = action.text

    def _short_of_groups(self, reason: str) -> None:
        """Called when dynamic sampling discards nearly all groups."""
        if self._config.dynamic_sampling_on_shortage == "train":
            self._warn(f"{reason}. From here on the run trains on all groups, as dynamic_sampling_on_shortage = train asks for")
            self._source.book.filters = False
        elif self._step < self._config.steps:
            saved = " with a checkpoint" if self._step else ""
            self._announce_end(f"no batch comes together: {reason}. The run ends{saved}")
            self._alarm = reason
            self._no_batch.set()

    async def _save(self) -> None:
        """Save a checkpoint. The learner is idle."""
        await self._checkpoints.finished()
        self._recorder.doing(f"checkpoint of step {self._step}")
        await self._recorder.flush()  # a resume goes on after this step: its line and counts have to be there by then
        await self._answer_alarms()  # and what its diagnostics have set off
        await self._checkpoints.begin(self._step, self._learner, self._training_state)

    async def _training_state(self) -> TrainingState:
        drawn = self._task.state  # of the same moment as the book's contents: groups go on finishing while their tokens are fetched
        book, monitor = await self._source.saved(self._pool, self._shutdown.is_hurried)
        mark = await self._by_disk(self._recorder.disk.result(self._source.ledger.flush), "the ledger's lines")
        return TrainingState(
            self._step,
            self._version,
            time.monotonic() - self._began,
            book,
            self._recorder.totals(),
            monitor,
            self._alarms.replacement,
            mark,
            self._task.fingerprint,
            self._lengths,
            self._config.model_dump(mode="json"),
            drawn,
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    @property
    def ended_by(self) -> int | None:
        """The signal that has asked for the end."""
        return self._shutdown.by

    @property
    def _ends_early(self) -> bool:
        return self.ended_by is not None or bool(self._alarm)

    def _announce_end(self, text: str) -> None:
        self._warn(text, kind=EventKind.ENDING)

    def _abort_step(self) -> None:
        """Called at SIGTERM, whose sender may kill in a few seconds: abort the step under way, so that finished steps are saved."""
        self._recorder.stop_waiting()
        self._aborting = asyncio.create_task(done_or_reported(self._learner.abort(), "end of the step under way", _END_S, self._warn))

    def _drop_step(self) -> None:
        if self._step_under_way is not None:
            self._step_under_way.drop()
            self._step_under_way = None

    async def _evaluate_last(self) -> Evaluation | None:
        if self._ends_early:
            return None
        with self._span("evaluate", version=self._version, why="after training"):
            whole = self._evaluations.whole("after training", self._step, self._version, self._sync)
            return await self._shutdown.unless_interrupted(whole)

    async def _finish(self, after: Evaluation | None) -> RunSummary:
        is_early = self._step < self._config.steps
        self.summary = RunSummary(
            self._step,
            self._first_evaluation,
            after,
            seconds=time.monotonic() - self._began,
            stopped_early=is_early,
            alarm=self._alarm,
            ended_by=self.ended_by if is_early else None,
        )
        self._shutdown.done(self.summary.exit_code)
        await self._recorder.flush()
        await unless_set(self._shutdown.is_hurried, self._source.keep_scatter())
        return self.summary

    async def _end(self) -> None:
        """Stop all parts that were started. A checkpoint that is being written is finished first, unless the run ends at once."""
        self._recorder.doing("ending")
        self._drop_step()
        if not (at_once := self._shutdown.is_at_once):
            await done_or_reported(self._checkpoints.finished(), "checkpoint under way", self._config.deadlines.checkpoint_s, self._warn)
        await done_or_reported(self._recorder.flush(), "lines of the last steps", 1.0 if at_once else _END_S, self._warn)
        self._checkpoints.abandon()
        await self._ends_of_parts.aclose()
        await self._ends.aclose()
        kill(*self._parts.values())

    async def _ended(self, name: str, end: Callable[[], Awaitable[None]]) -> None:
        with contextlib.suppress(EvenkeelError, ray.exceptions.RayError):
            await wait_for(end(), f"end of {name}", deadline_s=_END_S)


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


def run_controller(controller: Controller, *, silence_s: float) -> RunSummary:
    """The run, to its end. Args: silence_s: after so long without a sign of life it counts as hung.

    Raises: Interrupted if a signal has ended it at once.
    """
    try:
        return asyncio.run(_run_with_daemon_threads(controller, silence_s))
    except asyncio.CancelledError:
        if controller.ended_by is None:
            raise
        raise signals.Interrupted(controller.ended_by) from None


async def _run_with_daemon_threads(controller: Controller, silence_s: float) -> RunSummary:
    """Run with threads that don't keep the process alive if they hang, on its disk above all."""
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    with beating(silence_s):
        return await controller.run()
