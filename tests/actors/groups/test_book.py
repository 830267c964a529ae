"""Admission by staleness, and the life of a group. Behaviours locked here:

admitted - trained - discarded <= (max_staleness + 1) * groups_per_step, whatever happens in whatever order
no group is trained more than max_staleness versions after the one that engines had at its admission, stragglers, refills and skipped
steps included, and versions that don't go out to engines
when all groups are finished, a batch can be drawn whole: the places kept for the old never block
a second answer changes nothing; a snapshot loses nothing and keeps bound and counts; a draw that is taken back is drawn again
"""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evenkeel.actors.carriers import DiscardedGroup, DiscardReason, GroupTokens, StoredGroup, Ticket
from evenkeel.actors.groups.book import GroupBook
from evenkeel.correction.errors import LedgerError
from evenkeel.rollout.continuation import unsampled
from evenkeel.rollout.trajectory import UnfinishedGroup, ids_of
from tests.actors.cases import at_hand, group, prompt, prompts, snapshot_of


class BookLife(RuleBasedStateMachine):
    """A run as the book sees it: workers finish in any order, the driver prepares one batch ahead, services die, the driver restarts."""

    @initialize(groups_per_step=st.integers(1, 3), max_staleness=st.integers(0, 3), every_steps=st.integers(1, 4))
    def start(self, groups_per_step: int, max_staleness: int, every_steps: int) -> None:
        self.every_steps = min(every_steps, max_staleness + 1)
        self.shape = {"groups_per_step": groups_per_step, "max_staleness": max_staleness}
        self.book = GroupBook(**self.shape, dynamic_sampling=True)
        self.sampling: list[Ticket] = []
        self.drawn: list[StoredGroup] = []
        self.training: list[StoredGroup] | None = None
        self.preparing = 0
        """Version of the batch that is being drawn: the one after that in training."""
        self.admitted: list[str] = []
        self.gone: list[str] = []
        """Trained, or discarded and told."""

    @rule(count=st.integers(1, 8))
    def admit(self, count: int) -> None:
        start, free = len(self.admitted), self.book.free_places
        tickets = self.book.admit(prompts(start, start + count), now=0.0)
        assert len(tickets) == min(count, max(0, free))
        self.sampling += tickets
        self.admitted += [ticket.prompt.prompt_id for ticket in tickets]

    @precondition(lambda self: self.sampling)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ticket = self.sampling.pop(data.draw(st.integers(0, len(self.sampling) - 1)))
        rewards = data.draw(st.sampled_from([(1.0, 0.0)] * 4 + [(1.0, 1.0)]))
        assert self.book.waits(ticket.group_id)
        self.book.begin(ticket.group_id, now=0.0)
        found = self.book.finish(at_hand(group(ticket, rewards=rewards)), now=0.0)
        assert found is not None and (found.reason is None) == (rewards == (1.0, 0.0))
        before = self.book.counts()
        assert self.book.finish(at_hand(group(ticket)), now=0.0) is None and not self.book.waits(ticket.group_id)
        assert not self.book.give_up(ticket.group_id, DiscardReason.FAILED) and self.book.counts() == before

    @precondition(lambda self: self.sampling)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ticket = self.sampling.pop(data.draw(st.integers(0, len(self.sampling) - 1)))
        assert self.book.give_up(ticket.group_id, DiscardReason.FAILED)

    @rule()
    def draw(self) -> None:
        """What isn't worth training is discarded, which frees its place."""
        found = self.book.draw(self.preparing, self.book.groups_per_step - len(self.drawn))
        assert all(one.reason is None for one in found)
        self.drawn += found

    @precondition(lambda self: self.drawn)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        one = self.drawn.pop(data.draw(st.integers(0, len(self.drawn) - 1)))
        self.book.lose([one.group_id])
        self.sampling += self.book.take_lost()
        assert not self.book.has_lost

    @precondition(lambda self: self.training is None and len(self.drawn) == self.book.groups_per_step)
    @rule()
    def train(self) -> None:
        assert self.preparing == self.book.version
        staleness = [self.preparing - drawn.facts.admitted_version for drawn in self.drawn]
        assert min(staleness) >= 0 and max(staleness) <= self.book.max_staleness
        self.training, self.drawn = self.drawn, []
        self.preparing += 1

    @precondition(lambda self: self.training is not None)
    @rule()
    def settle(self) -> None:
        """Also after a step that the guard skipped: the version grows by one for each batch. Engines get each that every_steps divides."""
        assert self.training is not None
        published = self.preparing if self.preparing % self.every_steps == 0 else self.book.published
        discarded = self.book.settle(self.preparing, published, [trained.group_id for trained in self.training], now=0.0)
        self.gone += [*(trained.prompt_id for trained in self.training), *(one.prompt_id for one in discarded)]
        self.training = None

    @precondition(lambda self: self.training is None)
    @rule(finish=st.lists(st.integers(0, 11), max_size=3))
    def whole_step(self, finish: list[int]) -> None:
        """What a run does most of the time: fill the places, finish some groups out of order, and train if the batch is whole."""
        self.admit(12)
        for i in finish:
            if i < len(self.sampling):
                self.book.finish(at_hand(group(self.sampling.pop(i))), now=0.0)
        self.draw()
        if len(self.drawn) == self.book.groups_per_step:
            self.train()
            self.settle()

    @precondition(lambda self: self.sampling)
    @rule(which=st.integers(0, 11), tokens=st.integers(1, 3))
    def hand_back(self, which: int, tokens: int) -> None:
        """A worker leaves, or is lost: another one goes on from there, also after a restart."""
        ticket = self.sampling[which % len(self.sampling)]
        answer = replace(unsampled((1,), ticket.prompt.prompt_id), response_ids=ids_of(range(tokens)))
        there = UnfinishedGroup(ticket.group_id, (answer,))
        assert self.book.waits(ticket.group_id, so_far=there) and self.book.so_far(ticket.group_id) is there

    @precondition(lambda self: self.training is None)
    @rule()
    def restart(self) -> None:
        """From a checkpoint of this moment: what was being sampled is sampled, from where it was; what was drawn is drawn again."""
        unpublished = self.book.version - self.book.published  # engines get the newest
        snapshot = pickle.loads(pickle.dumps(snapshot_of(self.book)))
        restored = GroupBook(**self.shape, dynamic_sampling=True, snapshot=snapshot)
        assert [t.group_id for t in restored.in_flight] == sorted(t.group_id for t in self.sampling)
        assert restored.free_places == self.book.free_places + unpublished * self.book.groups_per_step
        assert restored.version == restored.published == self.book.version
        assert restored.contents() == self.book.contents()
        self.book, self.drawn = restored, []

    @rule()
    def service_dies(self) -> None:
        """It had drawn the batch ahead; that in training is the learner's."""
        before = self.book.counts()
        self.book.take_back(self.preparing)
        after = self.book.counts()
        assert after["finished"] == before["finished"] + len(self.drawn) and after["drawn"] == len(self.training or [])
        assert [t.group_id for t in self.book.in_flight] == sorted(t.group_id for t in self.sampling)
        self.drawn = []

    @invariant()
    def the_bound_holds(self) -> None:
        book = self.book
        assert book.admitted - book.trained - book.discarded <= (book.max_staleness + 1) * book.groups_per_step

    @invariant()
    def every_prompt_is_somewhere_once(self) -> None:
        contents = self.book.contents()
        held = [*(ticket.prompt.prompt_id for ticket in contents.tickets), *(one.prompt_id for one in contents.unreported)]
        assert sorted(held + self.gone) == sorted(self.admitted)
        assert contents.admitted == len(self.admitted)
        assert {one.group_id for one in contents.so_far} <= {ticket.group_id for ticket in self.sampling}
        counts = self.book.counts()
        assert counts["in_flight"] + counts["finished"] + counts["drawn"] == len(contents.tickets)

    def teardown(self) -> None:
        """Everything finishes: then batch after batch is whole at once, and nothing is too old."""
        if not hasattr(self, "book"):
            return
        for ticket in self.sampling:
            self.book.finish(at_hand(group(ticket)), now=0.0)
        assert self.book.are_all_sampled
        if self.training is not None:
            self.settle()
        while True:
            self.draw()
            if len(self.drawn) < self.book.groups_per_step:
                assert self.book.counts()["finished"] == 0, "places were kept for groups that are not there"
                return
            self.train()
            self.settle()


