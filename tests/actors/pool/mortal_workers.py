"""A pool over workers that die, freeze and talk rubbish as a test says, in simulated time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

import evenkeel.actors.pool.workers
from evenkeel.actors.carriers import ActorInfo, GroupFailure, Ticket
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.groups.ledger import imbalance_of
from evenkeel.actors.groups.snapshot import BookSnapshot
from evenkeel.actors.pool.pool import RolloutPool
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.trajectory import Group, GroupFacts, WorkerLoad
from tests.actors.cases import FakeActor, OpenBook, group, prompt
from tests.actors.pool.pool_cases import worker_settings
from tests.actors.simulated_time import simulate

GROUP_S = 10.0
START_S = 60.0
Outcome = GroupFacts | GroupFailure


class Mortal:
    """A worker that samples a group in GROUP_S, unless the test's `sample` says otherwise; killed, each of its calls ends."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world
        self.finished: list[int] = []
        self.dead = asyncio.Event()
        self.is_frozen = False
        self.engine_silent_s, self.lost_of = 0.0, ""
        self.loads = 0

    async def node_id(self) -> str:
        await self.world.nodes.wait()
        return self.world.node_of(self.name)

    async def start(self, *_: Any) -> ActorInfo:
        await self.world.starts(self)
        await asyncio.sleep(START_S)
        return ActorInfo("rollout", self.name, 1, "127.0.0.1:1", node=self.world.node_of(self.name))

    async def stop(self) -> None: ...

    async def load(self) -> WorkerLoad:
        self.loads += 1
        await self._living(self._answer())
        return WorkerLoad(1.0, 2.0, 3, 4, self.engine_silent_s, lost_of=self.lost_of)

    async def _answer(self) -> None:
        if self.is_frozen:
            await asyncio.sleep(1e6)

    async def generate_group(self, ticket: Ticket, *_: Any) -> tuple[Outcome, Group | None]:
        found: tuple[Outcome, Group | None] = await self._living(self._one(ticket))
        return found

    async def _one(self, ticket: Ticket) -> tuple[Outcome, Group | None]:
        await self._answer()
        outcome = await self.world.sample(self, ticket)
        if outcome is not None:
            return outcome, group(ticket) if isinstance(outcome, GroupFacts) else None
        await asyncio.sleep(GROUP_S)
        self.finished.append(ticket.group_id)
        return (made := group(ticket)).facts, made

    async def answer(self, prompts: list[Any], how: AnswerSampling) -> list[str]:
        await self._living(self.world.sample(self, Ticket(-1, prompts[0], 0)))
        return [p.prompt_id for p in prompts]

    async def _living(self, work: Coroutine[Any, Any, Any]) -> Any:
        """As Ray would: whoever waits for a dead actor is told."""
        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self.dead.wait())
        try:
            await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
            if self.dead.is_set():
                raise ray.exceptions.ActorDiedError()
            return working.result()
        finally:
            for one in (working, dying):
                one.cancel()


class AtOnce:
    """Weight sync that takes no time; `heals` says whether a dirty engine is well again after it."""

    version = 0

    def __init__(self, world: World) -> None:
        self.world = world
        self.resynced: list[str] = []

    def join(self, target: Any) -> None:
        target.version = 0

    def leave(self, name: str) -> None: ...

    def resync(self, target: Any, reason: str) -> None:
        self.resynced.append(target.name)
        target.version = -1
        asyncio.get_running_loop().call_later(1.0, self._receipt, target)

    def _receipt(self, target: Any) -> None:
        target.version = 0
        self.world.pool.wake()


async def nothing_special(mortal: Mortal, ticket: Ticket) -> None: ...


async def starts_well(mortal: Mortal) -> None: ...


