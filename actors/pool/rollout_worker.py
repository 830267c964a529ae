"""A rollout worker: a Ray actor that owns one SGLang engine, samples groups and scores them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import psutil
import ray
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from evenkeel.actors.carriers import ActorInfo, BegunTicket, GroupFailure, LaneReport, Ticket, WeightChecksums, WorkerSettings
from evenkeel.actors.groups import tokens as payloads
from evenkeel.actors.metrics.exporter import MetricsEndpoint, listen_address, node_address
from evenkeel.actors.pool.preemption import EndNotice
from evenkeel.actors.processes.lane import Lane, worker_lane
from evenkeel.actors.processes.pacing import LoopClock
from evenkeel.actors.settings.devices import check_received
from evenkeel.correction.errors import (
    DataError,
    DeadlineExceeded,
    EngineDirty,
    EngineError,
    EngineReplaced,
    EvenkeelError,
    LateError,
    RequestError,
    SyncError,
)
from evenkeel.engines.rendezvous import keep_nccl_on
from evenkeel.engines.weights import WeightBucket, WeightSpec, compare_checksums, digest_of
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.continuation import unanswered, unsampled
from evenkeel.rollout.engine.engine import in_answer_thread
from evenkeel.rollout.engine.temporary_files import own_folder, remove
from evenkeel.rollout.engine.weight_transfer import require_checksums
from evenkeel.rollout.sampler import Sampler
from evenkeel.rollout.stacks import register_stack_dump
from evenkeel.rollout.trajectory import GroupFacts, Prompt, SyncReceipt, Trajectory, UnfinishedGroup, WorkerLoad

log = logging.getLogger("evenkeel.pool")
T = TypeVar("T")
GroupOutcome = GroupFacts | GroupFailure | UnfinishedGroup
Answer = tuple[GroupOutcome, *tuple[Any, ...]]
"""The second is a Group | None; with wide fields there is a third, those of its trajectories, or None (tokens.py)."""
UNANSWERED = (RequestError, DataError, DeadlineExceeded)
"""Errors of one request after which the engine goes on."""
_ABORT_S = 10.0
TURNS_S = 30.0
"""Most seconds until `turns_so_far` answers."""
# Spans of tools that are so near each other are one; shorter ones than the second are left out.
_NEAR_S, _SEEN_S = 0.05, 0.005


@dataclass(frozen=True, slots=True)
class _Sampling:
    """A group under way."""

    task: asyncio.Task[Answer]
    """A repeated call for the group, after a lost answer, gets its result."""
    spoilt: int
    """The worker's number of spoilt updates when it began."""


