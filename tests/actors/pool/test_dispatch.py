"""Work is pulled: the real pool and queue with fake workers, in simulated time, and who takes what in closed form."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

import evenkeel.actors.pool.workers
from evenkeel.actors.carriers import ActorInfo, Ticket, WorkerSettings
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.groups.book import MAX_ENGINE_LOSSES, GroupBook
from evenkeel.actors.pool.dispatch import Questions, WaitingWork
from evenkeel.actors.pool.pool import RolloutPool
from evenkeel.actors.processes.pacing import Stopwatch
from evenkeel.rollout.config import AnswerSampling, RolloutConfig
from evenkeel.rollout.trajectory import Group, GroupFacts
from tests.actors.cases import FakeActor, OpenBook, group, prompt, prompts
from tests.actors.simulated_time import simulate

RECEIPTS_APART_S = 0.02


class Engine:
    """Samples as many groups at a time as it has slots for; a group takes `group_s`, give or take a half."""

    def __init__(self, name: str, group_s: float) -> None:
        self.name, self.group_s = name, group_s
        self.random = random.Random(name)
        self.under_way = self.most_under_way = self.sampled = 0
        self.answered = self.answers_under_way = self.most_answers_under_way = 0

    async def start(self, *_: Any) -> ActorInfo:
        return ActorInfo("rollout", self.name, 1, "127.0.0.1:1")

    async def generate_group(self, ticket: Ticket, *_: Any) -> tuple[GroupFacts, Group]:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(self.group_s * self.random.uniform(0.5, 1.5))
        self.under_way -= 1
        self.sampled += 1
        return (made := group(ticket)).facts, made

    async def answer(self, prompts: list[Any], how: AnswerSampling) -> list[str]:
        asked = len(prompts) * how.samples
        self.answers_under_way += asked
        self.most_answers_under_way = max(self.most_answers_under_way, self.answers_under_way)
        await asyncio.sleep(self.group_s)
        self.answers_under_way -= asked
        self.answered += asked
        return [p.prompt_id for p in prompts]


class Run:
    """A pool, and a learner that takes no time: each batch is trained at once, and every engine gets the new weights a moment later."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        group_s: Sequence[float],
        *,
        groups_per_step: int,
        max_staleness: int,
        slots: int | None = None,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.engines: list[Engine] = []
        self.books = OpenBook(groups_per_step=groups_per_step, max_staleness=max_staleness)
        self.sync = SimpleNamespace(version=0, join=lambda target: setattr(target, "version", 0), leave=lambda name: None)

        def make(name: str, *_: Any, **__: Any) -> FakeActor:
            self.engines.append(Engine(name, group_s[int(name)]))
            return FakeActor(self.engines[-1])

        fake_ray = SimpleNamespace(
            remote=lambda cls: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make)), exceptions=ray.exceptions
        )
        monkeypatch.setattr(evenkeel.actors.pool.workers, "ray", fake_ray)
        config = RolloutConfig.model_validate(
            {
                "workers": len(group_s),
                "slots": slots,
                "task": {"kind": "reasoning_gym", "dataset": "chain_sum"},
                "reward": {"kind": "exact_match"},
                "engine": {"device": "cpu"},
            }
        )
        settings = WorkerSettings(config, Path("model"), prompt(0), bind="127.0.0.1", resource="rollout")
        told = dict.fromkeys(("joined", "left", "group_finished", "lost", "waiting"), lambda *_: None)
        recorder = SimpleNamespace(**told, event=lambda *_: None)
        self.pool = RolloutPool(settings, DeadlinesConfig(start_s=50.0, notice_s=20.0), self.books.book, self.books.changes, recorder)

    async def begin(self) -> asyncio.Task[None]:
        self.pool.start()
        while len(list(self.pool.joined())) < len(self.pool.workers):
            await asyncio.sleep(0.001)
        self.pool.follow(self.sync)  # type: ignore[arg-type]
        return asyncio.create_task(self.pool.feed((prompt(i) for i in itertools.count()), [], lambda _: None, lambda _: None))

    async def step(self) -> None:
        """Train the next batch, publish, and send receipts one after the other."""
        version, batch = self.sync.version, 0
        trained: list[int] = []
        with Stopwatch().phase("wait") as wait:
            self.pool.learner_waits(version, wait)
            while batch < self.groups_per_step:
                drawn = await self.books.draw(version, self.groups_per_step - batch, 10.0)
                batch += len(drawn)
                trained += [g.group_id for g in drawn]
        self.sync.version += 1
        self.pool.wake()
        self.books.advance(self.sync.version, trained)
        for place, worker in enumerate(self.pool.joined(), start=1):
            asyncio.get_running_loop().call_later(place * RECEIPTS_APART_S, self._receipt, worker, self.sync.version)

    def _receipt(self, worker: Any, version: int) -> None:
        worker.sync.version = max(worker.sync.version, version)  # two of one moment come in any order
        self.pool.wake()

    def under_way(self) -> list[int]:
        return [len(worker.groups) for worker in self.pool.joined()]

    async def groups_per_second(self, steps: int) -> float:
        """Over so many steps, the first three left out."""
        feeding = await self.begin()
        for _ in range(3):
            await self.step()
        began = asyncio.get_running_loop().time()
        for _ in range(steps):
            await self.step()
        feeding.cancel()
        return steps * self.groups_per_step / (asyncio.get_running_loop().time() - began)


