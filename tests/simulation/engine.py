"""What plays SGLang: tokens take time, and each one is the name of the weights that sampled it.

The rollout worker is the real one; this stands in place of its sampler, with what a worker can see of an engine: updates that pause it,
that fail half-way and leave it dirty, requests that an update cuts into spans of versions, answers in SGLang's form (which the product's
own reading of them takes apart), a scheduler that dies or stands still.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from evenkeel.actors.carriers import WeightChecksums
from evenkeel.correction.errors import DeadlineExceeded, EngineDirty, EngineError, EvenkeelError, SyncError
from evenkeel.engines.weights import digest_of
from evenkeel.rollout.config import AnswerSampling, RolloutConfig
from evenkeel.rollout.continuation import continued, is_begun, kept, unsampled, with_more_to_read
from evenkeel.rollout.engine.engine import trajectory_of
from evenkeel.rollout.prompt_place import task_of
from evenkeel.rollout.trajectory import FailureKind, Group, Prompt, SyncReceipt, Trajectory, UnfinishedGroup
from tests.simulation.processes import Process

# An answer is sampled in so many parts, between which weights may change.
_CHUNKS = 3
# Of one that another engine has begun.
_CHUNKS_LEFT = 2
_LONGEST = 1000
READ = 1_000_000
"""Id of a token that is read between two turns, or of its first one at least."""
# Of the model; each is a bucket of its own.
_TENSORS = ("a", "b", "c")


@dataclass(frozen=True, slots=True)
class Piece:
    """A bucket of weights: one tensor, which is the name of the weights."""

    tensor: str
    weights: int

    def checksums(self) -> dict[str, str]:
        return {self.tensor: f"{self.weights}-{self.tensor}"}


def pieces_of(weights: int) -> list[Piece]:
    return [Piece(tensor, weights) for tensor in _TENSORS]


def checksums_of_weights(weights: int) -> WeightChecksums:
    by_name = {tensor: f"{weights}-{tensor}" for tensor in _TENSORS}
    return WeightChecksums(ray.put(by_name), digest_of(by_name))


def _at_a_time(prompt_id: str, index: int) -> int:
    """Tokens of a part of an answer."""
    return 1 + zlib.crc32(f"{prompt_id}/{index}".encode()) % 3


def turns_of(prompt_id: str) -> int:
    """Of each answer to a prompt of a task that is played: two to eight."""
    return 2 + zlib.crc32(f"turns of {prompt_id}".encode()) % 7


def reading_of(prompt_id: str, index: int, turn: int) -> list[int]:
    """What an answer reads before a turn, as long as it may be: its first token says which turn's it is, and how long."""
    length = 1 + zlib.crc32(f"{prompt_id}/{index}/{turn}".encode()) % 40
    return [READ + 100 * turn + length, *[READ] * (length - 1)]


def probe_of(weights: int, tokens: int) -> list[float]:
    """Logprobs of the fixed prompt under these weights."""
    return [-1.0 - (weights % 997) / 1000] * (tokens - 1)


