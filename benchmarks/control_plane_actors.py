"""What the control plane's own actors cost: the real queue, correction service, pool and weight sync over Ray; engines and learner replay.

    python benchmarks/control_plane_actors.py [--workers 10,50,100] [--groups 64] [--tokens 1000] [--steps 6] [--hosts 1]

Engines sleep and hand over groups of real size, cut from made-up buffers; a learner of one rank answers with logprobs near the sampled
ones. Many workers share a process. Printed for each number of workers: processor seconds and peak anonymous memory for each million
tokens trained, process by process; how long a place that has become free waits for its group (p50, p99); what the learner waits between two
steps; from publishing a version to the last worker's receipt; how late the driver's event loop was; and the tokens a second at which the
first of the single processes would have no time left.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.carriers import ActorInfo, ExportPlan, GroupSummary, Ticket, WeightSnapshot
from actors.cluster import beside_the_driver
from actors.config import DeadlinesConfig, EarlyWarningConfig, WeightSyncConfig
from actors.correction_service import CorrectionService, ServiceConfig
from actors.forwards import next_batch
from actors.learner_group import LearnerGroup
from actors.loop_clock import LoopClock
from actors.pool import RolloutPool
from actors.queue_actor import TrajectoryQueueActor
from actors.record.step_report import batch_metrics, learned_numbers
from actors.rollout_worker import RolloutWorker, WorkerSettings
from actors.weight_sync import SyncTarget, WeightSync
from actors.workers import WorkerHandle
from benchmarks.sides import options
from correction.config import CorrectionConfig
from learner.config import LearnerConfig
from rollout.config import RolloutConfig
from rollout.trajectory import FinishReason, Group, Prompt, SyncReceipt, Trajectory, VersionSpan, ids_of, logprobs_of

SAMPLES, PROMPT_TOKENS = 8, 200
CORRECTION = CorrectionConfig.model_validate({"preset": "tis-token"})


# -- what replays --------------------------------------------------------------------------------------------------------


class ReplayedEngine:
    """Stands where the sampler and its engine stand: answers of lognormal length, at a rate that keeps the run going."""

    engine: ReplayedEngine
    requests_in_flight = generated_tokens = 0
    busy_s = up_s = 0.0

    def __init__(self, tokens: int, seconds: float, seed: int) -> None:
        self._tokens, self._seconds, self._random = tokens, seconds, random.Random(seed)
        longest = 8 * tokens
        self._ids = ids_of(self._random.randrange(150_000) for _ in range(longest))
        self._logprobs = logprobs_of(-self._random.random() for _ in range(longest))
        self._version = 0
        self.engine = self

    async def group(self, prompt: Prompt, *, group_id: int, admitted_version: int, topk: int = 0) -> Group:
        lengths = [min(len(self._ids), max(1, int(self._tokens * self._random.lognormvariate(-0.125, 0.5)))) for _ in range(SAMPLES)]
        await asyncio.sleep(self._seconds * max(lengths) / self._tokens)
        answers = tuple(self._answer(prompt, n, i % 2, admitted_version) for i, n in enumerate(lengths))
        return Group(group_id, prompt, answers, admitted_version)

    def _answer(self, prompt: Prompt, length: int, reward: float, version: int) -> Trajectory:
        spans = (VersionSpan(version, 0, length),)
        if self._version > version:
            spans = (VersionSpan(version, 0, length // 2), VersionSpan(self._version, length // 2, length)) if length > 1 else spans
        ids, logprobs = self._ids[:length], self._logprobs[:length]
        text = "word " * (length // 2)
        prompt_ids = ids_of(prompt.token_ids)
        return Trajectory(prompt.prompt_id, prompt_ids, ids, logprobs, spans, FinishReason.STOP, text=text, reward=float(reward))

    async def update_weights(self, version: int, buckets: Sequence[Any]) -> SyncReceipt:
        self._version = version
        return SyncReceipt(version, "retract", len(buckets), 0, 0, 0.0)

    def raise_if_lost(self) -> None: ...

    async def weight_checksums(self) -> dict[str, str]:
        return {}


class NoEndpoint:
    """In the place of a worker's Prometheus endpoint: as many servers as workers would be what is measured."""

    def add(self, name: str, amount: float) -> None: ...

    def set(self, name: str, value: float) -> None: ...


class WorkerHost:
    """A process with many rollout workers, real ones but for their engines; calls name the worker."""

    def __init__(self, settings: WorkerSettings, queue: Any, tokens: int, seconds: float) -> None:
        self._settings, self._queue, self._tokens, self._seconds = settings, queue, tokens, seconds
        self._workers: dict[str, RolloutWorker] = {}

    async def start(self, name: str, version: int) -> ActorInfo:
        worker = RolloutWorker(name, self._settings, self._queue)
        worker._endpoint = NoEndpoint()  # type: ignore[assignment]
        worker._sampler = ReplayedEngine(self._tokens, self._seconds, int(name))  # type: ignore[assignment]
        self._workers[name] = worker
        return ActorInfo("rollout", name, os.getpid(), "")

    async def call(self, name: str, method: str, *arguments: Any) -> Any:
        return await getattr(self._workers[name], method)(*arguments)

    async def payloads(self, group_ids: Sequence[int]) -> Any:
        """As RolloutWorker.payloads: the queue knows the process, not the worker."""
        groups = [self._of(group_id) for group_id in group_ids]
        return groups if len(groups) > 1 else groups[0]

    def _of(self, group_id: int) -> Group:
        return next(held.pop(group_id) for held in (worker._payloads for worker in self._workers.values()) if group_id in held)


