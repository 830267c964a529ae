"""Two real ranks as Ray actors: one that computes, or holds Python's lock in C for a while, lives; one that stands still is dead.

Each is asked in another thread than its calls run in, which all run in one, in their order.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from evenkeel.actors.driver.recovery import Lost, lost_among, raise_when_lost
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.correction.correct import defer
from evenkeel.correction.errors import ActorLost
from tests.actors.on_two_nodes.test_learner_ranks_in_ray import learner
from tests.learner.learner_cases import TIS, random_batch

pytestmark = pytest.mark.slow

LIMIT_S, STEP_S = 6.0, 120.0


def thread_of(rank: Any) -> Any:
    return rank.__ray_call__.remote(lambda _: (threading.get_ident(), os.getpid()))


def holds_no_lock(_: Any) -> None:
    time.sleep(1.5 * LIMIT_S)


def holds_the_lock(_: Any) -> None:
    """As a call into C that doesn't give it back."""
    ctypes.PyDLL(None).usleep(int(0.5 * LIMIT_S * 1e6))


async def step(group: LearnerGroup) -> Any:
    return await group.step(ray.put(defer(random_batch(1, groups=3), TIS)), TIS, step=1)


async def lives_through(group: LearnerGroup, work: Any) -> None:
    watching = asyncio.ensure_future(raise_when_lost(group.ranks, LIMIT_S, lambda *_: None))
    working = asyncio.gather(*(rank.__ray_call__.remote(work) for rank in group.ranks.values()))
    await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
    assert not watching.done() or watching.exception() is None, watching.exception()
    await working
    watching.cancel()


def test_a_rank_that_stands_still_is_dead_and_a_busy_one_is_not(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with learner(tmp_path) as group:
            threads = [await thread_of(rank) for rank in group.ranks.values()]
            await lives_through(group, holds_no_lock)
            await lives_through(group, holds_the_lock)
            await step(group)
            for (thread, pid), rank in zip(threads, group.ranks.values(), strict=True):
                assert (thread, pid) == await thread_of(rank), "torch and Megatron stay in their thread"
            stopped = threads[1][1]
            os.kill(stopped, signal.SIGSTOP)
            began, told = time.monotonic(), list[str]()
            stepping = asyncio.ensure_future(step(group))  # rank 0 waits for the other one in the middle of it
            with pytest.raises(ActorLost, match=r"^learner rank 1: it gave no sign for 6 s .* its process was ended$"):
                await raise_when_lost(group.ranks, LIMIT_S, lambda _, text: told.append(text))
            assert time.monotonic() - began < STEP_S / 2 and not stepping.done()
            assert told == ["learner rank 1: no heartbeat for 3 s; it is ended after 6 s"]
            stepping.cancel()
            for _ in range(300):
                if not psutil.pid_exists(stopped):
                    break
                await asyncio.sleep(0.1)
            assert not psutil.pid_exists(stopped), "nothing of it is left to come back"

    asyncio.run(asyncio.wait_for(scenario(), 300.0))


def test_a_call_that_waits_for_its_arguments_holds_no_heartbeat_up(cluster: Cluster, tmp_path: Path) -> None:
    """A large batch may take longer over the network than a heartbeat may."""

    async def scenario() -> None:
        async with learner(tmp_path) as group:
            late = ray.remote(num_cpus=0)(late_batch).remote()
            watching = asyncio.ensure_future(raise_when_lost(group.ranks, LIMIT_S, lambda *_: None))
            stepping = asyncio.ensure_future(group.step(late, TIS, step=1))
            await asyncio.wait({watching, stepping}, return_when=asyncio.FIRST_COMPLETED)
            assert (await stepping).optimizer_steps == 1 and not watching.done()
            watching.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 300.0))


def test_a_step_whose_batch_never_comes_is_lost_work(cluster: Cluster, tmp_path: Path) -> None:
    """All ranks answer, and say that they have not begun: the run goes back for it, in place of ending by the step's deadline."""

    async def scenario() -> None:
        async with learner(tmp_path) as group:
            hasty = LearnerGroup(list(group.ranks.values()), version=0, step_s=LIMIT_S)
            said = r"not done in 6 s.*; not begun by rank 0 and rank 1: .*the call's arguments did not arrive$"
            with pytest.raises(ActorLost, match=said) as lost:
                await hasty.step(ray.remote(num_cpus=0)(late_batch).remote(10.0), TIS, step=1)
            assert await lost_among(group.ranks, lost.value) == Lost(answer=str(lost.value))

    asyncio.run(asyncio.wait_for(scenario(), 300.0))


def late_batch(times: float = 1.5) -> Any:
    time.sleep(times * LIMIT_S)
    return defer(random_batch(1, groups=3), TIS)
