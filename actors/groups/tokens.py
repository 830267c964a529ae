"""Groups by reference: between actors go a group's facts (rewards, lengths, version spans); its tokens stay in the object store.

A worker's call returns two results to the pool: the facts of the finished group, and the group itself. A reference to the group goes on to
the service. In Ray the caller owns a result, here the driver, and an object is lost with its owner. So a group
outlives the worker that sampled it, whose engine may fail at any moment. It lies in the object store of the worker's node: if the node is
lost, the group is sampled again.

The fields of a group that only the learner's ranks read (wide fields, correction/wide.py) are a third result, an object of its own. The
service never reads it: the batch names the object for each sequence, and each rank reads those that it computes with (LearnerGroup.fetch).

Small groups go on by value. Ray returns results below 100 KB into the caller's memory, and never frees one whose reference has passed
through two processes: with short answers 3 kB a group would be leaked until the run ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from evenkeel.actors.carriers import StoredGroup, WaitNotice
from evenkeel.actors.groups.snapshot import BookContents, BookSnapshot
from evenkeel.actors.processes.supervision import has_failed, no_room, wait_for
from evenkeel.actors.settings.deadlines import ANSWER_S, tokens_call_s, tokens_s
from evenkeel.correction.errors import ActorLost, EvenkeelError, counted
from evenkeel.rollout.trajectory import Group, GroupFacts

if TYPE_CHECKING:  # torch
    from evenkeel.correction.batch import PackedBatch
    from evenkeel.correction.wide import WideFields

# Most workers, and most groups, that a notice names.
_NAMED = 3
# Ray's max_direct_call_object_size.
_INLINE_BYTES = 100 * 1024
_AT_HAND_S = 10.0
# Lower bound of a token: an id and a logprob, four bytes each.
_LEAST_TOKEN_BYTES = 8
GONE, LATE = "gone with its node or its worker", "not there in time"
"""Reasons why an object can't be read."""


async def value_of(reference: Any) -> Any:
    """The object of a reference; anything else is returned as it is. Ray reads an awaited reference without blocking the event loop."""
    if isinstance(reference, asyncio.Future):
        return await asyncio.shield(reference)  # others may read it, too
    return await reference if isinstance(reference, Awaitable) else reference


def split_answer(group: Group) -> tuple[GroupFacts, Group, tuple[WideFields, ...] | None]:
    """A worker's three results: the facts, the group without its wide fields, and these. None: they are few, and stay in the group."""
    from evenkeel.rollout import wide_fields  # torch: not in the driver

    light, fields = wide_fields.split_wide_fields(group)
    size = sum(one.nbytes for one in fields)
    if size < _INLINE_BYTES:
        return group.facts, group, None
    return replace(group.facts, wide_bytes=size), light, fields


async def to_hand_on(facts: GroupFacts, reference: Any) -> Any:
    """What is handed on for a finished group: the group itself if it is small enough to be in this process already, else its reference."""
    if sum(one.response_tokens for one in facts.trajectories) * _LEAST_TOKEN_BYTES >= _INLINE_BYTES:
        return reference
    with suppress(ray.exceptions.RayError, EvenkeelError):  # raised again where the group is read
        return await wait_for(value_of(reference), f"group {facts.group_id} <- object store", deadline_s=_AT_HAND_S)
    return reference


def disregard(answer: Any, *further: Any) -> None:
    """Drop a call's answer and its further results without fetching them.

    If the call fails, all its results are its error, and Ray logs an error that nobody retrieves: it is retrieved here.
    """

    def look_at_its_error(ended: asyncio.Future[Any]) -> None:
        if has_failed(ended):
            for one in further:
                asyncio.ensure_future(one).add_done_callback(has_failed)

    asyncio.ensure_future(answer).add_done_callback(look_at_its_error)


def tokens_fetch_s(groups: Sequence[StoredGroup], bytes_per_s: float) -> float:
    """Seconds in which the tokens of these groups have to arrive."""
    return tokens_s(sum(one.response_tokens for group in groups for one in group.facts.trajectories), bytes_per_s)


async def fetched(
    groups: Sequence[StoredGroup], *, deadline_s: float, notice: Callable[[WaitNotice], None] | None = None
) -> tuple[list[Group], dict[int, str]]:
    """The groups that can be read, in order; and for the others GONE or LATE, by group id.

    Args:
        deadline_s: for all of them together; a pull from another node may hang.
        notice: as wait_for.
    Raises: ActorLost if the object store had no room for one: sampling it again would not help.
    """
    what = f"tokens of {counted(len(groups), 'group')} <- {_sources(groups)}"
    named: dict[str, Any] = {"notice": notice, "detail": lambda: _missing(groups)}
    found = await wait_for(_values([one.payload for one in groups], deadline_s), what, deadline_s=tokens_call_s(deadline_s), **named)
    lost = dict[int, str]()
    for one, value in zip(groups, found, strict=True):
        if isinstance(value, BaseException) and (needs := no_room(value)):
            raise ActorLost(f"group {one.group_id}: {needs}")
        if isinstance(value, ray.exceptions.RayError | TimeoutError):
            lost[one.group_id] = _why(value)
        elif isinstance(value, BaseException):
            raise value
    return [value for value in found if not isinstance(value, BaseException)], lost


def _sources(groups: Sequence[StoredGroup]) -> str:
    """Who sampled the groups: some of them by name."""
    sources = list(dict.fromkeys(one.source for one in groups if one.source)) or ["object store"]
    return ", ".join(sources[:_NAMED]) + (f" and {len(sources) - _NAMED} more" if len(sources) > _NAMED else "")


