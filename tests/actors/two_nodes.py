"""A real Ray cluster of two nodes on one machine: what crosses the network from one to the other can be counted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.ray_sessions import leave_ray


@contextmanager
def nodes_of_ray(head: Mapping[str, Any], *others: Mapping[str, Any]) -> Iterator[Cluster]:
    """A cluster of this machine with a head, to which this process belongs, and further nodes, each by what Cluster.add_node takes."""
    variables = {
        "RAY_AUTH_MODE": "disabled",
        "PYTHONWARNINGS": "ignore",
        "RAY_prestart_worker_first_driver": "0",  # processes that no actor here can use: these have an environment
        "RAY_idle_worker_killing_time_threshold_ms": "600000",  # by default a second; the next task's process would import torch anew
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    lean = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}  # daemons whose work nobody looks at here
    own = Cluster(initialize_head=True, head_node_args={**head, **lean})
    try:
        for node in others:
            own.add_node(**node)
        environment = {"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}}
        ray.init(own.address, logging_level="ERROR", log_to_driver=False, runtime_env=environment)
        yield own
    finally:
        leave_ray()
        own.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    """A node for the learner, to which this process belongs, and one for engines."""
    with nodes_of_ray({"num_cpus": 4}, {"num_cpus": 4, "resources": {"rollout": 4}}) as own:
        yield own


def stored_bytes(node: Any) -> int:
    """All that was ever put, or fetched, into a node's object store."""
    from ray._private.internal_api import node_stats

    info = next(info for info in ray.nodes() if info["NodeID"] == node.node_id)
    return int(node_stats(info["NodeManagerAddress"], info["NodeManagerPort"], False).store_stats.cumulative_created_bytes)
