"""A node with a rollout worker goes at once, by Ray's cluster utilities, in a run whose other worker is on the head's node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.e2e.cluster import OPEN
from tests.e2e.launch import RAY_AGENTS, RECIPE, Run, environment
from tests.failures.books import check_end
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUPS = 4
OF_NODE = {"num_cpus": 4, "resources": {"rollout": 1.0}}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name, value in (environment() | OPEN).items():  # as its nodes are to have it
        monkeypatch.setenv(name, value)
    found = Cluster(initialize_head=True, head_node_args={**OF_NODE, "include_dashboard": False})
    yield found
    found.shutdown()


def test_a_run_outlives_a_node_that_is_removed(cluster: Cluster, small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", "rollout.workers=2", f"groups_per_step={GROUPS}", "checkpoint.every_steps=5", "evaluation.problems=4"]
    words += ["rollout.sampling.max_tokens=96", "ray.allow_unauthenticated=true"]
    run = Run(run_dir, str(RECIPE), f"run_dir={run_dir}", *words, address=cluster.address, **OPEN)
    try:
        run.wait_until(lambda: "learner 0 is up" in run.events(), "the learner, on the head")
        other = cluster.add_node(**OF_NODE)
        run.wait_until(lambda: all(f"rollout {i} is up" in run.events() for i in (0, 1)), "a worker on each node")
        before = len(run.metrics())
        run.wait_until(lambda: len(run.metrics()) >= before + 2, "two steps of both")
        follows = "its worker's groups go to others, a node that comes gets a new one"
        recovery = Recovery(run, "node of a rollout worker removed, in a run of two", follows)
        cluster.remove_node(other, allow_graceful=False)
        run.wait_until(lambda: "rollout worker 1 is gone: " in run.events(), "the loss to be noticed")
        recovery.wait(steps=3)
        cluster.add_node(**OF_NODE)
        run.wait_until(lambda: "rollout 2 is up" in run.events(), "a worker on the new node")
        before = len(run.metrics())
        run.wait_until(lambda: len(run.metrics()) >= before + 3, "three more steps")
        run.interrupt()
        assert run.wait() == 0, run.output()[-4000:]
    finally:
        run.close()
    check_end(run, groups_per_step=GROUPS, but=RAY_AGENTS)
    assert run.events().count(" is gone: ") == 1