class HostedWorker:
    """Stands where a worker's handle stands."""

    def __init__(self, host: Any, name: str) -> None:
        self._host, self._name = host, name

    def __getattr__(self, method: str) -> HostedCall:
        return HostedCall(self._host, self._name, method)


@dataclass
class HostedCall:
    host: Any
    name: str
    method: str

    def remote(self, *arguments: Any) -> Any:
        if self.method == "__ray_ready__":
            return self.host.__ray_ready__.remote()
        if self.method == "start":
            return self.host.start.remote(self.name, *arguments)
        return self.host.call.remote(self.name, self.method, *arguments)


class ReplayedRank:
    """A learner's rank that reads its batch, takes its time and says logprobs near the sampled ones."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._version = seconds, 0

    def step(self, number: int, corrected: Any, correction: CorrectionConfig, step: int) -> tuple[Any, Any]:
        import torch

        from correction.batch import FinalDecision
        from correction.decision import no_counts
        from learner.step import StepResult, StepValues

        batch = corrected.batch
        began = time.monotonic()
        target = torch.where(batch.loss_mask, batch.behavior_logprobs + 0.01, 0.0)
        decided = FinalDecision(corrected.keep_mask.clone(), corrected.importance_weights.clone(), no_counts(correction))
        values = StepValues(target, decided, torch.ones(batch.num_tokens))
        time.sleep(max(0.0, self._seconds - (time.monotonic() - began)))
        self._version += 1
        numbers: dict[str, Any] = dict.fromkeys(StepResult.__dataclass_fields__, 0)
        numbers |= {"values": None, "metrics": {}, "group_norms": {}, "grad_norms": (1.0,), "seconds": {}, "entropy": 1.0, "loss": 0.0}
        return StepResult(**numbers), values

    def export(self, number: int, version: int, plan: ExportPlan) -> WeightSnapshot:
        return WeightSnapshot(self._version, [ray.put([])], [[]], [], {}, 0.0)


class ReplayPool(RolloutPool):
    """The pool, whose workers share a few processes."""

    hosts: Sequence[Any] = ()

    def _start_worker(self) -> None:
        name = str(self._born)
        self._born += 1
        proxy = HostedWorker(self.hosts[int(name) % len(self.hosts)], name)
        worker = WorkerHandle(name, proxy, SyncTarget(name, proxy, is_verified=True))
        self._workers[name] = worker
        self._spawn(self._bring_up(worker))


# -- what is measured ----------------------------------------------------------------------------------------------------


class ProcessUse:
    """Processor seconds of a process since `begin`, and by how much its anonymous memory has grown since it was met."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._first = self.peak = self._anonymous()
        self.begin()

    def begin(self) -> None:
        self._cpu_s = self._now()

    def _now(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _anonymous(self) -> int:
        """Without what is mapped, such as the object store."""
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared)

    def look(self) -> None:
        self.peak = max(self.peak, self._anonymous())

    @property
    def cpu_s(self) -> float:
        return self._now() - self._cpu_s

    @property
    def grown(self) -> int:
        return self.peak - self._first


@dataclass
class Figures:
    """Of a run."""

    admission_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    receipts_s: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    late_s: float = 0.0


class QuietObserver:
    """Of the pool: counts what it is told."""

    def __init__(self, figures: Figures) -> None:
        self.figures, self.freed_at = figures, 0.0

    def joined(self, info: ActorInfo) -> None: ...

    def left(self, key: str) -> None: ...

    def group_finished(self, summary: GroupSummary) -> None: ...

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


