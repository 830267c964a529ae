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
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from actors.carriers import ForwardRequest, PreparedBatch
from actors.supervision import persistently, wait_for
from correction.errors import DeadlineExceeded

if TYPE_CHECKING:  # torch and Megatron: not in the driver
    from torch import Tensor

    from actors.learner_group import LearnerGroup
    from correction.batch import PackedBatch
    from learner.results import Proximal


T = TypeVar("T")
AT_SAMPLING, NOW = "at_sampling", "now"
"""What is found of tokens that are scored at the weights that sampled them, and at the present ones."""


async def next_batch(
    ask: Callable[[], Awaitable[PreparedBatch | ForwardRequest]],
    service: Any,
    learner: LearnerGroup,
    *,
    deadline_s: float,
    is_moving: Callable[[], bool] = lambda: False,
) -> PreparedBatch:
    """The next batch of the correction service, whole. The learner is idle, and runs what the service asks for on the way.

    Args:
        ask: the service for its next batch.
        deadline_s: for the service to take what the learner has found.
        is_moving: the pool finishes groups, or has no workers: a late answer is no error then, and the service is asked again.
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
        if found.kept_since is not None:
            await learner.keep_weights(found.version, oldest=found.kept_since)
        proximal = await learner.proximal(found.batch, version=found.version) if found.wants_proximal else None
        reference = await learner.reference_logprobs(found.batch, version=found.version) if found.wants_reference else None
        at_sampling = None
        if found.scored_since is not None:
            at_sampling = await learner.at_sampling(found.batch, version=found.version, oldest=found.scored_since)
        tell = partial(service.forwarded.remote, found.number, proximal, reference, at_sampling, time.monotonic() - began)
        what = f"logprobs at version {found.version} -> correction service"
        await while_moving(partial(persistently, tell, what, deadline_s=deadline_s))
    return found


class ForwardRequests:
    """The service's side: what waits for the learner, in its order. One event loop uses it."""

    def __init__(self) -> None:
        self._number = 0
        self._waiting: deque[ForwardRequest] = deque()
        self._answers: dict[int, asyncio.Future[tuple[dict[str, Tensor], float]]] = {}
        self._changed = asyncio.Event()

    async def ask(
        self,
        batch: PackedBatch | None,
        *,
        version: int,
        deadline_s: float,
        wants_proximal: bool = False,
        wants_reference: bool = False,
        scored_since: int | None = None,
        kept_since: int | None = None,
    ) -> tuple[dict[str, Tensor], float]:
        """Wait for what the learner says of a batch's tokens at `version`, and its seconds for that; flags as in ForwardRequest.

        Returns: by the field of PackedBatch; with scored_since AT_SAMPLING and NOW, [N] float32.
        Raises: DeadlineExceeded if the learner doesn't come to that version.
        """
        self._number += 1
        number = self._number
        reference = None if batch is None else await asyncio.to_thread(ray.put, batch)
        request = ForwardRequest(number, version, reference, wants_proximal, wants_reference, scored_since, kept_since)
        answer = self._answers[request.number] = asyncio.get_running_loop().create_future()
        self._waiting.append(request)
        self._changed.set()
        try:
            return await wait_for(answer, f"forward at version {version} <- learner", deadline_s=deadline_s)
        finally:
            del self._answers[request.number]

    async def take(self) -> ForwardRequest:
        """The oldest one without an answer that is still waited for; waits until there is one. Taken again, it is the same: who took it
        first may have told nobody."""
        while True:
            while self._waiting:
                answer = self._answers.get(self._waiting[0].number)
                if answer is not None and not answer.done():
                    return self._waiting[0]
                self._waiting.popleft()
            self._changed.clear()
            await self._changed.wait()

    def answer(
        self, number: int, proximal: Proximal | None, reference: Tensor | None, at_sampling: tuple[Tensor, Tensor] | None, seconds: float
    ) -> None:
        """What the learner has found for the request of this number; it may have been given up."""
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return
        found: dict[str, Tensor] = {}
        if proximal is not None:
            found["proximal_logprobs"] = proximal.logprobs
            if proximal.routed_experts is not None:
                found["routed_experts"] = proximal.routed_experts
        if reference is not None:
            found["reference_logprobs"] = reference
        if at_sampling is not None:
            found[AT_SAMPLING], found[NOW] = at_sampling
        answer.set_result((found, seconds))
