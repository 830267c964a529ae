"""Payload by reference: groups travel as facts, and their tokens stay in the object store until somebody computes with them.

A worker answers the pool's call with the facts of the finished group (rewards, lengths, version spans) and, as a second result, with the
group itself: only its reference goes on, with the facts, to the queue and the service. Ray gives a result to who has called, so the driver
owns the object and not the worker, whose engine may fail or be replaced at any moment: an object goes with its owner, and what a lost
worker had finished would have to be sampled again. The object lies in the store of the worker's node (a small one with its reference);
with that node it is lost, and the group is sampled again.

What of a group only the learner's ranks look at (its wide fields, correction/wide.py) is a third result, an object of its own. The service
never reads it: a batch says where those of its sequences are, and each rank reads the ones that it computes with (LearnerGroup.fetch).

Small groups go on by value. Ray hands results below 100 KB to the caller's own memory, and keeps one there for good once its reference has
gone on through two processes, as from the queue to the service: 3 kB a group of short answers, for as long as the run lasts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from actors.carriers import QueueSnapshot, StoredGroup
from actors.supervision import persistently, wait_for
from actors.trajectory_queue import ANSWER_S
from correction.errors import ActorLost, EvenkeelError
from rollout.trajectory import Group, GroupFacts

if TYPE_CHECKING:  # torch
    from correction.batch import PackedBatch
    from correction.wide import WideFields

_INLINE_BYTES = 100 * 1024
"""Ray's max_direct_call_object_size."""
_AT_HAND_S = 10.0
_TOKEN_BYTES = 4096
"""Of a token with all that may go with it, generously: a hundred likely ones, or its experts in a hundred layers."""
_LEAST_TOKEN_BYTES = 8
"""An id and a logprob, each of four bytes."""
GONE, LATE = "gone with its node or its worker", "not there in time"
"""Why something can't be read."""
_NO_ROOM = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)


async def value_of(reference: Any) -> Any:
    """What a reference refers to, or the thing itself. It is read beside the event loop, as Ray does it for what is awaited."""
    return await reference if isinstance(reference, Awaitable) else reference


def apart(group: Group) -> tuple[GroupFacts, Group, tuple[WideFields, ...] | None]:
    """A worker's answer: facts, the group without its wide fields, and these; None: they are in the group, which is small."""
    from rollout import wide_fields  # torch: not in the driver

    light, fields = wide_fields.apart(group)
    size = sum(one.nbytes for one in fields)
    if size < _INLINE_BYTES:
        return group.facts, group, None
    return replace(group.facts, wide_bytes=size), light, fields


async def to_hand_on(facts: GroupFacts, reference: Any) -> Any:
    """A finished group as it goes on: itself if it may be in this process already, else its reference."""
    if sum(one.response_tokens for one in facts.trajectories) * _LEAST_TOKEN_BYTES >= _INLINE_BYTES:
        return reference
    with suppress(ray.exceptions.RayError, EvenkeelError):  # who computes with it will say
        return await wait_for(value_of(reference), f"group {facts.group_id} <- object store", deadline_s=_AT_HAND_S)
    return reference


def disregard(answer: Any, *beside: Any) -> None:
    """Nobody needs any more what a call returns beside its answer: that is never fetched.

    If the call fails, all results are its error, and Ray reports one that nobody has looked at.
    """

    def look_at_its_error(ended: asyncio.Future[Any]) -> None:
        if _has_failed(ended):
            for one in beside:
                asyncio.ensure_future(one).add_done_callback(_has_failed)

    asyncio.ensure_future(answer).add_done_callback(look_at_its_error)


def _has_failed(ended: asyncio.Future[Any]) -> bool:
    return not ended.cancelled() and ended.exception() is not None


def no_room(error: BaseException) -> str:
    """What a node needs whose object store has taken no result any more; empty: that is not what this error says."""
    for one in (getattr(error, "cause", None), error):
        if isinstance(one, _NO_ROOM):
            needs = "more memory in /dev/shm, or more free disk where Ray has its session (ray.temp_dir)"
            return f"no room in Ray's object store ({type(one).__name__}): its node needs {needs}"
    return ""


def fetch_s(groups: Sequence[StoredGroup], bytes_per_s: float) -> float:
    """Longest time for their tokens to come."""
    return tokens_s(sum(one.response_tokens for group in groups for one in group.facts.trajectories), bytes_per_s)


def tokens_s(tokens: int, bytes_per_s: float) -> float:
    """The same for so many tokens."""
    return ANSWER_S + tokens * _TOKEN_BYTES / bytes_per_s