BookLife.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestBookLife = BookLife.TestCase


def book_with(*, groups_per_step: int, max_staleness: int, admitted: int) -> tuple[GroupBook, list[Ticket]]:
    book = GroupBook(groups_per_step=groups_per_step, max_staleness=max_staleness)
    return book, book.admit(prompts(0, admitted), now=0.0)


def put(book: GroupBook, ticket: Ticket) -> bool:
    return book.finish(at_hand(group(ticket)), now=0.0) is not None


def train(book: GroupBook, version: int) -> list[int]:
    """Draw a batch, train it, publish."""
    drawn = [g.group_id for g in book.draw(version, book.groups_per_step)]
    book.settle(version + 1, version + 1, drawn, now=0.0)
    return drawn


def test_the_example_of_the_module() -> None:
    book, tickets = book_with(groups_per_step=2, max_staleness=1, admitted=9)
    assert [t.group_id for t in tickets] == [0, 1, 2, 3]
    for ticket in tickets:
        put(book, ticket)
    assert train(book, 0) == [0, 1]
    assert [t.admitted_version for t in book.admit(prompts(4, 9), now=0.0)] == [1, 1]
    assert book.due(1) == [2, 3]
    assert train(book, 1) == [2, 3]


def test_places_are_those_that_published_weights_have_steps_for() -> None:
    """Two groups a step, bound 3, every third version published: at version 0 there are places for 4 steps, at 2 for the two left of them,
    which are taken; at 3, which goes out, for 4 again."""
    book, tickets = book_with(groups_per_step=2, max_staleness=3, admitted=20)
    assert len(tickets) == 8
    admitted = []
    for version in range(1, 7):
        for one in snapshot_of(book).in_flight:
            put(book, one)
        drawn = [found.group_id for found in book.draw(version - 1, 2)]
        book.settle(version, version - version % 3, drawn, now=0.0)
        admitted.append([ticket.admitted_version for ticket in book.admit(prompts(100 * version, 100 * version + 20), now=0.0)])
    assert admitted == [[], [], [3] * 6, [], [], [6] * 6]


