"""What groups' ways take: by a clock that the test sets, and where the run's parts report what happens."""

from __future__ import annotations

import pytest

from actors.carriers import DiscardedGroup, DiscardReason, Ticket
from actors.metrics.step_metrics import lookup
from actors.queue.delays import ADMISSION, CALL, HANDOVER, GroupDelays
from actors.queue.outstanding import Outstanding
from tests.actors.cases import at_hand, facts, group, prompt


class Clock:
    """Seconds, as the test has them."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def at(clock: Clock) -> GroupDelays:
    return GroupDelays(clock)


def test_a_call_is_what_is_left_of_it_without_sampling_and_scoring() -> None:
    """Asked at 100, answered at 103 and 105; of that 2 + 0.5 s and 4 + 0.7 s were work: 0.5 s and 0.3 s are the calls'."""
    clock = Clock()
    delays = at(clock)
    delays.called(1)
    delays.called(2)
    clock.now = 103.0
    delays.finished(facts(1, 5, generate_s=2.0, reward_s=0.5))
    clock.now = 105.0
    delays.finished(facts(2, 5, generate_s=4.0, reward_s=0.7))
    assert delays.read() == {CALL: pytest.approx((0.5 + 0.3) / 2)}
    assert delays.read() == {}, "nothing has happened since"


def test_of_a_group_that_another_worker_began_no_call_is_counted() -> None:
    """Asked at 100, answered at 103; its 5 s of sampling hold 3 of the worker that handed it back."""
    clock = Clock()
    delays = at(clock)
    delays.called(1)
    clock.now = 103.0
    delays.finished(facts(1, 5, generate_s=5.0))
    assert delays.read() == {} and not delays._called


@pytest.mark.parametrize(("asked", "seconds"), [(101.0, 0.75), (104.0, 0.5)])
def test_the_hand_over_begins_with_the_last_answer_or_with_the_learner_s_asking(asked: float, seconds: float) -> None:
    """The batch's last group came at 103. Who asked before that waited for answers until then, which isn't the hand-over's."""
    clock = Clock()
    delays = at(clock)
    for group_id, when in ((0, 102.0), (1, 103.0)):
        clock.now = when
        delays.finished(facts(group_id, 5))
    clock.now = asked
    delays.asked()
    clock.now = asked + 0.1
    delays.asked()
    clock.now = max(103.0, asked) + seconds
    delays.finished(facts(9, 5))  # of another batch
    delays.given([0, 1])
    assert delays.read() == {HANDOVER: pytest.approx(seconds)}


def test_places_that_a_step_has_freed_are_measured_and_those_of_discarded_groups_are_not() -> None:
    """Two places are free from 100 on; one ticket comes at 100.2, another at 100.4. A third, at 107, has the place of a discarded group."""
    clock = Clock()
    delays = at(clock)
    delays.admitted(4)  # as the run begins: nothing was freed
    delays.freed(2)
    for when, tickets in ((100.2, 1), (100.4, 1), (107.0, 1)):
        clock.now = when
        delays.admitted(tickets)
    assert delays.read() == {ADMISSION: pytest.approx(0.3)}


def test_the_driver_s_books_report_what_happens_and_keep_nothing_of_groups_that_are_gone() -> None:
    """Of three groups one is trained, one is discarded, and one is lost and sampled again, whose second arrival counts."""
    clock, books = Clock(), Outstanding()
    books.delays = delays = at(clock)
    tickets = [Ticket(number, prompt(number), 0) for number in range(3)]
    books.admit(tickets)
    for ticket in tickets:
        delays.called(ticket.group_id)
        books.finish(at_hand(group(ticket)))
    books.lose([tickets[2]])
    clock.now = 130.0
    books.finish(at_hand(group(tickets[2])))
    delays.asked()
    clock.now = 131.0
    delays.given([0, 2])
    assert delays.read() == {CALL: 0.0, HANDOVER: 1.0}
    ids = [ticket.prompt.prompt_id for ticket in tickets]
    books.settle(1, 1, trained=[ids[0]], discarded=[DiscardedGroup(ids[1], DiscardReason.UNIFORM)])
    delays.called(0)
    books.finish(at_hand(group(tickets[0])))  # once more, and too late
    assert set(delays._finished) == {2} and not delays._called
    clock.now = 131.5
    books.admit([Ticket(3, prompt(3), 1)])
    assert delays.read() == {ADMISSION: 0.5}


def test_the_catalogue_has_them() -> None:
    assert {lookup(name).name for name in (ADMISSION, CALL, HANDOVER)} == {"time/admission_s", "time/call_s", "wait/handover_s"}
