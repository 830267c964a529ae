"""Replacements of engines, workers' processes and a learner's rank, for measuring the control plane alone: they replay made-up data.

Engines sleep and hand over groups of real size, cut from made-up buffers; many workers, real ones but for their engines, share a process.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import os
import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import ray

from evenkeel.actors.carriers import ActorInfo, ExportPlan, WeightChecksums, WeightSnapshot, WorkerSettings
from evenkeel.actors.groups.tokens import read_now
from evenkeel.actors.pool.pool import RolloutPool
from evenkeel.actors.pool.rollout_worker import RolloutWorker
from evenkeel.actors.pool.workers import WorkerHandle
from evenkeel.actors.weights.weight_sync import SyncTarget
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.errors import ActorLost, EngineError
from evenkeel.engines.weights import digest_of
from evenkeel.rollout.trajectory import (
    FinishReason,
    Group,
    Prompt,
    RoutedExperts,
    SyncReceipt,
    TopLogprobs,
    Trajectory,
    VersionSpan,
    ids_of,
    logprobs_of,
)
from lab.simulate.costs import AnswerLengths

SAMPLES = 8
"""Answers of a group."""
EXPERTS = 8
"""Experts of a token in each layer."""
LAYERS, EXPERT_TENSORS, LAYER_TENSORS = 48, 3 * 128, 9
"""Of Qwen3-30B-A3B, with 18,867 tensors in all: what a worker that joins is handed a checksum of each for. LAYER_TENSORS: attention (4
projections, 2 norms), the router, and 2 norms."""


@dataclass(frozen=True)
class WideShape:
    """Of the fields with many values a token that answers have."""

    topk: int = 0
    """Likeliest tokens stored with each sampled one."""
    layers: int = 0
    """With routed experts."""

    @property
    def token_bytes(self) -> int:
        return 8 * self.topk + EXPERTS * self.layers


@functools.cache
def made_up(tokens: int, wide: WideShape) -> tuple[TopLogprobs | None, RoutedExperts | None]:
    """Wide fields of so many tokens, one of each for a process: what answers have of them are copies."""
    ids, logprobs = ids_of(range(tokens * wide.topk)), logprobs_of(-1.0 for _ in range(tokens * wide.topk))
    top = TopLogprobs(wide.topk, ids, logprobs) if wide.topk else None
    return top, RoutedExperts(wide.layers, EXPERTS, array("B", bytes(tokens * wide.layers * EXPERTS))) if wide.layers else None


def probed(token_ids: Sequence[int]) -> list[float]:
    """Answer of engines and learner to the probe: a logprob for every token but the first."""
    return [-1.0] * max(0, len(token_ids) - 1)


@functools.cache
def tensor_names() -> tuple[str, ...]:
    """Of a large model with experts, as long as such names are."""
    experts = [f"mlp.experts.{number // 3}.{('gate', 'up', 'down')[number % 3]}_proj.weight" for number in range(EXPERT_TENSORS)]
    of_layer = [*experts, *(f"self_attn.{number}_proj.weight" for number in range(LAYER_TENSORS))]
    layers = (f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in of_layer)
    return "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", *layers


@functools.lru_cache(2)
def _made_up_checksums(version: int) -> dict[str, str]:
    return {name: hashlib.sha256(f"{version} {name}".encode()).hexdigest() for name in tensor_names()}


@dataclass(frozen=True)
class ReplayedBucket:
    """Takes the place of all WeightBuckets of a version: no bytes, but as many checksums as a large model has."""

    version: int

    def checksums(self) -> dict[str, str]:
        return _made_up_checksums(self.version)


class ReplayedEngine:
    """Takes the place of the sampler and its engine: its answers come at a rate that keeps the run going."""

    engine: ReplayedEngine
    requests_in_flight = generated_tokens = 0
    silent_s = 0.0
    lost_of = ""

    def __init__(self, lengths: AnswerLengths, token_s: float, wide: WideShape, seed: int) -> None:
        """Args: lengths: engines of a process draw from the same."""
        self._lengths, self._token_s, self._wide, chance = lengths, token_s, wide, random.Random(seed)
        self._began, self._dead = time.monotonic(), asyncio.Event()
        self._ids = ids_of(chance.randrange(150_000) for _ in range(lengths.max_tokens))
        self._logprobs = logprobs_of(-chance.random() for _ in range(lengths.max_tokens))
        self._version = 0
        self.engine = self

    async def succeeded(self) -> None: ...

    def has_its_weights(self) -> None: ...

    async def group(self, prompt: Prompt, *, group_id: int, admitted_version: int, topk: int = 0, begun: Any = None) -> Group:
        lengths = [self._lengths.next() for _ in range(SAMPLES)]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._token_s * max(lengths)):
                await self._dead.wait()
        self.raise_if_lost()
        self.generated_tokens += sum(lengths)
        answers = tuple(self._answer(prompt, n, i % 2, admitted_version) for i, n in enumerate(lengths))
        return Group(group_id, prompt, answers, admitted_version)

    def _answer(self, prompt: Prompt, length: int, reward: float, version: int) -> Trajectory:
        spans = (VersionSpan(version, 0, length),)
        if self._version > version:
            spans = (VersionSpan(version, 0, length // 2), VersionSpan(self._version, length // 2, length)) if length > 1 else spans
        ids, logprobs = self._ids[:length], self._logprobs[:length]
        text = "word " * (length // 2)
        prompt_ids = ids_of(prompt.token_ids)
        one = Trajectory(prompt.prompt_id, prompt_ids, ids, logprobs, spans, FinishReason.STOP, text=text, reward=float(reward))
        return self._with_wide_fields(one) if self._wide.token_bytes else one

    def _with_wide_fields(self, one: Trajectory) -> Trajectory:
        k, layers, length, read = self._wide.topk, self._wide.layers, len(one.response_ids), len(one.prompt_ids) + len(one.response_ids) - 1
        top, routes = made_up(len(one.prompt_ids) + len(self._ids), self._wide)
        return replace(
            one,
            top_logprobs=top and TopLogprobs(k, top.ids[: length * k], top.logprobs[: length * k]),
            routed_experts=routes and RoutedExperts(layers, EXPERTS, routes.ids[: read * layers * EXPERTS]),
        )

    async def update_weights(self, version: int, buckets: Sequence[Any]) -> SyncReceipt:
        self.raise_if_lost()
        self._version = version
        return SyncReceipt(version, 0, 0.0)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self.raise_if_lost()
        return probed(token_ids)

    @property
    def up_s(self) -> float:
        return time.monotonic() - self._began

    busy_s = up_s

    def die(self) -> None:
        """Fail all requests under way."""
        self._dead.set()

    def raise_if_lost(self) -> None:
        if self._dead.is_set():
            raise ActorLost("the replayed engine was ended")

    async def weight_checksums(self, sent: Sequence[ReplayedBucket], _: Any) -> dict[str, str]:
        return {name: checksum for bucket in sent for name, checksum in bucket.checksums().items()}


class NoEndpoint:
    """In the place of a worker's Prometheus endpoint: as many servers as workers would be what is measured."""

    def add(self, name: str, amount: float) -> None: ...

    def set(self, name: str, value: float) -> None: ...