def test_published_versions_only_grow_and_are_none_ahead_of_the_learner() -> None:
    book, _ = book_with(groups_per_step=1, max_staleness=3, admitted=0)
    book.settle(2, 2, [], now=0.0)
    book.settle(3, 2, [], now=0.0)
    for version, published in ((4, 1), (4, 5), (2, 2)):
        with pytest.raises(LedgerError, match=f"weight version {version}, published {published}, after 3, published 2: versions only grow"):
            book.settle(version, published, [], now=0.0)


def test_a_place_is_kept_for_a_straggler() -> None:
    """Group 0 is due in step 1 at the latest; younger ones take the other place, not its own."""
    book, tickets = book_with(groups_per_step=2, max_staleness=1, admitted=4)
    for ticket in tickets[1:]:
        put(book, ticket)
    assert train(book, 0) == [1, 2]
    for ticket in book.admit(prompts(4, 6), now=0.0):
        put(book, ticket)
    assert [g.group_id for g in book.draw(1, 2)] == [3]
    assert book.draw(1, 1) == []
    assert "due and unfinished: [0]" in book.waiting_for(1)
    put(book, tickets[0])
    assert [g.group_id for g in book.draw(1, 1)] == [0]


def test_a_place_is_kept_before_a_straggler_is_due() -> None:
    """One group a step, two versions of staleness: two stragglers of version 0 need steps 1 and 2, so step 1 can't go to a younger one."""
    book, tickets = book_with(groups_per_step=1, max_staleness=2, admitted=3)
    put(book, tickets[0])
    assert train(book, 0) == [0]
    for ticket in book.admit(prompts(3, 4), now=0.0):
        put(book, ticket)
    assert book.draw(1, 1) == []
    put(book, tickets[2])
    assert train(book, 1) == [2]
    assert book.draw(2, 1) == []
    put(book, tickets[1])
    assert train(book, 2) == [1]


