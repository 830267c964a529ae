"""Where tokens are while the driver handles facts, in a real Ray of two nodes: what outlives a worker, and what goes with its node."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from evenkeel.actors.carriers import StoredGroup
from evenkeel.actors.cluster.cluster import on_drivers_node
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.groups.tokens import GONE, _missing, fetched
from evenkeel.actors.settings.environment import OF_BATCHES
from evenkeel.correction.batch import CorrectedBatch, PackedBatch
from evenkeel.rollout.trajectory import Group, GroupFacts, ids_of, logprobs_of
from tests.actors.cases import group, prompts
from tests.failures.measured import Measured
from tests.ray_sessions import leave_ray

pytestmark = [pytest.mark.engine, pytest.mark.slow]
LARGE = 100_000
"""Tokens whose group is too large to travel with its reference."""


class Sampling:
    """A worker that has finished the group that it is given."""

    async def generate_group(self, one: Group) -> tuple[GroupFacts, Group]:
        return one.facts, one

    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    ray.init(address=found.address, logging_level="ERROR", log_to_driver=False)
    yield found
    leave_ray()
    found.shutdown()


def large(one: Group) -> Group:
    tokens = ids_of(range(LARGE)), logprobs_of([-0.5] * LARGE)
    return replace(one, trajectories=tuple(replace(t, response_ids=tokens[0], behavior_logprobs=tokens[1]) for t in one.trajectories))


def test_a_finished_group_outlives_its_worker_and_goes_with_its_node(cluster: Cluster) -> None:
    """A worker that is killed right after its answers costs none of them, small or large. Of a node that goes, the large ones
    are lost: said by their ids, and no others; the small ones came with their references."""
    node = cluster.add_node(num_cpus=2, resources={"rollout": 2})
    book = GroupBook(groups_per_step=4, max_staleness=0)
    here = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    sampling = ray.remote(Sampling).options(num_cpus=0, max_concurrency=10, scheduling_strategy=here)
    finished = [group(ticket) for ticket in book.admit(prompts(0, 4), now=0.0)]
    finished = [large(one) if one.group_id % 2 else one for one in finished]

    workers = [sampling.remote() for _ in range(2)]  # kept: Ray ends an actor that nobody holds
    pids = ray.get([worker.pid.remote() for worker in workers], timeout=60)
    pairs = [workers[i // 2].generate_group.options(num_returns=2).remote(one) for i, one in enumerate(finished)]
    facts = ray.get([found for found, _ in pairs], timeout=60)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for one, (_, tokens) in zip(facts, pairs, strict=True):
        book.finish(StoredGroup(one, tokens), now=0.0)
    del pairs
    stored = book.draw(0, 4)
    assert [one.facts for one in stored] == [one.facts for one in finished]
    groups, lost = asyncio.run(fetched(stored[:2], deadline_s=60.0))
    assert (groups, lost) == (finished[:2], {})

    cluster.remove_node(node)
    groups, lost = asyncio.run(fetched(stored[2:], deadline_s=60.0))
    assert (groups, lost) == ([finished[2]], {3: GONE})
    book.lose(lost)
    assert [ticket.group_id for ticket in book.take_lost()] == [3]
    follows = "its workers' groups go to others; of finished groups those whose tokens lay there are sampled again"
    Measured("node of rollout workers removed", follows, None, "1 group of 2 that were finished there", "a real node").write()


class Silent:
    async def never(self) -> None:
        await asyncio.Event().wait()


def in_ray_get() -> bool:
    """Whether a thread that is not this one waits for Ray's object store."""
    frames = [frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]
    while frames:
        if (frame := frames.pop()).f_code.co_name == "get_objects":
            return True
        frames += [frame.f_back] if frame.f_back else []
    return False


def test_a_fetch_that_is_given_up_leaves_no_thread_behind(cluster: Cluster) -> None:
    """A thread in ray.get can't be interrupted. Without a limit of its own each fetch that a run gives up would take one of the few
    threads of its process for good."""
    silent = ray.remote(Silent).options(num_cpus=0, max_concurrency=2).remote()
    (ticket,) = GroupBook(groups_per_step=1, max_staleness=0).admit(prompts(0, 1), now=0.0)
    waiting = StoredGroup(group(ticket).facts, silent.never.remote(), source="rollout worker 3 on node ab12cd34")

    async def until(is_there: bool) -> None:
        ends = time.monotonic() + 60.0
        while in_ray_get() is not is_there and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        assert in_ray_get() is is_there

    async def scenario() -> None:
        fetching = asyncio.create_task(fetched([waiting], deadline_s=5.0))
        await until(True)
        there = StoredGroup(group(ticket).facts, ray.put(group(ticket)), source="rollout worker 1")
        assert await _missing([there, waiting]) == "1 group not here yet: 0 of rollout worker 3 on node ab12cd34"
        fetching.cancel()
        with suppress(asyncio.CancelledError):
            await fetching
        assert in_ray_get(), "it is still there, and nobody waits for it"
        try:
            await until(False)
        finally:
            ray.kill(silent)  # or the end of the loop would wait for a thread that hangs

    asyncio.run(scenario())


class Maker:
    """Hands a batch on, as the correction service does."""

    def make(self, tokens: int) -> list[Any]:
        lengths = torch.tensor([0, tokens // 2, tokens])
        ids, ones = torch.arange(tokens), torch.ones(tokens)
        versions, groups = torch.zeros(tokens, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        batch = PackedBatch(ids, lengths, ones > 0, -ones, ones, versions, groups).validate()
        return [ray.put(CorrectedBatch(batch, ones.clone(), ones > 0, ones / tokens))]


class Reader:
    """Reads a batch, as a learner's rank does."""

    def read(self, corrected: CorrectedBatch) -> tuple[int, list[str]]:
        """Sum of the token ids; names of the tensors [N] that lie in memory of this process alone."""
        maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
        shared = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps if "s" in line[1]]
        everything = {f.name: getattr(of, f.name) for of in (corrected.batch, corrected) for f in fields(of)}
        long = {name: value for name, value in everything.items() if isinstance(value, torch.Tensor) and len(value) > LARGE}
        own = [name for name, value in long.items() if not any(first <= value.data_ptr() < end for first, end in shared)]
        return int(corrected.batch.token_ids.sum()), own if len(long) == 8 else sorted(long)


def test_ranks_read_a_batch_where_it_lies(cluster: Cluster) -> None:
    """All ranks of a node share one copy of a batch, in the object store: with copies of their own eight of them would hold eight. And
    nothing of it is checked or copied on the way, as torch's own pickling does."""
    makers, readers = (on_drivers_node(actor, max_concurrency=1, environment=OF_BATCHES) for actor in (Maker, Reader))
    maker, two = makers.remote(), [readers.remote() for _ in range(2)]
    (batch,) = ray.get(maker.make.remote(2 * LARGE), timeout=60)
    for total, own in ray.get([reader.read.remote(batch) for reader in two], timeout=60):
        assert (total, own) == (LARGE * (2 * LARGE - 1), [])
