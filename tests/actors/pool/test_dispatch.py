"""Who takes what: the waiting work by itself, over workers of constant speed, in closed form."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.carriers import Ticket
from evenkeel.actors.groups.book import MAX_ENGINE_LOSSES, GroupBook
from evenkeel.actors.pool.dispatch import Questions, WaitingWork
from evenkeel.actors.settings.evaluation_places import evaluation_answers_at_once, questions_of_a_call
from evenkeel.rollout.config import AnswerSampling, RolloutConfig
from tests.actors.cases import prompt, prompts

SAMPLES = 8


def worker(*groups: int, name: str = "0") -> SimpleNamespace:
    return SimpleNamespace(name=name, groups=set(groups), in_slots=set(groups), questions=0)


def book_of(groups: int) -> GroupBook:
    """All of them wait."""
    book = GroupBook(groups_per_step=max(1, groups), max_staleness=0)
    book.admit(prompts(0, groups), now=0.0)
    return book


def tickets(*ids: int) -> list[Ticket]:
    return [Ticket(i, prompt(i), 0) for i in ids]


def questions(count: int, how: AnswerSampling, size: int = 1) -> list[Questions]:
    """In parts of so many."""
    loop = asyncio.new_event_loop()
    loop.close()
    asked = [prompt(i) for i in range(count)]
    return [Questions(asked[i : i + size], how, asyncio.Future(loop=loop)) for i in range(0, count, size)]


class Hall:
    """Workers that take what waits as soon as one of them has finished something; a group takes `group_s`, give or take a half, an answer
    one second."""

    def __init__(self, group_s: Sequence[float], *, slots: int, groups: int) -> None:
        self.waiting, self.slots, self._group_s = WaitingWork(slots, SAMPLES), slots, group_s
        self.workers = [worker(name=str(i)) for i in range(len(group_s))]
        self.book, self._random, self._groups, self._made = book_of(20_000), random.Random(7), groups, 0
        self.now, self._ends, self._numbers = 0.0, list[tuple[float, int, int, Any]](), itertools.count()
        self.sampled, self.answered, self.most_answers = [[0] * len(group_s) for _ in range(3)]

    def add(self, groups: int) -> None:
        self.waiting.add_groups(tickets(*range(self._made, self._made + groups)))
        self._made += groups

    def take(self, ready: Sequence[Any] | None = None) -> None:
        for taker, work in self.waiting.take(self.book, self.workers if ready is None else ready, self.workers):
            number = self.workers.index(taker)
            is_group = isinstance(work, Ticket)
            takes_s = self._group_s[number] * self._random.uniform(0.5, 1.5) if is_group else 1.0
            heapq.heappush(self._ends, (self.now + takes_s, next(self._numbers), number, work))
            self.most_answers[number] = max(self.most_answers[number], taker.questions)

    def run(self, until_s: float) -> None:
        """Each group that is finished makes room for another one, as far as any are to come."""
        self.take()
        while self._ends and self._ends[0][0] <= until_s:
            self.now, _, number, work = heapq.heappop(self._ends)
            if isinstance(work, Ticket):
                self.workers[number].groups.discard(work.group_id)
                self.workers[number].in_slots.discard(work.group_id)
                self.sampled[number] += 1
                self.add(self._groups)
            else:
                self.workers[number].questions -= work.size
                self.answered[number] += work.size
                work.answers.cancel()
            self.take()


@pytest.mark.parametrize("ready", [(1, 2, 3, 4), (4,), (2, 4)], ids=["one after the other", "together", "in pairs"])
@pytest.mark.parametrize(("groups", "even"), [(32, [8, 8, 8, 8]), (33, [8, 8, 8, 9]), (3, [0, 1, 1, 1])])
def test_receipts_leave_the_workers_within_one_group(groups: int, even: list[int], ready: tuple[int, ...]) -> None:
    """Each engine has slots for all of the step's work, and the first one to hold the new weights is alone with it for a while."""
    hall = Hall([10.0] * 4, slots=64, groups=0)
    hall.add(groups)
    for number in ready:
        hall.take(hall.workers[:number])
    assert sorted(len(one.groups) for one in hall.workers) == even


def test_a_worker_ten_times_slower_gets_a_tenth() -> None:
    """More work waits than both have slots for: each takes the next group when one is finished. A tenth, give or take a quarter of it."""
    hall = Hall([0.1, 1.0], slots=4, groups=1)
    hall.add(160)
    hall.run(30.0)
    quick, slow = hall.sampled
    assert 0.075 < slow / quick < 0.125 and [len(one.groups) for one in hall.workers] == [4, 4]


@pytest.mark.parametrize(("workers", "times"), [(2, 1.9), (8, 7.5)])
def test_throughput_grows_with_the_workers(workers: int, times: float) -> None:
    rates = []
    for count in (1, workers):
        hall = Hall([1.0] * count, slots=8, groups=1)
        hall.add(256)
        hall.run(20.0)
        rates.append(sum(hall.sampled))
    assert rates[1] >= times * rates[0]