async def _missing(groups: Sequence[StoredGroup]) -> str:
    """A clause on the groups whose tokens are not on this node yet."""
    of_reference = {one.payload: one for one in groups if isinstance(one.payload, ray.ObjectRef)}
    if not of_reference:
        return ""
    _, late = await asyncio.to_thread(ray.wait, list(of_reference), num_returns=len(of_reference), timeout=0)
    missing = [of_reference[one] for one in late]
    ids = ", ".join(str(one.group_id) for one in missing[:_NAMED]) + " ..." * (len(missing) > _NAMED)
    return f"{counted(len(missing), 'group')} not here yet: {ids} of {_sources(missing)}" if missing else ""


async def _values(references: Sequence[Any], limit_s: float) -> list[Any]:
    """What they refer to; an error in the place of each that can't be read. Args: limit_s: seconds for all of them together."""
    ends = asyncio.get_running_loop().time() + limit_s

    async def in_time(reference: Any) -> Any:
        async with asyncio.timeout_at(ends):
            return await value_of(reference)

    if references and all(isinstance(one, ray.ObjectRef) for one in references):
        with suppress(ray.exceptions.RayError):  # the error doesn't say whose it is: each is read alone then
            return list(await asyncio.to_thread(ray.get, references, timeout=limit_s / 2))  # one by one takes several times as long
    return await asyncio.gather(*(in_time(one) for one in references), return_exceptions=True)


def _why(error: BaseException) -> str:
    return LATE if isinstance(error, TimeoutError) else GONE  # as Ray's own is, too


def read_now(references: Sequence[Any], limit_s: float) -> tuple[dict[Any, Any], dict[Any, str]]:
    """Read objects; it blocks, so call it in a thread. Args: limit_s: seconds, for all together.

    Returns: the objects by reference, and GONE or LATE by reference for those that can't be read.
    Raises: ActorLost if the object store has no room for one.
    """
    ends = time.monotonic() + limit_s
    with suppress(ray.exceptions.RayError):  # the error doesn't say whose it is: each is read alone then
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


async def with_wide_fields(batch: PackedBatch, *, deadline_s: float, has_topk: bool = True) -> PackedBatch:
    """The batch with its wide fields filled in. Args: has_topk: as PackedBatch's.

    Raises: RayError if an object is lost; DeadlineExceeded.
    """
    places = batch.wide or ()
    references = list(dict.fromkeys(one for place in places for one in place.references))
    what = f"wide fields of {len(places)} sequences <- object store"
    values = await wait_for(asyncio.gather(*map(value_of, references)), what, deadline_s=deadline_s)
    return batch.holding(dict(zip(references, values, strict=True))).with_wide_fields(has_topk=has_topk)


async def whole(groups: Sequence[StoredGroup], *, deadline_s: float) -> tuple[list[Group], list[int]]:
    """The groups that can be read, wide fields included, and the ids of the others; both objects of a group are needed.

    Args: deadline_s: for tokens and wide fields together.
    """
    clock = asyncio.get_running_loop().time
    ends = clock() + deadline_s
    found, lost = await fetched(groups, deadline_s=deadline_s)
    stored = [replace(one, payload=one.wide) for one in groups if one.wide is not None and one.group_id not in lost]
    if not stored:
        return found, sorted(lost)
    from evenkeel.rollout.wide_fields import join_wide_fields

    fields, lost_too = await fetched(stored, deadline_s=max(0.1, ends - clock()))
    of_group: dict[int, Any] = dict(zip((one.group_id for one in stored if one.group_id not in lost_too), fields, strict=True))
    kept = [one for one in found if one.group_id not in lost_too]
    joined = [join_wide_fields(one, of_group[one.group_id]) if one.group_id in of_group else one for one in kept]
    return joined, sorted([*lost, *lost_too])


async def whole_snapshot(
    contents: BookContents, turns: Sequence[Any] = (), *, tokens_s: float, tell: Callable[[str], object] = lambda _: None
) -> BookSnapshot:
    """What a checkpoint holds: finished groups with their tokens, and what there is of others. Groups whose tokens are lost go back to
    those in flight.

    Args:
        turns: references to what there is of groups, by id, as workers have said it (RolloutPool.turns_so_far).
        tokens_s: seconds for the tokens; those that are later are lost.
        tell: takes a sentence, if there are such groups.
    """
    told_s = min(tokens_s, ANSWER_S)  # without them rollouts begin again
    what = f"turns so far of {counted(len(turns), 'worker')} <- object store"
    of_workers = wait_for(_values(turns, told_s), what, deadline_s=tokens_call_s(told_s))
    (groups, lost), told = await asyncio.gather(whole(contents.finished, deadline_s=tokens_s), of_workers)
    if lost:
        tell(f"the tokens of {counted(len(lost), 'finished group')} can't be read: the checkpoint has their prompts, to be sampled again")
    if missing := sum(not isinstance(one, dict) for one in told):
        tell(f"the turns that {counted(missing, 'worker')} told of can't be read: in the checkpoint their rollouts go on from earlier ones")
    return BookSnapshot.of(contents, groups, [one for of_worker in told if isinstance(of_worker, dict) for one in of_worker.values()])


def checksums_of(*buckets: Any) -> tuple[dict[str, str], str]:
    """HF name -> checksum of what an engine must hold; and their digest. Args: buckets: WeightBuckets, as they lie in the object store."""
    from evenkeel.engines.weights import digest_of  # torch: not in the driver

    found = {name: checksum for bucket in buckets for name, checksum in bucket.checksums().items()}
    return found, digest_of(found)