class WorkerHost:
    """A process with many rollout workers, real ones but for their engines; calls name the worker."""

    def __init__(self, settings: WorkerSettings, lengths: AnswerLengths, token_s: float, wide: WideShape) -> None:
        self._settings, self._replays = settings, (lengths, token_s, wide)
        self._workers: dict[str, RolloutWorker] = {}

    async def node_id(self) -> str:
        """None: a host's workers are on no node of their own."""
        return ""

    async def start(self, name: str, version: int) -> ActorInfo:
        worker = RolloutWorker(name, self._settings)
        worker._endpoint = NoEndpoint()  # type: ignore[assignment]
        worker._end_notice = SimpleNamespace(received=asyncio.Event())  # type: ignore[assignment]
        worker._sampler = ReplayedEngine(*self._replays, int(name))  # type: ignore[assignment]
        self._workers[name] = worker
        return ActorInfo("rollout", name, os.getpid(), "")

    async def call(self, name: str, method: str, *arguments: Any) -> Any:
        return await getattr(self._workers[name], method)(*arguments)

    async def end_engine(self, name: str) -> None:
        self._workers[name]._sampler.die()  # type: ignore[attr-defined]


class HostedWorker:
    """Takes the place of a worker's handle."""

    def __init__(self, host: Any, name: str) -> None:
        self._host, self._name = host, name

    def __getattr__(self, method: str) -> HostedCall:
        return HostedCall(self._host, self._name, method)