@pytest.mark.parametrize(("groups", "even"), [(32, [8, 8, 8, 8]), (33, [8, 8, 8, 9]), (3, [0, 1, 1, 1])])
def test_receipts_20_ms_apart_leave_the_workers_within_one_group(monkeypatch: pytest.MonkeyPatch, groups: int, even: list[int]) -> None:
    """Each engine has slots for all of the step's work, and the first one to hold the new weights is alone with it for 20 ms."""

    async def scenario() -> None:
        run = Run(monkeypatch, [10.0] * 4, groups_per_step=groups, max_staleness=0, slots=64)
        feeding = await run.begin()
        await run.step()
        before = [engine.sampled for engine in run.engines]
        await asyncio.sleep(4.5 * RECEIPTS_APART_S)
        assert sorted(run.under_way()) == even
        await run.step()
        after = [engine.sampled for engine in run.engines]
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == even
        feeding.cancel()

    simulate(scenario)


def test_a_worker_ten_times_slower_gets_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """More work waits than both have slots for: each takes the next group when one is finished. A tenth, give or take a quarter of it."""

    async def scenario() -> None:
        run = Run(monkeypatch, [0.1, 1.0], groups_per_step=32, max_staleness=4, slots=4)
        await run.groups_per_second(40)
        quick, slow = run.engines
        assert 0.075 < slow.sampled / quick.sampled < 0.125
        assert quick.most_under_way == slow.most_under_way == 4

    simulate(scenario)


def test_throughput_grows_with_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """At max_staleness 1, with work for all: two workers 1.9 times one, eight 7.5 times."""
    rates: dict[int, float] = {}

    for workers in (1, 2, 8):

        async def scenario(workers: int = workers) -> None:
            run = Run(monkeypatch, [1.0] * workers, groups_per_step=128, max_staleness=1, slots=8)
            rates[workers] = await run.groups_per_second(8)

        simulate(scenario)
    assert rates[2] >= 1.9 * rates[1]
    assert rates[8] >= 7.5 * rates[1]


