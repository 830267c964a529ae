"""What a rollout worker does with finished groups. Sampling itself is tested with real engines (tests/rollout, tests/e2e)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.carriers import Ticket
from actors.rollout_worker import RolloutWorker, WorkerSettings
from correction.errors import EngineError
from rollout.config import RolloutConfig
from rollout.trajectory import GroupFacts
from tests.actors.cases import FakeActor, group, prompt


class SlowQueue:
    """Stands where the queue's actor handle stands: each call waits for the gate; calls named in `failing` lose their way."""

    def __init__(self, failing: frozenset[int] = frozenset()) -> None:
        self.calls: list[list[int]] = []
        self.gate = asyncio.Event()
        self._failing = failing
        self.put = SimpleNamespace(remote=self._put)

    async def _put(self, groups: list[GroupFacts], worker: str) -> list[int]:
        assert worker == "handle"
        self.calls.append([one.group_id for one in groups])
        number = len(self.calls) - 1
        await self.gate.wait()
        if number in self._failing:
            raise EngineError("the queue's actor is gone")
        return [one.group_id for one in groups]


CONFIG = RolloutConfig.model_validate({"task": {"kind": "file", "path": "none"}, "reward": {"kind": "exact_match"}})
SETTINGS = WorkerSettings(CONFIG, Path("model"), prompt(0), bind="127.0.0.1", resource="rollout")


async def hand_over_three(queue: SlowQueue) -> list[Any]:
    """The first group's call is under way when two more finish. Returns what each of the three got."""
    worker = RolloutWorker("0", SETTINGS, queue)
    worker._handle = lambda: "handle"  # type: ignore[method-assign]  # which an actor has
    tasks = []
    for finished in [group(Ticket(i, prompt(i), 0)) for i in range(3)]:
        tasks.append(asyncio.create_task(worker._finish(finished)))
        await asyncio.sleep(0)
    queue.gate.set()
    return list(await asyncio.gather(*tasks, return_exceptions=True))


def test_groups_that_finish_during_a_call_share_the_next_one() -> None:
    async def scenario() -> None:
        queue = SlowQueue()
        assert await hand_over_three(queue) == [None] * 3
        assert queue.calls == [[0], [1, 2]]

    asyncio.run(scenario())


def test_no_group_is_taken_for_delivered_by_a_call_that_failed() -> None:
    """Group 1's call fails with 2 on board: 2 makes its own, and 1, which its owner hears of, goes along once more."""

    async def scenario() -> None:
        queue = SlowQueue(failing=frozenset({1}))
        first, second, third = await hand_over_three(queue)
        assert first is None and third is None
        with pytest.raises(EngineError, match="the queue's actor is gone"):
            raise second
        assert queue.calls == [[0], [1, 2], [1, 2]]

    asyncio.run(scenario())


def test_a_finished_group_stays_with_its_worker_until_the_queue_asks_for_it() -> None:
    """What the queue is told are facts. A group that it doesn't ask for, because it has come before, is let go."""

    class Queue:
        async def put(self, groups: list[GroupFacts], worker: str) -> list[int]:
            assert not any(hasattr(one, "response_ids") for of_one in groups for one in of_one.trajectories)
            return [one.group_id for one in groups if one.group_id != 1]

    async def scenario() -> None:
        worker = RolloutWorker("0", SETTINGS, FakeActor(Queue()))
        worker._handle = lambda: "handle"  # type: ignore[method-assign]
        groups = [group(Ticket(i, prompt(i), 0)) for i in range(4)]
        for one in groups:
            await worker._finish(one)
        assert worker._payloads.keys() == {0, 2, 3}
        assert await worker.payloads([0]) is groups[0], "one result"
        assert await worker.payloads([3, 2]) == [groups[3], groups[2]], "two results"
        assert not worker._payloads

    asyncio.run(scenario())
