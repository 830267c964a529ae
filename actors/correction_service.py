"""The correction service: whole training batches, corrected, one ahead of the learner; diagnostics behind it.

It draws groups from the queue as they finish. When the correction needs proximal logprobs from a forward of their own, it asks the
learner for them as soon as the learner stands at the version from which the batch's update will start and has nothing else to do:
while rollouts are the bottleneck that forward is free. It never asks earlier: those would be the logprobs of older weights.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actors.learner_group import LearnerGroup
from actors.scatter import ScatterReservoir, ScatterSample
from correction.advantages import group_advantages
from correction.batch import CorrectedBatch, PackedBatch
from correction.config import CorrectionConfig
from correction.correct import correct, defer, needs_proximal_forward
from correction.diagnostics import diagnose
from correction.errors import DeadlineExceeded
from rollout.config import OverlongConfig
from rollout.packing import PackingCounts, pack_groups
from rollout.trajectory import Group

log = logging.getLogger("evenkeel.correction")
_POLL_S = 30.0
INVALID = "fewer than two valid trajectories"
UNIFORM = "rewards all alike"
"""Reasons for which the service discards a group."""


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """What the service needs of the run's configuration."""

    correction: CorrectionConfig
    groups_per_step: int
    optimizer_steps_per_batch: int
    temperature: float
    overlong: OverlongConfig
    max_tokens: int
    dynamic_sampling: bool
    has_reference: bool
    batch_s: float


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch on its way to the learner."""

    version: int
    """The learner's version from which the update starts."""
    corrected: CorrectedBatch
    groups: tuple[Group, ...]
    counts: PackingCounts
    proximal_s: float
    """Learner time spent on proximal (and reference) logprobs."""
    correct_s: float
    """Time of the correction itself."""


