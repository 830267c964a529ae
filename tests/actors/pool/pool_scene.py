"""A pool over workers that fail on cue, with a real queue."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

import evenkeel.actors.pool.workers
from evenkeel.actors.carriers import ActorInfo, Ticket
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.pool.pool import RolloutPool
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.trajectory import Group, GroupFacts, WorkerLoad
from tests.actors.cases import FakeActor, OpenBook, group, prompt
from tests.actors.pool.pool_cases import worker_settings

DEAD = ray.exceptions.ActorDiedError()
Fault = Exception | Callable[[], Awaitable[object]]


def raised(error: Exception) -> ray.exceptions.RayTaskError:
    """As Ray hands on what a worker raised."""
    return ray.exceptions.RayTaskError("f", f"a long traceback, {error!r}", error)


class Worker:
    """Samples at once, unless its turn in `faults` says what to raise or to wait for."""

    def __init__(self, name: str, scene: PoolScene) -> None:
        self.name, self.scene = name, scene
        self.sampled: list[int] = []
        self.answered = 0

    async def start(self, *_: Any) -> ActorInfo:
        fault = self.scene.start_faults.get(self.name)
        if fault is not None:
            raise fault
        return ActorInfo("rollout", self.name, 1, "127.0.0.1:1")

    async def generate_group(self, ticket: Ticket, *_: Any) -> tuple[GroupFacts, Group]:
        await self._play()
        self.sampled.append(ticket.group_id)
        return (made := group(ticket)).facts, made

    async def answer(self, prompts: list[Any], how: AnswerSampling) -> list[str]:
        await asyncio.sleep(0)
        await self._play()
        self.answered += len(prompts) * how.samples
        return [p.prompt_id for p in prompts]

    async def load(self) -> WorkerLoad:
        await self._play()
        return WorkerLoad(1.0, 2.0, 3, 4)

    async def _play(self) -> None:
        fault: Fault | None = self.scene.faults.get(self.name)
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            await fault()


class Sync:
    """Every engine that joins holds the published version at once, but for those in `behind`; a dirty one does when the test says so."""

    version = 0

    def __init__(self, behind: set[str]) -> None:
        self.behind = behind
        self.left: list[str] = []
        self.dirty: list[Any] = []
        """Targets, as often as they were marked."""

    def resync(self, target: Any, reason: str) -> None:
        self.dirty.append(target)
        target.version = -1

    def join(self, target: Any) -> None:
        target.version = -1 if target.name in self.behind else 0

    def leave(self, name: str) -> None:
        self.left.append(name)


class PoolScene:
    """A pool with its queue, and what it reported."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        workers: int = 1,
        faults: dict[str, Fault] | None = None,
        start_faults: dict[str, Exception] | None = None,
        behind: set[str] | None = None,
        places: int = 8,
        worker_s: float = 10.0,
    ) -> None:
        self.faults: dict[str, Fault] = faults or {}
        self.start_faults = start_faults or {}
        self.workers: dict[str, Worker] = {}
        self.killed: list[str] = []
        self.finished: list[int] = []
        self.events: list[str] = []
        self.joined: list[str] = []
        self.left: list[str] = []
        self.sync = Sync(behind or set())
        self.books = OpenBook(groups_per_step=places, max_staleness=0)
        fake_ray = SimpleNamespace(
            remote=lambda cls: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._make)),
            kill=lambda actor: self.killed.append(actor.instance.name),
            wait=lambda *_, **__: None,
            exceptions=ray.exceptions,
        )
        monkeypatch.setattr(evenkeel.actors.pool.workers, "ray", fake_ray)
        monkeypatch.setattr("ray.kill", fake_ray.kill)
        settings = worker_settings(workers)
        deadlines = DeadlinesConfig(start_s=worker_s / 2, sync_s=worker_s / 6, notice_s=0.2, no_workers_s=worker_s)
        recorder = SimpleNamespace(
            did=lambda _: None,
            failed=lambda _: None,
            joined=lambda info: self.joined.append(info.name),
            left=self.left.append,
            group_finished=lambda group, _: self.finished.append(group.group_id),
            lost=lambda _: None,
            event=lambda _, text: self.events.append(text),
            waiting=lambda notice: self.events.append(str(notice)),
        )
        self.pool = RolloutPool(settings, deadlines, self.books.book, self.books.changes, recorder)

    def _make(self, name: str, *_: Any, **__: Any) -> FakeActor:
        self.workers[name] = Worker(name, self)
        return FakeActor(self.workers[name])

    async def begin(self) -> asyncio.Task[None]:
        """Start, join, and feed; returns the feeding task."""
        self.pool.start()
        await self.pool.first_worker()
        self.pool.follow(self.sync)  # type: ignore[arg-type]
        return asyncio.create_task(self.pool.feed((prompt(i) for i in itertools.count()), [], lambda _: None, lambda _: None))

    async def until_finished(self, count: int) -> None:
        """And with the queue."""
        while len(self.finished) < count or self.books.book.counts()["finished"] < count:
            await asyncio.sleep(0.01)


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20.0))  # type: ignore[arg-type]


async def hang() -> None:
    await asyncio.sleep(60.0)
