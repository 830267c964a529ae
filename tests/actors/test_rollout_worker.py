"""What a rollout worker does with finished groups. Sampling itself is tested with real engines (tests/rollout, tests/e2e)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from actors.carriers import GroupFailure, Ticket
from actors.rollout_worker import RolloutWorker, WorkerSettings
from correction.errors import DataError, DeadlineExceeded, EngineError, EvenkeelError, LateError, RequestError
from rollout.config import AnswerSampling, RolloutConfig
from rollout.trajectory import Group, GroupFacts
from tests.actors.cases import FakeActor, group, prompt
from tests.actors.simulated_time import simulate


class SlowQueue:
    """Stands where the queue's actor handle stands: each call waits for the gate; calls named in `failing` lose their way."""

    def __init__(self, failing: frozenset[int] = frozenset()) -> None:
        self.calls: list[list[int]] = []
        self.handles: list[str | None] = []
        self.gate = asyncio.Event()
        self._failing = failing
        self.put = SimpleNamespace(remote=self._put)

    async def _put(self, groups: list[GroupFacts], worker: str | None, generation: int, name: str) -> list[int]:
        assert name == "0"
        self.handles.append(worker)
        self.calls.append([one.group_id for one in groups])
        number = len(self.calls) - 1
        await self.gate.wait()
        if number in self._failing:
            raise EngineError("the queue's actor is gone")
        return [one.group_id for one in groups]


CONFIG = RolloutConfig.model_validate({"task": {"kind": "file", "path": "none"}, "reward": {"kind": "exact_match"}})
SETTINGS = WorkerSettings(CONFIG, Path("model"), prompt(0), bind="127.0.0.1", resource="rollout")


def idle_worker(queue: Any) -> RolloutWorker:
    worker = RolloutWorker("0", SETTINGS, queue)
    worker._handle = lambda: "handle"  # type: ignore[method-assign]  # which an actor has
    return worker


async def hand_over_three(queue: SlowQueue) -> list[Any]:
    """The first group's call is under way when two more finish. Returns what each of the three got."""
    worker = idle_worker(queue)
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
        assert queue.handles == ["handle", None], "it is sent once: it makes a call half as long again"

    asyncio.run(scenario())


def test_another_queue_gets_the_workers_handle_as_well() -> None:
    async def scenario() -> None:
        first, second = SlowQueue(), SlowQueue()
        worker = idle_worker(first)
        for queue in (first, second):
            queue.gate.set()
            for i in range(2):
                await worker._finish(group(Ticket(i, prompt(i), 0)))
            assert queue.handles == ["handle", None]
            await worker.follow(second, 1)

    asyncio.run(scenario())


def test_a_queue_that_has_forgotten_the_handle_gets_it_again() -> None:
    class Forgetful(SlowQueue):
        async def _put(self, groups: list[GroupFacts], worker: str | None, generation: int, name: str) -> list[int] | None:  # type: ignore[override]
            taken = await super()._put(groups, worker, generation, name)
            return taken if worker else None

    async def scenario() -> None:
        queue = Forgetful()
        queue.gate.set()
        worker = idle_worker(queue)
        for i in range(2):
            await worker._finish(group(Ticket(i, prompt(i), 0)))
        assert queue.handles == ["handle", None, "handle"] and queue.calls == [[0], [1], [1]]
        assert worker._payloads.keys() == {0, 1} and worker._finished == []

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
        async def put(self, groups: list[GroupFacts], worker: str | None, generation: int, name: str) -> list[int]:
            assert not any(hasattr(one, "response_ids") for of_one in groups for one in of_one.trajectories)
            return [one.group_id for one in groups if one.group_id != 1]

    async def scenario() -> None:
        worker = idle_worker(FakeActor(Queue()))
        groups = [group(Ticket(i, prompt(i), 0)) for i in range(4)]
        for one in groups:
            await worker._finish(one)
        assert worker._payloads.keys() == {0, 2, 3}
        assert await worker.payloads([0]) is groups[0], "one result"
        assert await worker.payloads([3, 2]) == [groups[3], groups[2]], "two results"
        assert not worker._payloads

    asyncio.run(scenario())