@dataclass(slots=True)
class Health:
    """What faults do to one engine."""

    slowness: float = 1.0
    is_hanging: bool = False
    garbage: int = 0
    """So many of the next answers are none."""
    spoilt_updates: int = -1
    """Its answers are none, until it has got weights so many times more; -1: they are."""
    breaks_updates: int = 0
    """So many of the next updates stop after the first tensor."""
    damages_updates: int = 0
    """So many of the next weights arrive with other bytes."""
    lost: str = ""
    """Why its scheduler is gone."""
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    """Of those who let time go by in the engine."""

    def changed(self) -> None:
        for waiter in self.waiters:
            _wake(waiter)
        self.waiters.clear()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class FaultyEngine:
    def __init__(self, process: Process, config: RolloutConfig, version: int, given: Callable[[str, int], None]) -> None:
        """Args: given: takes a prompt's id, and how many tokens were sampled for it just now."""
        self.given, self._process, self._deadlines = given, process, config.engine.deadlines
        self.health = Health()
        self.version = version
        self.held: dict[str, int] = dict.fromkeys(_TENSORS, -1)
        """By tensor: the weights that it is of."""
        self.requests_in_flight, self.metrics = 0, None
        self.born = asyncio.get_running_loop().time()
        self._busy_s, self._busy_since = 0.0, 0.0
        self.silent_s = 0.0
        self.is_leaving = False
        self._dirty: str | None = "it has had no weights yet"
        self._failed_updates = 0
        self._updating = asyncio.Lock()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._broadcasts: dict[str, Any] = {}

    # -- time --------------------------------------------------------------------------------------------------------

    def _s(self, what: str, least_s: float, most_s: float) -> float:
        return self._process.cluster.delay(f"{self._process.name} {what}", least_s, most_s) * self.health.slowness

    async def _takes(self, seconds: float, limit_s: float, phase: str, *, may_be_aborted: bool = False) -> None:
        """Time goes by in the engine. Raises: EngineError if it is lost meanwhile, DeadlineExceeded if it stands still for too long."""
        loop = asyncio.get_running_loop()
        ends, limit = loop.time() + seconds, loop.time() + limit_s
        while True:
            self.raise_if_lost()
            now = loop.time()
            if now >= limit:
                raise DeadlineExceeded(f"{phase}: not done in {limit_s:g} s")
            if (now >= ends or (may_be_aborted and self.is_leaving)) and not self.health.is_hanging:
                return
            waiter: asyncio.Future[None] = loop.create_future()
            self.health.waiters.append(waiter)
            timer = loop.call_at(min(limit, ends if ends > now else limit), _wake, waiter)
            await waiter
            timer.cancel()
            if waiter in self.health.waiters:
                self.health.waiters.remove(waiter)

    def raise_if_lost(self) -> None:
        if self.health.lost:
            raise EngineError(f"{self._process.name}: {self.health.lost}")

    # -- answers -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        samples: int,
        begun: Sequence[Trajectory] = (),
        tell: Callable[[tuple[Trajectory, ...]], None] = lambda _: None,
        *,
        has_turns: bool = False,
    ) -> tuple[Trajectory, ...]:
        """As the real one; after `hand_back` what there is of each answer.

        Args:
            tell: is told what there is in between.
            has_turns: each part is one, and there is something to read before the next.
        """
        self.raise_if_lost()
        found = list(begun) or [unsampled(prompt.token_ids, prompt.prompt_id)] * samples
        todo = [i for i, answer in enumerate(found) if is_begun(answer)]
        if not todo or self.is_leaving:
            return tuple(found)
        if self._dirty is not None:
            raise EngineDirty(f"{self._process.name} is dirty: {self._dirty}. Send it a whole weight update first")
        failed_updates = self._failed_updates
        spans: list[tuple[int, int]] = []

        def so_far(ends: str) -> tuple[Trajectory, ...]:
            there = list(found)
            for i in todo:
                rest = self._answer(prompt, i, spans, ends, found[i])
                whole = continued(found[i], rest) if found[i].response_ids else rest
                there[i] = kept(whole, _LONGEST) if is_begun(whole) else whole
            return tuple(there)

        self._asked(samples)
        try:
            parts = _CHUNKS_LEFT if begun else _CHUNKS
            if has_turns:
                parts = turns_of(prompt.prompt_id) + 1 - found[todo[0]].turns
            for left in reversed(range(parts)):
                what = f"generate {prompt.prompt_id}"
                await self._takes(self._s("tokens", 0.1, 2.0), self._deadlines.generate_s, what, may_be_aborted=True)
                if is_aborted := self.is_leaving:
                    break
                await self._resumed.wait()
                self.raise_if_lost()  # an update that stood still has ended the scheduler, and with it what waited for the update
                if self._failed_updates != failed_updates:
                    raise EngineDirty(f"{self._process.name}: a weight update failed while this request ran")
                spans.append((self.version, self._weights()))
                self.given(prompt.prompt_id, sum(_at_a_time(prompt.prompt_id, i) for i in todo))
                if has_turns and left:
                    for i, one in enumerate(so_far("stop")):
                        if i in todo:
                            found[i] = with_more_to_read(one, reading_of(prompt.prompt_id, i, one.turns))
                    spans.clear()
                    tell(tuple(found))
                elif not self.health.garbage and self.health.spoilt_updates < 0:
                    tell(so_far("abort"))
        finally:
            self._asked(-samples)
        return so_far("abort" if is_aborted else "stop")

    def _asked(self, requests: int) -> None:
        self._busy_s = self.busy_s
        self._busy_since = asyncio.get_running_loop().time()
        self.requests_in_flight += requests

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request."""
        return self._busy_s + (asyncio.get_running_loop().time() - self._busy_since) * bool(self.requests_in_flight)

    async def hand_back(self) -> None:
        self.is_leaving = True
        while self.requests_in_flight:
            self.health.changed()
            await asyncio.sleep(0.1)

    def _weights(self) -> int:
        """What a token shows of the weights that sampled it: their name if they are of one version, something else if they are not."""
        held = set(self.held.values())
        return held.pop() if len(held) == 1 else -2

    def _answer(self, prompt: Prompt, index: int, spans: Sequence[tuple[int, int]], ends: str, begun: Trajectory) -> Trajectory:
        """From an answer in SGLang's form, to what there is of it. Raises: EngineError for one that is none."""
        each = _at_a_time(prompt.prompt_id, index)
        ids = [weights for _, weights in spans for _ in range(each)]
        logprobs: list[list[Any]] = [[-1.0, token, None] for token in ids]
        if (self.health.garbage > 0 or self.health.spoilt_updates >= 0) and ids:
            self.health.garbage -= self.health.garbage > 0
            logprobs = [[math.nan, token, None] for token in ids] if index % 2 else logprobs[:-1]
        versions: list[dict[str, Any]] = []
        for i, (version, _) in enumerate(spans):
            if versions and versions[-1]["version"] == str(version):
                versions[-1]["end"] = (i + 1) * each
            else:
                versions.append({"version": str(version), "start": i * each, "end": (i + 1) * each})
        meta = {"output_token_logprobs": logprobs, "weight_versions": versions, "finish_reason": {"type": ends}, "prompt_tokens": 3}
        answer = {"output_ids": ids, "meta_info": meta}
        read = [*begun.token_ids]
        return trajectory_of(answer, read, self._process.name, prompt_id=prompt.prompt_id)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self.raise_if_lost()
        if self._dirty is not None:
            raise EngineDirty(f"{self._process.name} is dirty: {self._dirty}. Send it a whole weight update first")
        await self._takes(self._s("probe", 0.05, 3.0), self._deadlines.control_s, "score")
        await self._resumed.wait()
        self.raise_if_lost()
        return probe_of(self._weights(), len(token_ids))

    # -- weights -----------------------------------------------------------------------------------------------------

    async def update_weights(self, version: int, buckets: Sequence[Piece]) -> SyncReceipt:
        """As the real one: under way it is shielded from whoever has asked for it."""
        self.raise_if_lost()
        is_damaged = self.health.damages_updates > 0  # this one, though a broadcast may still be under way
        self.health.damages_updates -= is_damaged
        return await asyncio.shield(asyncio.ensure_future(self._update(version, buckets, is_damaged=is_damaged)))

    async def _update(self, version: int, buckets: Sequence[Piece], *, is_damaged: bool = False) -> SyncReceipt:
        async with self._updating:
            self.raise_if_lost()
            began = asyncio.get_running_loop().time()
            self._resumed.clear()
            self._dirty = f"an update to v{version} has begun"
            try:
                for number, piece in enumerate(buckets):
                    if number and self.health.breaks_updates:
                        self.health.breaks_updates -= 1
                        raise SyncError(f"{self._process.name}: tensor {piece.tensor} of v{version} could not be read")
                    await self._takes(self._s("tensor", 0.02, 0.6), self._deadlines.update_s, f"weight update v{version}")
                    self.held[piece.tensor] = piece.weights
                if is_damaged:
                    self.held["b"] = -3
            except DeadlineExceeded as error:
                self.health.lost = f"weight update v{version}: {error}"
                self.health.changed()
                raise
            except EvenkeelError as error:
                self._failed_updates += 1
                self._dirty = f"the update to v{version} failed ({error})"
                raise
            finally:
                self._resumed.set()
            self.version, self._dirty = version, None
            self.health.spoilt_updates -= self.health.spoilt_updates >= 0
            pause_s = asyncio.get_running_loop().time() - began
            return SyncReceipt(version, bytes=8, pause_s=pause_s)

    async def join_weight_group(self, host: str, port: int, rank: int, world_size: int, name: str) -> None:
        self.raise_if_lost()
        self._broadcasts[name] = await self._process.cluster.meetings.rendezvous(name, world_size, self._deadlines.update_s)

    async def leave_weight_group(self, name: str) -> None:
        self._broadcasts.pop(name, None)

    async def receive_weights(self, version: int, buckets: Sequence[Any], *, group: str) -> SyncReceipt:
        self.raise_if_lost()
        if group not in self._broadcasts:
            raise SyncError(f"{self._process.name} is in no weight group {group}")
        weights = await self._process.cluster.meetings.received(group, self._deadlines.update_s)
        return await asyncio.shield(asyncio.ensure_future(self._update(version, pieces_of(weights))))

    async def weight_checksums(self, *_: Any) -> dict[str, str]:
        await self._takes(self._s("checksums", 0.01, 0.5), self._deadlines.control_s, "checksums")
        return {tensor: f"{weights}-{tensor}" for tensor, weights in self.held.items()}

    async def processor(self) -> None: ...

    async def shutdown(self) -> None: ...