class World:
    """A pool over mortal workers, with a queue that has places for `places` groups, and what it told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, workers: int, places: int, no_workers_s: float | None = None) -> None:
        self.mortals: dict[str, Mortal] = {}
        self.events: list[str] = []
        self.finished: list[int] = []
        self.options: list[dict[str, Any]] = []
        self.nodes: asyncio.Event = asyncio.Event()
        self.nodes.set()
        self.node_of: Callable[[str], str] = lambda name: f"node-{name}"
        self.starts: Callable[[Mortal], Coroutine[Any, Any, None]] = starts_well
        """What happens before an engine's start; it may raise."""
        self.sample: Callable[[Mortal, Ticket], Coroutine[Any, Any, Outcome | None]] = nothing_special
        self.books = OpenBook(groups_per_step=places, max_staleness=0)
        self.failures: list[str] = []
        """Kinds, as the recorder counts them."""
        self.sync = AtOnce(self)
        fake_ray = SimpleNamespace(
            remote=lambda cls: SimpleNamespace(options=self._with_options),
            kill=lambda actor: actor.instance.dead.set(),
            exceptions=ray.exceptions,
        )
        monkeypatch.setattr(evenkeel.actors.pool.workers, "ray", fake_ray)
        monkeypatch.setattr("ray.kill", fake_ray.kill)
        settings = worker_settings(workers)
        recorder = SimpleNamespace(
            did=lambda _: None,
            failed=self.failures.append,
            joined=lambda _: None,
            left=lambda _: None,
            group_finished=lambda group, _: self.finished.append(group.group_id),
            lost=lambda _: None,
            handed_back=lambda *_: None,
            event=lambda _, text: self.events.append(text),
            waiting=lambda notice: self.events.append(str(notice)),
        )
        self.pool = RolloutPool(settings, DeadlinesConfig(no_workers_s=no_workers_s), self.books.book, self.books.changes, recorder)

    def _with_options(self, **options: Any) -> Any:
        self.options.append(options)
        return SimpleNamespace(remote=self._make)

    def _make(self, name: str, *_: Any, **__: Any) -> FakeActor:
        self.mortals[name] = Mortal(name, self)
        return FakeActor(self.mortals[name])

    async def begin(self, *, has_scored: bool = False) -> None:
        self.pool.start(has_scored=has_scored)
        await self.pool.first_worker()
        await asyncio.sleep(0.001)
        self.pool.follow(self.sync)  # type: ignore[arg-type]
        self.feeding = asyncio.create_task(self.pool.feed((prompt(i) for i in itertools.count()), [], lambda _: None, lambda _: None))

    async def all_done(self, count: int) -> None:
        """Until so many groups are finished or discarded; the books balance then. Raises: what ends the run."""
        while True:
            counts = self.books.book.counts()
            if min(len(self.finished), counts["finished"] + counts["drawn"]) + counts["discarded"] >= count:
                self.check_books()
                return
            if self.pool.has_failed:
                await self.pool.raise_on_failure()
            await asyncio.sleep(1.0)

    def check_books(self) -> None:
        """Admitted = trained + discarded (by reason) + under way, each prompt once; and the book has what was told as finished."""
        book = self.books.book
        under_way = [entry.ticket for entry in book._entries.values()]
        assert imbalance_of(BookSnapshot.of(book.contents(), ()), None) is None
        assert len(set(self.finished)) == len(self.finished), "told twice"
        assert book.trained == 0, "or not all of them are known by their ids"
        known = [*(ticket.prompt.prompt_id for ticket in under_way), *(one.prompt_id for one in book.unreported)]
        assert sorted(known) == sorted(prompt(i).prompt_id for i in range(book.admitted)), "each prompt once"
        assert {i for i, entry in book._entries.items() if entry.group is not None} == {*self.finished}, "or one is on its way to it"

    @property
    def lost(self) -> list[str]:
        return [event for event in self.events if " is gone: " in event]

    @property
    def sampled_again(self) -> str:
        """By what is said of the lost workers."""
        return f"{sum(int(taken.split()[0]) for event in self.lost if (taken := event.partition('others take its ')[2]))} groups"

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    simulate(scenario)