class CorrectionService:
    """Draws, packs and corrects; used as a Ray actor (async)."""

    def __init__(self, config: ServiceConfig, queue: Any, learner: LearnerGroup) -> None:
        self._config, self._queue, self._learner = config, queue, learner
        self._needs_forward = needs_proximal_forward(config.correction, config.optimizer_steps_per_batch)
        self._learner_at = asyncio.Condition()
        self._learner_version = -1
        self._ahead: tuple[int, asyncio.Task[PreparedBatch]] | None = None
        self._last: PreparedBatch | None = None
        self._scatter = ScatterReservoir()
        gc.freeze()  # a full garbage collection need not walk through all that the imports made

    async def learner_reached(self, version: int) -> None:
        """The learner stands at `version` and is idle: forwards for the batch of that version may run."""
        async with self._learner_at:
            self._learner_version = version
            self._learner_at.notify_all()

    async def next_batch(self, version: int) -> PreparedBatch:
        """The batch of `version`; the one after it is begun before this returns."""
        if self._ahead is None or self._ahead[0] != version:
            self._ahead = (version, asyncio.create_task(self._prepare(version)))
        # The deadline counts from the learner's asking, not from the work ahead: that may rest while the learner trains.
        done, _ = await asyncio.wait({self._ahead[1]}, timeout=self._config.batch_s)
        if not done:
            missing = await self._queue.waiting_for.remote(version)
            raise DeadlineExceeded(f"batch of version {version} <- trajectory queue: not whole in {self._config.batch_s:.0f} s ({missing})")
        prepared = self._ahead[1].result()
        self._last = prepared
        self._ahead = (version + 1, asyncio.create_task(self._prepare(version + 1)))
        return prepared

    async def stop(self) -> None:
        """No further batch is drawn."""
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None

    async def observe(self, version: int, target_logprobs: Tensor) -> dict[str, float]:
        """Diagnostics of the batch that was trained last, off the learner's path.

        Args:
            target_logprobs: [N] float32, the learner's at the weights from which the update started; the proximal ones of a fused step.
        """
        last = self._last
        if last is None or last.version != version:
            return {}
        corrected = last.corrected
        if corrected.is_deferred:  # one step: those logprobs are the proximal ones, and the service can redo what the learner did
            batch = replace(corrected.batch, proximal_logprobs=target_logprobs)
            corrected = correct(batch, self._config.correction)
        batch = corrected.batch
        proximal = target_logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
        self._scatter.add(version, batch.behavior_logprobs, proximal, version - batch.weight_versions, batch.loss_mask)
        return dict(diagnose(corrected.batch, corrected, target_logprobs=target_logprobs, config=self._config.correction))

    async def scatter(self) -> ScatterSample | None:
        """Tokens of the recent batches, for the report's picture of pi_prox against mu."""
        return self._scatter.sample()

    # -- preparation -------------------------------------------------------------------------------------------------

    async def _prepare(self, version: int) -> PreparedBatch:
        groups: list[Group] = []
        forwards: list[tuple[list[Group], asyncio.Task[tuple[Tensor | None, Tensor | None, float]]]] = []
        while len(groups) < self._config.groups_per_step:
            chunk = await self._draw(version, self._config.groups_per_step - len(groups))
            groups += chunk
            # A few large forwards beat many small ones: start one when half a batch or the rest of it is there.
            pending = [g for g in groups if not any(g in done for done, _ in forwards)]
            if self._wants_forwards and (len(pending) * 2 >= self._config.groups_per_step or len(groups) == self._config.groups_per_step):
                forwards.append((pending, asyncio.create_task(self._forward(version, pending))))
        groups.sort(key=lambda group: group.group_id)
        batch, counts = self._pack(groups, version)
        proximal_s = 0.0
        if forwards:
            batch, proximal_s = await self._with_forwards(batch, groups, forwards)
        began = time.monotonic()
        settle = correct if self._needs_forward else defer  # defer is correct where nothing waits for a proximal policy
        corrected = settle(batch, self._config.correction)
        return PreparedBatch(version, corrected, tuple(groups), counts, proximal_s, time.monotonic() - began)

    @property
    def _wants_forwards(self) -> bool:
        return self._needs_forward or self._config.has_reference

    async def _draw(self, version: int, places: int) -> list[Group]:
        """Groups worth training; the others are discarded here, which frees their places for new prompts."""
        while True:
            drawn = await self._queue.draw.remote(version, places, _POLL_S)
            if not drawn:
                continue
            failed = [g.group_id for g in drawn if len(g.valid) < 2]
            uniform = [g.group_id for g in drawn if g.group_id not in failed and g.is_uniform] if self._config.dynamic_sampling else []
            for group_ids, reason in ((failed, INVALID), (uniform, UNIFORM)):
                if group_ids:
                    await self._queue.discard.remote(group_ids, reason)
            kept = [g for g in drawn if g.group_id not in failed and g.group_id not in uniform]
            if kept:
                return kept

    def _pack(self, groups: list[Group], version: int) -> tuple[PackedBatch, PackingCounts]:
        return pack_groups(
            groups,
            learner_version=version,
            advantage=self._advantages,
            overlong=self._config.overlong,
            max_tokens=self._config.max_tokens,
            temperature=self._config.temperature,
        )

    @property
    def _advantages(self) -> Callable[[Tensor, Tensor], Tensor]:
        part = self._config.correction.advantage
        return partial(group_advantages, estimator=part.estimator, ddof=part.ddof, epsilon=part.epsilon)

    async def _forward(self, version: int, groups: list[Group]) -> tuple[Tensor | None, Tensor | None, float]:
        async with self._learner_at:
            await self._learner_at.wait_for(lambda: self._learner_version >= version)
        batch, _ = self._pack(groups, version)
        began = time.monotonic()
        proximal = await self._learner.logprobs(batch, version=version) if self._needs_forward else None
        reference = await self._learner.reference_logprobs(batch) if self._config.has_reference else None
        return proximal, reference, time.monotonic() - began

    async def _with_forwards(
        self, batch: PackedBatch, groups: list[Group], forwards: list[tuple[list[Group], asyncio.Task[Any]]]
    ) -> tuple[PackedBatch, float]:
        """The batch with the chunks' logprobs put where their groups stand in it."""
        # A chunk packs its groups in its own order; find each group's tokens in the whole batch by its group id.
        proximal = torch.zeros(batch.num_tokens) if self._needs_forward else None
        reference = torch.zeros(batch.num_tokens) if self._config.has_reference else None
        seconds = 0.0
        group_of_sequence = batch.group_ids.tolist()
        for chunk, task in forwards:
            chunk_proximal, chunk_reference, chunk_s = await task
            seconds += chunk_s
            order = [i for g in chunk for i, group_id in enumerate(group_of_sequence) if group_id == g.group_id]
            index = batch.token_index(order)
            if proximal is not None and chunk_proximal is not None:
                proximal[index] = chunk_proximal
            if reference is not None and chunk_reference is not None:
                reference[index] = chunk_reference
        return replace(batch, proximal_logprobs=proximal, reference_logprobs=reference), seconds
