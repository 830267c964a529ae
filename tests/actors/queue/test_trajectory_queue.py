"""Admission by staleness. Behaviours locked here:

    admitted - trained - discarded <= (max_staleness + 1) * groups_per_step, whatever happens in whatever order
    no group is trained more than max_staleness versions after the one that engines had at its admission, stragglers, refills and skipped
    steps included, and versions that don't go out to engines
    when all groups are finished, a batch can be drawn whole: the places kept for the old never block
    a second delivery changes nothing; a snapshot loses nothing and keeps bound and counts
"""

from __future__ import annotations

import pickle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.carriers import DiscardedGroup, QueueContents, StoredGroup, Ticket
from actors.queue.outstanding import Outstanding
from actors.queue.trajectory_queue import TrajectoryQueue
from correction.errors import DataError, LedgerError
from tests.actors.cases import at_hand, group, prompt, prompts, snapshot_of


class QueueLife(RuleBasedStateMachine):
    """A run as the queue sees it: workers finish in any order, the service prepares one batch ahead, the driver restarts at times."""

    @initialize(groups_per_step=st.integers(1, 3), max_staleness=st.integers(0, 3), every_steps=st.integers(1, 4))
    def start(self, groups_per_step: int, max_staleness: int, every_steps: int) -> None:
        self.every_steps = min(every_steps, max_staleness + 1)
        self.queue = TrajectoryQueue(groups_per_step=groups_per_step, max_staleness=max_staleness)
        self.sampling: list[Ticket] = []
        self.drawn: list[StoredGroup] = []
        self.training: list[StoredGroup] | None = None
        self.preparing = 0
        """Version of the batch that is being drawn: the one after that in training."""
        self.is_published = False
        self.admitted: list[str] = []
        self.gone: list[str] = []
        self.outstanding = Outstanding(dynamic_sampling=True)

    @rule(count=st.integers(1, 8))
    def admit(self, count: int) -> None:
        start = len(self.admitted)
        free = self.queue.free_places
        tickets = self.queue.admit(prompts(start, start + count))
        assert len(tickets) == min(count, max(0, free))
        self.sampling += tickets
        self.outstanding.admit(tickets)
        self.admitted += [ticket.prompt.prompt_id for ticket in tickets]

    @precondition(lambda self: self.sampling)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ticket = self.sampling.pop(data.draw(st.integers(0, len(self.sampling) - 1)))
        rewards = data.draw(st.sampled_from([(1.0, 0.0)] * 4 + [(1.0, 1.0)]))
        finished = self.outstanding.finish(at_hand(group(ticket, rewards=rewards)))
        assert self.queue.put(finished)
        before = self.queue.counts()
        assert not self.queue.put(finished) and self.queue.counts() == before

    @rule()
    def draw(self) -> None:
        """The service takes what is there, and discards some of it, which frees their places."""
        for drawn in self.queue.draw(self.preparing, self.queue.groups_per_step - len(self.drawn)):
            if drawn.reason is not None:
                self.queue.discard([drawn.group_id], drawn.reason)
                self.gone.append(drawn.prompt_id)
            else:
                self.drawn.append(drawn)

    @precondition(lambda self: self.training is None and len(self.drawn) == self.queue.groups_per_step)
    @rule()
    def train(self) -> None:
        assert self.preparing == self.queue.version
        staleness = [self.preparing - drawn.facts.admitted_version for drawn in self.drawn]
        assert min(staleness) >= 0 and max(staleness) <= self.queue.max_staleness
        self.training, self.drawn = self.drawn, []
        self.preparing += 1

    @precondition(lambda self: self.training is not None and not self.is_published)
    @rule()
    def publish(self) -> None:
        """Also after a step that the guard skipped: the version grows by one for each batch. Engines get each that every_steps divides."""
        is_out = self.preparing % self.every_steps == 0
        self.queue.publish(self.preparing, self.preparing if is_out else self.queue.published)
        self.is_published = True

    @precondition(lambda self: self.is_published)
    @rule()
    def settle(self) -> None:
        assert self.training is not None
        self.queue.settle([trained.group_id for trained in self.training])
        trained = [trained.prompt_id for trained in self.training]
        self.gone += trained
        discarded = self.queue.take_discarded()
        self.outstanding.settle(self.queue.version, self.queue.published, trained=trained, discarded=discarded)
        self.training, self.is_published = None, False

    @precondition(lambda self: self.training is None)
    @rule(finish=st.lists(st.integers(0, 11), max_size=3))
    def whole_step(self, finish: list[int]) -> None:
        """What a run does most of the time: fill the places, finish some groups out of order, and train if the batch is whole."""
        self.admit(12)
        for i in finish:
            if i < len(self.sampling):
                ticket = self.sampling.pop(i)
                self.queue.put(self.outstanding.finish(at_hand(group(ticket))))
        self.draw()
        if len(self.drawn) == self.queue.groups_per_step:
            self.train()
            self.publish()
            self.settle()

    @precondition(lambda self: self.training is None)
    @rule()
    def restart(self) -> None:
        """From a checkpoint of this moment: what was being sampled is sampled again, what was drawn is drawn again."""
        snapshot = pickle.loads(pickle.dumps(snapshot_of(self.queue)))
        restored = TrajectoryQueue(groups_per_step=self.queue.groups_per_step, max_staleness=self.queue.max_staleness)
        self.outstanding = Outstanding(snapshot, dynamic_sampling=True)
        restored.fill(self.outstanding.contents())
        assert sorted(t.group_id for t in self.outstanding.in_flight) == sorted(t.group_id for t in self.sampling)
        unpublished = self.queue.version - self.queue.published  # engines get the newest
        judged = self.judge(restored)
        assert restored.free_places == self.queue.free_places + unpublished * self.queue.groups_per_step + judged
        assert restored.version == restored.published == self.queue.version
        self.queue, self.drawn = restored, []

    def judge(self, new: TrajectoryQueue) -> int:
        """What the new queue has discarded of groups that the old one held: how many."""
        judged = set(self.queue.outstanding()) - set(new.outstanding())
        self.gone += judged
        return len(judged)

    @rule()
    def replace(self) -> None:
        """Queue and service die, before or after the update that is under way: new ones go on from what the driver knows."""
        queue = TrajectoryQueue(groups_per_step=self.queue.groups_per_step, max_staleness=self.queue.max_staleness)
        queue.fill(self.outstanding.contents([trained.group_id for trained in self.training or []]))
        assert sorted(t.group_id for t in self.outstanding.in_flight) == sorted(t.group_id for t in self.sampling)
        self.judge(queue)
        self.queue, self.drawn, self.is_published = queue, [], False

    @invariant()
    def another_queue_can_be_filled_with_all_that_it_holds(self) -> None:
        other = TrajectoryQueue(groups_per_step=self.queue.groups_per_step, max_staleness=self.queue.max_staleness)
        other.fill(self.queue.contents())
        assert other.contents() == self.queue.contents()
        assert other.counts() == self.queue.counts() and other.free_places == self.queue.free_places

    @invariant()
    def the_bound_holds(self) -> None:
        queue = self.queue
        assert queue.admitted - queue.trained - queue.discarded <= (queue.max_staleness + 1) * queue.groups_per_step

    @invariant()
    def every_prompt_is_somewhere_once(self) -> None:
        snapshot = snapshot_of(self.queue)
        held = [t.prompt.prompt_id for t in snapshot.in_flight] + [g.prompt.prompt_id for g in snapshot.finished]
        assert sorted(held + self.gone) == sorted(self.admitted)
        assert snapshot.admitted == len(self.admitted)

    def teardown(self) -> None:
        """Everything finishes: then batch after batch is whole at once, and nothing is too old."""
        if not hasattr(self, "queue"):
            return
        for ticket in self.sampling:
            self.queue.put(group(ticket))
        if self.training is not None:
            if not self.is_published:
                self.publish()
            self.settle()
        while True:
            counts = self.queue.counts()
            if counts["finished"] + counts["drawn"] < self.queue.groups_per_step:
                return
            self.drawn += self.queue.draw(self.preparing, self.queue.groups_per_step - len(self.drawn))
            assert len(self.drawn) == self.queue.groups_per_step, "places were kept for groups that are not there"
            self.train()
            self.publish()
            self.settle()


