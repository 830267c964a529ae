"""Forward passes that a batch needs before its update: the correction service asks for them, the controller has the learner run them.

The learner's ranks work together in nearly every call, so that all of them must get the same calls in the same order. One process sees to
that, the controller's: the service has no handle of the learner. Its answer to the question for the next batch is the batch, or what it
still needs from the learner for it; the controller, who asks only while the learner is idle, brings that and asks again. So no forward can
wait for a step that waits for its batch, and none runs on other weights than those from which the batch's update starts.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from actors.carriers import FetchRequest, ForwardRequest, KeepRequest, PreparedBatch, ScoringRequest, SplitRequest
from actors.processes.supervision import call_with_retries, wait_for
from correction.errors import DeadlineExceeded, EvenkeelError

if TYPE_CHECKING:  # torch and Megatron: not in the driver
    from torch import Tensor

    from actors.ranks.learner_group import LearnerGroup
    from correction.batch import PackedBatch
    from learner.results import Proximal, SplitLogprobs
    from rollout.trajectory import Group


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ForwardAnswer:
    """What the learner has computed for a request."""

    fields: dict[str, Any]
    """By the field of PackedBatch."""
    split: SplitLogprobs | None
    """For a SplitRequest."""
    seconds: float
    """Time that it took, seconds."""


Forward = tuple[Sequence["Group"], asyncio.Task[ForwardAnswer]]
"""Groups of a batch; and a task for what the learner computes of them."""


class GroupsLost(EvenkeelError):
    """Wide fields of groups can't be read; the learner has not begun with the batch."""

    def __init__(self, why: Mapping[int, str]) -> None:
        """Args: why: by group id."""
        super().__init__(f"wide fields of groups {sorted(why)} are lost")
        self.why = dict(why)


