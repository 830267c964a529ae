"""Finished groups go to the queue together: how many calls that takes, in what order they come, and what becomes of a call that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from actors.carriers import StoredGroup, Ticket
from actors.pool.admission import QueueClient
from actors.pool.delivery import Delivery
from rollout.trajectory import GroupFacts
from tests.actors.cases import group, prompt
from tests.actors.pool.mortal_workers import Mortal, World, play
from tests.actors.simulated_time import simulate

CALL_S = 0.005


class Queue:
    """Stands where the queue's handle stands. A call takes CALL_S; those named in `failing` find nobody."""

    def __init__(self, failing: Sequence[int] = ()) -> None:
        self.calls: list[list[int]] = []
        self.at: list[float] = []
        self.under_way = 0
        self._failing = failing
        self.put = SimpleNamespace(remote=self._put)

    async def _put(self, groups: list[StoredGroup]) -> None:
        self.under_way += 1
        assert self.under_way == 1, "one call at a time, or a later one could come first"
        self.calls.append([one.group_id for one in groups])
        self.at.append(asyncio.get_running_loop().time())
        number = len(self.calls) - 1
        await asyncio.sleep(CALL_S)
        self.under_way -= 1
        if number in self._failing:
            raise ray.exceptions.ActorDiedError()


class DeliveryScene:
    def __init__(self, *, failing: Sequence[int] = ()) -> None:
        self.queue = Queue(failing)
        self.told: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.delivery = Delivery(
            QueueClient(self.queue, late=lambda _: None),
            self.told.append,
            spawn=lambda work: self.tasks.append(asyncio.ensure_future(work)),
        )

    def finish(self, *ids: int) -> None:
        for i in ids:
            self.delivery.add(StoredGroup(group(Ticket(i, prompt(i), 0)).facts, None))

    async def end(self) -> None:
        await asyncio.gather(*self.tasks)


def test_while_the_learner_is_at_work_groups_wait_a_moment_for_others() -> None:
    """32 groups, 30 in a second, as a large pool finishes them, in four calls: each is made a quarter of a second after its first group
    came. Order is kept."""

    async def scenario() -> None:
        scene = DeliveryScene()
        for i in range(32):
            scene.finish(i)
            await asyncio.sleep(1 / 30)
        await scene.end()
        assert scene.queue.calls == [list(range(i, i + 8)) for i in range(0, 32, 8)]

    simulate(scenario)


def test_the_longer_a_step_takes_the_longer_groups_wait_for_others() -> None:
    """A quarter of the step, 0.25 s at least and 1 s at most. Of ten groups a second, for 4 s, a call takes 11, 6 or 3."""

    async def calls(scene: DeliveryScene, step_s: float) -> int:
        """Of the step after one of this length; each begins with a learner that has its batch at once."""
        with scene.delivery.urgent():
            pass
        await asyncio.sleep(step_s)
        with scene.delivery.urgent():
            pass
        before = len(scene.queue.calls)
        for _ in range(40):
            scene.finish(0)
            await asyncio.sleep(0.1)
        await scene.end()
        return len(scene.queue.calls) - before

    async def scenario() -> None:
        scene = DeliveryScene()
        assert [await calls(scene, step_s) for step_s in (60.0, 2.0, 0.4)] == [4, 7, 14]

    simulate(scenario)


def test_while_the_learner_waits_no_group_does_but_for_a_call_under_way() -> None:
    """The first goes at once; what finishes during its call goes with the next. A learner that begins to wait ends the moment."""

    async def scenario() -> None:
        scene, clock = DeliveryScene(), asyncio.get_running_loop().time
        scene.finish(0)
        await asyncio.sleep(0.02)
        assert scene.queue.calls == []
        with scene.delivery.urgent():
            await asyncio.sleep(0.001)
            assert scene.queue.calls == [[0]]
            scene.finish(1, 2)
            await asyncio.sleep(2 * CALL_S)
            assert scene.queue.calls == [[0], [1, 2]]
            await scene.end()
            began = clock()
            scene.finish(3)
            await scene.end()
            assert scene.queue.calls[2:] == [[3]] and scene.queue.at[-1] == began
        scene.finish(4)
        await scene.end()
        assert scene.queue.calls[3:] == [[4]] and scene.queue.at[-1] >= began + 0.25

    simulate(scenario)


def test_the_last_groups_that_are_being_sampled_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other one comes along. With a staleness of one they complete the next batch; to correct it later would keep the learner waiting.
    A pool of two workers that take 10 s for a group samples eight."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=8)
        finished_at: list[float] = []
        taken_at: list[float] = []
        put = world.queue.put

        async def taken(groups: list[StoredGroup]) -> None:
            taken_at.extend([world.now] * len(groups))
            await put(groups)

        async def apart(mortal: Mortal, ticket: Ticket) -> GroupFacts:
            await asyncio.sleep(10.0 + ticket.group_id)
            finished_at.append(world.now)
            return group(ticket).facts

        monkeypatch.setattr(world.queue, "put", taken)
        world.sample = apart
        await world.begin()
        await world.all_done(8)
        waited_s = [taken - finished for finished, taken in zip(finished_at, taken_at, strict=True)]
        assert waited_s == pytest.approx([0.25] * 7 + [0.0], abs=1e-6)

    play(scenario)


def test_after_the_last_groups_of_a_batch_others_wait_again() -> None:
    async def scenario() -> None:
        scene = DeliveryScene()
        scene.finish(0)
        scene.delivery.add(StoredGroup(group(Ticket(1, prompt(1), 0)).facts, None), are_last=True)
        await asyncio.sleep(2 * CALL_S)
        assert scene.queue.calls == [[0, 1]]
        scene.finish(2)
        await asyncio.sleep(0.1)
        assert scene.queue.calls == [[0, 1]]
        await scene.end()
        assert scene.queue.calls == [[0, 1], [2]]

    simulate(scenario)


def test_the_groups_of_a_call_that_fails_go_with_the_next_one() -> None:
    """A queue that lives takes them then; one that is dead is replaced, and its successor is told of all that is under way."""

    async def scenario() -> None:
        scene = DeliveryScene(failing=[1])
        with scene.delivery.urgent():
            scene.finish(0)
            await asyncio.sleep(0.001)
            scene.finish(1, 2, 3)
            await asyncio.sleep(CALL_S)
            scene.finish(4)
            await scene.end()
            scene.finish(5)
            scene.delivery.close()
            await scene.end()
        assert scene.queue.calls == [[0], [1, 2, 3], [1, 2, 3, 4]]
        assert [told.partition(" wait:")[0] for told in scene.told] == ["groups [1, 2, 3]"]

    simulate(scenario)
