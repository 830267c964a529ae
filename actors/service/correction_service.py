"""The correction service: whole training batches, packed and corrected; diagnostics and early warning behind them.

It answers the driver (actors/driver/batches.py) and asks nobody. What takes long (unpacking, packing, correcting, diagnosing) runs in
threads, so that it pulls the next batch's groups while it diagnoses the last one. One batch is diagnosed after the other; where that takes
longer than a step, one waits for its turn and the next ones are left out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch import Tensor

from evenkeel.actors.carriers import ActorInfo, Example, Observation, PackedGroups, PreparedBatch, ScatterSample, ShownAnswer, StoredGroup
from evenkeel.actors.config import RunConfig
from evenkeel.actors.groups import tokens as payloads
from evenkeel.actors.metrics.exporter import MetricsEndpoint, listen_address
from evenkeel.actors.processes.lane import Lane
from evenkeel.actors.processes.pacing import LoopClock
from evenkeel.actors.processes.part_heartbeat import HeartbeatActor
from evenkeel.actors.processes.supervision import abandon, has_failed, lost_if_late, wait_for
from evenkeel.actors.service.gap_split import stale_sample, to_numbers
from evenkeel.actors.service.scatter import ScatterReservoir
from evenkeel.actors.service.token_sample import chosen_sequences, shown_answer, token_sample
from evenkeel.actors.settings.deadlines import tokens_s
from evenkeel.actors.settings.true_on_policy import compare_batch
from evenkeel.correction.batch import CorrectedBatch, PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import correct, defer
from evenkeel.correction.diagnostics.diagnose import clipped_tokens, diagnose, proximal_of, reference_kl
from evenkeel.correction.early_warning.monitor import SYMPTOMS, Monitor
from evenkeel.correction.errors import ConfigError, EvenkeelError, LateError
from evenkeel.correction.settings.schedule import needs_logprobs_at_sampling, needs_reference_logprobs
from evenkeel.correction.terms.advantages import group_advantages, turn_advantages
from evenkeel.correction.wide import WidePlace
from evenkeel.rollout import wide_fields
from evenkeel.rollout.packing import Packed, pack_groups
from evenkeel.rollout.stacks import register_stack_dump
from evenkeel.rollout.trajectory import Group

if TYPE_CHECKING:
    from evenkeel.engines.agreement import Agreement
    from evenkeel.learner.results import Proximal, SplitLogprobs, StepResult, StepValues

log = logging.getLogger("evenkeel.correction")
_VALUES = "what the learner computed of a batch <- rank 0"


@dataclass(frozen=True, slots=True)
class _Undiagnosed:
    """What diagnostics need of a batch that the learner has or had."""

    corrected: CorrectedBatch
    split: Mapping[str, float]
    shown: Mapping[int, ShownAnswer]
    """What is told of the sequences whose tokens are kept for people, by their places in the batch."""
    kept_counts: asyncio.Task[Tensor | None] | None
    """Reads the sizes of the kept sets of their tokens; None: there are none."""


@dataclass(frozen=True, slots=True)
class _Pulled:
    """A group of the batch in preparation, here in memory."""

    group: Group
    """The group without its wide fields."""
    wide: Any
    """Reference to them; None: it has none."""


class CorrectionService(HeartbeatActor):
    """Packs, corrects and diagnoses; used as a Ray actor (async).

    A call that prepares a batch names its version and has a number. The same call again, because its answer was lost, changes nothing and
    gets the same answer; diagnostics are asked for once. The first call for a version ends the preparation of the one before.
    """

    def __init__(self, config: RunConfig, monitor_state: Mapping[str, Any] | None = None) -> None:
        """Args: monitor_state: what the early warning knew after the last batch that was diagnosed before; None: a new run."""
        super().__init__()
        register_stack_dump()
        self._config = config
        self._monitor = Monitor(config.monitor.thresholds)
        if monitor_state is not None:
            self._monitor.load_state_dict(monitor_state)
        self._clock, self._observing = LoopClock(), asyncio.Lock()
        self._lane = Lane("service", waits_for="calls")
        self._endpoint: MetricsEndpoint | None = None  # once there is a number to show
        self._waiting_to_observe = 0
        # Of the batch in preparation, as are the next two.
        self._version = -1
        # By group id.
        self._groups: dict[int, _Pulled] = {}
        # By number of the call.
        self._answers: dict[int, asyncio.Task[Any]] = {}
        # By version: the batch ahead, the one that the learner has, and the one before, which is diagnosed while it has that.
        self._undiagnosed: dict[int, _Undiagnosed] = {}
        # Logprobs of the start model by version, of batches whose KL to it is reported and not trained on.
        self._reference_logprobs: dict[int, Tensor] = {}
        self._scatter = ScatterReservoir()

    # -- preparation -------------------------------------------------------------------------------------------------

    async def pull(self, version: int, number: int, groups: list[StoredGroup], lost: Sequence[int] = ()) -> dict[int, str]:
        """Bring the tokens of groups of the batch of `version` here, and unpack them.

        Args: lost: ids of groups that were pulled before and are not in the batch any more.
        Returns: why groups can't be read, by group id; the others are here.
        Raises: ActorLost if the object store has no room for one, or doesn't answer.
        """
        self._clock.start()

        async def pull() -> dict[int, str]:
            for group_id in lost:
                self._groups.pop(group_id, None)
            limit_s = payloads.tokens_fetch_s(groups, self._config.deadlines.bytes_per_s)
            found, why = await payloads.fetched(groups, deadline_s=limit_s, notice=self.report)
            wide_of = {one.group_id: one.wide for one in groups}
            for group in found:
                self._groups[group.group_id] = await _without_wide_fields(group, wide_of[group.group_id])
            return why

        answer: dict[int, str] = await self._once(version, number, pull, "pull")
        return answer

    async def pack(self, version: int, number: int, group_ids: Sequence[int], correction: CorrectionConfig) -> PackedGroups:
        """Pack pulled groups for a forward of the learner at `version`. Args: correction: the batch's."""

        async def pack() -> PackedGroups:
            batch = (await asyncio.to_thread(self._packed, group_ids, version, correction)).batch
            scores = self._config.learner.needs_proximal_forward(correction) or needs_logprobs_at_sampling(correction)
            return await self._stored(self._for_forward(batch, replays_engine=scores and self._replays_engine))

        answer: PackedGroups = await self._once(version, number, pack, "pack")
        return answer

    async def sample_stale(self, version: int, number: int, group_ids: Sequence[int], correction: CorrectionConfig) -> PackedGroups:
        """Pack some of the sequences with tokens of earlier weights, to split their gap. Args: group_ids: of the whole batch."""

        async def sample() -> PackedGroups:
            return await self._stored(await asyncio.to_thread(self._stale_sample, group_ids, version, correction))

        answer: PackedGroups = await self._once(version, number, sample, "pack")
        return answer

    async def correct(
        self,
        version: int,
        number: int,
        group_ids: Sequence[int],
        correction: CorrectionConfig,
        chunks: Sequence[Sequence[int]] = (),
        split: SplitLogprobs | None = None,
        *scored: Any,
    ) -> PreparedBatch:
        """Pack and correct the batch of `version`.

        Args:
            group_ids: of the batch, in its order; all are pulled.
            chunks: group ids of each forward of the learner, in the order in which they were packed.
            split: what the learner says of the sample of `sample_stale`.
            scored: for each chunk its Proximal, its reference logprobs and its SplitLogprobs; None: not wanted. (References to them are
                arguments of their own: Ray brings what an argument refers to.)
        Returns: the batch without the facts of its groups, which the driver has.
        """

        async def prepare() -> PreparedBatch:
            answers = zip(chunks, scored[::3], scored[1::3], scored[2::3], strict=True)
            forwards = [(chunk, _found(*found)) for chunk, *found in answers]
            return await self._prepare(version, group_ids, correction, forwards, split)

        answer: PreparedBatch = await self._once(version, number, prepare, "correct")
        return answer

    async def _once(self, version: int, number: int, work: Callable[[], Coroutine[Any, Any, Any]], what: str) -> Any:
        """The result of the work, which runs once under this number.

        Args: what: the work, as a span of the timeline.
        Raises: LateError for an earlier version; ActorLost if a deadline within the work passes.
        """
        if version < self._version:
            raise LateError(f"batch of version {version}: a call came after the first one for that of version {self._version}")
        self._go_on_to(version)
        if number not in self._answers:
            self._answers[number] = asyncio.create_task(lost_if_late(self._as_span(what, version, work())))
            self._answers[number].add_done_callback(has_failed)
        return await asyncio.shield(self._answers[number])

    async def _as_span(self, what: str, version: int, work: Coroutine[Any, Any, Any]) -> Any:
        with self._lane.span(what, version=version):
            return await work

    def _go_on_to(self, version: int) -> None:
        """What is held of batches before this one's preparation is let go."""
        if version > self._version:
            self._version, self._groups, self._answers = version, {}, {}

    async def _prepare(
        self,
        version: int,
        group_ids: Sequence[int],
        correction: CorrectionConfig,
        chunks: Sequence[tuple[Sequence[int], dict[str, Any]]],
        found: SplitLogprobs | None,
    ) -> PreparedBatch:
        packed = await asyncio.to_thread(self._packed, group_ids, version, correction)
        batch = packed.batch
        if chunks:
            batch = await asyncio.to_thread(_put_in_place, batch, chunks)
        if needs_logprobs_at_sampling(correction) and batch.at_sampling_logprobs is None:  # no token is stale, or there is none
            batch = replace(batch, at_sampling_logprobs=torch.full_like(batch.behavior_logprobs, torch.nan))
        if not needs_reference_logprobs(correction) and batch.reference_logprobs is not None:
            newest = {v: kept for v, kept in self._reference_logprobs.items() if v >= version - 1}
            self._reference_logprobs = newest | {version: batch.reference_logprobs}
            batch = replace(batch, reference_logprobs=None)  # what is trained is what would be without a report
        split: Mapping[str, float] = {}
        if found is not None and (now := found.now) is not None:
            sample = await asyncio.to_thread(self._stale_sample, group_ids, version, correction)
            split = await asyncio.to_thread(to_numbers, sample, found.at_sampling, now, version)
        began = time.monotonic()
        corrected = await asyncio.to_thread(defer if self._config.learner.defers(correction) else correct, batch, correction)
        correct_s = time.monotonic() - began
        stored = await asyncio.to_thread(ray.put, corrected)
        if fetch_s := self._fetch_s(batch):
            corrected = replace(corrected, batch=replace(corrected.batch, wide=None))  # diagnostics need no tensor that it names
        self._undiagnosed = {v: kept for v, kept in self._undiagnosed.items() if v >= version - 2}
        told = self._shown(group_ids, packed)
        self._undiagnosed[version] = _Undiagnosed(corrected, split, told, self._kept_counts(packed.batch, list(told)))
        shown = [self._groups[group_id].group for group_id in group_ids[: self._config.metrics.trajectories_per_step]]
        return PreparedBatch(
            version=version,
            correction=correction,
            corrected=stored,
            tokens=batch.num_tokens,
            groups=(),
            places=packed.places,
            proximal_s=0.0,
            correct_s=correct_s,
            fetch_s=fetch_s,
            examples=tuple(Example(group.prompt, group.example.text) for group in shown),
            trained_tokens=_tokens_of_groups(packed, len(group_ids)),
        )

    def _shown(self, group_ids: Sequence[int], packed: Packed) -> dict[int, ShownAnswer]:
        """Sequences of the batch whose tokens are kept for people."""
        lengths, count = packed.batch.lengths.tolist(), self._config.metrics.trajectories_per_step
        found = {}
        for sequence in chosen_sequences(packed.places, lengths, groups=count, version=packed.batch.learner_version):
            place = packed.places[sequence]
            group = self._groups[group_ids[place.group]].group
            found[sequence] = shown_answer(group, place, tokens=lengths[sequence])
        return found

    def _kept_counts(self, batch: PackedBatch, sequences: Sequence[int]) -> asyncio.Task[Tensor | None] | None:
        """Begin to read from how many tokens those of some sequences were drawn, beside all else: people alone look at it."""
        if not sequences or batch.wide is None or not self._config.rollout.sampling.is_partial:
            return None

        async def read() -> Tensor | None:
            try:
                shown = batch.select(sequences).without_routes()
                found = await payloads.with_wide_fields(shown, deadline_s=self._config.deadlines.batch_s, has_topk=False)
            except (ray.exceptions.RayError, EvenkeelError) as error:
                log.warning("the kept sets of some tokens can't be shown: %s", error)
                return None
            return found.kept_counts

        return asyncio.create_task(read())

    def _packed(self, group_ids: Sequence[int], version: int, correction: CorrectionConfig) -> Packed:
        pulled = [self._groups[group_id] for group_id in group_ids]
        advantage = correction.advantage
        return pack_groups(
            [one.group for one in pulled],
            learner_version=version,
            advantage=partial(group_advantages, **advantage.of_group),
            turn_advantage=partial(turn_advantages, **advantage.of_group) if advantage.is_by_turn else None,
            overlong=self._config.rollout.overlong,
            max_tokens={entry.name: self._config.rollout.sampling_of(entry.name).max_tokens for entry in self._config.rollout.entries},
            temperature=self._config.rollout.sampling.temperature,
            wide_of={one.group.group_id: one.wide for one in pulled if one.wide is not None},
        )

    def _stale_sample(self, group_ids: Sequence[int], version: int, correction: CorrectionConfig) -> PackedBatch:
        batch = self._packed(group_ids, version, correction).batch
        return stale_sample(self._for_forward(batch, replays_engine=self._replays_engine), version)

    def _for_forward(self, batch: PackedBatch, *, replays_engine: bool) -> PackedBatch:
        """The batch with no more wide fields than a forward reads."""
        if replays_engine:
            return batch
        is_partial = self._config.rollout.sampling.is_partial  # kept sets are those of every policy
        return batch.without_routes() if is_partial else replace(batch, wide=None)

    async def _stored(self, batch: PackedBatch) -> PackedGroups:
        if not batch.num_tokens:
            return PackedGroups(None)
        return PackedGroups(await asyncio.to_thread(ray.put, batch), self._fetch_s(batch))

    @property
    def _replays_engine(self) -> bool:
        return self._config.learner.routing_replay == "rollout"

    def _fetch_s(self, batch: PackedBatch) -> float:
        """Longest time for a batch's wide fields to come; 0: there is nothing to fetch."""
        return tokens_s(batch.num_tokens, self._config.deadlines.bytes_per_s) if batch.wide else 0.0

    # -- diagnostics -------------------------------------------------------------------------------------------------

    async def observe(self, step: int, version: int, result: StepResult) -> Observation | None:
        """Diagnostics of the batch of `version` and what the monitor says about them.

        Args:
            step: number of the batch's step.
            result: the learner's, with a reference to its values. They are read here: Ray would bring a bare reference on the event loop.
        Returns: None if the batch isn't held (any more), or is left out because another one waits for its turn already.
        """
        trained = self._undiagnosed.pop(version, None)  # its tensors live as long as this call
        reference = self._reference_logprobs.pop(version, None)
        if trained is not None:
            self._go_on_to(version + 1)
        if trained is None or self._waiting_to_observe:
            return None
        self._waiting_to_observe += 1
        try:
            await self._observing.acquire()
        finally:
            self._waiting_to_observe -= 1
        try:
            with self._lane.span("diagnose", version=version):
                values = await self._values(result)
                counts = _if_there(trained.kept_counts)
                observation = await asyncio.to_thread(self._observe, step, version, trained, reference, values, counts)
            observation = replace(observation, late_s=self._clock.read())
            return replace(observation, info=self._published(observation), told=self._lane.report())
        finally:
            self._observing.release()

    def _published(self, observation: Observation) -> ActorInfo | None:
        """Put its times where Prometheus finds them, beside the memory of this process. Returns: where that is; None if this node has no
        such address: the monitor has moved on, and what it says must not be lost for that."""
        if self._endpoint is None:
            try:
                self._endpoint = MetricsEndpoint("correction", "0", bind=listen_address(self._config.metrics.bind))
            except ConfigError as error:
                log.warning("the times of diagnostics are not shown to Prometheus: %s", error)
                return None
        self._endpoint.publish({"time/diagnose_s": observation.seconds, "time/service_late_s": observation.late_s})
        return ActorInfo("correction", "0", os.getpid(), self._endpoint.target)

    def _observe(
        self,
        step: int,
        version: int,
        trained: _Undiagnosed,
        reference: Tensor | None,
        values: StepValues,
        kept_counts: Tensor | None,
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
        if batch.at_sampling_logprobs is not None:
            numbers |= to_numbers(batch, batch.at_sampling_logprobs, proximal, version, mask)
        events = self._monitor.update(step, numbers)
        state, clipped = self._monitor.state, clipped_tokens(batch, decided)
        if reference is not None:
            numbers["reference_kl"] = reference_kl(target_logprobs, reference, batch.loss_mask)
        seconds = time.monotonic() - began
        told = list(trained.shown.values())
        tokens = token_sample(corrected, list(trained.shown), told, values, kept_counts) if told else None
        at = self._monitor.state_dict()
        return Observation(dict(numbers), tuple(events), state, seconds, clipped, monitor=at, tokens=tokens)

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

    async def switch(self, before: CorrectionConfig, after: CorrectionConfig) -> dict[str, Any]:
        """Follow batches of another correction from now on. Returns: what the early warning knows then."""
        async with self._observing:
            if after.proximal is before.proximal:
                self._monitor.forget(symptom.name for symptom in SYMPTOMS if symptom.is_level_of_bounds)
            else:  # the level of every symptom is another one
                self._monitor = Monitor(self._config.monitor.thresholds)
            return self._monitor.state_dict()

    async def scatter(self) -> ScatterSample | None:
        """Tokens of the recent batches, for the report's picture of pi_prox against mu."""
        async with self._observing:
            return self._scatter.sample()


def _if_there(counts: asyncio.Task[Tensor | None] | None) -> Tensor | None:
    """Kept sets that have been read; they had a step's time, and the early warning doesn't wait for what people alone look at."""
    if counts is None or counts.done():
        return None if counts is None else counts.result()
    abandon(counts)
    return None


async def _without_wide_fields(group: Group, wide: Any) -> _Pulled:
    """The group without its wide fields, which are put into the object store. Only small groups and those of a checkpoint have any."""
    if not wide_fields.has_wide_fields(group):
        return _Pulled(group, wide)

    def put_apart() -> _Pulled:
        light, fields = wide_fields.split_wide_fields(group)
        return _Pulled(light, ray.put(fields))

    return await asyncio.to_thread(put_apart)


def _found(proximal: Proximal | None, reference: Tensor | None, split: SplitLogprobs | None) -> dict[str, Any]:
    """What a forward has found, by the field of PackedBatch."""
    found: dict[str, Any] = {}
    if proximal is not None:
        found["proximal_logprobs"] = proximal.logprobs
        if proximal.route_places is not None:
            found["wide"] = proximal.route_places
    if reference is not None:
        found["reference_logprobs"] = reference
    if split is not None:
        found["at_sampling_logprobs"] = split.at_sampling
    return found


def _put_in_place(batch: PackedBatch, chunks: Sequence[tuple[Sequence[int], dict[str, Any]]]) -> PackedBatch:
    """The batch with the results for chunks of its groups, by the field of PackedBatch, put in their places."""
    # A chunk packs its groups in its own order; find each group's tokens in the whole batch by its group id.
    whole: dict[str, Any] = {} if batch.num_tokens else {"proximal_logprobs": batch.behavior_logprobs}
    places = list(batch.wide or [WidePlace(())] * batch.num_sequences)
    sequences = batch.sequences_of_groups()
    for group_ids, found in chunks:
        own = [i for group_id in group_ids for i in sequences.get(group_id, ())]
        index = batch.token_index(own)
        for name, values in found.items():
            if name == "wide":
                for i, place in zip(own, values, strict=True):
                    places[i] |= place
            else:
                whole.setdefault(name, values.new_zeros(batch.num_tokens, *values.shape[1:]))[index] = values
    wide = tuple(places) if any(place.sources for place in places) else None
    return replace(batch, **whole, wide=wide)


def _tokens_of_groups(packed: Packed, groups: int) -> tuple[int, ...]:
    """Sampled tokens of each group of a batch, by the batch's own mask."""
    before = torch.cat([torch.zeros(1, dtype=torch.int64), packed.batch.loss_mask.cumsum(0)])[packed.batch.offsets]
    found = [0] * groups
    for place, tokens in zip(packed.places, before.diff().tolist(), strict=True):
        found[place.group] += tokens
    return tuple(found)