async def fetched(groups: Sequence[StoredGroup], *, deadline_s: float) -> tuple[list[Group], dict[int, str]]:
    """The groups themselves, in their order; and why the others can't be read, by id: GONE or LATE.

    Args: deadline_s: for all of them: a pull from another node may hang.
    Raises: ActorLost for one that found no room: sampled again it would find none either.
    """
    found = await wait_for(_values(groups, deadline_s), f"tokens of {len(groups)} groups <- object store", deadline_s=2 * deadline_s)
    lost = dict[int, str]()
    for one, value in zip(groups, found, strict=True):
        if isinstance(value, BaseException) and (needs := no_room(value)):
            raise ActorLost(f"group {one.group_id}: {needs}")
        if isinstance(value, ray.exceptions.RayError | TimeoutError):
            lost[one.group_id] = _why(value)
        elif isinstance(value, BaseException):
            raise value
    return [value for value in found if not isinstance(value, BaseException)], lost


async def _values(groups: Sequence[StoredGroup], limit_s: float) -> list[Any]:
    """What the payloads refer to, or the error of each that can't be read. Args: limit_s: for all of them."""
    ends = asyncio.get_running_loop().time() + limit_s

    async def in_time(reference: Any) -> Any:
        async with asyncio.timeout_at(ends):
            return await value_of(reference)

    references = [one.payload for one in groups]
    if references and all(isinstance(one, ray.ObjectRef) for one in references):
        with suppress(ray.exceptions.RayError):  # of one of them, which isn't said
            return list(await asyncio.to_thread(ray.get, references, timeout=limit_s / 2))  # one by one takes several times as long
    return await asyncio.gather(*(in_time(one) for one in references), return_exceptions=True)


def _why(error: BaseException) -> str:
    return LATE if isinstance(error, TimeoutError) else GONE  # as Ray's own is, too


def read_now(references: Sequence[Any], limit_s: float) -> tuple[dict[Any, Any], dict[Any, str]]:
    """What references refer to, for who waits in a thread of its own; and why others can't be read: GONE or LATE."""
    ends = time.monotonic() + limit_s
    with suppress(ray.exceptions.RayError):  # of one of them, which isn't said
        return dict(zip(references, ray.get(list(references), timeout=limit_s / 2), strict=True)), {}
    found, lost = dict[Any, Any](), dict[Any, str]()
    for one in references:
        try:
            found[one] = ray.get(one, timeout=max(0.0, ends - time.monotonic()))
        except ray.exceptions.RayError as error:
            if needs := no_room(error):
                raise ActorLost(f"wide fields of a batch: {needs}") from error
            lost[one] = _why(error)
    return found, lost


async def with_wide_fields(batch: PackedBatch, *, deadline_s: float) -> PackedBatch:
    """The whole batch, with what lies elsewhere of it. Raises: RayError if some of it is gone."""
    places = batch.wide or ()
    references = list(dict.fromkeys(one for place in places for one in place.references))
    what = f"wide fields of {len(places)} sequences <- object store"
    values = await wait_for(asyncio.gather(*map(value_of, references)), what, deadline_s=deadline_s)
    return batch.holding(dict(zip(references, values, strict=True))).with_wide_fields()


async def whole(groups: Sequence[StoredGroup], *, deadline_s: float) -> tuple[list[Group], list[int]]:
    """As `fetched`; with their wide fields, where these are kept apart."""
    found, lost = await fetched(groups, deadline_s=deadline_s)
    stored = [replace(one, payload=one.wide) for one in groups if one.wide is not None and one.group_id not in lost]
    if not stored:
        return found, sorted(lost)
    from rollout.wide_fields import together

    fields, lost_too = await fetched(stored, deadline_s=deadline_s)
    of_group: dict[int, Any] = dict(zip((one.group_id for one in stored if one.group_id not in lost_too), fields, strict=True))
    joined = [together(one, of_group[one.group_id]) if one.group_id in of_group else one for one in found if one.group_id not in lost_too]
    return joined, sorted([*lost, *lost_too])


async def whole_snapshot(queue: Any, *, deadline_s: float) -> QueueSnapshot:
    """The queue as a checkpoint has it: finished groups with their tokens; those that are lost will be sampled again.

    Raises: DeadlineExceeded.
    """
    snapshot: QueueSnapshot
    what = "snapshot <- trajectory queue"
    snapshot, held, tickets = await persistently(lambda: queue.snapshot.remote(), what, deadline_s=deadline_s)
    groups, lost = await whole(held, deadline_s=deadline_s)
    again = [ticket for ticket in tickets if ticket.group_id in set(lost)]
    in_flight = sorted([*snapshot.in_flight, *again], key=lambda ticket: ticket.group_id)
    return replace(snapshot, finished=tuple(groups), in_flight=tuple(in_flight))


def checksums_of(*buckets: Any) -> dict[str, str]:
    """HF name -> checksum of what an engine must hold. Args: buckets: WeightBuckets, as they lie in the object store."""
    return {name: checksum for bucket in buckets for name, checksum in bucket.checksums().items()}
