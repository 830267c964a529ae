"""Half of a real wait is over, on a real Ray with processes of two jobs: where the waiting run's own stand is in its folder."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from evenkeel.actors.processes import supervision
from evenkeel.actors.processes.supervision import HALF_OVER, wait_for
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.stack_collector import StackCollector
from evenkeel.actors.record.stack_summary import newest_stack_summary
from evenkeel.correction.errors import DeadlineExceeded
from evenkeel.rollout.stacks import register_stack_dump
from tests.ray_sessions import leave_ray

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
_OTHER_RUN = """
import sys, time, ray
from tests.actors.record.test_stacks_in_ray import Stands
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False, namespace="other")
actor = ray.remote(Stands).options(num_cpus=0).remote()
print(ray.get(actor.pid.remote()), flush=True)
time.sleep(300)
"""


class Stands:
    """A part of a run."""

    def __init__(self) -> None:
        register_stack_dump()

    def pid(self) -> int:
        return os.getpid()

    def stands_here(self) -> None:
        time.sleep(300.0)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(found.address, logging_level="ERROR", log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
    yield found
    leave_ray()
    found.shutdown()


def test_a_wait_that_is_half_over_leaves_the_stacks_of_the_runs_own_processes(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is in a call, one is stopped, and one belongs to another run, which is nobody's business."""
    monkeypatch.setattr(supervision, "_LONG_S", 0.0)
    folder = RunFolder.create(tmp_path / "run", "run")
    command = [sys.executable, "-c", _OTHER_RUN, cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as other:
        try:
            assert other.stdout is not None
            theirs = int(other.stdout.readline())
            busy, stopped = (ray.remote(Stands).options(num_cpus=0).remote() for _ in range(2))
            busy_pid, stopped_pid = ray.get([busy.pid.remote(), stopped.pid.remote()], timeout=60)
            os.kill(stopped_pid, signal.SIGSTOP)

            async def scenario() -> None:
                collector = StackCollector(folder, folder.event)
                HALF_OVER.set(collector.half_over)
                with pytest.raises(DeadlineExceeded):
                    await wait_for(busy.stands_here.remote(), "a step <- rank 0", deadline_s=4.0)
                assert collector._collecting is not None
                await collector._collecting

            asyncio.run(scenario())
            os.kill(stopped_pid, signal.SIGCONT)
        finally:
            other.kill()
    text = (folder.path / "stacks" / "01.txt").read_text()
    assert text.startswith("half of the time for a step <- rank 0 is over\n") and " in stands_here\n" in text
    assert f"(process {stopped_pid})\nsays nothing; state T (stopped)\n" in text
    assert f"(process {theirs})" not in text and f"(process {busy_pid})" in text
    gist = "\n".join(newest_stack_summary(folder.path))
    assert "stands_here" in gist and "state T (stopped)" in gist
    assert "half of the time for a step <- rank 0 is over" in folder.events_path.read_text()
    folder.close()