QueueLife.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestQueueLife = QueueLife.TestCase


def queue_with(*, groups_per_step: int, max_staleness: int, admitted: int) -> tuple[TrajectoryQueue, list[Ticket]]:
    queue = TrajectoryQueue(groups_per_step=groups_per_step, max_staleness=max_staleness)
    return queue, queue.admit(prompts(0, admitted))


def train(queue: TrajectoryQueue, version: int) -> list[int]:
    """Draw a batch, train it, publish."""
    drawn = [g.group_id for g in queue.draw(version, queue.groups_per_step)]
    queue.publish(version + 1)
    queue.settle(drawn)
    return drawn


def test_the_example_of_the_module() -> None:
    queue, tickets = queue_with(groups_per_step=2, max_staleness=1, admitted=9)
    assert [t.group_id for t in tickets] == [0, 1, 2, 3]
    for ticket in tickets:
        queue.put(group(ticket))
    assert train(queue, 0) == [0, 1]
    assert [t.admitted_version for t in queue.admit(prompts(4, 9))] == [1, 1]
    assert queue.due(1) == [2, 3]
    assert train(queue, 1) == [2, 3]


def test_places_are_those_that_published_weights_have_steps_for() -> None:
    """Two groups a step, bound 3, every third version published: at version 0 there are places for 4 steps, at 2 for the two left of them,
    which are taken; at 3, which goes out, for 4 again."""
    queue, tickets = queue_with(groups_per_step=2, max_staleness=3, admitted=20)
    assert len(tickets) == 8
    admitted = []
    for version in range(1, 7):
        for one in snapshot_of(queue).in_flight:
            queue.put(group(one))
        drawn = [found.group_id for found in queue.draw(version - 1, 2)]
        queue.publish(version, version - version % 3)
        queue.settle(drawn)
        admitted.append([ticket.admitted_version for ticket in queue.admit(prompts(100 * version, 100 * version + 20))])
    assert admitted == [[], [], [3] * 6, [], [], [6] * 6]


