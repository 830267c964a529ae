"""Wide fields in a real Ray of three nodes, with two real ranks: from their worker's node to the ranks, and gone when they are trained.

A node that goes takes some of a finished batch along: no rank has begun, the groups are sampled again and counted, and the step is trained.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from evenkeel.actors.carriers import StoredGroup, Ticket
from evenkeel.actors.cluster.cluster import on_drivers_node
from evenkeel.actors.cluster.placement import RankPlaces
from evenkeel.actors.config import EarlyWarningConfig, RunConfig
from evenkeel.actors.driver.batches import BatchSource
from evenkeel.actors.driver.parts import StartingPoint
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.service.correction_service import CorrectionService
from evenkeel.actors.settings.environment import OF_BATCHES
from evenkeel.correction.config import CorrectionConfig
from evenkeel.learner.config import LearnerConfig
from evenkeel.rollout.trajectory import Group, GroupFacts
from evenkeel.rollout.wide_fields import split_wide_fields
from tests.actors.cases import prompts
from tests.actors.groups.test_wide_groups import routed_group
from tests.actors.service.service_scene import ROLLOUT
from tests.actors.two_nodes import stored_bytes
from tests.learner.moe_cases import save_moe
from tests.ray_sessions import leave_ray

pytestmark = [pytest.mark.engine, pytest.mark.slow]
GROUPS = 4
SMALL = 500
"""Bytes of a result that Ray hands over by value: those of the groups here are larger."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A node for this process and the ranks; two for workers."""
    own = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "include_dashboard": False, "_system_config": {"max_direct_call_object_size": SMALL}},
    )
    try:
        for _ in range(2):
            own.add_node(num_cpus=1)
        environment = {"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), **OF_BATCHES}}
        ray.init(own.address, logging_level="ERROR", log_to_driver=False, runtime_env=environment)
        yield own
    finally:
        leave_ray()
        own.shutdown()


class Sampling:
    """A worker's answer: facts, the group without its wide fields, and these."""

    async def generate_group(self, ticket: Ticket) -> tuple[GroupFacts, Group, Any]:
        light, fields = split_wide_fields(routed_group(ticket))
        size = sum(one.nbytes for one in fields)
        assert size > SMALL
        return replace(light.facts, wide_bytes=size), light, fields


def objects_on(node: Any) -> int:
    """In its object store now."""
    from ray._private.internal_api import node_stats

    info = next(info for info in ray.nodes() if info["NodeID"] == node.node_id)
    return int(node_stats(info["NodeManagerAddress"], info["NodeManagerPort"], False).store_stats.num_local_objects)


class Run:
    """Book, service and two ranks; workers on two nodes."""

    def __init__(self, cluster: Cluster, group: LearnerGroup, config: LearnerConfig) -> None:
        self.learner, self.step = group, 0
        self.nodes = list(cluster.worker_nodes)
        places = [NodeAffinitySchedulingStrategy(node.node_id, soft=False) for node in self.nodes]
        self.workers = [ray.remote(Sampling).options(num_cpus=0, scheduling_strategy=place).remote() for place in places]
        settings = RunConfig(
            model=Path("none"),
            steps=10,
            groups_per_step=GROUPS,
            max_staleness=0,
            rollout=ROLLOUT,
            learner=config,
            correction=CorrectionConfig.model_validate({"preset": "tis-token"}),
            monitor=EarlyWarningConfig(detailed=False),
        )
        service = on_drivers_node(CorrectionService, max_concurrency=64, environment=OF_BATCHES)
        recorder: Any = SimpleNamespace(event=lambda *_: None, waiting=lambda _: None, did=lambda _: None)
        self.source = BatchSource(settings, StartingPoint(Path("none")), None, recorder)  # type: ignore[arg-type]
        self.book = self.source.book
        self.service = self.source.service = service.remote(settings)

    async def sample(self, tickets: Sequence[Ticket], workers: Sequence[Any]) -> None:
        """Each by the next worker; the groups, which are small, go on by value."""
        for i, ticket in enumerate(tickets):
            call = workers[i % len(workers)].generate_group.options(num_returns=3)
            facts, light, wide = call.remote(ticket)
            self.book.finish(StoredGroup(await facts, await light, wide), now=0.0)

    def admitted(self) -> list[Ticket]:
        first = self.step * GROUPS
        return self.book.admit(prompts(first, first + GROUPS), now=0.0)

    async def train(self) -> Any:
        version, service = self.learner.version, self.service
        pool: Any = SimpleNamespace(last_progress=lambda: 0.0)
        batch = await self.source.next(version, self.learner, pool, step=self.step)
        result = await self.learner.step(batch.corrected, batch.correction, step=self.step)
        self.book.settle(self.learner.version, self.learner.version, batch.group_ids, now=0.0)
        assert await service.observe.remote(self.step, version, result) is not None
        self.step += 1
        return batch, result


def test_wide_fields_go_to_the_ranks_and_are_gone_when_trained(cluster: Cluster, tmp_path: Path) -> None:
    async def scenario() -> None:
        own: dict[str, Any] = {"data_parallel": 2, "device": "cpu", "routing_replay": "rollout", "tokens_per_microbatch": 300}
        config = LearnerConfig(**own, collective_timeout_s=60.0)
        group, _ = await LearnerGroup.start(
            RankPlaces(config, {}), save_moe(tmp_path / "model"), version=0, bind="127.0.0.1", start_s=300.0, step_s=120.0
        )
        try:
            run = Run(cluster, group, config)
            for _ in range(3):
                await run.sample(run.admitted(), run.workers)
                batch, result = await run.train()
                assert batch.group_ids == [4 * run.step - 4 + i for i in range(GROUPS)]
                assert result.optimizer_steps == 1 and result.routing_agreement < 0.5, "the experts that they brought"
            del batch, result
            await until(lambda: sum(map(objects_on, run.nodes)) <= GROUPS, "those of the last batch alone, which may be asked for again")

            await run.sample(run.admitted(), run.workers)  # two groups on each node
            before = stored_bytes(cluster.head_node)
            gone = run.nodes.pop()
            cluster.remove_node(gone)
            training = asyncio.create_task(run.train())
            await run.source.changes.until(lambda: run.book.has_lost, within_s=60.0)
            lost = run.book.take_lost()
            assert [ticket.group_id for ticket in lost] == [13, 15] and not training.done()
            await run.sample(lost, run.workers[:1])
            batch, result = await training
            assert batch.group_ids == [12, 13, 14, 15] and result.optimizer_steps == 1
            assert stored_bytes(cluster.head_node) > before
            run.source.stop()
        finally:
            group.kill()

    asyncio.run(asyncio.wait_for(scenario(), 400.0))


async def until(is_so: Any, what: str) -> None:
    for _ in range(100):
        if is_so():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(what)