def test_slots_are_twice_what_an_engine_samples_at_a_time() -> None:
    """The small recipe: 64 groups of 8, 512 requests at a time; what staleness 1 admits is 128 groups, which one worker may have."""
    common = {"task": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "reward": {"kind": "exact_match"}}
    for requests, slots in ((512, 128), (64, 16)):
        engine = {"engine": {"device": "cpu", "max_running_requests": requests}, "sampling": {"samples_per_group": SAMPLES}}
        assert RolloutConfig.model_validate(common | engine).slots_per_worker == slots


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize(("slots", "samples"), [(16, 1), (16, 8), (16, 16), (4, 1), (4, 8), (2, 1), (2, 4)])
def test_an_evaluation_during_training_starves_neither(slots: int, samples: int, engines: int) -> None:
    """256 answers and more groups than slots, of 8 requests each: answers have a quarter of an engine's requests, and groups the other
    slots, of which no half one is kept free. Several answers to a question are as many requests."""
    answers, share = 256 * engines, slots * SAMPLES // 4
    hall = Hall([1.0] * engines, slots=slots, groups=1)
    hall.waiting.is_fed = True
    hall.add(320 * engines)
    hall.run(5.0)
    size = questions_of_a_call(evaluation_answers_at_once(slots, SAMPLES), samples)
    hall.waiting.add_questions(questions(answers // samples, AnswerSampling(samples=samples, temperature=0.7), size))
    hall.take()
    assert {one.questions for one in hall.workers} == {share}, "they don't wait for the groups that wait, and don't take more"
    began, rounds = hall.sampled.copy(), 256 // share
    hall.run(7.0)
    if rounds > 2:
        assert {(one.questions, len(one.groups)) for one in hall.workers} == {(share, slots - slots // 4)}
    hall.run(5.5 + rounds)
    assert hall.answered == [256] * engines and hall.most_answers == [share] * engines
    for before, after in zip(began, hall.sampled, strict=True):
        assert after - before >= 0.9 * (slots - slots // 4) * (rounds - 2), "rounds of a second"


@pytest.mark.parametrize(("is_fed", "samples", "most"), [(True, 16, 16), (False, 1, 16)], ids=["beside groups", "alone"])
def test_questions_are_answered_whole_however_small_the_share_and_have_all_slots_alone(is_fed: bool, samples: int, most: int) -> None:
    """16 answers to each question, and room for 4 beside groups: one question at a time. 2 slots of 8 requests without groups."""
    hall = Hall([1.0], slots=2, groups=int(is_fed))
    hall.waiting.is_fed = is_fed
    hall.add(64 * is_fed)
    hall.run(5.0)
    before = hall.sampled[0]
    hall.waiting.add_questions(questions(8 if is_fed else 64, AnswerSampling(samples=samples, temperature=float(is_fed))))
    hall.run(20.0)
    assert hall.answered == [8 * samples if is_fed else 64] and hall.most_answers == [most]
    assert not is_fed or hall.sampled[0] - before >= 2 * 6


def test_groups_that_wait_for_environments_take_no_slot() -> None:
    """Two workers with 3 slots each take all 20 groups, half each: what bounds them is admission."""
    waiting, takers = WaitingWork(slots=3, samples_per_group=2, without_slot={""}), [worker(), worker(name="1")]
    waiting.add_groups(tickets(*range(20)))
    list(waiting.take(book_of(20), takers, takers))
    assert [len(one.groups) for one in takers] == [10, 10]


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
        ready.in_slots.clear()
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
    taker.in_slots.clear()
    assert [ticket.group_id for _, ticket in waiting.take(book, [taker], [taker])] == [1]


def test_an_evaluation_that_ended_leaves_no_questions_behind() -> None:
    """Those of an ended one leave when their turn comes, and count for no share then. Whether any wait takes the same time however many
    do: each change in the pool asks that."""
    looks = 0

    class CountingFuture(asyncio.Future[Any]):
        def done(self) -> bool:
            nonlocal looks
            looks += 1
            return super().done()

    waiting, parts = WaitingWork(slots=4, samples_per_group=2), questions(1000, AnswerSampling())
    for part in parts:
        part.answers = CountingFuture(loop=part.answers.get_loop())
    waiting.add_questions(parts)
    looks = 0
    assert all(waiting for _ in range(100)) and str(waiting) == "1000 evaluation answers"
    assert looks == 101
    for part in parts[:998]:
        part.answers.cancel()
    takers = [worker(), worker()]
    assert [part for _, part in waiting.take(book_of(0), takers, takers)] == parts[998:]
    assert [taker.questions for taker in takers] == [1, 1] and not waiting and str(waiting) == "nothing"