def test_published_versions_only_grow_and_are_none_ahead_of_the_learner() -> None:
    queue, _ = queue_with(groups_per_step=1, max_staleness=3, admitted=0)
    queue.publish(2, 2)
    queue.publish(3, 2)
    for version, published in ((4, 1), (4, 5), (2, 2)):
        with pytest.raises(LedgerError, match=f"weight version {version}, published {published}, after 3, published 2: versions only grow"):
            queue.publish(version, published)


def test_a_place_is_kept_for_a_straggler() -> None:
    """Group 0 is due in step 1 at the latest; younger ones take the other place, not its own."""
    queue, tickets = queue_with(groups_per_step=2, max_staleness=1, admitted=4)
    for ticket in tickets[1:]:
        queue.put(group(ticket))
    assert train(queue, 0) == [1, 2]
    for ticket in queue.admit(prompts(4, 6)):
        queue.put(group(ticket))
    assert [g.group_id for g in queue.draw(1, 2)] == [3]
    assert queue.draw(1, 1) == []
    assert "due and unfinished: [0]" in queue.waiting_for(1)
    queue.put(group(tickets[0]))
    assert [g.group_id for g in queue.draw(1, 1)] == [0]


def test_a_place_is_kept_before_a_straggler_is_due() -> None:
    """One group a step, two versions of staleness: two stragglers of version 0 need steps 1 and 2, so step 1 can't go to a younger one."""
    queue, tickets = queue_with(groups_per_step=1, max_staleness=2, admitted=3)
    queue.put(group(tickets[0]))
    assert train(queue, 0) == [0]
    for ticket in queue.admit(prompts(3, 4)):
        queue.put(group(ticket))
    assert queue.draw(1, 1) == []
    queue.put(group(tickets[2]))
    assert train(queue, 1) == [2]
    assert queue.draw(2, 1) == []
    queue.put(group(tickets[1]))
    assert train(queue, 2) == [1]


