"""What an operation of the book costs doesn't grow with the groups held. Two do, once a step and once a service: book and ledger are
compared id by id, and a draw is taken back, over all that is under way, which are max_staleness + 1 steps' groups at most."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.carriers import DiscardReason
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.pool.dispatch import WaitingWork
from tests.actors.cases import prompts
from tests.actors.groups.test_book import book_with, put


class Unwalked(dict[int, Any]):
    """Refuses to be walked through."""

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("it walks through all groups of the book")

    __iter__ = items = values = keys = _refuse  # type: ignore[assignment]


def test_nothing_but_the_comparison_of_the_books_walks_through_all_groups() -> None:
    """A run of hundreds of workers holds thousands of groups and looks for work at every finished one."""
    book, tickets = book_with(groups_per_step=50, max_staleness=1, admitted=100)
    book._entries = Unwalked(book._entries)
    book.give_up(0, DiscardReason.FAILED)
    for ticket in tickets[1:]:
        put(book, ticket)
    drawn = [g.group_id for g in book.draw(0, 50)]
    assert drawn == list(range(1, 51))
    book.settle(1, 1, drawn, now=0.0)
    assert book.counts()["finished"] == 49 and book.free_places == 51
    with pytest.raises(AssertionError, match="walks through all groups"):
        book.outstanding()


def operations(held: int) -> int:
    """Lines of the book and of the dispatch, and comparisons, that it takes to admit, hand out, finish, draw, lose and give up 64 groups
    while so many others wait, finished and not: a loop through them would run a line, or compare, for each."""
    count = 0

    class Number(int):
        def __lt__(self, other: int) -> bool:
            nonlocal count
            count += 1
            return int(self) < int(other)

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(("book.py", "dispatch.py")):
            return None
        count += event == "line"
        return trace

    book, work = GroupBook(groups_per_step=2 * held, max_staleness=1), WaitingWork(10, 1)
    book.admitted = Number(0)
    others = [replace(ticket, group_id=Number(ticket.group_id)) for ticket in book.admit(prompts(0, held), now=0.0)]
    for ticket in others[::2]:
        put(book, ticket)
    work.add_groups(others[1::2])
    taker = SimpleNamespace(groups=set(), in_slots=set(), questions=0)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        tickets = [replace(ticket, group_id=Number(ticket.group_id)) for ticket in book.admit(prompts(held, held + 64), now=0.0)]
        work.add_groups(tickets)
        for _ in range(64):
            taker.groups.clear()
            taker.in_slots.clear()
            assert len(list(work.take(book, [taker], [taker]))) == 10
        for ticket in tickets:
            book.begin(ticket.group_id, now=0.0)
            put(book, ticket)
            (drawn,) = book.draw(0, 1)
            book.lose([drawn.group_id])
            book.take_lost()
            book.give_up(drawn.group_id, DiscardReason.LOST)
    finally:
        sys.settrace(before)
    return count


def test_what_a_group_takes_does_not_grow_with_the_groups_held() -> None:
    """From 2,048 to 8,192: two levels of a heap more, of the dozen that there are; what walks through them takes four times as much."""
    few, many = operations(2048), operations(8192)
    assert many < 1.5 * few
