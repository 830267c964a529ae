"""Who has died, how often a run goes back, what of a withdrawn generation is refused. A whole run: tests/failures/test_parts_killed.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from actors.going_back import MOST_RETURNS, Returns, lost_among, raise_when_lost
from actors.queue_actor import TrajectoryQueueActor
from actors.rollout_worker import RolloutWorker
from correction.errors import ActorLost, ActorUnavailable, DeadlineExceeded, EngineError, LateError
from rollout.trajectory import Group, GroupFacts
from tests.actors.cases import FakeActor, group, prompts, put


class Part:
    """Says of itself what the next of these is: alive (None), or what Ray raises; the last one again and again. "silent": no answer."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.__ray_ready__ = SimpleNamespace(remote=self._ready)

    async def _ready(self) -> None:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer == "silent":
            await asyncio.sleep(60.0)
        if isinstance(answer, Exception):
            raise answer


ALIVE = None
GONE = RayActorError()
UNREACHABLE = ActorUnavailableError("for now", None)


@pytest.fixture(autouse=True)
def without_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.going_back._ANSWER_S", 1.5)
    monkeypatch.setattr("actors.going_back._LOOK_S", 0.01)


@pytest.mark.parametrize(
    ("parts", "error", "expected"),
    [
        ({"queue": Part(ALIVE), "rank": Part(GONE)}, EngineError("step"), ["rank"]),
        ({"queue": Part(ALIVE), "rank": Part(ALIVE)}, EngineError("a bit differs"), []),
        ({"queue": Part(UNREACHABLE, UNREACHABLE, GONE), "rank": Part("silent")}, EngineError("places"), ["queue"]),
        ({"queue": Part(UNREACHABLE, ALIVE), "rank": Part(ALIVE)}, EngineError("places"), []),
        ({"queue": Part(ALIVE), "rank": Part("silent")}, DeadlineExceeded("step"), ["rank"]),
        ({"queue": Part(ALIVE), "rank": Part(ALIVE)}, ActorUnavailable("step"), ["an answer"]),
        ({"queue": Part(ALIVE), "rank": Part("silent")}, EngineError("of another kind, while a step is under way"), []),
    ],
    ids=["dead", "none", "unreachable, then dead", "unreachable for a moment", "hangs", "answer lost", "busy"],
)
def test_a_part_is_lost_if_it_is_dead_or_hangs(parts: dict[str, Any], error: Exception, expected: list[str]) -> None:
    assert asyncio.run(lost_among(parts, error)) == expected


def test_the_watch_names_who_dies_and_outlives_a_bad_network() -> None:
    parts = {"queue": Part(ALIVE), "service": Part(ALIVE, UNREACHABLE, ALIVE, GONE)}
    with pytest.raises(ActorLost, match=r"^service: its process is gone$"):
        asyncio.run(asyncio.wait_for(raise_when_lost(parts), 20.0))


def test_a_run_goes_back_to_one_checkpoint_so_many_times_only() -> None:
    saved = [3]
    folder: Any = SimpleNamespace(checkpoints=lambda: [SimpleNamespace(step=step) for step in saved])
    returns = Returns(folder, None)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="a bit differs"):
        returns.allow([], EngineError("a bit differs"))
    for _ in range(MOST_RETURNS):
        returns.allow(["rank"], EngineError("step 5"))
    saved.append(6)
    for _ in range(MOST_RETURNS):  # a new checkpoint is progress
        returns.allow(["rank"], EngineError("step 8"))
    with pytest.raises(ActorLost, match=r"^rank: the 4th death after step 6, before there was another checkpoint: step 9$"):
        returns.allow(["rank"], EngineError("step 9"))


def test_a_queue_takes_groups_of_its_own_generation_only() -> None:
    """Group ids come again with the same prompts; an answer by withdrawn weights must not be taken for the new one."""

    async def scenario() -> None:
        queue = TrajectoryQueueActor(groups_per_step=2, max_staleness=0, generation=1)
        (ticket, _) = await queue.admit(prompts(0, 2))
        await put(queue, group(ticket), generation=0)
        assert (await queue.draw(0, 2, 0.0)) == []
        await put(queue, group(ticket), generation=1)
        assert [one.group_id for one in await queue.draw(0, 2, 0.0)] == [ticket.group_id]

    asyncio.run(scenario())


class Sampler:
    """Takes until `finish` is set; may swallow its cancellation, as a library's code could."""

    def __init__(self, *, is_stubborn: bool = False) -> None:
        self.finish, self.aborted, self._is_stubborn = asyncio.Event(), 0, is_stubborn
        self.engine = SimpleNamespace(requests_in_flight=0)

    async def group(self, prompt: Any, *, group_id: int, admitted_version: int, topk: int, begun: None = None) -> Group:
        try:
            await self.finish.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            if not self._is_stubborn:
                raise
            await self.finish.wait()
        return group(SimpleNamespace(group_id=group_id, prompt=prompt, admitted_version=admitted_version))  # type: ignore[arg-type]


class Receives:
    def __init__(self) -> None:
        self.groups: list[tuple[int, int]] = []

    async def put(self, groups: list[GroupFacts], worker: str | None, generation: int, name: str) -> list[int]:
        self.groups += [(one.group_id, generation) for one in groups]
        return [one.group_id for one in groups]


@pytest.mark.parametrize("is_stubborn", [False, True], ids=["aborted", "finishes all the same"])
def test_a_worker_gives_up_what_it_has_under_way_when_it_follows_another_queue(is_stubborn: bool) -> None:
    async def scenario() -> None:
        old, new = Receives(), Receives()
        worker = RolloutWorker("0", SimpleNamespace(topk=0), FakeActor(old))  # type: ignore[arg-type]
        worker._handle = lambda: "handle"  # type: ignore[method-assign]  # which an actor has
        sampler = Sampler(is_stubborn=is_stubborn)
        worker._sampler = sampler  # type: ignore[assignment]
        worker._endpoint = SimpleNamespace(add=lambda *_: None, set=lambda *_: None)  # type: ignore[assignment]
        queue = TrajectoryQueueActor(groups_per_step=2, max_staleness=0)
        tickets = await queue.admit(prompts(0, 2))
        first = asyncio.ensure_future(worker.generate_groups(tickets[:1]))
        await asyncio.sleep(0.01)
        await worker.follow(FakeActor(new), 1)
        await asyncio.sleep(0.01)
        assert sampler.aborted == 1
        second = asyncio.ensure_future(worker.generate_groups(tickets))
        await asyncio.sleep(0.01)
        sampler.finish.set()
        assert len(await second) == 2
        with pytest.raises(LateError, match="withdrawn"):
            await first
        assert old.groups == [] and sorted(new.groups) == [(0, 1), (1, 1)]

    asyncio.run(scenario())
