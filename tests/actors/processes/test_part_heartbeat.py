"""Parts are watched while they live: one that stands still is ended, and what they report reaches the run's events."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from typing import Any

import psutil
import pytest
import ray
import ray.exceptions

from evenkeel.actors.cluster.cluster import on_drivers_node
from evenkeel.actors.processes.part_heartbeat import HeartbeatActor, raise_when_silent
from evenkeel.actors.processes.supervision import HALF_OVER, LongWait
from evenkeel.correction.errors import ActorLost
from tests.actors.cases import FakeActor
from tests.actors.simulated_time import simulate
from tests.ray_sessions import leave_ray

LIMIT_S = 120.0


class Freezable(HeartbeatActor):
    """Stands still, or can't be reached, for seconds from a time on."""

    def __init__(self, at: float = 0.0, stands_s: float = 0.0, unreached_s: float = 0.0) -> None:
        super().__init__()
        self.at, self.stands_s, self.unreached_s = at, stands_s, unreached_s

    async def heartbeat(self, acknowledged: int) -> list[tuple[int, str]]:
        late_s = asyncio.get_running_loop().time() - self.at
        if 0 <= late_s < self.unreached_s:
            raise ray.exceptions.ActorUnavailableError("a moment", b"1" * 16)
        if 0 <= late_s < self.stands_s:
            await asyncio.sleep(self.stands_s - late_s)
        return await super().heartbeat(acknowledged)


@pytest.mark.parametrize(
    ("part", "is_lost"),
    [
        (Freezable(100.0, stands_s=80.0), False),
        (Freezable(100.0, stands_s=1e6), True),
        (Freezable(100.0, unreached_s=80.0), False),
        (Freezable(100.0, unreached_s=1e6), True),
    ],
    ids=["busy for a while", "frozen", "a bad network", "no network"],
)
def test_a_part_that_gives_no_sign_is_ended(monkeypatch: pytest.MonkeyPatch, part: Freezable, is_lost: bool) -> None:
    """At half of the time the stacks are asked for. Before, a frozen part was noticed when a batch was late: hours with long answers."""
    killed, stacks, told = list[Any](), list[LongWait](), list[str]()
    monkeypatch.setattr("ray.kill", lambda actor: killed.append(actor.instance))

    async def scenario() -> None:
        HALF_OVER.set(stacks.append)
        parts = {"learner rank 0": FakeActor(part), "correction service": FakeActor(Freezable())}
        watching = raise_when_silent(parts, LIMIT_S, lambda _, text: told.append(text))
        if is_lost:
            with pytest.raises(ActorLost, match=r"^learner rank 0: it gave no sign for 120 s .* and its process was ended$"):
                await watching
            assert part.at + LIMIT_S <= asyncio.get_running_loop().time() <= part.at + 1.25 * LIMIT_S
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(watching, 1000.0)

    simulate(scenario)
    assert killed == [part] * is_lost
    assert stacks == [LongWait("heartbeat <- learner rank 0")] and "no heartbeat for 60 s" in told[0] and len(told) == 1


def test_what_a_part_has_to_tell_comes_with_its_heartbeat_once() -> None:
    """The service waits for tokens that are late: without this it would say so in a log file of Ray's."""
    told: list[str] = []

    async def scenario() -> None:
        service = HeartbeatActor()
        watching = asyncio.ensure_future(
            raise_when_silent({"correction service": FakeActor(service)}, LIMIT_S, lambda _, text: told.append(text))
        )
        for seconds in (60, 120, 180):
            await asyncio.sleep(60.0)
            service.report(f"tokens are late by {seconds} s")
        await asyncio.sleep(20.0 + LIMIT_S)
        watching.cancel()

    simulate(scenario)
    assert told == [f"correction service: tokens are late by {seconds} s" for seconds in (60, 120, 180)]


def test_what_nobody_heard_is_kept_to_a_limit_and_what_was_heard_makes_room() -> None:
    """Before, a part that had told a thousand things told nothing more. Whoever listens next gets what the last one missed."""

    async def scenario() -> None:
        part, acknowledged = HeartbeatActor(), 0
        for number in range(3000):
            part.report(f"notice {number}")
            if number % 500 == 499:
                told = await part.heartbeat(acknowledged)
                assert [report.message for report in told] == [f"notice {n}" for n in range(number - 499, number + 1)]
                assert await part.heartbeat(acknowledged) == told, "an answer that was lost is asked for again"
                acknowledged = told[-1].number
        for number in range(1200):
            part.report(f"unheard {number}")
        told = await part.heartbeat(acknowledged)
        assert [told[0].message, told[-1].message, len(told)] == ["unheard 200", "unheard 1199", 1000]
        assert await part.heartbeat(0) == told

    asyncio.run(scenario())


class Busy(HeartbeatActor):
    """A part whose own event loop computes for longer than its heartbeat may be late."""

    async def compute(self, seconds: float) -> None:
        time.sleep(seconds)

    async def pid(self) -> int:
        return os.getpid()


@pytest.mark.slow
def test_a_busy_part_beats_and_a_stopped_one_is_dead_for_ray_too() -> None:
    """Real processes: the heartbeat comes from another thread than the work, and a process that is stopped (SIGSTOP) can be ended."""

    async def watched(part: Any, limit_s: float, work: Any) -> None:
        work_done = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(raise_when_silent({"queue": part}, limit_s, lambda *_: None))
        await asyncio.wait({work_done, watching}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if watching.done():
            watching.result()

    async def scenario() -> None:
        part = on_drivers_node(Busy, max_concurrency=10).remote()
        pid = await part.pid.remote()
        await watched(part, 2.0, as_coroutine(part.compute.remote(5.0)))
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ActorLost, match="queue: it gave no sign for 2 s"):
            await watched(part, 2.0, asyncio.sleep(20.0))
        with pytest.raises(ray.exceptions.RayActorError):
            await asyncio.wait_for(as_coroutine(part.pid.remote()), 20.0)
        for _ in range(300):  # Ray gives it some seconds to end by itself
            if not psutil.pid_exists(pid):
                break
            await asyncio.sleep(0.1)
        assert not psutil.pid_exists(pid), "nothing of it is left to come back"

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False, _temp_dir=tempfile.mkdtemp(prefix="ek-"))
    try:
        asyncio.run(scenario())
    finally:
        leave_ray()


async def as_coroutine(reference: Any) -> Any:
    return await reference
