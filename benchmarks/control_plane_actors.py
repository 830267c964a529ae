"""What the control plane's own actors cost: the real queue, correction service, pool and weight sync over Ray; engines and learner replay.

    python benchmarks/control_plane_actors.py [--workers 10,50,100] [--groups 64] [--tokens 1000] [--rate 300000] [--steps 6] [--hosts 1]

Engines sleep and hand over groups of real size, cut from made-up buffers; a learner of one rank answers with logprobs near the sampled
ones. Many workers share a process. Printed for each number of workers and of groups: processor seconds for each million tokens trained,
process by process, what of them a process takes in that time without any work, and by how much its anonymous memory has grown; how long a
place that has become free waits for its group (p50, p99); what the learner waits between two steps; from publishing a version to the last
worker's receipt; how late the driver's event loop was; how many calls of Ray's the processes made for a group; and the tokens a second at
which the first of the single processes would have no time left; before that, what Ray takes for a call that does nothing. With --profile
also in which threads, or functions of their event loops, or what the driver's loop was doing while it was late.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.carriers import ActorInfo, GroupSummary, Ticket
from actors.cluster.cluster import beside_the_driver
from actors.config import DeadlinesConfig, EarlyWarningConfig, RunConfig, WeightSyncConfig
from actors.pool.rollout_worker import WorkerSettings
from actors.pool.scaling import ScalingDecision
from actors.processes.loop_clock import LoopClock
from actors.processes.supervision import unless_failed
from actors.queue.queue_actor import TrajectoryQueueActor
from actors.ranks.forwards import next_batch
from actors.ranks.learner_group import LearnerGroup
from actors.record.step_report import batch_metrics, learned_numbers
from actors.service.correction_service import CorrectionService
from actors.settings.environment import OF_BATCHES, OF_SERVICE
from actors.weights.weight_sync import WeightSync
from benchmarks.call_floor import CallFloor
from benchmarks.late_loop import LateLoop
from benchmarks.process_use import Uses
from benchmarks.replayed_parts import SAMPLES, ReplayedRank, ReplayPool, WorkerHost
from benchmarks.sides import ROOT, options
from correction.config import CorrectionConfig
from rollout.config import RolloutConfig
from rollout.trajectory import Prompt

PROMPT_TOKENS = 200
CORRECTION = CorrectionConfig.model_validate({"preset": "tis-token"})
_WARM_UP = 2
"""Steps that don't count."""
_JOIN_S = 120.0
_RECEIPT_S = 60.0
_SETTLE_S = 0.1


@dataclass
class Figures:
    """Of a run."""

    admission_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    receipts_s: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    late_s: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    """Of actors, as Uses.calls."""
    idle: dict[str, float] = field(default_factory=dict)
    """Of each process, as Uses.idle_share."""


class QuietObserver:
    """Of the pool: counts what it is told."""

    def __init__(self, figures: Figures) -> None:
        self.figures, self.freed_at = figures, 0.0

    def joined(self, info: ActorInfo) -> None: ...

    def left(self, key: str) -> None: ...

    def group_finished(self, summary: GroupSummary) -> None: ...

    def handed_back(self, groups: int, tokens: int) -> None: ...

    def scaled(self, decision: ScalingDecision) -> None: ...

    def lost(self, tickets: Sequence[Ticket]) -> None: ...

    def event(self, level: str, text: str) -> None:
        print(f"  {level}: {text}", flush=True)

    def admitted(self, tickets: Sequence[Ticket]) -> None:
        if self.freed_at:
            self.figures.admission_s += [time.monotonic() - self.freed_at] * len(tickets)


