"""The correction service: whole training batches, corrected, one ahead of the learner; diagnostics and early warning behind it.

It draws groups from the queue as they finish. When the correction needs proximal logprobs from a forward of their own, it asks for them
(actors.ranks.forwards) as soon as the learner stands at the version from which the batch's update will start and has nothing else to do:
while rollouts are the bottleneck that forward is free. It never asks earlier: those would be the logprobs of older weights.

What takes long (packing, correcting, diagnosing) runs in threads, so that draws and forwards go on meanwhile. One batch is diagnosed after
the other; where that takes longer than a step, one waits for its turn and the next ones are left out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from torch import Tensor

from actors.carriers import Example, FetchRequest, ForwardRequest, Observation, PreparedBatch, ScatterSample, ScoringRequest
from actors.config import RunConfig
from actors.processes.loop_clock import LoopClock
from actors.processes.numbered import NumberedCaller
from actors.processes.part_heartbeat import HeartbeatActor
from actors.processes.supervision import lost_if_late, wait_for
from actors.queue import payloads
from actors.ranks.forwards import Forward, ForwardAnswer, ForwardRequests, GroupsLost, with_forwards
from actors.service.drawing import Drawing
from actors.service.gap_split import GapSplit
from actors.service.scatter import ScatterReservoir
from actors.settings.deadlines import tokens_s
from actors.settings.true_on_policy import compare_batch
from correction.batch import CorrectedBatch, PackedBatch
from correction.config import CorrectionConfig
from correction.correct import correct, defer
from correction.diagnostics.diagnose import clipped_tokens, diagnose, proximal_of, reference_kl
from correction.early_warning.monitor import Monitor
from correction.early_warning.symptoms import SYMPTOMS
from correction.errors import LateError
from correction.settings.schedule import needs_reference_logprobs
from correction.terms.advantages import group_advantages
from rollout.packing import Packed, pack_groups
from rollout.stacks import register_stack_dump
from rollout.trajectory import Group

if TYPE_CHECKING:
    from correction.engines.agreement import Agreement
    from learner.results import Proximal, SplitLogprobs, StepResult, StepValues

log = logging.getLogger("evenkeel.correction")
_VALUES = "what the learner computed of a batch <- rank 0"


@dataclass(frozen=True, slots=True)
class _Undiagnosed:
    """What diagnostics need of a batch that the learner has or had."""
    corrected: CorrectedBatch
    split: Mapping[str, float]


class CorrectionService(HeartbeatActor):
    """Draws, packs and corrects; used as a Ray actor (async)."""

    def __init__(
        self, config: RunConfig, queue: Any, monitor_state: Mapping[str, Any] | None = None, correction: CorrectionConfig | None = None
    ) -> None:
        """Args:
        monitor_state: what the monitor knew at the checkpoint that the run goes on from; None: a new run.
        correction: what an alarm has put in the place of the run's; None: the run's.
        """
        super().__init__()
        register_stack_dump()
        self._config, self._queue = config, queue
        books, bytes_per_s = NumberedCaller(queue, late=self.report), config.deadlines.bytes_per_s
        self._drawing = Drawing(books, bytes_per_s=bytes_per_s, notice=self.report)
        self._correction = self._next_correction = correction or config.correction
        self._monitor = Monitor(config.monitor.thresholds)
        if monitor_state is not None:
            self._monitor.load_state_dict(monitor_state)
        self._clock, self._observing = LoopClock(), asyncio.Lock()
        self._waiting_to_observe = 0
        self._forwards = ForwardRequests()
        self._ahead: tuple[int, asyncio.Task[PreparedBatch]] | None = None
        self._given: tuple[int, PreparedBatch | None] = (-1, None)
        """The last batch that was asked for, by its version, until it is trained: it may be lost on its way, and is asked for again."""
        self._undiagnosed: dict[int, _Undiagnosed] = {}
        """By version: the batch ahead, the one that the learner has, and the one before, which is diagnosed while it has that."""
        self._references: dict[int, Tensor] = {}
        """By version, of batches whose KL to the start model is reported: its logprobs, which are no part of the batch that is trained."""
        self._scatter = ScatterReservoir()
        self._gap_split = GapSplit(
            self._forwards,
            every=config.monitor.split_every,
            max_staleness=config.max_staleness,
            deadline_s=config.deadlines.forward_s,
            replays_engine=self._replays_engine,
            fetch_s=self._fetch_s,
        )

    async def next_batch(self, version: int) -> PreparedBatch | ForwardRequest:
        """The batch of `version`, the present version of the idle learner; the next batch is begun before this returns.

        If the batch needs something of the learner first, this returns what: answer by `forwarded`, and ask again. Asked again for the
        same version, the answer is the same.
        Raises: LateError for a version before the last one.
        """
        self._clock.start()
        if version == (last := self._given[0]) and self._given[1] is not None:
            return self._given[1]
        if version <= last:
            raise LateError(f"batch of version {version}: asked for after that of version {last} was trained")
        ahead = self._ahead if self._ahead is not None and self._ahead[0] == version else self._begin(version)
        # The deadline counts from the learner's asking: the work ahead may rest while the learner trains.
        prepared = await wait_for(
            self._prepared_or_request(ahead[1]),
            f"batch of version {version} <- trajectory queue",
            deadline_s=self._config.deadlines.batch_s,
            detail=lambda: self._queue.waiting_for.remote(version),
        )
        if isinstance(prepared, ForwardRequest):
            return prepared
        if self._given[0] == last:  # no other call for the same batch has come first
            self._given = version, prepared
            self._undiagnosed = {v: batch for v, batch in self._undiagnosed.items() if v >= version - 1}
            self._begin(version + 1)
        return prepared

    def _begin(self, version: int) -> tuple[int, asyncio.Task[PreparedBatch]]:
        self._ahead = (version, asyncio.create_task(lost_if_late(self._prepare(version))))
        return self._ahead

    async def _prepared_or_request(self, preparing: asyncio.Task[PreparedBatch]) -> PreparedBatch | ForwardRequest:
        """The prepared batch or a request for the learner, whichever comes first. The preparation goes on if this wait is cancelled."""
        request = asyncio.create_task(self._forwards.take())
        try:
            await asyncio.wait({preparing, request}, return_when=asyncio.FIRST_COMPLETED)
            return preparing.result() if preparing.done() else request.result()
        finally:
            request.cancel()

    async def forwarded(
        self,
        number: int,
        proximal: Proximal | None,
        reference: Tensor | None,
        split: SplitLogprobs | None,
        seconds: float,
        lost: Mapping[int, str],
    ) -> None:
        """Take the learner's results for a ForwardRequest, and the seconds that they took; or the groups that it could not read, and why.

        References to the first three are enough: each is an argument of its own, and Ray brings what an argument refers to.
        """
        self._forwards.answer(number, proximal, reference, split, seconds, lost)

    async def stop(self) -> None:
        """Stop: no further batch is drawn."""
        self._clock.stop()
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None

    async def observe(self, step: int, version: int, result: StepResult) -> Observation | None:
        """Diagnostics of the batch of `version` and what the monitor says about them.

        Args:
            step: number of the batch's step.
            result: the learner's, with a reference to its values. They are read here: Ray would bring a bare reference on the event loop.
        Returns: None if the batch isn't held (any more), or is left out because another one waits for its turn already.
        """
        trained = self._undiagnosed.pop(version, None)  # its tensors live as long as this call
        reference = self._references.pop(version, None)
        if version == self._given[0]:
            self._given = version, None
        if trained is None or self._waiting_to_observe:
            return None
        self._waiting_to_observe += 1
        try:
            await self._observing.acquire()
        finally:
            self._waiting_to_observe -= 1
        try:
            observation = await asyncio.to_thread(self._observe, step, version, trained, reference, await self._values(result))
            return replace(observation, late_s=self._clock.read())
        finally:
            self._observing.release()

    def _observe(
        self, step: int, version: int, trained: _Undiagnosed, reference: Tensor | None, values: StepValues
    ) -> Observation:
        """Diagnose a batch. Runs in a thread; monitor and scatter are only used under the lock."""
        began = time.monotonic()
        corrected, batch = trained.corrected, trained.corrected.batch
        target_logprobs, decided = values.target_logprobs, values.decided
        proximal, known = proximal_of(batch, target_logprobs, decided.before_update)
        mask = batch.loss_mask if known is None else batch.loss_mask & known
        self._scatter.add(step, batch.behavior_logprobs, proximal, version - batch.weight_versions, mask)
        detailed = self._config.monitor.detailed
        numbers = diagnose(batch, corrected, target_logprobs, decided=decided, entropy=values.entropies, detailed=detailed)
        numbers |= trained.split
        events = self._monitor.update(step, numbers)
        state, clipped = self._monitor.state, clipped_tokens(batch, decided)
        if reference is not None:
            numbers["reference_kl"] = reference_kl(target_logprobs, reference, batch.loss_mask)
        return Observation(dict(numbers), tuple(events), state, time.monotonic() - began, clipped, monitor=self._monitor.state_dict())

    async def compared(self, version: int, result: StepResult) -> Agreement | None:
        """True on-policy: sampled against trained logprobs of the batch of `version`. None: it isn't held. Args: result: as `observe`."""
        if (trained := self._undiagnosed.get(version)) is None:
            return None
        return await asyncio.to_thread(compare_batch, trained.corrected.batch, await self._values(result))

    async def _values(self, result: StepResult) -> StepValues:
        """What the learner computed of a batch. Args: result: as `observe`."""
        reading, limit_s = payloads.value_of(result.values), self._config.deadlines.batch_s
        found: StepValues = await wait_for(reading, _VALUES, deadline_s=limit_s, notice=self.report)
        return found

    async def monitor_state(self) -> dict[str, Any]:
        """What the monitor knows after the batches observed so far, for a checkpoint."""
        async with self._observing:
            return self._monitor.state_dict()

    async def switch(self, correction: CorrectionConfig) -> dict[str, Any]:
        """Use this correction from the next batch on whose preparation begins; a batch in preparation keeps its own. Returns: as
        monitor_state."""
        async with self._observing:
            if correction.proximal is self._next_correction.proximal:
                self._monitor.forget(symptom.name for symptom in SYMPTOMS if symptom.is_level_of_bounds)
            else:  # the level of every symptom is another one
                self._monitor = Monitor(self._config.monitor.thresholds)
            self._next_correction = correction
            return self._monitor.state_dict()

    async def scatter(self) -> ScatterSample | None:
        """Tokens of the recent batches, for the report's picture of pi_prox against mu."""
        async with self._observing:
            return self._scatter.sample()

    # -- preparation -------------------------------------------------------------------------------------------------

    async def _prepare(self, version: int) -> PreparedBatch:
        # One batch is prepared at a time, so this holds for all of it.
        self._correction = self._next_correction
        keeping = asyncio.create_task(self._gap_split.keep(version)) if self._gap_split.keeps(version) else None
        groups = list[Group]()
        self._drawing.wide_of = {}
        forwards: list[Forward] = []
        while True:
            try:
                prepared = await self._prepare_with(groups, forwards, version, keeping)
                self._drawing.forget(group.group_id for group in groups)
                return prepared
            except GroupsLost as error:  # before the learner has begun with them: others come in their places
                for _, task in forwards:
                    task.cancel()
                await asyncio.gather(*(task for _, task in forwards), return_exceptions=True)
                forwards.clear()
                await self._drawing.lose(error.why)
                groups = [group for group in groups if group.group_id not in error.why]

    async def _prepare_with(
        self, groups: list[Group], forwards: list[Forward], version: int, keeping: asyncio.Task[float] | None
    ) -> PreparedBatch:
        """Args: groups: drawn already; others join them. forwards: those that are asked for join it.

        Raises: GroupsLost if wide fields can't be read.
        """
        pending = list(groups)
        while len(groups) < self._config.groups_per_step:
            chunk = await self._drawing.draw(version, self._config.groups_per_step - len(groups))
            groups += chunk
            pending += chunk
            # A few large forwards beat many small ones: start one when half a batch or the rest of it is there.
            is_enough = len(pending) * 2 >= self._config.groups_per_step or len(groups) == self._config.groups_per_step
            if is_enough and self._wants_forwards(version):
                forwards.append((pending, asyncio.create_task(self._forward(version, pending))))
                pending = []
        groups.sort(key=lambda group: group.group_id)
        packed = await asyncio.to_thread(self._pack, groups, version)
        batch = packed.batch
        proximal_s = 0.0
        if forwards:
            batch, proximal_s = await with_forwards(batch, forwards)
        if not self._penalises_reference_kl and batch.reference_logprobs is not None:
            self._references = {v: kept for v, kept in self._references.items() if v >= version - 1} | {version: batch.reference_logprobs}
            batch = replace(batch, reference_logprobs=None)  # what is trained is what would be without a report
        split, split_s = await self._gap_split.split(batch, version) if self._gap_split.splits(version) else ({}, 0.0)
        split_s += await keeping if keeping is not None else 0.0
        began = time.monotonic()
        corrected = await asyncio.to_thread(defer if self._config.learner.defers(self._correction) else correct, batch, self._correction)
        correct_s = time.monotonic() - began
        stored = await asyncio.to_thread(ray.put, corrected)
        if fetch_s := self._fetch_s(batch):
            wanted = FetchRequest(version, stored, self._correction, fetch_s)
            await self._forwards.ask(wanted, deadline_s=self._config.deadlines.forward_s)
            corrected = replace(corrected, batch=replace(corrected.batch, wide=None))  # diagnostics need no tensor that it names
        self._undiagnosed[version] = _Undiagnosed(corrected, split)
        return PreparedBatch(
            version=version,
            correction=self._correction,
            corrected=stored,
            tokens=batch.num_tokens,
            groups=tuple(group.facts for group in groups),
            places=packed.places,
            proximal_s=proximal_s,
            correct_s=correct_s,
            split_s=split_s,
            examples=tuple(Example(g.prompt, g.example.text) for g in groups[: self._config.metrics.trajectories_per_step]),
        )

    @property
    def _needs_forward(self) -> bool:
        return self._config.learner.needs_proximal_forward(self._correction)

    @property
    def _penalises_reference_kl(self) -> bool:
        """Whether every batch needs the reference policy's logprobs."""
        return needs_reference_logprobs(self._correction)

    @property
    def _replays_engine(self) -> bool:
        return self._config.learner.routing_replay == "rollout"

    def _wants_forwards(self, version: int) -> bool:
        return self._needs_forward or self._wants_reference(version)

    def _wants_reference(self, version: int) -> bool:
        """The start model's logprobs: for a penalty in every batch, for a report of the KL in some."""
        every = self._config.learner.report_kl_every
        return self._penalises_reference_kl or (every > 0 and version % every == 0)

    def _pack(self, groups: list[Group], version: int) -> Packed:
        return pack_groups(
            groups,
            learner_version=version,
            advantage=self._advantages,
            overlong=self._config.rollout.overlong,
            max_tokens=self._config.rollout.sampling.max_tokens,
            temperature=self._config.rollout.sampling.temperature,
            wide_of=self._drawing.wide_of,
        )

    def _fetch_s(self, batch: PackedBatch) -> float:
        """Longest time for a batch's wide fields to come; 0: there is nothing to fetch."""
        return tokens_s(batch.num_tokens, self._config.deadlines.bytes_per_s) if batch.wide else 0.0

    @property
    def _advantages(self) -> Callable[[Tensor, Tensor], Tensor]:
        part = self._correction.advantage
        return partial(group_advantages, estimator=part.estimator, ddof=part.ddof, epsilon=part.epsilon)

    async def _forward(self, version: int, groups: list[Group]) -> ForwardAnswer:
        """What the learner says of the groups' tokens."""
        if not (packed := (await asyncio.to_thread(self._pack, groups, version)).batch).num_tokens:  # all their answers are masked
            return ForwardAnswer({}, None, 0.0)
        if not (self._needs_forward and self._replays_engine):
            packed = replace(packed, wide=None)
        wanted = ScoringRequest(
            version,
            await asyncio.to_thread(ray.put, packed),
            wants_proximal=self._needs_forward,
            wants_reference=self._wants_reference(version),
            fetch_s=self._fetch_s(packed),
        )
        return await self._forwards.ask(wanted, deadline_s=self._config.deadlines.forward_s)
