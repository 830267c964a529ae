"""A run whose engines and learner replay: controller, book, correction service, pool, weight sync and recorder are a run's own.

The controller's loop is what drives it, so that ledger, metrics line and events are paid for as in a run. It starts no engine and no
Megatron, takes no checkpoint, and notes when things happen.
"""

from __future__ import annotations

import asyncio
import io
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from rich.console import Console

from benchmarks.late_loop import LateLoop, LongestHalt
from benchmarks.process_use import StoreUse, Uses
from benchmarks.replayed_parts import SAMPLES, ReplayedRank, ReplayPool, WideShape, WorkerHost
from evenkeel.actors.carriers import PreparedBatch, Ticket, WaitNotice, WorkerSettings
from evenkeel.actors.checkpoints.state import open_ledger
from evenkeel.actors.config import CheckpointConfig, EarlyWarningConfig, RunConfig, WeightSyncConfig
from evenkeel.actors.driver.batches import BatchSource
from evenkeel.actors.driver.controller import Controller, EmptySteps
from evenkeel.actors.driver.evaluation import Evaluations
from evenkeel.actors.driver.parts import make_sync
from evenkeel.actors.processes.pacing import LoopClock
from evenkeel.actors.processes.supervision import kill, unless_failed
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.record.recorder import Recorder
from evenkeel.actors.record.run_folder import EventKind, RunFolder
from evenkeel.actors.record.terminal import TerminalView
from evenkeel.actors.settings.environment import OF_BATCHES
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.actors.weights.weight_sync import SyncTarget
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.errors import ConfigError
from evenkeel.rollout.config import RolloutConfig
from evenkeel.rollout.trajectory import GroupFacts, Prompt, SyncReceipt
from lab.simulate.costs import AnswerLengths

PROMPT_TOKENS = 200
P50, P99 = 0.8825, 2.824
"""Of lognormal lengths whose mean is 1 (sigma 0.5)."""
CORRECTION = CorrectionConfig.model_validate({"preset": "tis-token"})
WARM_UP = 2
"""Number of first steps that are left out."""
_JOIN_S = 120.0
_RECEIPT_S = 60.0
_FIRST_RECEIPTS_S = 300.0
_SETTLE_S = 0.1


@dataclass
class Figures:
    """Of a run."""

    admission_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    gap_unpublished_s: list[float] = field(default_factory=list)
    """Of `gap_s`: those after a step whose weights weren't published."""
    last_group_s: list[float] = field(default_factory=list)
    """From the end of the step before until the batch's last group was finished; 0: it was by then."""
    receipts_s: list[float] = field(default_factory=list)
    probes: int = 0
    """Comparisons of an engine's logprobs of the probe with the learner's."""
    tokens: int = 0
    seconds: float = 0.0
    late_s: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    """Of actors, as Uses.calls."""
    idle: dict[str, float] = field(default_factory=dict)
    """Of each process, as Uses.idle_share."""
    lost: int = 0
    """Number of workers that were killed."""
    counts: dict[str, float] = field(default_factory=dict)
    """Of the run, by name of the catalogue."""
    start_s: float = 0.0
    """From publishing version 0 to the last of all workers' receipts, which have checksums; not counted anywhere else."""
    start_cpu_s: float = 0.0
    """Of the driver, in that time."""
    start_late_s: float = 0.0
    """Longest time for which the driver's loop stood still, in that time."""
    verified: int = 0
    """Number of receipts with checksums after that."""
    exports: dict[int, int] = field(default_factory=dict)
    """Copies that the learner made, by version."""
    wide: list[int] = field(default_factory=list)
    """Bytes of each group's wide fields; 0: too few for an object of their own."""
    stored: int = 0
    """Bytes by which the object store has grown."""