async def run(workers: int, groups: int, tokens: int, steps: int, hosts: int) -> tuple[Figures, dict[str, tuple[float, int]]]:
    """A run of `steps` steps after two that don't count. Returns: of each process, CPU seconds and bytes of those steps, besides."""
    rollout = RolloutConfig.model_validate(
        {
            "task": {"kind": "file", "path": "none"},
            "reward": {"kind": "exact_match"},
            "workers": workers,
            "sampling": {"samples_per_group": SAMPLES, "max_tokens": 8 * tokens},
            "engine": {"device": "cpu", "max_running_requests": max(SAMPLES, 2 * groups * SAMPLES // workers)},
        }
    )
    deadlines, figures = DeadlinesConfig(), Figures()
    queue = beside_the_driver(TrajectoryQueueActor, max_concurrency=4096).remote(groups_per_step=groups, max_staleness=1)
    settings = ServiceConfig(
        CORRECTION, False, groups, 1, False, rollout, LearnerConfig(), deadlines, EarlyWarningConfig(detailed=False), examples=4
    )
    service = beside_the_driver(CorrectionService, max_concurrency=64).remote(settings, queue)
    step_s = max(0.5, groups * SAMPLES * tokens / 1e6)
    rank = ray.remote(ReplayedRank).options(num_cpus=0).remote(step_s)
    learner = LearnerGroup([rank], version=0, step_s=600.0)
    of_workers = WorkerSettings(rollout, Path("model"), next(prompts()), bind="127.0.0.1", resource="rollout")
    host = ray.remote(WorkerHost).options(num_cpus=0, max_concurrency=4096)
    observer = QuietObserver(figures)
    pool = ReplayPool(of_workers, deadlines, queue, observer)
    pool.hosts = [host.remote(of_workers, queue, tokens, step_s / 2) for _ in range(hosts)]
    sync = WeightSync(
        WeightSyncConfig(), learner, probe_ids=[], sync_s=60.0, on_receipt=lambda _: pool.wake(), on_probe=lambda *_: None,
        on_dirty=lambda target, reason: print(f"  dirty: {reason}"), on_failure=pool.report_unsyncable,
    )  # fmt: skip
    pool.start()
    pool.follow(sync)
    while pool.counts()[0] < workers:
        await asyncio.sleep(0.1)
    await sync.publish()
    await sync.receipts(0, deadline_s=60.0)
    pids = {"driver": os.getpid()}
    for name, actor in (("queue", queue), ("service", service), ("rank", rank)):
        pids[name] = await actor.__ray_call__.remote(lambda _: os.getpid())
    for number, one in enumerate(pool.hosts):
        pids[f"host {number}"] = await one.__ray_call__.remote(lambda _: os.getpid())
    uses = {name: ProcessUse(pid) for name, pid in pids.items()}
    feeding = asyncio.create_task(pool.feed(prompts(), [], observer.admitted))
    watching = threading.Event()
    threading.Thread(target=_watch, args=(uses, watching), daemon=True).start()
    clock = LoopClock()
    clock.start()
    waits: list[asyncio.Task[None]] = []
    ended = began = time.monotonic()
    for step in range(steps + 2):
        if step == 2:
            for use in uses.values():
                use.begin()
            clock.read()
            figures.admission_s, figures.gap_s, figures.tokens, began = [], [], 0, time.monotonic()
        batch = await next_batch(lambda: service.next_batch.remote(learner.version), service, learner, deadline_s=60.0)
        figures.gap_s.append(time.monotonic() - ended)
        result = await learner.step(batch.corrected, batch.correction, step=step)
        ended = time.monotonic()
        await sync.publish()
        waits.append(asyncio.create_task(_receipts(sync, figures)))
        await queue.advance.remote(learner.version, [group.group_id for group in batch.groups])
        observer.freed_at = time.monotonic()
        service.observe.remote(step, batch.version, (result.values,), learned_numbers(batch, result))
        batch_metrics(batch, correct_at=1.0)
        figures.tokens += batch.tokens
    figures.seconds, figures.late_s = time.monotonic() - began, clock.read()
    used = {name: (use.cpu_s, use.grown) for name, use in uses.items()}
    watching.set()
    feeding.cancel()
    await asyncio.wait(waits, timeout=30.0)
    await service.stop.remote()
    await sync.close()
    for actor in (*pool.hosts, rank, service, queue):
        ray.kill(actor)
    return figures, used


async def _receipts(sync: WeightSync, figures: Figures) -> None:
    began = time.monotonic()
    await sync.receipts(sync.version, deadline_s=60.0)
    figures.receipts_s.append(time.monotonic() - began)


def _watch(uses: dict[str, ProcessUse], ended: threading.Event) -> None:
    while not ended.wait(0.1):
        for use in uses.values():
            use.look()


def _of(values: Sequence[float], share: float) -> float:
    """The value that so many of them don't exceed, s."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.nan


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--workers", default="10,50,100", help="numbers of workers, one run each")
    parser.add_argument("--groups", type=int, default=64, help="groups (of 8) in a training batch")
    parser.add_argument("--tokens", type=int, default=1000, help="mean length of an answer")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hosts", type=int, default=1, help="processes that the workers share")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ek", dir="/tmp") as folder:
        ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False, _temp_dir=folder)
        for workers in map(int, arguments.workers.split(",")):
            found, used = asyncio.run(run(workers, arguments.groups, arguments.tokens, arguments.steps, arguments.hosts))
            _tell(workers, found, used, arguments.steps)
        ray.shutdown()


def _tell(workers: int, found: Figures, used: dict[str, tuple[float, int]], steps: int) -> None:
    millions, rate = found.tokens / 1e6, found.tokens / found.seconds / 1e3
    print(f"{workers} workers, {millions / steps:.2f} million tokens a step, {rate:.0f} thousand a second")
    for name, (cpu_s, grown) in used.items():
        held = 2 * millions / steps  # of this batch and the next
        print(f"  {name:8} {cpu_s / millions:7.3f} CPU s for a million tokens, {grown / 2**20 / held:6.0f} MiB for a million in flight")
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
