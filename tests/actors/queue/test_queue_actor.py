"""The queue as an actor: it waits for places and groups, and what reaches it twice happens once."""

from __future__ import annotations

import asyncio

import pytest

from actors.carriers import DiscardedGroup, Ticket
from actors.queue.outstanding import Outstanding
from actors.queue.payloads import fetched, whole_snapshot
from actors.queue.queue_actor import TrajectoryQueueActor
from correction.errors import DataError, LateError
from tests.actors.cases import FakeActor, group, prompts, stored


def test_the_actor_waits_for_places_and_groups() -> None:
    """Both waits end by the change they wait for, long before their limit, and at the limit without one."""

    async def scenario() -> None:
        actor = TrajectoryQueueActor(groups_per_step=1, max_staleness=0)
        assert await actor.wait_for_places(60.0) == 1
        (ticket,) = await actor.admit(prompts(0, 3))
        assert await actor.wait_for_places(0.05) == 0
        assert await actor.draw(0, 1, 0.05) == []
        drawing = asyncio.create_task(actor.draw(0, 1, 60.0))
        placing = asyncio.create_task(actor.wait_for_places(60.0))
        await asyncio.sleep(0.05)
        assert not drawing.done()
        await actor.put(stored(group(ticket)))
        assert [g.group_id for g in await asyncio.wait_for(drawing, 5.0)] == [0]
        assert not placing.done()
        settled = await actor.advance(1, [0])
        discarded, counts = settled.discarded, settled.counts
        assert (discarded, counts["trained"]) == ([], 1)
        assert await asyncio.wait_for(placing, 5.0) == 1

    asyncio.run(scenario())


def test_a_checkpoint_has_the_groups_that_are_left_and_samples_the_others_again() -> None:
    async def scenario() -> None:
        actor = TrajectoryQueueActor(groups_per_step=4, max_staleness=0)
        finished = [group(ticket) for ticket in await actor.admit(prompts(0, 4))]
        await actor.put(stored(*finished[:3], lost=(1,)))
        snapshot = await whole_snapshot(FakeActor(actor), deadline_s=5.0)
        assert snapshot.finished == (finished[0], finished[2])
        assert [ticket.group_id for ticket in snapshot.in_flight] == [1, 3]
        again = TrajectoryQueueActor(groups_per_step=4, max_staleness=0)
        under_way = Outstanding(snapshot)
        assert [ticket.group_id for ticket in under_way.in_flight] == [1, 3]
        await again.fill(under_way.contents())
        await again.fill(under_way.contents())  # a call that ran, and whose answer was lost
        drawn = await again.draw(0, 2, 5.0)
        assert await fetched(drawn, deadline_s=5.0) == ([finished[0], finished[2]], {})
        for _ in range(2):  # a refusal is told again, too
            with pytest.raises(DataError, match="needs an empty queue"):
                await actor.fill(under_way.contents())

    asyncio.run(scenario())


def test_a_repeated_delivery_changes_nothing() -> None:
    """Neither of a whole call, which may run twice, nor of a group that another worker has sampled as well: the first one counts."""

    async def scenario() -> None:
        actor = TrajectoryQueueActor(groups_per_step=2, max_staleness=0)
        finished = [group(ticket) for ticket in await actor.admit(prompts(0, 2))]
        other = group(Ticket(0, finished[0].prompt, 0), rewards=(1.0, 0.0))
        await actor.put(stored(finished[0]))
        await actor.put(stored(other, finished[1], finished[1]))
        drawn = await actor.draw(0, 2, 5.0)
        assert await fetched(drawn, deadline_s=5.0) == (finished, {})
        await actor.put(stored(*finished))
        assert actor._queue.counts() == {"admitted": 2, "trained": 0, "discarded": 0, "in_flight": 0, "finished": 0, "drawn": 2}

    asyncio.run(scenario())


def test_what_may_be_asked_twice_happens_once() -> None:
    """An admission, a draw, a discard under the same number; giving up what is gone, or has been finished meanwhile; a new version."""

    async def scenario() -> None:
        actor = TrajectoryQueueActor(groups_per_step=4, max_staleness=0)
        first = await actor.admit(prompts(0, 2), 1)
        assert await actor.admit(prompts(0, 2), 1) == first and actor._queue.counts()["admitted"] == 2
        second = await actor.admit(prompts(2, 6), 2)
        assert [ticket.group_id for ticket in second] == [2, 3]
        await actor.put(stored(group(first[0])))
        assert [await actor.give_up(group_id, "why") for group_id in (0, 1, 1)] == [False, True, False]
        counts = actor._queue.counts()
        assert (counts["finished"], counts["in_flight"], counts["discarded"]) == (1, 2, 1)
        (drawn,) = await actor.draw(0, 1, 1.0)
        told = await actor.advance(1, [drawn.group_id])
        await actor.put(stored(*map(group, second)))
        drawing = [asyncio.ensure_future(actor.draw(1, 2, 5.0, number=1)) for _ in range(2)]  # the first is not done when it is repeated
        assert [one.group_id for one in await drawing[0]] == [2, 3] and await drawing[1] == await drawing[0]
        await actor.discard([2], "why", number=2)
        await actor.discard([2], "why", number=2)
        assert actor._queue.counts()["discarded"] == 2
        with pytest.raises(LateError, match="call 1 came after call 2"):
            await actor.draw(1, 2, 5.0, number=1)
        assert told.discarded == [DiscardedGroup("train/0/1", "why")] and told.counts["trained"] == 1
        assert await actor.advance(1, [drawn.group_id]) == told and actor._queue.counts()["trained"] == 1

    asyncio.run(scenario())
