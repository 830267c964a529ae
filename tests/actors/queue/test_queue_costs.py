"""What an operation of the queue, or of the driver's books of it, costs doesn't grow with the groups held. One does, once a step: queue and
ledger are compared id by id, over all that is under way, which are max_staleness + 1 steps' groups at most."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.carriers import Ticket
from actors.pool.dispatch import WaitingWork
from actors.queue.outstanding import Outstanding
from actors.queue.trajectory_queue import TrajectoryQueue
from tests.actors.cases import CountingName, at_hand, group, prompt, prompts
from tests.actors.queue.test_trajectory_queue import queue_with


class Unwalked(dict[int, Any]):
    """Refuses to be walked through."""

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("it walks through all groups of the queue")

    __iter__ = items = values = keys = _refuse  # type: ignore[assignment]


def test_nothing_but_the_comparison_of_the_books_walks_through_all_groups() -> None:
    """A run of hundreds of workers holds thousands of groups and looks for work at every finished one."""
    queue, tickets = queue_with(groups_per_step=50, max_staleness=1, admitted=100)
    queue._entries = Unwalked(queue._entries)
    for ticket in tickets:
        queue.put(group(ticket))
    queue.discard([0], "uniform")
    drawn = [g.group_id for g in queue.draw(0, 50)]
    assert drawn == list(range(1, 51)), "the discarded one is passed over"
    queue.publish(1)
    queue.settle(drawn)
    assert queue.counts()["finished"] == 49 and queue.free_places == 51
    with pytest.raises(AssertionError, match="walks through all groups"):
        queue.outstanding()


def operations(held: int) -> int:
    """Lines of the queue and of the dispatch, and comparisons, that it takes to admit, hand out, put, draw, lose and discard 64 groups
    while so many others wait, finished and not: a loop through them would run a line, or compare, for each."""
    count = 0

    class Number(int):
        def __lt__(self, other: int) -> bool:
            nonlocal count
            count += 1
            return int(self) < int(other)

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(("trajectory_queue.py", "dispatch.py")):
            return None
        count += event == "line"
        return trace

    queue, work = TrajectoryQueue(groups_per_step=2 * held, max_staleness=1), WaitingWork(10, 1)
    queue.admitted = Number(0)
    others = [replace(ticket, group_id=Number(ticket.group_id)) for ticket in queue.admit(prompts(0, held))]
    for ticket in others[::2]:
        queue.put(group(ticket))
    work.add_groups(others[1::2])
    taker = SimpleNamespace(groups=set(), questions=0)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        tickets = [replace(ticket, group_id=Number(ticket.group_id)) for ticket in queue.admit(prompts(held, held + 64))]
        work.add_groups(tickets)
        for _ in range(64):
            taker.groups.clear()
            assert len(list(work.take([taker], [taker]))) == 10
        for ticket in tickets:
            queue.put(group(ticket))
            (drawn,) = queue.draw(0, 1)
            queue.lose([drawn.group_id])
            queue.take_lost()
            queue.discard([drawn.group_id], "test")
    finally:
        sys.settrace(before)
    return count


def test_what_a_group_takes_does_not_grow_with_the_groups_held() -> None:
    """From 2,048 to 8,192: two levels of a heap more, of the dozen that there are; what walks through them takes four times as much."""
    few, many = operations(2048), operations(8192)
    assert many < 1.5 * few


def hashed_by_giving_up(worthless: int) -> int:
    """Prompt ids that are looked up while one group is given up, with so many others that are not worth training."""

    books = Outstanding(dynamic_sampling=True)
    tickets = [Ticket(i, replace(prompt(i), prompt_id=CountingName(f"train/0/{i}")), 0) for i in range(worthless + 1)]
    books.admit(tickets)
    for ticket in tickets[:-1]:
        books.finish(at_hand(group(ticket, rewards=(1.0, 1.0))))
    CountingName.lookups = 0
    books.give_up(tickets[-1], "failed")
    lookups = CountingName.lookups
    assert (worthless, "failed") in books.given_up
    return lookups


def test_giving_up_does_not_look_through_the_others() -> None:
    assert hashed_by_giving_up(10) == hashed_by_giving_up(1000) < 10