def prompts() -> Iterator[Prompt]:
    ids = tuple(range(PROMPT_TOKENS))
    number = 0
    while True:
        yield Prompt(f"replayed/0/{number}", "question " * 20, ids, "answer")
        number += 1


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

    @property
    def step_s(self) -> float:
        return self.groups * SAMPLES * self.tokens / self.rate

    @property
    def rollout(self) -> RolloutConfig:
        requests = max(SAMPLES, 2 * self.groups * SAMPLES // self.workers)  # all that admission allows
        return RolloutConfig.model_validate(
            {
                "task": {"kind": "file", "path": "none"},
                "reward": {"kind": "exact_match"},
                "workers": self.workers,
                "sampling": {"samples_per_group": SAMPLES, "max_tokens": 8 * self.tokens},
                "engine": {"device": "cpu", "max_running_requests": requests},
            }
        )


class ReplayedRun:
    """Queue, service, pool and weight sync as a run has them, with parts that replay."""

    def __init__(self, shape: ReplayedShape, *, profile: str) -> None:
        """Start them; workers join as they come."""
        self.shape, self.figures, self.profile = shape, Figures(), profile
        rollout, deadlines = shape.rollout, DeadlinesConfig()
        self.queue = beside_the_driver(TrajectoryQueueActor, max_concurrency=4096).remote(groups_per_step=shape.groups, max_staleness=1)
        settings = RunConfig(
            model=Path("model"), steps=10**6, groups_per_step=shape.groups, max_staleness=1, rollout=rollout, correction=CORRECTION,
            deadlines=deadlines, monitor=EarlyWarningConfig(detailed=False),
        )  # fmt: skip
        service = beside_the_driver(CorrectionService, max_concurrency=64, environment=OF_SERVICE)
        self.service = service.remote(settings, self.queue)
        self.rank = ray.remote(ReplayedRank).options(num_cpus=0, runtime_env={"env_vars": OF_BATCHES}).remote(shape.step_s)
        self.learner = LearnerGroup([self.rank], version=0, step_s=600.0)
        of_workers = WorkerSettings(rollout, Path("model"), next(prompts()), bind="127.0.0.1", resource="rollout")
        host = ray.remote(WorkerHost).options(num_cpus=0, max_concurrency=4096)
        self.observer = QuietObserver(self.figures)
        self.pool = ReplayPool(of_workers, deadlines, self.queue, self.observer)
        self.pool.hosts = [host.remote(of_workers, shape.tokens, shape.step_s / 4) for _ in range(shape.hosts)]
        self.sync = WeightSync(
            WeightSyncConfig(), self.learner, probe_ids=[], sync_s=_RECEIPT_S, on_receipt=lambda _: self.pool.wake(),
            on_probe=lambda *_: None, on_dirty=lambda target, reason: print(f"  dirty: {reason}"),
            on_failure=self.pool.report_unsyncable,
            on_loss=self.pool.fail,
        )  # fmt: skip
        self._waits: list[asyncio.Task[None]] = []

    @property
    def actors(self) -> dict[str, Any]:
        hosts = {f"host {number}": one for number, one in enumerate(self.pool.hosts)}
        return {"queue": self.queue, "service": self.service, "rank": self.rank} | hosts

    async def join(self) -> None:
        """All workers, with the weights of version 0. Raises: TimeoutError if they take too long, or what the pool fails with."""
        self.pool.start()
        self.pool.follow(self.sync)
        async with asyncio.timeout(_JOIN_S):
            await self.pool.until(lambda: self.pool.counts()[0] == self.shape.workers)
        await self.sync.publish()
        await self.sync.receipts(0, deadline_s=_RECEIPT_S)

    async def train(self, uses: Uses) -> dict[str, tuple[float, int]]:
        """Steps that don't count, then those that do. Returns: of each process, CPU seconds and bytes of these, besides.

        Raises: what the pool fails with.
        """
        gc.freeze()  # as the controller, before it trains
        return await unless_failed(self._steps(uses), self._failing())

    async def _failing(self) -> None:
        await asyncio.gather(self.pool.feed(prompts(), [], self.observer.admitted), self.pool.raise_on_failure())

    async def _steps(self, uses: Uses) -> dict[str, tuple[float, int]]:
        clock, figures = LoopClock(), self.figures
        clock.start()
        late: LateLoop | None = None
        ended = began = time.monotonic()
        for step in range(self.shape.steps + _WARM_UP):
            if step == _WARM_UP:
                uses.begin()
                await asyncio.sleep(_SETTLE_S)  # so that by how much this was late is read here
                clock.read()
                late = LateLoop() if self.profile == "late" else None
                figures.admission_s, figures.gap_s, figures.tokens, began = [], [], 0, time.monotonic()
            ended = await self._step(step, ended)
        figures.seconds, figures.late_s = time.monotonic() - began, clock.read()
        if late is not None:
            print(late.end(), flush=True)
        used = uses.end()
        figures.calls = uses.calls
        await asyncio.wait(self._waits, timeout=_RECEIPT_S)
        return used

    async def _step(self, step: int, ended: float) -> float:
        """Args: ended: when the learner ended the last one. Returns: when it ended this one."""
        learner, service, figures = self.learner, self.service, self.figures
        with self.pool.learner_waits():
            ask = lambda: service.next_batch.remote(learner.version)  # noqa: E731
            batch = await next_batch(ask, service, learner, step=step, deadline_s=_RECEIPT_S)
        figures.gap_s.append(time.monotonic() - ended)
        result = await learner.step(batch.corrected, batch.correction, step=step)
        ended = time.monotonic()
        await self.sync.publish()
        self._waits.append(asyncio.create_task(self._receipts()))
        await self.queue.advance.remote(learner.version, [group.group_id for group in batch.groups])
        self.observer.freed_at = time.monotonic()
        service.observe.remote(step, batch.version, (result.values,), learned_numbers(batch, result))
        batch_metrics(batch, correct_at=1.0)
        figures.tokens += batch.tokens
        return ended

    async def _receipts(self) -> None:
        began = time.monotonic()
        await self.sync.receipts(self.sync.version, deadline_s=_RECEIPT_S)
        self.figures.receipts_s.append(time.monotonic() - began)

    async def close(self) -> None:
        await self.service.stop.remote()
        await self.sync.close()
        for actor in self.actors.values():
            ray.kill(actor)


async def run(shape: ReplayedShape, *, profile: str) -> tuple[Figures, dict[str, tuple[float, int]]]:
    """Of a run: what was measured, and of each process CPU seconds and bytes."""
    replayed = ReplayedRun(shape, profile=profile)
    try:
        await replayed.join()
        uses = Uses(replayed.actors, profile=profile)
        replayed.figures.idle = await uses.idle_share()
        return replayed.figures, await replayed.train(uses)
    finally:
        await replayed.close()


def _of(values: Sequence[float], share: float) -> float:
    """The value that so many of them don't exceed, s."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.nan


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--workers", default="10,50,100", help="numbers of workers, one run each")
    parser.add_argument("--groups", default="64", help="numbers of groups (of 8) in a training batch, one run each")
    parser.add_argument("--tokens", type=int, default=1000, help="mean length of an answer")
    parser.add_argument("--rate", type=float, default=3e5, help="tokens a second that engines and learner aim at")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hosts", type=int, default=1, help="processes that the workers share")
    profile = parser.add_argument("--profile", choices=("threads", "functions", "late"), default="")
    profile.help = "print what of the processes takes their time, or what makes the driver's loop late"
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # of the actors
    with tempfile.TemporaryDirectory(prefix="ek", dir="/tmp") as folder:
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # as a private Ray (actors/cluster/cluster.py)
        ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False, _temp_dir=folder)
        print(asyncio.run(CallFloor.measured()), flush=True)
        for workers, groups in itertools.product(map(int, arguments.workers.split(",")), map(int, arguments.groups.split(","))):
            shape = ReplayedShape(workers, groups, arguments.tokens, arguments.rate, arguments.steps, arguments.hosts)
            found, used = asyncio.run(run(shape, profile=arguments.profile))
            _tell(shape, found, used)
        ray.shutdown()


def _tell(shape: ReplayedShape, found: Figures, used: dict[str, tuple[float, int]]) -> None:
    millions, rate, steps = found.tokens / 1e6, found.tokens / found.seconds / 1e3, shape.steps
    print(f"{shape.workers} workers, {shape.groups} groups and {millions / steps:.2f} million tokens a step, {rate:.0f} thousand a second")
    for name, (cpu_s, grown) in used.items():
        held = 2 * millions / steps  # of this batch and the next
        idle = found.idle[name] * found.seconds / millions
        memory = f"{grown / 2**20:.0f} MiB more with {held:.1f} million tokens in flight"
        print(f"  {name:8} {cpu_s / millions:7.3f} CPU s for a million tokens ({idle:.3f} of them without any work), {memory}")
    groups, calls = shape.groups * steps, sum(found.calls.values())
    made = ", ".join(f"{name} {number / groups:.2f}" for name, number in found.calls.items() if number)
    print(f"  {calls / groups:.2f} calls of Ray's for a group of {shape.tokens * SAMPLES} tokens, made by: {made}")
    print(f"  a free place has its group after {_of(found.admission_s, 0.5):.3f} s (p50), {_of(found.admission_s, 0.99):.3f} s (p99)")
    gap_s, receipts_s = statistics.median(found.gap_s), statistics.median(found.receipts_s)
    print(
        f"  the learner waits {gap_s:.3f} s between steps; the last receipt comes {receipts_s:.3f} s after publishing; the "
        f"driver's loop is late by {found.late_s * 1e3:.0f} ms (p99)"
    )
    name, (cpu_s, _) = max(((n, u) for n, u in used.items() if n in ("driver", "queue", "service")), key=lambda pair: pair[1][0])
    print(f"  full first: {name}, at {found.tokens / cpu_s / 1e6:.1f} million tokens a second of its one process", flush=True)


if __name__ == "__main__":
    main()
