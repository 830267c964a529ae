"""One Ray cluster of two nodes for all tests of this folder, and processes that read weights there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.actors.on_two_nodes.reader import FAR_READERS, Nodes, reader_on
from tests.actors.two_nodes import two_nodes


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    with two_nodes() as own:
        yield own


@pytest.fixture(scope="package")
def nodes(cluster: Cluster) -> Nodes:
    """With the readers of both; they end with the cluster."""
    (far,), home = cluster.worker_nodes, ray.get_runtime_context().get_node_id()
    return Nodes(far, {far.node_id: [reader_on(far.node_id) for _ in range(FAR_READERS)], home: [reader_on(home)]})