def test_one_worker_is_given_all_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small recipe: 64 groups of 8, 512 requests at a time; what staleness 1 admits is 128 groups, which are its slots."""

    async def scenario() -> None:
        run = Run(monkeypatch, [10.0], groups_per_step=64, max_staleness=1, slots=None)
        feeding = await run.begin()
        await asyncio.sleep(0.1)
        assert run.under_way() == [16], "max_running_requests 64, groups of 8: room for 8, and as many again"
        feeding.cancel()

    simulate(scenario)
    recipe = {"engine": {"device": "cpu", "max_running_requests": 512}, "sampling": {"samples_per_group": 8}}
    config = RolloutConfig.model_validate(
        {"task": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "reward": {"kind": "exact_match"}, **recipe}
    )
    assert config.slots_per_worker == 128


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize(("slots", "samples"), [(16, 1), (16, 8), (16, 16), (4, 1), (4, 8), (2, 1), (2, 4)])
def test_an_evaluation_during_training_starves_neither(monkeypatch: pytest.MonkeyPatch, slots: int, samples: int, engines: int) -> None:
    """256 answers and more groups than slots, of 8 requests each: answers have a quarter of an engine's requests, and groups the other
    slots, of which no half one is kept free. Several answers to a question are as many requests."""
    answers, share = 256 * engines, slots * 8 // 4

    async def scenario() -> None:
        run = Run(monkeypatch, [1.0] * engines, groups_per_step=64 * engines, max_staleness=4, slots=slots)
        how = AnswerSampling(samples=samples, temperature=0.7)
        feeding = await run.begin()
        await asyncio.sleep(5.0)
        asking = asyncio.create_task(run.pool.answer([prompt(i) for i in range(answers // samples)], how))
        await asyncio.sleep(0.01)
        workers = list(run.pool.joined())
        taken = {worker.questions for worker in workers}
        assert taken == {share}, "they don't wait for the groups that wait, and don't take more than their share"
        await asyncio.sleep(2.0)
        assert {(worker.questions, len(worker.groups)) for worker in workers} == {(share, slots - slots // 4)}
        began, rounds = [engine.sampled for engine in run.engines], 256 // share
        await asking
        assert sum(engine.answered for engine in run.engines) == answers
        for engine, before in zip(run.engines, began, strict=True):
            assert engine.most_answers_under_way <= share
            assert engine.sampled - before >= 0.9 * (slots - slots // 4) * (rounds - 2), "rounds of a second, all but two seen here"
        feeding.cancel()

    simulate(scenario)


def test_a_question_is_answered_whole_however_small_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 answers to each question, and room for 4: one question at a time, beside groups."""

    async def scenario() -> None:
        run = Run(monkeypatch, [1.0], groups_per_step=64, max_staleness=4, slots=2)
        feeding = await run.begin()
        await asyncio.sleep(5.0)
        before = run.engines[0].sampled
        await run.pool.answer([prompt(i) for i in range(8)], AnswerSampling(samples=16, temperature=0.7))
        assert run.engines[0].most_answers_under_way == 16 and run.engines[0].sampled - before >= 2 * 6
        feeding.cancel()

    simulate(scenario)


def test_without_groups_an_evaluation_has_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        run = Run(monkeypatch, [1.0], groups_per_step=64, max_staleness=4, slots=2)
        feeding = await run.begin()
        await asyncio.sleep(5.0)
        feeding.cancel()
        await asyncio.sleep(5.0)
        await run.pool.answer([prompt(i) for i in range(64)], AnswerSampling())
        assert run.engines[0].most_answers_under_way == 16, "2 slots of 8 requests"

    simulate(scenario)


# -- who takes what ------------------------------------------------------------------------------------------------------------------------


def worker(*groups: int, name: str = "0") -> SimpleNamespace:
    return SimpleNamespace(name=name, groups=set(groups), questions=0)


def book_of(groups: int) -> GroupBook:
    """All of them wait."""
    book = GroupBook(groups_per_step=max(1, groups), max_staleness=0)
    book.admit(prompts(0, groups), now=0.0)
    return book


def tickets(*ids: int) -> list[Ticket]:
    return [Ticket(i, prompt(i), 0) for i in ids]