class RolloutWorker:
    """Used as a Ray actor (async). Calls overlap; a weight update pauses the engine, not the calls."""

    def __init__(self, name: str, settings: WorkerSettings) -> None:
        register_stack_dump()
        self._name, self._settings = name, settings
        # Number of the newest update asked for. An older one whose weights arrive late is dropped: it would take the engine back.
        self._asked_update = 0
        # Updates whose checksums are not compared yet. Until they are, nothing that the engine has sampled is returned.
        self._verifying: set[asyncio.Future[None]] = set()
        # Number of updates whose checksums were wrong. Answers sampled meanwhile belong to no known version and are refused.
        self._spoilt = 0
        # Highest (generation, version) asked for; a late call for an older one is refused.
        self._newest = (0, -1)
        self._generation = 0
        self._under_way: set[asyncio.Future[Any]] = set()
        self._groups: dict[int, _Sampling] = {}
        self._starting: asyncio.Task[ActorInfo] | None = None
        self._lane, self._clock = Lane(worker_lane(name), waits_for="work"), LoopClock()

    async def follow(self, generation: int) -> None:
        """Abort all groups and requests under way: the next calls belong to this generation. The caller doesn't wait for this call, which
        the network may lose; the first weights or the first group of a generation have the same effect."""
        self._follow(generation)

    def _follow(self, generation: int) -> None:
        if generation <= self._generation:
            return
        self._generation = generation
        self._groups.clear()
        for task in self._under_way:
            task.cancel()

    async def node_id(self) -> str:
        """Ray's id of its node. Asked before the engine starts, so that a start that fails is known to have failed there."""
        return ray.get_runtime_context().get_node_id()

    async def start(self, version: int) -> ActorInfo:
        """Start the engine and the reward processes, once; asked again, the answer is the same.

        Args: version: what the engine calls its weights before the first sync.
        """
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start_as_span(version))
        return await asyncio.shield(self._starting)

    async def _start_as_span(self, version: int) -> ActorInfo:
        with self._lane.span("start"):
            return await self._start(version)

    async def _start(self, version: int) -> ActorInfo:
        settings = self._settings
        if settings.rollout.engine.resolved_device == "cuda":
            check_received(f"rollout worker {self._name}", settings.rollout.gpus_of_a_worker, ray.get_gpu_ids())
            keep_nccl_on(node_address(), psutil.net_if_addrs())
        self._endpoint = MetricsEndpoint("rollout", self._name, bind=listen_address(settings.bind))
        with own_folder() as self._temporary:
            self._sampler = await Sampler.start(
                settings.model,
                settings.rollout,
                samples=settings.samples,
                version=version,
                name=f"rollout worker {self._name}",
                seed=settings.seed,
                topk=settings.topk,
                has_weights=False,
                node=node_address,
            )
        self._endpoint.registry.register(_EngineNumbers(self._sampler))
        self._end_notice = EndNotice()
        self._clock.start()
        return ActorInfo("rollout", self._name, os.getpid(), self._endpoint.target, node=ray.get_runtime_context().get_node_id())

    async def generate_group(self, ticket: Ticket, generation: int = 0) -> Answer:
        """Sample the G trajectories of a prompt, or go on with them, and score them. After `hand_back`: what there is of them.

        A second call for the group while it is sampled waits for the same answer.
        Args: generation: of the run when the group was given out.
        Returns: the outcome; for a finished group also the group itself, which stays in the object store, as its wide fields do
        (tokens.py).
        Raises: EngineError kinds, if the engine is dirty or lost; LateError after `follow` and `abort`, and for an older
            generation than the worker's.
        """
        if generation < self._generation:
            raise LateError(f"rollout worker {self._name}: group {ticket.group_id} was withdrawn before its call came")
        self._follow(generation)
        own = self._groups.get(ticket.group_id)
        if own is None or own.task.done() or own.task.cancelling():
            work = self._generate_group(ticket, self._spoilt)
            own = self._groups[ticket.group_id] = _Sampling(asyncio.ensure_future(work), self._spoilt)
        try:
            (found,) = await self._until_withdrawn([own.task])
        finally:
            if self._groups.get(ticket.group_id) is own and own.task.done():
                del self._groups[ticket.group_id]
        return found

    async def abort(self, group_id: int) -> None:
        """Abort a group and its requests. Returns when none of them is under way. Raises: EngineError if one doesn't end."""
        if (own := self._groups.get(group_id)) is None:
            return
        own.task.cancel()
        if not (await asyncio.wait({own.task}, timeout=_ABORT_S))[0]:
            raise EngineError(f"rollout worker {self._name}: group {group_id} was given up, and doesn't end in {_ABORT_S:g} s")

    async def _generate_group(self, ticket: Ticket, spoilt: int) -> Answer:
        """An error that nobody has foreseen (a tokenizer that can't decode a token, say) is a failure of this group alone."""
        try:
            with self._lane.busy(), self._dirty_if_succeeded():
                return await self._sampled_group(ticket, spoilt)
        except UNANSWERED as error:
            failure = GroupFailure(ticket.group_id, str(error), is_final=isinstance(error, DataError))
        except (EvenkeelError, ray.exceptions.RayError):
            raise
        except Exception as error:
            log.exception("rollout worker %s: group %d (%s)", self._name, ticket.group_id, ticket.prompt.prompt_id)
            failure = GroupFailure(ticket.group_id, f"{type(error).__name__}: {error}", is_final=False)
        return failure, *self._nothing

    @contextlib.contextmanager
    def _dirty_if_succeeded(self) -> Iterator[None]:
        """A block in which a lost engine counts as dirty if another one takes its place: the driver keeps the worker, and sends weights."""
        try:
            yield
        except EngineError as error:
            if type(error) is EngineError and (why := self._sampler.lost_of):
                raise EngineReplaced(why) from error
            raise

    @property
    def _nothing(self) -> tuple[None, ...]:
        """What stands in place of references to a group's tokens and wide fields, where there are none."""
        return (None, None) if self._settings.has_wide_fields else (None,)

    async def _sampled_group(self, ticket: Ticket, spoilt: int) -> Answer:
        """Args: spoilt: as of _Sampling."""
        generation, began = self._generation, time.monotonic()
        tell = partial(self._lane.add, version=ticket.admitted_version, group=ticket.group_id)
        between: list[tuple[float, float]] = []
        try:
            group = await self._sampler.group(
                ticket.prompt,
                group_id=ticket.group_id,
                admitted_version=ticket.admitted_version,
                topk=self._settings.topk,
                begun=ticket.begun if isinstance(ticket, BegunTicket) else None,
                between=lambda begin, end: between.append((begin, end)),
            )
        except BaseException as error:
            tell("sample", began, time.monotonic(), why=type(error).__name__)
            raise
        scored_at = time.monotonic()
        sampled_at = scored_at if isinstance(group, UnfinishedGroup) else max(began, scored_at - group.reward_s)
        tell("sample", began, sampled_at)
        for begin, end in _united(between):
            tell("tool", begin, end)
        if scored_at > sampled_at:
            tell("reward", sampled_at, scored_at)
        await self._of_known_weights(spoilt)
        if generation != self._generation:
            raise LateError(f"rollout worker {self._name}: group {ticket.group_id} was withdrawn while it was sampled")
        if isinstance(group, UnfinishedGroup):
            return group, *self._nothing
        answer: Answer = group.facts, group
        if self._settings.has_wide_fields:  # in a thread: with prompts of 16,000 tokens it takes 50 ms
            answer = await in_answer_thread(lambda: payloads.split_answer(group))
        self._count(group.trajectories)
        self._endpoint.add("rollout/finished_groups_total", 1)
        return answer

    async def turns_so_far(self, generation: int) -> tuple[int, dict[int, UnfinishedGroup]]:
        """What there is of the groups under way whose rollouts have turns, once one has had a turn since the last answer, and at the
        latest after TURNS_S. Others go on from there if this worker is lost. For one caller.

        Returns: how many tokens these are, sampled and read; and what there is by group id, which stays in the object store.
        """
        self._follow(generation)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TURNS_S):
                await self._sampler.turned()
        while self._verifying:
            await asyncio.wait(self._verifying)
        found = self._sampler.so_far([group_id for group_id, own in self._groups.items() if own.spoilt == self._spoilt])
        return sum(one.tokens + one.read_tokens for one in found.values()), found

    async def answer(self, prompts: Sequence[Prompt], how: AnswerSampling) -> list[tuple[Trajectory, ...]]:
        """Scored answers to each prompt (evaluation), which the book knows nothing of. Raises: as `generate_group`."""
        spoilt = self._spoilt
        with self._lane.span("evaluate"):
            answers = await self._until_withdrawn([self._answer(prompt, how) for prompt in prompts])
        await self._of_known_weights(spoilt)
        self._count([one for of_one in answers for one in of_one])
        return answers

    async def _until_withdrawn(self, work: Sequence[Awaitable[T]]) -> list[T]:
        """The results. Raises: LateError after `follow`, and for what was aborted."""
        tasks = [asyncio.ensure_future(part) for part in work]
        self._under_way.update(tasks)
        try:
            return list(await asyncio.gather(*tasks))
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # it is this call that was cancelled
                raise
            raise LateError(f"rollout worker {self._name}: this work was withdrawn") from None
        finally:
            self._under_way.difference_update(tasks)

    async def _answer(self, prompt: Prompt, how: AnswerSampling) -> tuple[Trajectory, ...]:
        """The answers, without a reward if the engine could not give them."""
        try:
            with self._dirty_if_succeeded():
                return await self._sampler.answer(prompt, how)
        except UNANSWERED as error:
            return (unanswered(unsampled(prompt.token_ids, prompt.prompt_id), str(error)),) * how.samples

    def _count(self, trajectories: Sequence[Trajectory]) -> None:
        self._endpoint.add("rollout/generated_tokens_total", sum(t.response_tokens for t in trajectories))
        self._endpoint.set("rollout/requests_in_flight", self._sampler.engine.requests_in_flight)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def update_weights(
        self, version: int, buckets: Sequence[Any], checksums: WeightChecksums | None, generation: int = 0
    ) -> SyncReceipt:
        """Take the weights of a version while requests are in flight. All of them are here before the engine pauses.

        Args:
            buckets: references to WeightBuckets. A node fetches them once, for all of its engines, which read them in its object store.
            checksums: of what has to arrive, and of what the engine has to hold then; None: not compared, and not asked of the engine.
            generation: of the version; the receipt names both.
        Raises: LateError if they don't come to this node. SyncError if the engine fails while it takes them, and is dirty then; or if
            others were asked for meanwhile, and nothing has begun.
        """
        began, this_update = time.monotonic(), self._number_of_update(version, generation)
        with self._lane.span("fetch", version=version):
            *fetched, expected = await self._fetched(version, [*buckets, checksums.by_name if checksums is not None else None])
        if expected is not None:
            await asyncio.to_thread(require_checksums, fetched, expected)
        await self._sampler.succeeded()
        if this_update != self._asked_update:
            raise SyncError(f"rollout worker {self._name}: weights v{version} came after others had been asked for; these stay")
        if expected is None and (why := self._sampler.lost_of):  # what arrives in another engine has to be compared
            raise EngineDirty(why)
        holding_back = self._holding_back() if expected is not None else contextlib.nullcontext()
        with self._lane.span("update", version=version), holding_back, self._dirty_if_succeeded():
            receipt = await self._sampler.engine.update_weights(version, fetched)
            is_as_sent = expected is None
            try:
                receipt = await self._receipt(replace(receipt, generation=generation), began, fetched, expected)
                is_as_sent = True
            finally:
                self._spoilt += not is_as_sent
        if expected is not None:
            self._sampler.has_its_weights()
        return replace(receipt, load=await self.load())

    @contextlib.contextmanager
    def _holding_back(self) -> Iterator[None]:
        """A block within which finished groups and answers are held back."""
        verified = asyncio.get_running_loop().create_future()
        self._verifying.add(verified)
        try:
            yield
        finally:
            self._verifying.discard(verified)
            verified.set_result(None)

    async def _of_known_weights(self, spoilt: int) -> None:
        """Returns once the weights of the engine are compared. Args: spoilt: as it was when the work began. Raises: EngineDirty."""
        while self._verifying:
            await asyncio.wait(self._verifying)
        if self._spoilt != spoilt:
            raise EngineDirty(f"rollout worker {self._name}: other weights arrived than were sent while this ran. Submit it again")

    async def _fetched(self, version: int, references: Sequence[Any]) -> list[Any]:
        """Buckets and checksums, once all are on this node. Raises: LateError if they don't come; the engine is unchanged, not to blame."""
        place, limit_s = f"rollout worker {self._name}: weights v{version}", self._settings.weights_fetch_s
        try:
            async with asyncio.timeout(limit_s):
                return list(await asyncio.gather(*map(payloads.value_of, references)))
        except TimeoutError:
            raise LateError(
                f"{place}: not all of {len(references) - 1} buckets came in {limit_s:.0f} s; if that is the network's usual pace, lower "
                "deadlines.bytes_per_s"
            ) from None
        except ray.exceptions.RayError as error:
            raise LateError(f"{place} could not be read from the object store ({type(error).__name__})") from error

    def _number_of_update(self, version: int, generation: int) -> int:
        if (generation, version) < self._newest:
            raise SyncError(f"rollout worker {self._name}: weights v{version} were asked for after v{self._newest[1]}; those stay")
        self._follow(generation)
        self._newest = generation, version
        self._asked_update += 1
        return self._asked_update

    async def join_weight_group(self, host: str, port: int, rank: int, world_size: int, name: str) -> None:
        """Join the learner's broadcast group. An engine that takes the place of this one would not be in it."""
        self._sampler.have_no_successor()
        await self._sampler.engine.join_weight_group(host, port, rank, world_size, name)

    async def leave_weight_group(self, name: str) -> None:
        await self._sampler.engine.leave_weight_group(name)

    async def receive_weights(self, version: int, buckets: list[list[WeightSpec]], group: str, generation: int = 0) -> SyncReceipt:
        """Take the weights that the learner broadcasts. Raises: as `update_weights`."""
        began = time.monotonic()
        self._number_of_update(version, generation)
        with self._lane.span("update", version=version):
            receipt = await self._sampler.engine.receive_weights(version, buckets, group=group)
            receipt = await self._receipt(replace(receipt, generation=generation), began)
        return replace(receipt, load=await self.load())

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of a fixed prompt at the present weights."""
        return await self._sampler.engine.score(token_ids)

    async def _receipt(
        self, receipt: SyncReceipt, began: float, sent: Sequence[WeightBucket] = (), verified: Mapping[str, str] | None = None
    ) -> SyncReceipt:
        """Args: sent: buckets to compare with what the engine holds. verified: checksums of what was sent; None: nothing is compared.
        Raises: SyncError naming what the engine holds otherwise."""
        digest, processor = "", None
        if verified is not None:
            held = await self._sampler.engine.weight_checksums(sent, verified)
            await asyncio.to_thread(compare_checksums, self._name, verified, held, version=receipt.version)
            digest = await asyncio.to_thread(digest_of, held)
            processor = await self._sampler.engine.processor() if self._settings.rollout.engine.batch_invariant else None
        self._endpoint.set("rollout/weight_version", receipt.version)
        self._endpoint.set("rollout/last_sync_time_s", time.time())
        return replace(receipt, seconds=time.monotonic() - began, digest=digest, processor=processor)

    # -- life --------------------------------------------------------------------------------------------------------

    async def load(self) -> WorkerLoad:
        """Raises: EngineError if the engine is lost."""
        sampler, engine = self._sampler, self._sampler.engine
        if not (lost_of := sampler.lost_of):
            engine.raise_if_lost()
        totals, late_s = (sampler.busy_s, sampler.up_s, sampler.generated_tokens), self._clock.read()
        self._endpoint.set("time/rollout_late_s", late_s)
        return WorkerLoad(*totals, engine.requests_in_flight, engine.silent_s, late_s, lost_of, self._lane.report())

    async def hand_back(self) -> None:
        """Sample nothing more; `generate_group` returns what there is. Returns when the engine has nothing under way."""
        await self._sampler.hand_back()

    async def end_notice(self) -> None:
        """Returns when the process has got a SIGTERM."""
        await self._end_notice.received.wait()

    async def stop(self) -> LaneReport:
        """End the engine. Returns: what the worker has done since its last answer."""
        with self._lane.span("end"):
            await self._sampler.close()
            await asyncio.to_thread(remove, self._temporary)
        self._clock.stop()
        self._endpoint.close()
        return self._lane.report()


class _EngineNumbers(Collector):
    """Metrics of the engine that a sampler has."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets; called by the registry."""
        return self._sampler.engine.metrics.collect()


def _united(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of a group's rollouts that overlap, or nearly do, as one: hundreds of calls of tools are few spans of its lane. Without those
    that are too short to be seen."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + _NEAR_S:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return [(begin, end) for begin, end in found if end - begin >= _SEEN_S]
