"""Prompts, tickets and groups for the tests of the actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import ray

from evenkeel.actors.carriers import DiscardedGroup, StoredGroup, Ticket
from evenkeel.actors.groups.book import GroupBook, discard_reason
from evenkeel.actors.groups.changes import Changes
from evenkeel.actors.groups.snapshot import BookContents, BookSnapshot
from evenkeel.rollout.trajectory import (
    AnswerFacts,
    FailureKind,
    FinishReason,
    Group,
    GroupFacts,
    Prompt,
    Trajectory,
    VersionSpan,
    ids_of,
    logprobs_of,
)


class CountingName(str):
    """A name; `lookups`, of the class, counts how often one was hashed: looked up in a dict or a set. A test sets it to 0 first."""

    lookups = 0

    def __hash__(self) -> int:
        CountingName.lookups += 1
        return str.__hash__(self)

    __eq__ = str.__eq__


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


def facts(
    group_id: int,
    *tokens: int,
    failures: Sequence[tuple[FailureKind, str]] = (),
    prompt_id: str = "",
    generate_s: float = 0.1,
    reward_s: float = 0.0,
) -> GroupFacts:
    """Of a finished group with answers of so many tokens; the first ones failed."""
    failed = [*failures, *[None] * (len(tokens) - len(failures))]
    answers = [
        AnswerFacts(n, (VersionSpan(0, 0, n),), FinishReason.STOP, None if why else 1.0, {}, why and why[1], why and why[0])
        for n, why in zip(tokens, failed, strict=True)
    ]
    return GroupFacts(group_id, prompt_id, tuple(answers), 0, generate_s, reward_s)


def at_hand(of: Group) -> StoredGroup:
    return StoredGroup(of.facts, of)


class OpenBook:
    """A book of groups and who waits for it, as the driver has both."""

    def __init__(self, *, groups_per_step: int, max_staleness: int, dynamic_sampling: bool = False) -> None:
        own = {"groups_per_step": groups_per_step, "max_staleness": max_staleness, "dynamic_sampling": dynamic_sampling}
        self.changes = Changes()
        self.book = GroupBook(**own, changed=self.changes.tell)  # type: ignore[arg-type]

    def admit(self, prompts: Sequence[Prompt]) -> list[Ticket]:
        return self.book.admit(prompts, now=0.0)

    def put(self, *groups: StoredGroup) -> None:
        for one in groups:
            self.book.finish(one, now=0.0)

    async def draw(self, version: int, places: int, within_s: float = 5.0) -> list[StoredGroup]:
        """Waits for the first."""
        drawn: list[StoredGroup] = []

        def take() -> bool:
            drawn.extend(self.book.draw(version, places - len(drawn)))
            return bool(drawn)

        await self.changes.until(take, within_s=within_s)
        return drawn

    def advance(self, version: int, trained: Sequence[int]) -> list[DiscardedGroup]:
        """A step is over, and its version published."""
        return self.book.settle(version, version, trained, now=0.0)


def contents(admitted: int, trained: int, held: Collection[int] = ()) -> BookContents:
    """Of a book. Args: held: positions of the prompts under way, which nobody has sampled yet."""
    return BookContents(0, admitted, trained, tuple(Ticket(position, prompt(position), 0) for position in held), (), {}, ())


def snapshot_of(book: GroupBook) -> BookSnapshot:
    """As a checkpoint has it, of a book whose groups are at hand."""
    contents = book.contents()
    return BookSnapshot.of(contents, [getattr(one, "payload", one) for one in contents.finished])


def stored(*groups: Group, lost: Collection[int] = (), dynamic_sampling: bool = False) -> list[StoredGroup]:
    """Finished groups as they reach the book; those in `lost` went with their node."""
    found = []
    for one in groups:
        reference = asyncio.get_running_loop().create_future()
        if one.group_id in lost:
            reference.set_exception(ray.exceptions.ObjectLostError("", "", ""))
        else:
            reference.set_result(one)
        found.append(StoredGroup(one.facts, reference, reason=discard_reason(one.facts, dynamic_sampling=dynamic_sampling)))
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


# Of an actor that doesn't have it: its process is there at once, on a node without an id, is never told to end, and aborts at once.
_USUAL = {
    "__ray_ready__": SimpleNamespace(remote=lambda: asyncio.sleep(0, True)),
    "node_id": SimpleNamespace(remote=lambda: asyncio.sleep(0, "")),
    "end_notice": SimpleNamespace(remote=lambda: asyncio.get_running_loop().create_future()),
    "abort": SimpleNamespace(remote=lambda group_id: asyncio.sleep(0)),
}


class _FakeMethod:
    def __init__(self, method: Callable[..., Coroutine[Any, Any, Any]], name: str, results: int = 1) -> None:
        self._method, self._method_name, self._results = method, name, results

    def options(self, *, num_returns: int) -> _FakeMethod:
        return _FakeMethod(self._method, self._method_name, num_returns)

    def remote(self, *args: Any, **named: Any) -> Any:
        task = asyncio.ensure_future(self._method(*args, **named))
        return task if self._results == 1 else [CallResult(task, number) for number in range(self._results)]


class CallResult:
    """A reference to one of the results of a call."""

    def __init__(self, task: asyncio.Task[Any], number: int) -> None:
        self._task, self.number = task, number

    def __await__(self) -> Generator[Any, None, Any]:
        found = yield from asyncio.shield(self._task).__await__()
        return found[self.number]