@dataclass(frozen=True)
class ReplayedShape:
    """Of a run."""

    workers: int
    groups: int
    """Of a step."""
    tokens: int
    """Mean length of an answer."""
    rate: float
    """Tokens a second that engines and learner would make if nothing else took time."""
    steps: int
    hosts: int
    """Processes that the workers share."""
    churn: int = 0
    """Workers that die in the time of a step; others join in their places."""
    wide: WideShape = field(default_factory=WideShape)
    recorded: AnswerLengths | None = None
    """None: lengths are lognormal, of mean `tokens`."""
    prompt_tokens: int = PROMPT_TOKENS
    every: int = 1
    """Steps from one published version to the next."""

    @property
    def lengths(self) -> AnswerLengths:
        if self.recorded is not None:
            return self.recorded
        return AnswerLengths.lognormal(max(1.0, P50 * self.tokens), P99 * self.tokens, max_tokens=8 * self.tokens)

    @property
    def step_s(self) -> float:
        return self.groups * SAMPLES * self.tokens / self.rate

    @property
    def config(self) -> RunConfig:
        requests = max(SAMPLES, (self.every + 1) * self.groups * SAMPLES // self.workers)  # all that admission allows
        rollout = RolloutConfig.model_validate(
            {
                "task": {"kind": "file", "path": "none"},
                "reward": {"kind": "exact_match"},
                "workers": self.workers,
                "sampling": {"samples_per_group": SAMPLES, "max_tokens": self.lengths.max_tokens},
                "engine": {"device": "cpu", "max_running_requests": requests, "return_routed_experts": self.wide.layers > 0},
            }
        )
        config = RunConfig(
            model=Path("model"), steps=self.steps + WARM_UP, groups_per_step=self.groups, max_staleness=self.every, rollout=rollout,
            correction=CORRECTION, monitor=EarlyWarningConfig(detailed=False), checkpoint=CheckpointConfig(every_steps=0),
            weight_sync=WeightSyncConfig(every_steps=self.every),
        )  # fmt: skip
        return with_devices(config, has_gpu=False)


def prompt_of(number: int, tokens: int = PROMPT_TOKENS) -> Prompt:
    return Prompt(f"replayed/0/{number}", "question " * 20, tuple(range(tokens)), "answer")


def recorded_shape(lengths: AnswerLengths, mean: int | None) -> tuple[AnswerLengths, int]:
    """(lengths of a recorded run as long as they were, or scaled to this mean; their mean), tokens.

    Raises: ConfigError if some are longer than the run's recipe lets answers be: they would be cut, and their mean another one.
    """
    if (longest := max(lengths.recorded)) > lengths.max_tokens:
        raise ConfigError(f"{lengths.description}: {longest} tokens, above the max_tokens of the run's recipe, {lengths.max_tokens}")
    own = statistics.fmean(lengths.recorded)
    scaled = [max(1, round(one * (mean or own) / own)) for one in lengths.recorded]
    description = lengths.description + (f", {mean / own:.3g} times as long" if mean else "")
    return AnswerLengths.like(scaled, description, max_tokens=max(scaled)), max(1, round(statistics.fmean(scaled)))


class TimedRecorder(Recorder):
    """A run's recorder that also records how long places waited, and prints warnings."""

    def __init__(self, config: RunConfig, folder: RunFolder, figures: Figures, *, steps: int) -> None:
        super().__init__(config, folder, TerminalView(steps, "replayed", console=Console(file=io.StringIO(), width=200)))
        self.figures, self.freed_at = figures, 0.0
        self.finished_at: dict[int, float] = {}
        """By id of each group that is under way."""

    def event(self, level: str, text: str | WaitNotice, kind: EventKind = EventKind.NONE) -> None:
        super().event(level, text, kind)
        if level != "info":
            print(f"  {level}: {text}", flush=True)

    def probed(self, target: SyncTarget, version: int, differences: Sequence[float]) -> None:
        super().probed(target, version, differences)
        self.figures.probes += 1

    def group_finished(self, group: GroupFacts, worker: str) -> None:
        super().group_finished(group, worker)
        self.figures.wide.append(group.wide_bytes)
        self.finished_at[group.group_id] = time.monotonic()

    def admitted(self, tickets: Sequence[Ticket]) -> None:
        super().admitted(tickets)
        if self.freed_at:
            self.figures.admission_s += [time.monotonic() - self.freed_at] * len(tickets)


class ReplayedRun(Controller):
    """A run's driver, with parts that replay."""

    def __init__(self, shape: ReplayedShape, *, profile: str) -> None:
        """Start the parts; workers join as they come."""
        self._store = StoreUse()
        self.shape, self.figures, self.profile = shape, Figures(), profile
        self._prompt = partial(prompt_of, tokens=shape.prompt_tokens)
        self._temporary = tempfile.TemporaryDirectory(prefix="ek-replayed-")
        config = shape.config
        folder = RunFolder.create(Path(self._temporary.name) / "run", "replayed")
        self.recorder = TimedRecorder(config, folder, self.figures, steps=config.steps)
        task: Any = SimpleNamespace(train_prompt=self._prompt)
        super().__init__(config, folder, task, self.recorder)
        self._is_begun = True  # without an evaluation
        self.recorder.serve()
        self._empty_steps = EmptySteps(config.max_staleness, self.recorder.event)
        ledger = open_ledger(folder.path / "ledger.jsonl", None, self.recorder.event, self.recorder.disk.do)
        self._source = BatchSource(config, self._point, ledger, self.recorder)
        self._parts |= self._source.parts
        self._source.start(CORRECTION)
        self.rank = ray.remote(ReplayedRank).options(num_cpus=0, runtime_env={"env_vars": OF_BATCHES}).remote(shape.step_s)
        self._learner = LearnerGroup([self.rank], version=0, step_s=600.0)
        self._begin_pool()
        probe_ids, pool = self._prompt(0).token_ids, self._pool
        self._sync = make_sync(config, self._learner, probe_ids, self.recorder, pool, generation=0, on_receipt=self._receipt)
        self._waits: list[asyncio.Task[None]] = []
        self._late: LateLoop | None = None
        self._clock, self._counted_from, self._learned_at = LoopClock(), 0.0, time.monotonic()

    def _begin_pool(self) -> None:
        shape, config = self.shape, self._config
        topk = shape.wide.topk
        settings = WorkerSettings(config.rollout, Path("model"), self._prompt(0), bind="127.0.0.1", resource="rollout", topk=topk)
        source = self._source
        self._pool = ReplayPool(settings, config.deadlines, source.book, source.changes, self.recorder, config.places)
        host = ray.remote(WorkerHost).options(num_cpus=0, max_concurrency=4096)
        token_s = shape.step_s / 4 / shape.tokens
        seeds = range(shape.hosts)
        self._pool.hosts = [host.remote(settings, shape.lengths.afresh(seed), token_s, shape.wide) for seed in seeds]
        how = {"steps": config.steps, "correct_at": config.correct_at}
        self._evaluations = Evaluations(config.evaluation, config.deadlines, self._pool, [], self.recorder, **how)

    service = property(lambda self: self._source.service)
    learner = property(lambda self: self._learner)
    sync = property(lambda self: self._sync)
    pool = property(lambda self: self._pool)

    @property
    def actors(self) -> dict[str, Any]:
        hosts = {f"host {number}": one for number, one in enumerate(self.pool.hosts)}
        return {"service": self.service, "rank": self.rank} | hosts

    async def join(self) -> None:
        """All workers, with the weights of version 0. Raises: TimeoutError if they take too long, or what the pool fails with."""
        self.pool.start()
        self.pool.follow(self.sync)
        async with asyncio.timeout(_JOIN_S):
            await self.pool.tasks.until(lambda: self.pool.counts()[0] == self.shape.workers)
        await self._first_weights()

    async def _first_weights(self) -> None:
        """To all workers, verified."""
        figures, halts, cpu_s, began = self.figures, LongestHalt(), time.process_time(), time.monotonic()
        await self.sync.publish()
        await self.sync.receipts(0, deadline_s=_FIRST_RECEIPTS_S)
        figures.start_s, figures.start_cpu_s = time.monotonic() - began, time.process_time() - cpu_s
        figures.start_late_s = halts.end()
        if figures.verified != self.shape.workers:
            raise SystemExit(f"{figures.verified} receipts with checksums from {self.shape.workers} workers that have just started")
        figures.verified = 0

    async def train(self, uses: Uses) -> dict[str, tuple[float, int]]:
        """Steps that don't count, then those that do. Returns: of each process, CPU seconds and bytes of these, besides.

        Raises: what the pool fails with, and LedgerError where prompts are lost.
        """
        self._uses = uses
        self._clock.start()
        await unless_failed(self._until_trained(), self.pool.raise_on_failure())
        figures = self.figures
        await asyncio.gather(*self._waits)
        await self.recorder.flush()
        figures.counts = dict(self._folder.read_metrics()[-1])
        figures.exports = await self.rank.exports.remote()
        return self._used

    # -- the controller's loop, with notes of when it comes where ----------------------------------------------------------

    async def _train_and_save(self) -> None:
        dying = asyncio.create_task(self._churn())
        try:
            await unless_failed(self._train(), self._stays(dying))
        finally:
            dying.cancel()
        figures = self.figures
        figures.seconds, figures.late_s = time.monotonic() - self._counted_from, self._clock.read()
        if self._late is not None:
            print(self._late.end(), flush=True)
        self._used = self._uses.end()
        figures.calls, figures.stored = self._uses.calls, self._store.grown

    async def _learn(self, batch: PreparedBatch) -> Any:
        is_published = self.sync.version == self._version
        gaps = self.figures.gap_s if is_published else self.figures.gap_unpublished_s
        gaps.append(time.monotonic() - self._learned_at)
        finished_at = max(self.recorder.finished_at.pop(group.group_id) for group in batch.groups)
        self.figures.last_group_s.append(max(0.0, finished_at - self._learned_at))
        result = await super()._learn(batch)
        self._learned_at = time.monotonic()
        return result

    async def _publish(self) -> None:
        await super()._publish()
        if self.sync.version == self._version:
            self._waits.append(asyncio.create_task(self._receipts()))

    async def _learn_and_publish(self, batch: PreparedBatch) -> Any:
        result = await super()._learn_and_publish(batch)
        self.recorder.freed_at = time.monotonic()  # the book frees the batch's places now
        return result

    async def _settle(self, batch: PreparedBatch, result: Any) -> None:
        await super()._settle(batch, result)
        self.figures.tokens += batch.tokens
        if self._step == WARM_UP:
            await self._count_from_here()

    async def _count_from_here(self) -> None:
        figures = self.figures
        self._uses.begin()
        await asyncio.sleep(_SETTLE_S)  # so that by how much this was late is read here
        self._clock.read()
        self._late = LateLoop() if self.profile == "late" else None
        figures.admission_s, figures.gap_s, figures.gap_unpublished_s, figures.last_group_s, figures.receipts_s = [], [], [], [], []
        figures.probes = figures.tokens = 0
        self._counted_from = time.monotonic()
        self._learned_at = time.monotonic()

    def _receipt(self, receipt: SyncReceipt) -> None:
        super()._receipt(receipt)
        self.figures.verified += bool(receipt.digest)

    async def _receipts(self) -> None:
        began = time.monotonic()
        await self.sync.receipts(self.sync.version, deadline_s=_RECEIPT_S)
        self.figures.receipts_s.append(time.monotonic() - began)

    async def _churn(self) -> None:
        """Kill randomly chosen engines, one after the other, at even intervals."""
        chance, dead = random.Random(0), set[str]()
        while self.shape.churn:
            await asyncio.sleep(self.shape.step_s / self.shape.churn)
            if names := [name for name in self.pool.joined_names() if name not in dead]:
                dead.add(name := chance.choice(names))
                await self.pool.end_engine(name)
                self.figures.lost = len(dead)

    @staticmethod
    async def _stays(task: asyncio.Task[None]) -> None:
        """Never returns. Raises: what the task fails with."""
        await task
        await asyncio.Event().wait()

    async def close(self) -> None:
        self._source.stop()
        await self.sync.close()
        await self.pool.stop()
        kill(*self.actors.values())
        self._clock.stop()
        self.recorder.close()
        self._folder.close()
        self._temporary.cleanup()
