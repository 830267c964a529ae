"""The real pool, queue and rule with fake workers in simulated time; nodes come when the test has some."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

import evenkeel.actors.pool.workers
from evenkeel.actors.carriers import ActorInfo, BegunTicket, ScalingDecision, Ticket, WorkerSettings
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.pool.pool import RolloutPool
from evenkeel.actors.processes.pacing import Stopwatch
from evenkeel.correction.errors import EngineError
from evenkeel.rollout.config import AnswerSampling, RolloutConfig
from evenkeel.rollout.continuation import unsampled
from evenkeel.rollout.trajectory import Group, GroupFacts, UnfinishedGroup, VersionSpan, WorkerLoad, ids_of, logprobs_of
from tests.actors.cases import FakeActor, OpenBook, group, prompt

TOKENS = 100
"""Of an answer; a group has two, of the same length."""


class ElasticEngine:
    """Samples `TOKENS` tokens of each group in `group_s`, from where another worker left off; counts as busy while it has any."""

    def __init__(self, name: str, scene: ElasticScene) -> None:
        self.name, self.scene = name, scene
        self.node = asyncio.Event()
        self.told = asyncio.Event()
        self.leaves = asyncio.Event()
        self.ended: list[float] = []
        self.under_way: list[float] = []
        """When each began."""
        self.busy_s = self.tokens = 0.0
        self.born = scene.now
        self.dies = False

    async def node_id(self) -> str:
        await self.node.wait()
        return f"node{self.name}"

    async def start(self, *_: Any) -> ActorInfo:
        await asyncio.sleep(self.scene.engine_s)
        self.born = self.scene.now
        return ActorInfo("rollout", self.name, 1, "127.0.0.1:1", node=f"node{self.name}")

    async def generate_group(self, ticket: Ticket, *_: Any) -> tuple[GroupFacts | UnfinishedGroup, Group | None]:
        begun = ticket.begun.answers[0] if isinstance(ticket, BegunTicket) else unsampled(ticket.prompt.token_ids, ticket.prompt.prompt_id)
        began, before = self.scene.now, len(begun.response_ids)
        self.under_way.append(began)
        left_s = (1 - before / TOKENS) * self.scene.group_s
        try:
            await asyncio.wait_for(self.leaves.wait(), left_s)
        except TimeoutError:
            self.scene.sampled.append((ticket.group_id, self.name, before))
            return group(ticket).facts, group(ticket)
        finally:
            self.under_way.remove(began)
            self.busy_s += (self.scene.now - began) / max(1, self.scene.slots)
        if self.dies:
            raise ray.exceptions.ActorDiedError()
        n = before + int((self.scene.now - began) / self.scene.group_s * TOKENS)
        await asyncio.sleep(self.scene.hand_back_s)
        spans = (*begun.version_spans, VersionSpan(self.scene.sync.version, before, n))
        half = replace(begun, response_ids=ids_of([7] * n), behavior_logprobs=logprobs_of([-1.0] * n), version_spans=spans)
        return UnfinishedGroup(ticket.group_id, (half, half), 0.0), None

    async def answer(self, prompts: list[Any], how: AnswerSampling) -> list[str]:
        try:
            await asyncio.wait_for(self.leaves.wait(), self.scene.group_s)
        except TimeoutError:
            return [p.prompt_id for p in prompts]
        raise EngineError("it leaves: ask another one")

    async def hand_back(self) -> None:
        self.leaves.set()
        if self.dies:
            raise ray.exceptions.ActorDiedError()

    async def end_notice(self) -> None:
        await self.told.wait()

    async def load(self) -> WorkerLoad:
        return self.told_load()

    def told_load(self) -> WorkerLoad:
        now = self.scene.now
        present_s = sum(now - began for began in self.under_way) / max(1, self.scene.slots)
        return WorkerLoad(self.busy_s + present_s, now - self.born, 0, len(self.under_way))

    async def stop(self) -> None:
        self.ended.append(self.scene.now)


class ElasticScene:
    """`nodes` are there from the beginning, one for each worker; others come when the test says so."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        nodes: int = 99,
        group_s: float = 10.0,
        drain_s: float = 20.0,
        groups_per_step: int = 8,
        max_staleness: int = 0,
        **rollout: int,
    ) -> None:
        self.group_s, self.engine_s, self.nodes = group_s, 5.0, nodes
        self.hand_back_s = 0.0
        self.engines: list[ElasticEngine] = []
        self.sampled: list[tuple[int, str, int]] = []
        """(group, worker that ended it, tokens that it had been handed)."""
        self.killed: list[str] = []
        self.left: list[str] = []
        self.events: list[str] = []
        self.decisions: list[ScalingDecision] = []
        self.handed_back = [0, 0]
        self.asked: list[str] = []
        """Workers that were called for their loads, but for heartbeats."""
        self.learner_s = 1.0
        self.groups_per_step = groups_per_step
        self.books = OpenBook(groups_per_step=groups_per_step, max_staleness=max_staleness)
        self.sync = SimpleNamespace(version=0, join=lambda target: setattr(target, "version", 0), leave=lambda name: None)
        fake_ray = SimpleNamespace(
            remote=lambda cls: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._make)),
            exceptions=ray.exceptions,
            kill=lambda actor: self.killed.append(actor.instance.name),
        )
        monkeypatch.setattr(evenkeel.actors.pool.workers, "ray", fake_ray)
        monkeypatch.setattr("ray.kill", fake_ray.kill)
        monkeypatch.setattr(evenkeel.actors.pool.workers, "_asked", partial(self._note_asked, evenkeel.actors.pool.workers._asked))
        common = {"task": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "reward": {"kind": "exact_match"}}
        engine = {"engine": {"device": "cpu", "max_running_requests": 8}, "sampling": {"samples_per_group": 2}}
        config = RolloutConfig.model_validate(common | engine | rollout)
        self.slots = config.slots_per_worker
        settings = WorkerSettings(config, Path("model"), prompt(0), bind="127.0.0.1", resource="rollout")
        recorder = SimpleNamespace(
            did=lambda _: None,
            failed=lambda _: None,
            joined=lambda _: None,
            left=self.left.append,
            group_finished=lambda *_: None,
            handed_back=self._count,
            lost=lambda _: None,
            scaled=self.decisions.append,
            event=lambda _, text: self.events.append(text),
            waiting=lambda notice: self.events.append(str(notice)),
        )
        deadlines = DeadlinesConfig(start_s=50.0, notice_s=20.0, drain_s=drain_s)
        places = (max_staleness + 1) * groups_per_step
        self.pool = RolloutPool(settings, deadlines, self.books.book, self.books.changes, recorder, places)

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _note_asked(self, ask: Callable[..., Awaitable[Any]], workers: Sequence[Any], *rest: Any) -> Any:
        self.asked += [worker.name for worker in workers]
        return await ask(workers, *rest)

    def _count(self, groups: int, tokens: int) -> None:
        self.handed_back[0] += groups
        self.handed_back[1] += tokens

    def _make(self, name: str, *_: Any, **__: Any) -> FakeActor:
        self.engines.append(ElasticEngine(name, self))
        self.bring_nodes(0)
        return FakeActor(self.engines[-1])

    def bring_nodes(self, more: int) -> None:
        self.nodes += more
        for engine in self.engines[: self.nodes]:
            engine.node.set()

    async def begin(self) -> asyncio.Task[None]:
        self.pool.start()
        await self.pool.first_worker()
        self.pool.follow(self.sync)  # type: ignore[arg-type]
        return asyncio.create_task(self.pool.feed((prompt(i) for i in itertools.count()), [], lambda _: None, lambda _: None))

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await asyncio.sleep(0.1)

    def joined(self) -> list[str]:
        return [worker.name for worker in self.pool.joined()]

    async def step(self, *, tells_loads: bool = True) -> None:
        """As the controller's: wait for a batch, train it, publish. Args: tells_loads: receipts bring them."""
        version, trained = self.sync.version, 0
        batch: list[int] = []
        with Stopwatch().phase("wait") as wait:
            self.pool.learner_waits(version, wait)
            while trained < self.groups_per_step:
                drawn = await self.books.draw(version, self.groups_per_step - trained, 10.0)
                batch += [g.group_id for g in drawn]
                trained = len(batch)
        await asyncio.sleep(self.learner_s)
        self.sync.version += 1
        for worker in self.pool.joined():
            worker.sync.version = self.sync.version
            worker.sync.load = worker.actor.instance.told_load() if tells_loads else None
        self.pool.wake()
        self.books.advance(self.sync.version, batch)

    def assert_balanced(self) -> None:
        counts = self.books.book.counts()
        assert counts["admitted"] == counts["trained"] + counts["discarded"] + counts["in_flight"] + counts["finished"] + counts["drawn"]
        ids = [group_id for group_id, _, _ in self.sampled]
        assert len(ids) == len(set(ids)), "no group was sampled to its end twice"
        assert counts["discarded"] == 0 and len(ids) == counts["trained"] + counts["finished"] + counts["drawn"]