class SimulatedSampler:
    """Groups of answers, scored by a hash: some questions are too easy, some answers can't be scored, and some have a branch."""

    generated_tokens, lost_of = 0, ""

    async def succeeded(self) -> None: ...

    def has_its_weights(self) -> None: ...

    def have_no_successor(self) -> None: ...

    def __init__(self, engine: FaultyEngine, samples: int, unscored: float, faults: Any, played: Collection[str] = ()) -> None:
        """Args: played: names of tasks whose answers have turns."""
        self.engine, self._samples, self._unscored, self._faults, self._played = engine, samples, unscored, faults, played
        self._under_way = dict[int, UnfinishedGroup]()
        self._turned = asyncio.Event()

    @property
    def busy_s(self) -> float:
        return self.engine.busy_s

    @property
    def up_s(self) -> float:
        return asyncio.get_running_loop().time() - self.engine.born

    async def group(
        self, prompt: Prompt, *, group_id: int, admitted_version: int, begun: UnfinishedGroup | None = None, **_: Any
    ) -> Group | UnfinishedGroup:
        await self._faults.befalls_sampling(prompt.prompt_id)

        lost_tokens = begun.lost_tokens if begun is not None else 0

        def note(answers: tuple[Trajectory, ...]) -> None:
            self._under_way[group_id] = UnfinishedGroup(group_id, answers, lost_tokens=lost_tokens)
            self._turned.set()

        try:
            has_turns, there = task_of(prompt.prompt_id) in self._played, begun.answers if begun is not None else ()
            answers = await self.engine.generate(prompt, self._samples, there, note, has_turns=has_turns)
        finally:
            self._under_way.pop(group_id, None)
        if self.engine.is_leaving and any(map(is_begun, answers)):
            return UnfinishedGroup(group_id, answers, lost_tokens=lost_tokens)
        scored = tuple(self._scored(answer, prompt, index) for index, answer in enumerate(answers))
        self.engine.given(prompt.prompt_id, sum(branch.response_tokens for one in scored for branch in one.branches))
        return Group(group_id, prompt, scored, admitted_version, lost_tokens=lost_tokens)

    async def turned(self) -> None:
        await self._turned.wait()
        self._turned.clear()

    def so_far(self, groups: Iterable[int]) -> dict[int, UnfinishedGroup]:
        """After each part of an answer, as after a turn."""
        return {group_id: self._under_way[group_id] for group_id in groups if group_id in self._under_way}

    async def answer(self, prompt: Prompt, how: AnswerSampling) -> tuple[Trajectory, ...]:
        await self._faults.befalls_sampling(prompt.prompt_id)
        answers = await self.engine.generate(prompt, how.samples)
        if self.engine.is_leaving and any(map(is_begun, answers)):
            raise EngineError("the engine is shutting down: ask another worker")
        return tuple(self._scored(one, prompt, i) for i, one in enumerate(answers))

    def _scored(self, answer: Trajectory, prompt: Prompt, index: int) -> Trajectory:
        share = zlib.crc32(f"reward of {prompt.prompt_id}/{index}".encode()) / 2**32
        if share < self._unscored or self._faults.judge_is_down():
            return replace(answer, error="the reward took longer than its deadline", failure=FailureKind.REWARD_TIMEOUT)
        others = (replace(answer, prompt_ids=answer.token_ids + answer.prompt_ids),) if int(share * 1000) % 3 == 0 else ()
        return replace(answer, reward=float(share > 0.6), branches=others)

    async def hand_back(self) -> None:
        await self.engine.hand_back()

    async def close(self) -> None: ...
