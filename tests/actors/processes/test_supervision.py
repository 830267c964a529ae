"""Waits: results and errors pass as they are; notices say what is waited for; a deadline names it and ends the wait."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import ray.exceptions

from evenkeel.actors.carriers import WaitNotice
from evenkeel.actors.processes.supervision import HALF_OVER, LongWait, call_with_retries, unwrapped, wait_for
from evenkeel.correction.errors import ActorLost, ActorUnavailable, DeadlineExceeded, EngineError, SyncError, counted
from tests.actors.simulated_time import simulate


async def late(seconds: float, value: str = "done") -> str:
    await asyncio.sleep(seconds)
    return value


def test_a_result_passes() -> None:
    assert asyncio.run(wait_for(late(0.01), "x", deadline_s=5.0)) == "done"


def test_a_deadline_names_the_wait_and_what_is_missing() -> None:
    async def missing() -> str:
        return "due and unfinished: [7]"

    with pytest.raises(DeadlineExceeded) as caught:
        asyncio.run(wait_for(late(30.0), "batch of version 3 <- correction service", deadline_s=0.2, detail=missing))
    assert str(caught.value).startswith("batch of version 3 <- correction service: not done in 0 s (due and unfinished: [7])")
    assert (caught.value.what, caught.value.remedy) == ("batch of version 3 <- correction service", "the deadline is set under deadlines")
    assert caught.value.seconds >= 0.2


def test_what_is_waited_for_is_cancelled_at_the_deadline() -> None:
    cancelled = []

    async def work() -> None:
        try:
            await asyncio.sleep(30.0)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def scenario() -> None:
        with pytest.raises(DeadlineExceeded):
            await wait_for(work(), "x", deadline_s=0.05)
        await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert cancelled == [True]


def test_notices_come_while_it_waits() -> None:
    notices: list[WaitNotice] = []

    async def broken_detail() -> str:
        raise RuntimeError("no")

    result = wait_for(late(0.5), "receipt of worker 2", deadline_s=5.0, notice_s=0.1, notice=notices.append, detail=broken_detail)
    assert asyncio.run(result) == "done"
    assert 2 <= len(notices) <= 4
    assert {(notice.what, notice.detail) for notice in notices} == {("receipt of worker 2", "no detail: RuntimeError")}
    assert re.fullmatch(r"waiting \d s for receipt of worker 2 \(no detail: RuntimeError\)", str(notices[0]))


def test_a_usual_wait_is_information_and_a_longer_one_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "evenkeel"):
        asyncio.run(wait_for(late(0.5), "process of learner rank 0 <- Ray", deadline_s=5.0, notice_s=0.1, usual_s=0.25))
        asyncio.run(wait_for(late(0.15), "receipt of worker 2", deadline_s=5.0, notice_s=0.1))
    levels = [record.levelname for record in caplog.records]
    assert levels[0] == "INFO" and levels[-2:] == ["WARNING", "WARNING"] and levels == sorted(levels)
    assert re.fullmatch(r"waiting \d s for process of learner rank 0 <- Ray", caplog.messages[0])


def test_numbers_have_their_plural() -> None:
    assert [counted(number, "learner rank") for number in (0, 1, 2)] == ["0 learner ranks", "1 learner rank", "2 learner ranks"]


def test_errors_of_another_process_arrive_as_themselves() -> None:
    async def fail(error: Exception) -> None:
        raise error

    wrapped = ray.exceptions.RayTaskError("f", "a long traceback", SyncError("tensor x differs"))
    assert isinstance(unwrapped(wrapped), SyncError)
    with pytest.raises(SyncError, match=r"^tensor x differs$"):
        asyncio.run(wait_for(fail(wrapped), "x", deadline_s=5.0))
    with pytest.raises(EngineError, match=r"sync -> worker 1: the actor's process has died, or its answer was lost \(ActorDiedError\)"):
        asyncio.run(wait_for(fail(ray.exceptions.ActorDiedError()), "sync -> worker 1", deadline_s=5.0))
    foreign = ray.exceptions.RayTaskError("f", "a long traceback", ValueError("no"))
    assert unwrapped(foreign) is foreign


def errors_of_ray() -> Iterator[ray.exceptions.RayError]:
    """One of each kind but for what an actor's own code raised."""
    values = {"actor_id": b"1" * 16, "owner_address": b"1", "cause": None}
    for kind in vars(ray.exceptions).values():
        if isinstance(kind, type) and issubclass(kind, ray.exceptions.RayError) and not issubclass(kind, ray.exceptions.RayTaskError):
            wanted = list(inspect.signature(kind.__init__).parameters.values())[1:]
            plain = [p.name for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
            if kind is not ray.exceptions.CrossLanguageError:  # takes one of Java's
                yield kind(*(values.get(name, "deadbeef") for name in plain))


@pytest.mark.parametrize("error", errors_of_ray(), ids=lambda error: type(error).__name__)
def test_whatever_ray_says_of_a_call_its_actor_is_lost(error: ray.exceptions.RayError) -> None:
    """Killed for its memory, never scheduled, its node gone, its answer lost: none of it is a mistake that would come again."""

    async def fail() -> None:
        raise error

    with pytest.raises(ActorLost) as caught:
        asyncio.run(wait_for(fail(), "groups [3] <- rollout worker 1", deadline_s=5.0))
    is_full = isinstance(error, ray.exceptions.ObjectStoreFullError | ray.exceptions.OutOfDiskError)
    said = "no room in Ray's object store (" if is_full else "the actor"
    assert str(caught.value).startswith(f"groups [3] <- rollout worker 1: {said}") and type(error).__name__ in str(caught.value)
    assert isinstance(caught.value, ActorUnavailable) == isinstance(error, ray.exceptions.ActorUnavailableError)


@pytest.mark.parametrize(("failures", "seconds"), [(2, 3.0), (6, None)], ids=["comes back", "stays away"])
def test_what_can_not_be_reached_is_asked_again(failures: int, seconds: float | None) -> None:
    """Twice in vain: pauses of 1 and 2 s. Six times: after 1 + 2 + 4 + 8 + 15 s that is the answer."""
    calls = []

    async def call() -> str:
        calls.append(1)
        if len(calls) <= failures:
            raise ray.exceptions.ActorUnavailableError("the network hiccups", b"1" * 16)
        return "done"

    async def scenario() -> None:
        began = asyncio.get_running_loop().time()
        if seconds is None:
            with pytest.raises(ActorUnavailable):
                await call_with_retries(call, "counts <- queue", deadline_s=5.0)
            assert asyncio.get_running_loop().time() - began == pytest.approx(30.0)
        else:
            assert await call_with_retries(call, "counts <- queue", deadline_s=5.0) == "done"
            assert asyncio.get_running_loop().time() - began == pytest.approx(seconds)

    simulate(scenario)
    assert len(calls) == min(failures + 1, 6)


def test_what_is_lost_is_not_asked_again() -> None:
    calls = []

    async def call() -> None:
        calls.append(1)
        raise ray.exceptions.ActorDiedError()

    with pytest.raises(ActorLost):
        asyncio.run(call_with_retries(call, "counts <- queue", deadline_s=5.0))
    assert len(calls) == 1


def test_a_deadline_counts_from_the_last_progress() -> None:
    """Ten seconds without progress: with the last one at 25 s the wait ends at 35 s."""

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        with pytest.raises(DeadlineExceeded):
            await wait_for(late(1e4), "batch", deadline_s=10.0, notice_s=3.0, counts_from=lambda: began + min(25.0, clock() - began))
        assert clock() - began == pytest.approx(35.0)

    simulate(scenario)


@pytest.mark.parametrize(
    ("wait", "told"),
    [
        ({"deadline_s": 3000.0}, [(LongWait("a node"), 1500.0)]),
        ({"deadline_s": 50.0}, []),
        ({"deadline_s": math.inf}, [(LongWait("a node", has_deadline=False), 600.0)]),
        ({"deadline_s": math.inf, "notice_s": 7.0}, [(LongWait("a node", has_deadline=False), 600.0)]),
        ({"deadline_s": math.inf, "usual_s": 1200.0}, [(LongWait("a node", has_deadline=False), 1200.0)]),
        ({"deadline_s": math.inf, "usual_s": math.inf}, []),
        ({"deadline_s": math.inf, "counts_from": lambda: 400.0}, [(LongWait("a node", has_deadline=False), 1000.0)]),
    ],
    ids=["half of it", "short", "endless", "endless with notices", "endless, usually long", "endless as a matter of course", "progress"],
)
def test_a_long_wait_asks_for_stacks_once(wait: dict[str, Any], told: list[tuple[LongWait, float]]) -> None:
    found: list[tuple[LongWait, float]] = []

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        HALF_OVER.set(lambda wait: found.append((wait, clock())))
        with suppress(DeadlineExceeded):
            await wait_for(late(5000.0), "a node", **{"notice": lambda _: None, **wait})

    simulate(scenario)
    assert found == told


def test_a_wait_cancelled_as_its_task_fails_leaves_nothing_unseen() -> None:
    """asyncio would print "exception was never retrieved" with a traceback below the one sentence that the user gets."""
    unseen: list[str] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context["message"]))
        failing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(wait_for(failing, "x", deadline_s=5.0))
        await asyncio.sleep(0.01)
        failing.set_exception(SyncError("no"))
        await asyncio.sleep(0)  # the task inside has failed, the wait has not looked at it
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(scenario())
    gc.collect()
    assert unseen == []


def test_outside_a_session_nothing_starts_or_joins_a_ray() -> None:
    """A kill of actors after the end of their Ray would else join the machine's last cluster, or wait for one that is gone."""
    program = (
        "from evenkeel.actors.processes.supervision import kill\n"
        "import ray\n"
        "kill(object())\n"
        "try:\n"
        "    ray.get_actor('queue')\n"
        "except ray.exceptions.RaySystemError as error:\n"
        "    print('refused:', error, ray.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("refused:") and done.stdout.endswith("False\n"), done.stdout + done.stderr
