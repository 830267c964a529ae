"""What stands where engines, workers' processes and a learner's rank stand when the control plane alone is measured: it replays.

Engines sleep and hand over groups of real size, cut from made-up buffers; many workers, real ones but for their engines, share a process.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ray

from actors.carriers import ActorInfo, ExportPlan, WeightSnapshot
from actors.pool.pool import RolloutPool
from actors.pool.rollout_worker import RolloutWorker, WorkerSettings
from actors.pool.workers import WorkerHandle
from actors.weights.weight_sync import SyncTarget
from correction.config import CorrectionConfig
from rollout.trajectory import FinishReason, Group, Prompt, SyncReceipt, Trajectory, VersionSpan, ids_of, logprobs_of

SAMPLES = 8
"""Answers of a group."""


class ReplayedEngine:
    """Stands where the sampler and its engine stand: answers of lognormal length, at a rate that keeps the run going."""

    engine: ReplayedEngine
    requests_in_flight = generated_tokens = 0
    busy_s = up_s = silent_s = 0.0

    def __init__(self, tokens: int, seconds: float, seed: int) -> None:
        self._tokens, self._seconds, self._random = tokens, seconds, random.Random(seed)
        longest = 8 * tokens
        self._ids = ids_of(self._random.randrange(150_000) for _ in range(longest))
        self._logprobs = logprobs_of(-self._random.random() for _ in range(longest))
        self._version = 0
        self.engine = self

    async def group(self, prompt: Prompt, *, group_id: int, admitted_version: int, topk: int = 0, begun: Any = None) -> Group:
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

    async def weight_checksums(self, *_: Any) -> dict[str, str]:
        return {}


class NoEndpoint:
    """In the place of a worker's Prometheus endpoint: as many servers as workers would be what is measured."""

    def add(self, name: str, amount: float) -> None: ...

    def set(self, name: str, value: float) -> None: ...


class WorkerHost:
    """A process with many rollout workers, real ones but for their engines; calls name the worker."""

    def __init__(self, settings: WorkerSettings, tokens: int, seconds: float) -> None:
        self._settings, self._tokens, self._seconds = settings, tokens, seconds
        self._workers: dict[str, RolloutWorker] = {}

    async def start(self, name: str, version: int) -> ActorInfo:
        worker = RolloutWorker(name, self._settings)
        worker._endpoint = NoEndpoint()  # type: ignore[assignment]
        worker._end_notice = SimpleNamespace(told=asyncio.Event())  # type: ignore[assignment]
        worker._sampler = ReplayedEngine(self._tokens, self._seconds, int(name))  # type: ignore[assignment]
        self._workers[name] = worker
        return ActorInfo("rollout", name, os.getpid(), "")

    async def call(self, name: str, method: str, *arguments: Any) -> Any:
        return await getattr(self._workers[name], method)(*arguments)


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
    results: int = 1

    def options(self, *, num_returns: int) -> HostedCall:
        return HostedCall(self.host, self.name, self.method, num_returns)

    def remote(self, *arguments: Any) -> Any:
        if self.method == "__ray_ready__":
            return self.host.__ray_ready__.remote()
        if self.method == "start":
            return self.host.start.remote(self.name, *arguments)
        return self.host.call.options(num_returns=self.results).remote(self.name, self.method, *arguments)


class ReplayedRank:
    """A learner's rank that reads its batch, takes its time and says logprobs near the sampled ones."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._version = seconds, 0

    def step(self, number: int, corrected: Any, correction: CorrectionConfig, step: int) -> tuple[Any, Any]:
        import torch

        from correction.batch import FinalDecision
        from correction.decision import no_counts
        from learner.results import StepResult, StepValues

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
        self.spawn(self._bring_up(worker))
