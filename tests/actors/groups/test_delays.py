"""What groups' ways take, by times that the test gives."""

from __future__ import annotations

import pytest

from evenkeel.actors.groups.book import ADMISSION, CALL, HANDOVER, GroupBook, GroupDelays
from evenkeel.actors.metrics.step_metrics import lookup
from tests.actors.cases import at_hand, facts, group, prompts


def test_a_call_is_what_is_left_of_it_without_sampling_and_scoring() -> None:
    """Asked at 100, answered at 103 and 105; of that 2 + 0.5 s and 4 + 0.7 s were work: 0.5 s and 0.3 s are the calls'."""
    delays = GroupDelays()
    delays.answered(facts(1, 5, generate_s=2.0, reward_s=0.5), 103.0, called_at=100.0)
    delays.answered(facts(2, 5, generate_s=4.0, reward_s=0.7), 105.0, called_at=100.0)
    assert delays.read() == {CALL: pytest.approx((0.5 + 0.3) / 2)}
    assert delays.read() == {}, "nothing has happened since"


def test_of_a_group_that_another_worker_began_no_call_is_counted() -> None:
    """Asked at 100, answered at 103; its 5 s of sampling hold 3 of the worker that handed it back."""
    delays = GroupDelays()
    delays.answered(facts(1, 5, generate_s=5.0), 103.0, called_at=100.0)
    assert delays.read() == {}


@pytest.mark.parametrize(("asked", "seconds"), [(101.0, 0.75), (104.0, 0.5)])
def test_the_hand_over_begins_with_the_last_answer_or_with_the_learner_s_asking(asked: float, seconds: float) -> None:
    """The batch's last group came at 103. Who asked before that waited for answers until then, which isn't the hand-over's."""
    delays = GroupDelays()
    delays.asked(asked)
    delays.asked(asked + 0.1)
    delays.given([102.0, 103.0], max(103.0, asked) + seconds)
    assert delays.read() == {HANDOVER: pytest.approx(seconds)}


def test_places_that_a_step_has_freed_are_measured_and_those_of_discarded_groups_are_not() -> None:
    """Two places are free from 100 on; one ticket comes at 100.2, another at 100.4. A third, at 107, has the place of a discarded group."""
    delays = GroupDelays()
    delays.admitted(4, 100.0)  # as the run begins: nothing was freed
    delays.freed(2, 100.0)
    for when in (100.2, 100.4, 107.0):
        delays.admitted(1, when)
    assert delays.read() == {ADMISSION: pytest.approx(0.3)}


def test_the_book_times_groups_and_a_lost_one_by_its_second_arrival() -> None:
    """Two groups come at 100, when they were asked for; one is lost and comes again at 130, called at 120. The learner has both at 131."""
    book = GroupBook(groups_per_step=2, max_staleness=0)
    first, second = book.admit(prompts(0, 2), now=90.0)
    for ticket in (first, second):
        book.begin(ticket.group_id, now=99.9)
        book.finish(at_hand(group(ticket)), now=100.0)
    book.draw(0, 2)
    book.lose([1])
    book.begin(1, now=120.0)
    book.finish(at_hand(group(second)), now=130.0)
    book.draw(0, 1)
    book.delays.asked(101.0)
    assert book.finished_at([0, 1]) == {0: 100.0, 1: 130.0}
    assert book.waited_for_a_worker([0, 1]) == {0: (90.0, 99.9), 1: (90.0, 120.0)}
    book.delays.given(book.finished_at([0, 1]).values(), 131.0)
    spent_s = group(first).facts.generate_s + group(first).facts.reward_s
    assert book.delays.read() == {CALL: pytest.approx((0.1 + 0.1 + 10.0) / 3 - spent_s), HANDOVER: 1.0}
    book.settle(1, 1, [0, 1], now=131.0)
    book.admit(prompts(2, 3), now=131.5)
    assert book.delays.read() == {ADMISSION: 0.5}


def test_the_catalogue_has_them() -> None:
    assert {lookup(name).name for name in (ADMISSION, CALL, HANDOVER)} == {"time/admission_s", "time/call_s", "wait/handover_s"}
