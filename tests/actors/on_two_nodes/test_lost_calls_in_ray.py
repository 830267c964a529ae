"""Two real ranks as Ray actors, and a driver whose calls Ray loses: some on their way, of others the answer.

Ray does that itself (RAY_testing_rpc_failure), in a process of its own; the ranks' processes know nothing of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster

from evenkeel.actors.ranks.learner_group import LearnerGroup
from tests.actors.on_two_nodes.test_learner_ranks_in_ray import learner, two_steps, two_steps_and_back

pytestmark = pytest.mark.slow

RANKS = "ranks.pickle"
"""The actors, for the other process."""
LOSSES = {"CoreWorkerService.grpc_client.PushTask": {"num_failures": 7, "req_failure_prob": 50, "resp_failure_prob": 50}}
"""Each of the first seven calls: six are a step's, to two ranks."""


async def driven(folder: Path, calls: int) -> list[dict[str, str]]:
    """Two steps, by a driver that loses calls. Args: calls: collective ones that the ranks have had."""
    group = LearnerGroup(cloudpickle.loads((folder / RANKS).read_bytes()), version=2, step_s=120.0)
    group._collective.calls = calls
    return await two_steps(group)


def main() -> None:
    """The driver's process."""
    address, folder, calls = sys.argv[1:]
    ray.init(address, logging_level="ERROR", log_to_driver=False)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    print(json.dumps(asyncio.run(driven(Path(folder), int(calls)))))


def test_lost_calls_and_lost_answers_change_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    """A step whose answer is lost is done once, and one that has come to a single rank is made whole: the ranks stay in step."""

    async def scenario() -> None:
        async with learner(tmp_path) as group:
            undisturbed = await two_steps_and_back(group, tmp_path)
            (tmp_path / "learner" / RANKS).write_bytes(cloudpickle.dumps(list(group.ranks.values())))
            code = "from tests.actors.on_two_nodes.test_lost_calls_in_ray import main; main()"
            words = [sys.executable, "-c", code, cluster.address, str(tmp_path / "learner"), str(group._collective.calls)]
            environment = {**os.environ, "RAY_testing_rpc_failure": json.dumps(LOSSES), "PYTHONPATH": os.getcwd()}
            ended = await asyncio.to_thread(subprocess.run, words, env=environment, capture_output=True, text=True, timeout=300)
            assert ended.returncode == 0, ended.stderr[-4000:]
            assert ended.stderr.count("can't be reached (ActorUnavailableError); asked again") >= 3, ended.stderr[-4000:]
            assert json.loads(ended.stdout.splitlines()[-1]) == undisturbed

    asyncio.run(asyncio.wait_for(scenario(), 400.0))