def test_a_failed_workers_groups_are_the_oldest_that_wait() -> None:
    waiting, taker = WaitingWork(slots=3, samples_per_group=2), worker()
    waiting.add_groups(tickets(7, 8, 9))
    waiting.add_groups(tickets(2, 5))
    list(waiting.take(book_of(10), [taker], [taker]))
    assert taker.groups == {2, 5, 7}


def test_who_is_behind_keeps_a_share_but_holds_up_nobody() -> None:
    """One of two workers never gets the new weights: half of the work waits for it, but only while the other one has work of its own."""
    waiting, book, ready, behind = WaitingWork(slots=64, samples_per_group=2), book_of(8), worker(), worker(name="1")
    waiting.add_groups(tickets(*range(8)))
    taken = []
    while waiting:
        list(waiting.take(book, [ready], [ready, behind]))
        assert ready.groups, "idle while work waits"
        taken.append(len(ready.groups))
        ready.groups.clear()
    assert taken == [4, 2, 1, 1]


def test_a_group_that_failed_comes_back_to_its_worker_when_no_other_one_is_ready_for_long() -> None:
    """One that is ready and full is waited for all the same."""
    waiting, book, failed, other = WaitingWork(slots=2, samples_per_group=2), book_of(4), worker(), worker(0, 1, name="1")
    assert book.waits(3, failed_at=failed.name)
    waiting.add_groups(tickets(3))
    assert not list(waiting.take(book, [failed], [failed, other])), "the other one will soon be ready"
    book.overdue(3)
    assert not list(waiting.take(book, [failed, other], [failed, other]))
    assert [taker for taker, _ in waiting.take(book, [failed], [failed, other])] == [failed]


def test_a_worker_takes_one_group_at_a_time_that_two_engines_were_lost_with() -> None:
    """The next loss would make each of both the cause."""
    waiting, book, taker = WaitingWork(slots=4, samples_per_group=2), book_of(3), worker()
    for group_id in (0, 1):
        assert [book.engine_lost(group_id) for _ in range(MAX_ENGINE_LOSSES - 1)] == [1, 2] and book.is_suspect(group_id)
    waiting.add_groups(tickets(0, 1, 2))
    assert [ticket.group_id for _, ticket in waiting.take(book, [taker], [taker])] == [0, 2] and waiting
    taker.groups.clear()
    assert [ticket.group_id for _, ticket in waiting.take(book, [taker], [taker])] == [1]


def test_an_evaluation_that_ended_leaves_no_questions_behind() -> None:
    async def scenario() -> None:
        waiting = WaitingWork(slots=4, samples_per_group=2)
        part = Questions([prompt(0)], AnswerSampling(), asyncio.get_running_loop().create_future())
        waiting.add_questions([part])
        assert str(waiting) == "1 evaluation answers" and waiting
        part.answers.cancel()
        taker = worker()
        assert not waiting and list(waiting.take(book_of(0), [taker], [taker])) == [] and taker.questions == 0

    asyncio.run(scenario())


def test_whether_questions_wait_costs_the_same_however_many_do() -> None:
    """Each change in the pool asks that. Those of an evaluation that has ended leave when their turn comes, and count for no share then."""

    class CountingFuture(asyncio.Future[Any]):
        looks = 0

        def done(self) -> bool:
            CountingFuture.looks += 1
            return super().done()

    async def scenario() -> None:
        waiting, loop = WaitingWork(slots=4, samples_per_group=2), asyncio.get_running_loop()
        parts = [Questions([prompt(i)], AnswerSampling(), CountingFuture(loop=loop)) for i in range(1000)]
        waiting.add_questions(parts)
        CountingFuture.looks = 0
        assert all(waiting for _ in range(100)) and str(waiting) == "1000 evaluation answers"
        assert CountingFuture.looks == 101
        for part in parts[:998]:
            part.answers.cancel()
        takers = [worker(), worker()]
        assert [part for _, part in waiting.take(book_of(0), takers, takers)] == parts[998:]
        assert [taker.questions for taker in takers] == [1, 1] and not waiting and str(waiting) == "nothing"

    asyncio.run(scenario())
