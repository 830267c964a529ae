"""Where Ray places rollout workers that are to avoid a node: elsewhere as long as there is room, and there rather than nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray
from ray.cluster_utils import Cluster

import evenkeel.actors.pool.workers
from evenkeel.actors.carriers import WorkerSettings
from evenkeel.actors.pool.workers import create
from evenkeel.actors.processes.supervision import kill
from tests.actors.pool.pool_cases import worker_settings

pytestmark = pytest.mark.slow

ROOM = 2
"""Workers that a node has room for."""


class Worker:
    """In the place of one that has an engine, which would take longer to import than all the rest."""

    def __init__(self, name: str, settings: WorkerSettings) -> None: ...

    async def node_id(self) -> str:
        return ray.get_runtime_context().get_node_id()


@pytest.fixture
def nodes_of_engines(cluster: Cluster) -> Iterator[list[str]]:
    """Ids of two nodes, alike, where nothing else has room."""
    own = [cluster.add_node(num_cpus=ROOM, resources={"engines": ROOM}) for _ in range(2)]
    yield [node.node_id for node in own]
    for node in own:
        cluster.remove_node(node)


@pytest.mark.parametrize("which", [0, 1])
def test_an_avoided_node_gets_what_has_no_room_elsewhere(nodes_of_engines: list[str], which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two in turn: by chance, or by its order, only one of them would be left alone."""
    avoided, other = nodes_of_engines[which], nodes_of_engines[1 - which]
    monkeypatch.setattr(evenkeel.actors.pool.workers, "RolloutWorker", Worker)
    settings = replace(worker_settings(1), resource="engines")
    workers = []
    try:
        for place in range(2 * ROOM):
            workers.append(create(str(place), settings, [avoided]))
            assert ray.get(workers[-1].actor.node_id.remote(), timeout=120) == (other if place < ROOM else avoided), f"worker {place}"
    finally:
        kill(*(worker.actor for worker in workers))