def test_synchronous_mode_admits_one_batch() -> None:
    book, tickets = book_with(groups_per_step=3, max_staleness=0, admitted=9)
    assert len(tickets) == 3
    for ticket in tickets:
        put(book, ticket)
    assert len(book.draw(0, 3)) == 3
    assert book.admit(prompts(3, 9), now=0.0) == [], "a batch in training is outstanding"
    book.settle(1, 1, [0, 1, 2], now=0.0)
    assert [t.admitted_version for t in book.admit(prompts(3, 9), now=0.0)] == [1, 1, 1]


def test_a_discarded_group_frees_its_place_and_is_reported_once() -> None:
    """Uniform, it keeps its place until it is drawn; then another prompt has it."""
    book = GroupBook(groups_per_step=2, max_staleness=0, dynamic_sampling=True)
    for ticket, rewards in zip(book.admit(prompts(0, 2), now=0.0), ((0.0, 1.0), (1.0, 1.0)), strict=True):
        book.finish(at_hand(group(ticket, rewards=rewards)), now=0.0)
    assert book.free_places == 0
    assert [one.group_id for one in book.draw(0, 2)] == [0]
    assert book.free_places == 1 and book.discarded_by_reason == {DiscardReason.UNIFORM: 1}
    assert [t.group_id for t in book.admit([prompt(2)], now=0.0)] == [2]
    tokens = GroupTokens(sampled=4, discarded=4)
    assert book.settle(1, 1, [0], now=0.0) == [DiscardedGroup("train/0/1", DiscardReason.UNIFORM, tokens)]
    assert book.settle(2, 2, [], now=0.0) == []


def test_what_was_sampled_for_a_group_is_told_however_it_ends() -> None:
    """Tokens that can't be read are lost, those of the next answers come to them; of a group that nobody could sample there is what was
    begun."""
    book = GroupBook(groups_per_step=2, max_staleness=0, dynamic_sampling=True)
    again, failed = book.admit(prompts(0, 2), now=0.0)
    book.finish(at_hand(group(again)), now=0.0)
    book.lose([one.group_id for one in book.draw(0, 2)])
    begun = book.so_far(again.group_id)
    assert begun is not None and (begun.tokens, begun.lost_tokens) == (0, 4)
    book.finish(at_hand(replace(group(again, rewards=(1.0, 1.0)), lost_tokens=begun.lost_tokens)), now=0.0)
    assert book.draw(0, 2) == []
    book.waits(failed.group_id, so_far=UnfinishedGroup(failed.group_id, group(failed).trajectories, lost_tokens=3))
    book.give_up(failed.group_id, DiscardReason.FAILED)
    assert [one.tokens for one in book.settle(1, 1, [], now=0.0)] == [
        GroupTokens(sampled=8, discarded=4, lost=4),
        GroupTokens(sampled=7, discarded=4, lost=3),
    ]


def test_advantages_by_turn_have_a_gradient_where_the_sums_are_alike() -> None:
    """Of two turns each, 1 in all: the turns' own rewards differ, so the group is trained; where each turn got 1 it is not, nor is it
    where one advantage holds for the whole."""
    for by_turn, turns, reason in ((True, ((1.0, 0.0), (0.0, 1.0)), None), (True, ((1.0, 1.0), (1.0,)), DiscardReason.UNIFORM),
                                   (False, ((1.0, 0.0), (0.0, 1.0)), DiscardReason.UNIFORM)):  # fmt: skip
        book = GroupBook(groups_per_step=1, max_staleness=0, dynamic_sampling=True, by_turn=by_turn)
        (ticket,) = book.admit(prompts(0, 1), now=0.0)
        whole = group(ticket)
        answers = tuple(replace(one, reward=sum(of), turn_rewards=of) for one, of in zip(whole.trajectories, turns, strict=True))
        found = book.finish(at_hand(replace(whole, trajectories=answers)), now=0.0)
        assert found is not None and found.reason is reason


