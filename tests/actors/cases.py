"""Prompts, tickets and groups for the tests of the actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import ray

from actors.carriers import Ticket
from rollout.trajectory import FinishReason, Group, Prompt, Trajectory, VersionSpan, ids_of, logprobs_of


def prompt(position: int) -> Prompt:
    return Prompt(f"train/0/{position}", f"question {position}", (1, 2, 3), f"answer {position}")


def prompts(start: int, stop: int) -> list[Prompt]:
    return [prompt(position) for position in range(start, stop)]


def trajectory(prompt: Prompt, response_ids: Sequence[int] = (7, 8), *, reward: float | None = 1.0, version: int = 0) -> Trajectory:
    """All tokens of one version, each with logprob -1."""
    n = len(response_ids)
    return Trajectory(
        prompt_id=prompt.prompt_id,
        prompt_ids=ids_of(prompt.token_ids),
        response_ids=ids_of(response_ids),
        behavior_logprobs=logprobs_of([-1.0] * n),
        version_spans=(VersionSpan(version, 0, n),),
        finish_reason=FinishReason.STOP,
        reward=reward,
        error=None if reward is not None else "the reward raised ValueError: no",
    )


def group(ticket: Ticket, *, rewards: Sequence[float | None] = (0.0, 1.0)) -> Group:
    """The answer of a worker to a ticket."""
    answers = tuple(trajectory(ticket.prompt, reward=reward, version=ticket.admitted_version) for reward in rewards)
    return Group(ticket.group_id, ticket.prompt, answers, ticket.admitted_version)


class FakeWorker:
    """Stands where the handle of a rollout worker stands that holds finished groups; those in `lost` went with its node."""

    def __init__(self, *groups: Group, lost: Collection[int] = ()) -> None:
        self._groups = {group.group_id: group for group in groups}
        self._lost = lost
        self.asked: list[int] = []
        self.payloads = self

    def options(self, *, num_returns: int) -> FakeWorker:
        self._returns = num_returns
        return self

    def remote(self, group_ids: Sequence[int]) -> Any:
        assert len(group_ids) == self._returns
        self.asked += group_ids
        references = [asyncio.get_running_loop().create_future() for _ in group_ids]
        for reference, group_id in zip(references, group_ids, strict=True):
            if group_id in self._lost:
                reference.set_exception(ray.exceptions.ObjectLostError("", "", ""))
            else:
                reference.set_result(self._groups[group_id])
        return references if self._returns > 1 else references[0]


async def put(queue: Any, *groups: Group, generation: int = 0) -> list[int]:
    """As a worker hands over what it has finished. Args: queue: a TrajectoryQueueActor."""
    found: list[int] = await queue.put([group.facts for group in groups], FakeWorker(*groups), generation)
    return found


class FakeActor:
    """A plain object called like a Ray actor: fake.method.remote(...) runs instance.method in the present event loop.

    What Ray would run in the actor's process is not run: there is none.
    """

    __ray_call__ = SimpleNamespace(remote=lambda function: None)

    def __init__(self, instance: object) -> None:
        self.instance = instance

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self.instance, name) and name in _USUAL:
            return _USUAL[name]
        return _FakeMethod(getattr(self.instance, name), name)


_USUAL = {
    "__ray_ready__": SimpleNamespace(remote=lambda: asyncio.sleep(0, True)),
    "end_notice": SimpleNamespace(remote=lambda: asyncio.get_running_loop().create_future()),
}
"""Of an actor that doesn't have it: its process is there at once, and is never told to end."""


class _FakeMethod:
    def __init__(self, method: Callable[..., Coroutine[Any, Any, Any]], name: str) -> None:
        self._method, self._method_name = method, name

    def remote(self, *args: Any, **named: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._method(*args, **named))