@dataclass
class HostedCall:
    """A method of one worker of a host, called as Ray's: `.options(num_returns=...).remote(...)`."""

    host: Any
    name: str
    method: str
    results: int = 1

    def options(self, *, num_returns: int) -> HostedCall:
        return HostedCall(self.host, self.name, self.method, num_returns)

    def remote(self, *arguments: Any) -> Any:
        if self.method == "node_id":
            return self.host.node_id.remote()
        if self.method == "start":
            return self.host.start.remote(self.name, *arguments)
        return self.host.call.options(num_returns=self.results).remote(self.name, self.method, *arguments)


class ReplayedRank:
    """A learner's rank that reads its batch, sleeps, and answers with logprobs near the sampled ones."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._version, self._calls = seconds, 0, 0
        self._read: dict[Any, Any] = {}
        self._exports = Counter[int]()

    def _in_order(self, number: int) -> None:
        self._calls += 1
        if number != self._calls:
            raise EngineError(f"collective call {number} came as the one of number {self._calls}")

    def fetch(self, batch: Any, correction: CorrectionConfig | None, step: int, limit_s: float, *, everything: bool) -> dict[int, str]:
        """As a rank that computes with all sequences."""
        packed = getattr(batch, "batch", None) or batch
        self._read, lost = read_now(list(dict.fromkeys(one for place in packed.wide for one in place.references)), limit_s)
        if not lost:
            packed.holding(self._read).check_wide_fields()
        of_group = zip(packed.group_ids.tolist(), packed.wide, strict=True)
        return {group: lost[one] for group, place in of_group for one in place.references if one in lost}

    def step(self, number: int, corrected: Any, correction: CorrectionConfig, step: int) -> tuple[Any, Any]:
        import torch

        from evenkeel.correction.batch import FinalDecision
        from evenkeel.correction.decision import no_counts
        from evenkeel.learner.results import StepResult, StepValues

        self._in_order(number)
        batch, self._read = corrected.batch, {}
        began = time.monotonic()
        gap = torch.where(torch.arange(batch.num_tokens) % 2 == 0, math.log(1.01), math.log(0.99))  # the monitor expects a mean ratio of 1
        target = torch.where(batch.loss_mask, batch.behavior_logprobs + gap, 0.0)
        decided = FinalDecision(corrected.keep_mask.clone(), corrected.importance_weights.clone(), no_counts(correction))
        values = StepValues(target, decided, torch.ones(batch.num_tokens))
        time.sleep(max(0.0, self._seconds - (time.monotonic() - began)))
        self._version += 1
        numbers: dict[str, Any] = dict.fromkeys(StepResult.__dataclass_fields__, 0)
        numbers |= {"values": None, "metrics": {}, "group_norms": {}, "grad_norms": (1.0,), "entropy": 1.0, "loss": 0.0}
        kept = trained = int(batch.loss_mask.sum())
        numbers |= {"trained_tokens": trained, "kept_tokens": kept, "optimizer_steps": 1, "skipped": ()}
        numbers |= {"tokens": batch.num_tokens, "loss_scale": None, "routing_agreement": None}
        return StepResult(**numbers), values

    def export(self, number: int, version: int, plan: ExportPlan) -> WeightSnapshot:
        self._in_order(number)
        self._exports[version] += 1
        bucket = ReplayedBucket(version)
        sums = WeightChecksums(ray.put(bucket.checksums()), digest_of(bucket.checksums())) if plan.checksums else None
        return WeightSnapshot(self._version, [ray.put(bucket)], [[]], probed(plan.probe_ids), sums, 0.0)

    def exports(self) -> dict[int, int]:
        """Copies of the weights, by version."""
        return dict(self._exports)


class ReplayPool(RolloutPool):
    """The pool, whose workers share a few processes."""

    hosts: Sequence[Any] = ()

    def __init__(self, *of_pool: Any) -> None:
        """Args: of_pool: as of RolloutPool."""
        super().__init__(*of_pool)
        self.create = self._create

    def joined_names(self) -> list[str]:
        return [worker.name for worker in self.joined()]

    async def end_engine(self, name: str) -> None:
        """Of a worker, with what it has under way."""
        await self.hosts[int(name) % len(self.hosts)].end_engine.remote(name)

    async def stop(self) -> None:
        """Ends no worker: whoever started the processes ends them."""
        self.tasks.stop()

    def _create(self, name: str, settings: WorkerSettings, avoided: Sequence[str] = ()) -> WorkerHandle:
        proxy = HostedWorker(self.hosts[int(name) % len(self.hosts)], name)
        return WorkerHandle(name, proxy, SyncTarget(name, proxy))