def test_mistakes_of_the_callers_are_errors() -> None:
    book, tickets = book_with(groups_per_step=1, max_staleness=1, admitted=2)
    with pytest.raises(LedgerError, match="group 0 was trained but the book has it as waiting"):
        book.settle(1, 1, [0], now=0.0)
    with pytest.raises(LedgerError, match="group 9 was trained but the book has it as unknown"):
        book.settle(1, 1, [9], now=0.0)
    with pytest.raises(LedgerError, match="came back with prompt train/0/1, but was admitted with train/0/0"):
        book.finish(at_hand(group(Ticket(0, prompt(1), 0))), now=0.0)
    assert put(book, tickets[0])


def test_a_lost_group_keeps_its_place_and_is_due_when_it_was() -> None:
    """Its staleness is that of its admission; what comes for it again is drawn before younger ones. Only drawn groups can be lost."""
    book, tickets = book_with(groups_per_step=2, max_staleness=1, admitted=4)
    for ticket in tickets:
        put(book, ticket)
    book.draw(0, 2)
    book.lose([1])
    assert book.counts() == {"admitted": 4, "trained": 0, "discarded": 0, "in_flight": 1, "finished": 2, "drawn": 1}
    assert book.free_places == 0 and book.take_lost() == [tickets[1]] and book.take_lost() == []
    assert [ticket.group_id for ticket in snapshot_of(book).in_flight] == [1] and book.losses(1) == 1
    assert put(book, tickets[1]) and not put(book, tickets[1])
    assert [g.group_id for g in book.draw(0, 1)] == [1]
    with pytest.raises(LedgerError, match="group 2 was lost but the book has it as finished"):
        book.lose([2])


def test_a_draw_that_is_taken_back_is_that_of_the_batch_ahead_alone() -> None:
    """Groups 0 and 1 are in training; 2 and 3 were drawn for the next batch, and are due there."""
    book, tickets = book_with(groups_per_step=2, max_staleness=1, admitted=4)
    for ticket in tickets:
        put(book, ticket)
    assert [one.group_id for version in (0, 1) for one in book.draw(version, 2)] == [0, 1, 2, 3]
    book.take_back(1)
    assert (book.counts()["drawn"], book.counts()["finished"]) == (2, 2)
    book.settle(1, 1, [0, 1], now=0.0)
    for ticket in book.admit(prompts(4, 6), now=0.0):
        put(book, ticket)
    assert train(book, 1) == [2, 3] and train(book, 2) == [4, 5]


def test_book_forgets_what_went_wrong_with_a_group_once_it_is_finished() -> None:
    book = GroupBook(groups_per_step=4, max_staleness=0)
    tickets = book.admit(prompts(0, 4), now=0.0)
    assert [book.engine_lost(one) for one in (0, 1) for _ in range(2)] == [1, 2, 1, 2]
    assert book.have_suspect({0, 9}) and book.have_suspect({1}) and not book.have_suspect({2, 3})
    assert book.failed(0) == 1 and book.unreached(0) == 1 and book.waits(0, failed_at="7")
    assert book.finish(at_hand(group(tickets[0])), now=0.0) is not None
    assert (book.failed(0), book.unreached(0), book.engine_lost(0)) == (0, 0, 0), "nobody has to sample it"
    assert not book.have_suspect({0}) and book.attempts(0).failed_at == ""
    drawn = book.draw(0, 1)
    book.lose([one.group_id for one in drawn])
    assert book.failed(0) == 1 and book.attempts(0).engines_lost == 0, "it is sampled anew, with a clean slate"
    assert book.give_up(1, DiscardReason.LOST) and not book.have_suspect({1})


def test_book_counts_the_groups_of_a_lost_worker_until_others_have_them() -> None:
    book = GroupBook(groups_per_step=6, max_staleness=0)
    tickets = book.admit(prompts(0, 6), now=0.0)
    book.orphaned(range(4), "a")
    book.orphaned([4, 99], "b")
    assert (book.orphans("a"), book.orphans("b"), book.orphans("c")) == (4, 1, 0)
    book.adopted(0)
    book.adopted(0)
    book.orphaned([0], "b")
    book.finish(at_hand(group(tickets[1])), now=0.0)  # a late answer of the lost one
    book.give_up(2, DiscardReason.FAILED)
    assert (book.orphans("a"), book.orphans("b")) == (1, 2)
    book.orphaned([3], "c")
    assert (book.orphans("a"), book.orphans("c")) == (0, 1), "a group lost a second time is the second worker's"
