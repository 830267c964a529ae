"""Measures from which size on a delta reaches all nodes sooner in waves (actors/weights/relay.py) than from the learner's node alone.

    python benchmarks/delta_relay.py [--nodes 7] [--megabytes 0.3 3 30 300] [--turns 9]

Real nodes of Ray on one machine: this process's, which holds the delta, and others that fetch it and hand it to a task, as for
weight_sync.deltas: all at once, or when it is their turn. Both ways take turns, with new objects each time. All nodes share the machine's
cores and memory here, so that waves can save nothing, and what they cost is seen. Where the learner's network is what a delta waits for, n
nodes wait for n of its copies, and in waves for log2(n + 1) of them. The last lines say from which size on that is less, with what a wave
costs here with the smallest delta.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import ray
from ray.cluster_utils import Cluster

from actors.weights.relay import Relay, fetched
from actors.weights.weight_deltas import task_on
from benchmarks.sides import ROOT, TimeRatio, in_turns, options

BUCKET = 5_000_000
"""Bytes of a delta's largest object: about 2 % of a bucket of weights."""
PATIENCE_S = 600.0
NETWORKS = {"1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}
"""Bytes a second."""


def handed(*parts: np.ndarray) -> int:
    """A Ray task, in place of the one that applies the delta."""
    return sum(len(part) for part in parts)


def delta_of(size: int) -> list[Any]:
    """References to new objects in this node's store."""
    count = -(-size // BUCKET)
    return [ray.put(np.random.default_rng().integers(256, size=size // count, dtype=np.uint8)) for _ in range(count)]


async def everywhere(size: int, nodes: Sequence[str], *, in_waves: bool) -> float:
    """Seconds until each node's task has the delta."""
    delta, relay = delta_of(size), Relay()

    async def to(node: str) -> None:
        if in_waves:
            await relay.in_turn(partial(task_on(fetched, node).remote, delta), PATIENCE_S)
        await task_on(handed, node).remote(*delta)

    began = time.perf_counter()
    await asyncio.gather(*map(to, nodes))
    return time.perf_counter() - began


@contextmanager
def nodes_of(count: int, store_bytes: int) -> Iterator[list[str]]:
    """Ids of nodes beside this process's own."""
    os.environ.update({"RAY_AUTH_MODE": "disabled", "PYTHONWARNINGS": "ignore"})
    lean = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    with tempfile.TemporaryDirectory(prefix="ek-") as folder:
        each = {"num_cpus": 1, "object_store_memory": store_bytes}
        cluster = Cluster(initialize_head=True, head_node_args={**each, **lean, "temp_dir": folder})
        try:
            others = [cluster.add_node(**each, wait=False) for _ in range(count)]
            cluster.wait_for_nodes()
            environment = {"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}}
            ray.init(cluster.address, logging_level="ERROR", log_to_driver=False, runtime_env=environment)
            yield [node.node_id for node in others]
        finally:
            ray.shutdown()
            cluster.shutdown()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--nodes", type=int, default=7, help="nodes that fetch; one fewer than a power of two fills the last wave")
    parser.add_argument("--megabytes", type=float, nargs="*", default=[0.3, 3, 30, 300], help="sizes of the delta")
    parser.add_argument("--turns", type=int, default=9, help="times that each way is taken with each size; at least 2, for the quartiles")
    asked = parser.parse_args()
    count, sizes = asked.nodes, [int(1e6 * size) for size in sorted(asked.megabytes)]
    waves, pause_s = math.ceil(math.log2(count + 1)), 0.0
    with nodes_of(count, 3 * max(*sizes, 100_000_000)) as nodes:
        print(f"{count} nodes, {waves} waves; median of {asked.turns} turns (quartiles)")
        for size in sizes:

            def side(_: int, *, in_waves: bool, size: int = size) -> float:
                return asyncio.run(everywhere(size, nodes, in_waves=in_waves))

            took = in_turns({"at once": partial(side, in_waves=False), "waves": partial(side, in_waves=True)}, asked.turns, warm_up=2)
            once_s, waves_s = (statistics.median(took[name]) for name in ("at once", "waves"))
            pause_s = pause_s or max(0.0, waves_s - once_s) / waves
            ratio = TimeRatio.of(took["waves"], took["at once"])
            print(f"{size / 1e6:6g} MB: at once {once_s:.3f} s, in waves {waves_s:.3f} s: {ratio} times as long", flush=True)
    print(f"a wave costs {1000 * pause_s:.0f} ms here; where the learner's network is what all wait for, waves are shorter from")
    for name, rate in NETWORKS.items():
        print(
            f"{name:>10s}: " + ", ".join(f"{shorter_from(others, rate, pause_s) / 1e6:.2g} MB for {others} nodes" for others in (3, 7, 31))
        )


def shorter_from(nodes: int, rate: float, pause_s: float) -> float:
    """Bytes from which `nodes` copies from one node take longer than waves do. Args: rate: of a node's network, bytes a second."""
    waves = math.ceil(math.log2(nodes + 1))
    return rate * pause_s * waves / (nodes - waves)


if __name__ == "__main__":
    main()
