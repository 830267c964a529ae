"""A node of rollout workers that nothing reaches for a while: its processes are stopped until the head has given it up, and go on then.

Of a network that is cut this is what one machine allows: nobody there answers, nothing is closed, and the node itself notices nothing.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import Node, ray_cluster
from tests.e2e.launch import RAY_AGENTS, RECIPE, Run, command_of, living
from tests.failures.books import check_end
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUPS, HEARTBEAT_S = 4, 12
HEALTH = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "4",
}
"""The head gives up a node that answers none of four probes, after some 20 s; Ray's own is a minute."""


def stop(node: Node) -> list[psutil.Process]:
    """All of its processes. Returns: them."""
    stopped: list[psutil.Process] = []
    while new := [process for process in node.processes() if process not in stopped]:  # who was just being started
        for process in new:
            os.kill(process.pid, signal.SIGSTOP)
        stopped += new
    return stopped


def test_a_node_that_is_cut_off_and_comes_back(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", "rollout.workers=2", f"groups_per_step={GROUPS}", "checkpoint.every_steps=5", "evaluation.problems=4"]
    words += ["rollout.sampling.max_tokens=96", f"rollout.engine.deadlines.heartbeat_s={HEARTBEAT_S}"]
    with ray_cluster(**HEALTH) as cluster:
        run = Run(run_dir, str(RECIPE), f"run_dir={run_dir}", *words, address=cluster.address, **cluster.variables)
        try:
            run.wait_until(lambda: "learner 0 is up" in run.events(), "the learner, on the head")
            other = cluster.add_node()
            run.wait_until(lambda: all(f"rollout {i} is up" in run.events() for i in (0, 1)), "a worker on each node")
            before = len(run.metrics())
            run.wait_until(lambda: len(run.metrics()) >= before + 2, "two steps of both")
            assert len(other.processes("ray::RolloutWorker")) == 1 and other.processes("sglang::scheduler")
            follows = "its workers' groups go to others; what wakes on it later ends by itself, and none of its answers counts"
            recovery = Recovery(run, f"node of rollout workers cut off from the network (heartbeat_s {HEARTBEAT_S})", follows)
            stopped = stop(other)
            run.wait_until(lambda: "is gone" in run.events(), "the loss of its worker")
            recovery.wait(steps=3)
            run.wait_until(lambda: cluster.look()["nodes"] == 1, "the head to give the node up")
            for process in stopped:
                os.kill(process.pid, signal.SIGCONT)
            left = [command_of(process) for process in living(stopped, timeout_s=90.0)]
            assert left == [], "a node that was given up ends its processes when it hears of it"
            before = len(run.metrics())
            run.wait_until(lambda: len(run.metrics()) >= before + 3, "three more steps")
            run.interrupt()
            assert run.wait() == 0, run.output()[-4000:]
            gone = re.findall(r"rollout worker (\d+) is gone: ", run.events())
            assert gone.count("1") == 1 and "0" not in gone, "those after it may have been put there before the head knew"
        finally:
            run.close()
    check_end(run, groups_per_step=GROUPS, but=RAY_AGENTS)