def test_synchronous_mode_admits_one_batch() -> None:
    queue, tickets = queue_with(groups_per_step=3, max_staleness=0, admitted=9)
    assert len(tickets) == 3
    for ticket in tickets:
        queue.put(group(ticket))
    assert len(queue.draw(0, 3)) == 3
    assert queue.admit(prompts(3, 9)) == [], "a batch in training is outstanding"
    queue.publish(1)
    assert queue.admit(prompts(3, 9)) == []
    queue.settle([0, 1, 2])
    assert [t.admitted_version for t in queue.admit(prompts(3, 9))] == [1, 1, 1]


def test_a_discarded_group_frees_its_place_and_is_reported_once() -> None:
    queue, tickets = queue_with(groups_per_step=2, max_staleness=0, admitted=2)
    for ticket in tickets:
        queue.put(group(ticket))
    queue.draw(0, 2)
    queue.discard([1], "rewards all alike")
    assert queue.free_places == 1 and queue.discarded_by_reason == {"rewards all alike": 1}
    assert [t.group_id for t in queue.admit([prompt(2)])] == [2]
    assert queue.take_discarded() == [DiscardedGroup("train/0/1", "rewards all alike")]
    assert queue.take_discarded() == []


def test_mistakes_of_the_callers_are_errors() -> None:
    queue, tickets = queue_with(groups_per_step=1, max_staleness=1, admitted=2)
    with pytest.raises(LedgerError, match="group 0 was trained but the queue has it as admitted"):
        queue.settle([0])
    with pytest.raises(LedgerError, match="group 9 can't be discarded"):
        queue.discard([9], "x")
    with pytest.raises(LedgerError, match="came back with prompt train/0/1, but was admitted with train/0/0"):
        queue.put(group(Ticket(0, prompt(1), 0)))
    queue.publish(1)
    with pytest.raises(LedgerError, match="versions only grow"):
        queue.publish(0)
    with pytest.raises(DataError, match="needs an empty queue"):
        queue.fill(QueueContents())
    assert queue.put(group(tickets[0]))


def test_a_lost_group_keeps_its_place_and_is_due_when_it_was() -> None:
    """Its staleness is that of its admission; what is put for it again is drawn before younger ones. Only drawn groups can be lost."""
    queue = TrajectoryQueue(groups_per_step=2, max_staleness=1)
    tickets = queue.admit(prompts(0, 4))
    for ticket in tickets:
        queue.put(group(ticket))
    queue.draw(0, 2)
    queue.lose([1])
    assert queue.counts() == {"admitted": 4, "trained": 0, "discarded": 0, "in_flight": 1, "finished": 2, "drawn": 1}
    assert queue.free_places == 0 and queue.take_lost() == [tickets[1]] and queue.take_lost() == []
    assert [ticket.group_id for ticket in snapshot_of(queue).in_flight] == [1]
    assert queue.put(group(tickets[1])) and not queue.put(group(tickets[1]))
    assert [g.group_id for g in queue.draw(0, 1)] == [1]
    with pytest.raises(LedgerError, match="group 2 was lost but the queue has it as finished"):
        queue.lose([2])


def test_books_of_the_driver_that_do_not_balance_name_the_prompts() -> None:
    """A group that nobody knows of any more; one is given up, two are under way."""
    outstanding = Outstanding()
    tickets = [Ticket(number, prompt(number), 0) for number in range(4)]
    outstanding.admit(tickets)
    outstanding.give_up(tickets[3], "invalid")
    assert len(outstanding.contents().tickets) == 3
    outstanding._leave(tickets[1].prompt.prompt_id)
    first, _, third, last = (ticket.prompt.prompt_id for ticket in tickets)
    known = rf"4 groups were admitted, but 3 are known: 0 as trained, 1 as discarded \({last} not .*\), 2 under way \({first}, {third}\)"
    with pytest.raises(LedgerError, match=known):
        outstanding.contents()