def test_a_worker_ends_when_the_queue_has_what_was_finished_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been told of group 0, which would go with the process; one that it doesn't ask for is waited for a few seconds."""

    class Sampler:
        closed_at = -1.0

        async def close(self) -> None:
            self.closed_at = asyncio.get_running_loop().time()

    class Queue:
        async def put(self, groups: list[GroupFacts], worker: str | None, generation: int, name: str) -> list[int]:
            return [one.group_id for one in groups]

    async def at_once(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    async def scenario() -> None:
        monkeypatch.setattr(asyncio, "to_thread", at_once)  # simulated time has no threads
        ended = []
        for is_fetched in (True, False):
            worker, sampler = idle_worker(FakeActor(Queue())), Sampler()
            worker._sampler, worker._temporary = sampler, Path("none")  # type: ignore[assignment]
            worker._endpoint = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
            await worker._finish(group(Ticket(0, prompt(0), 0)))
            began = asyncio.get_running_loop().time()
            stopping = asyncio.ensure_future(worker.stop())
            await asyncio.sleep(1.0)
            assert sampler.closed_at < 0
            if is_fetched:
                await worker.payloads([0])
            await stopping
            ended.append(sampler.closed_at - began)
        assert ended == [pytest.approx(1.0, abs=0.03), pytest.approx(5.0, abs=0.03)]

    simulate(scenario)


def test_a_queue_that_is_silent_for_ninety_seconds_is_waited_for() -> None:
    """It is asked again after a minute, which it may be any number of times."""

    async def scenario() -> None:
        queue = SlowQueue()
        asyncio.get_running_loop().call_later(90.0, queue.gate.set)
        worker = idle_worker(queue)
        await worker._finish(group(Ticket(0, prompt(0), 0)))
        assert queue.calls == [[0], [0]] and asyncio.get_running_loop().time() == pytest.approx(90.0)
        assert worker._finished == []

    simulate(scenario)


class Failing:
    """A sampler whose engine fails each request in its own way."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def group(self, *_: Any, **__: Any) -> Group:
        raise self._error

    answer = group


@pytest.mark.parametrize(
    ("error", "is_final"),
    [(RequestError("one logprob is not finite"), False), (DeadlineExceeded("no answer in 600 s"), False), (DataError("too long"), True)],
)
def test_one_request_that_fails_is_told_and_costs_nothing_else(error: EvenkeelError, is_final: bool) -> None:
    async def scenario() -> None:
        worker = idle_worker(SlowQueue())
        worker._sampler = Failing(error)  # type: ignore[assignment]
        assert await worker.generate_groups([Ticket(7, prompt(0), 0)]) == [GroupFailure(7, str(error), is_final)]
        answered = await worker._answer(prompt(0), AnswerSampling(samples=2, temperature=1.0))
        assert [(one.error, one.reward, one.is_valid) for one in answered] == [(str(error), None, False)] * 2

    asyncio.run(scenario())


def test_a_lost_engine_is_no_failed_request() -> None:
    async def scenario() -> None:
        worker = idle_worker(SlowQueue())
        worker._sampler = Failing(EngineError("the scheduler is gone"))  # type: ignore[assignment]
        with pytest.raises(EngineError, match="the scheduler is gone"):
            await worker.generate_groups([Ticket(7, prompt(0), 0)])

    asyncio.run(scenario())


def test_a_lost_queue_is_not_the_engines_fault() -> None:
    async def scenario() -> None:
        async def lost(groups: list[GroupFacts], worker: str | None, generation: int, name: str) -> list[int]:
            raise ray.exceptions.ActorDiedError()

        worker = idle_worker(SimpleNamespace(put=SimpleNamespace(remote=lost)))
        finished = group(Ticket(0, prompt(0), 0))
        with pytest.raises(LateError) as caught:
            await worker._finish(finished)
        assert not isinstance(caught.value, EngineError) and worker._finished == [finished.facts], "it goes along with the next one"

    asyncio.run(scenario())