async def next_batch(
    ask: Callable[[], Awaitable[PreparedBatch | ForwardRequest]],
    service: Any,
    learner: LearnerGroup,
    *,
    step: int,
    deadline_s: float,
    is_moving: Callable[[], bool] = lambda: False,
) -> PreparedBatch:
    """The next batch of the correction service, complete. The learner is idle, and runs the forward passes that the service asks for.

    Args:
        ask: asks the service for its next batch.
        step: number of the step that will train it.
        deadline_s: for the service to take the learner's results.
        is_moving: whether the pool finishes groups, or has no workers: then a late answer is no error, and the service is asked again.
    """

    async def while_moving(call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except DeadlineExceeded:
                if not is_moving():
                    raise

    while isinstance(found := await while_moving(ask), ForwardRequest):
        began = time.monotonic()
        try:
            results, lost = await _results(found, learner, step), dict[int, str]()
        except GroupsLost as error:
            results, lost = (None, None, None), error.why
        answer = partial(service.forwarded.remote, found.number, *results, time.monotonic() - began, lost)
        what = f"logprobs at version {found.version} -> correction service"
        await while_moving(partial(call_with_retries, answer, what, deadline_s=deadline_s))
    return found


async def _results(request: ForwardRequest, learner: LearnerGroup, step: int) -> tuple[Any, Any, Any]:
    """What the learner computes for a request, each a reference: a Proximal, reference logprobs, SplitLogprobs; None: not wanted.

    Raises: GroupsLost, before anything is computed.
    """
    version, proximal, reference = request.version, None, None
    match request:
        case KeepRequest(oldest=oldest):
            await learner.keep_weights(version, oldest=oldest)
        case FetchRequest(batch=batch, correction=correction, fetch_s=limit_s):
            _check(await learner.fetch(batch, correction, step=step, limit_s=limit_s, everything=False))
        case SplitRequest(batch=batch, oldest=oldest, fetch_s=limit_s):
            if limit_s:
                _check(await learner.fetch(batch, None, step=step, limit_s=limit_s, everything=True))
            return None, None, await learner.at_sampling(batch, version=version, oldest=oldest)
        case ScoringRequest(batch=batch, wants_proximal=wants_proximal, wants_reference=wants_reference, fetch_s=limit_s):
            if limit_s:
                _check(await learner.fetch(batch, None, step=step, limit_s=limit_s, everything=False))
            if wants_proximal:
                proximal = await learner.proximal(batch, version=version)
            if wants_reference:
                reference = await learner.reference_logprobs(batch, version=version)
        case _:
            raise TypeError(f"no request of the service: {type(request).__name__}")
    return proximal, reference, None


def _check(lost: Mapping[int, str]) -> None:
    """Raises: GroupsLost if there are any."""
    if lost:
        raise GroupsLost(lost)


async def with_forwards(batch: PackedBatch, forwards: Sequence[Forward]) -> tuple[PackedBatch, float]:
    """The batch with the learner's results for chunks of its groups put in their places; and the learner's seconds."""
    answers = [(chunk, await task) for chunk, task in forwards]
    chunks = [(chunk, answer.fields) for chunk, answer in answers]
    return await asyncio.to_thread(_put_in_place, batch, chunks), sum(answer.seconds for _, answer in answers)


def _put_in_place(batch: PackedBatch, chunks: Sequence[tuple[Sequence[Group], dict[str, Any]]]) -> PackedBatch:
    """The batch with the results for chunks of its groups, by the field of PackedBatch, put in their places."""
    from correction.wide import WidePlace

    # A chunk packs its groups in its own order; find each group's tokens in the whole batch by its group id.
    whole: dict[str, Any] = {} if batch.num_tokens else {"proximal_logprobs": batch.behavior_logprobs}
    places = list(batch.wide or [WidePlace(())] * batch.num_sequences)
    sequences = batch.sequences_of_groups()
    for chunk, found in chunks:
        own = [i for g in chunk for i in sequences.get(g.group_id, ())]
        index = batch.token_index(own)
        for name, values in found.items():
            if name == "wide":
                for i, place in zip(own, values, strict=True):
                    places[i] |= place
            else:
                whole.setdefault(name, values.new_zeros(batch.num_tokens, *values.shape[1:]))[index] = values
    wide = tuple(places) if any(place.sources for place in places) else None
    return replace(batch, **whole, wide=wide)


class ForwardRequests:
    """The service's side: a queue of requests for the learner. One event loop uses it."""

    def __init__(self) -> None:
        self._number = 0
        self._waiting: deque[ForwardRequest] = deque()
        self._answers: dict[int, asyncio.Future[ForwardAnswer]] = {}
        self._changed = asyncio.Event()

    async def ask(self, wanted: ForwardRequest, *, deadline_s: float) -> ForwardAnswer:
        """Have the learner do what a request names, and wait for the results.

        Raises: DeadlineExceeded if the learner doesn't come to that version; GroupsLost.
        """
        self._number += 1
        request = replace(wanted, number=self._number)
        answer = self._answers[request.number] = asyncio.get_running_loop().create_future()
        self._waiting.append(request)
        self._changed.set()
        try:
            return await wait_for(answer, f"forward at version {request.version} <- learner", deadline_s=deadline_s)
        finally:
            del self._answers[request.number]

    async def take(self) -> ForwardRequest:
        """The oldest request without an answer that somebody still waits for; waits until there is one. A second call returns the same
        request until it is answered, because the answer to the first call may have been lost."""
        while True:
            while self._waiting:
                answer = self._answers.get(self._waiting[0].number)
                if answer is not None and not answer.done():
                    return self._waiting[0]
                self._waiting.popleft()
            self._changed.clear()
            await self._changed.wait()

    def answer(
        self,
        number: int,
        proximal: Proximal | None,
        reference: Tensor | None,
        split: SplitLogprobs | None,
        seconds: float,
        lost: Mapping[int, str],
    ) -> None:
        """Give the learner's results for a request; nothing happens if the request was given up. Args: lost: as in GroupsLost."""
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return
        if lost:
            answer.set_exception(GroupsLost(lost))
            return
        found: dict[str, Any] = {}
        if proximal is not None:
            found["proximal_logprobs"] = proximal.logprobs
            if proximal.route_places is not None:
                found["wide"] = proximal.route_places
        if reference is not None:
            found["reference_logprobs"] = reference
        answer.set_result(ForwardAnswer(found, split, seconds))
