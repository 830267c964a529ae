"""An object store that is full, on a node whose disk has no room either: a real Ray that takes any disk for a full one."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from evenkeel.actors.driver.recovery import Lost, lost_among, lost_answer
from evenkeel.actors.processes.supervision import wait_for
from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.cluster import RunningCluster, ray_cluster
from tests.e2e.launch import RECIPE, Run, environment
from tests.failures.books import check_end
from tests.failures.measured import Recovery
from tests.ray_sessions import leave_ray

pytestmark = pytest.mark.slow

STORE = 80 << 20
"""Bytes; the least that Ray takes is 75 MiB."""


class Learner:
    """Hands out weights that stay where they are."""

    def export(self, size: int) -> list[Any]:
        return [ray.put(np.ones(size, dtype=np.uint8))]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    settings = {"local_fs_capacity_threshold": 0.001, "automatic_object_spilling_enabled": False}
    head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False, "_system_config": settings}
    found = Cluster(initialize_head=True, head_node_args=head)
    ray.init(found.address, logging_level="ERROR", log_to_driver=False)
    yield found
    leave_ray()
    found.shutdown()


def test_weights_without_room_take_the_run_back_and_the_reason_is_said(cluster: Cluster) -> None:
    """The learner lives, but nobody has what it made: an answer that is lost. Before, Ray's own error ended the run."""
    learner = ray.remote(Learner).options(num_cpus=0).remote()

    async def scenario() -> tuple[list[Any], Exception, Lost]:
        kept = [await wait_for(learner.export.remote(STORE // 2), "copy of the weights v1 <- rank 0", deadline_s=60.0)]
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            while len(kept) < 4:
                kept.append(await wait_for(learner.export.remote(STORE), "copy of the weights v2 <- rank 0", deadline_s=120.0))
        return kept, caught.value, await lost_among({"learner rank 0": learner}, caught.value)

    kept, error, lost = asyncio.run(scenario())
    assert 1 <= len(kept) < 4 and lost.parts == () and lost.answer == lost_answer(error)
    assert lost_answer(error).startswith("no room in Ray's object store (") and "ray.temp_dir" in lost_answer(error)


FILLS = """
import select, sys, numpy, ray
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
kept, is_told = [], False
def is_over(wait_s):
    return select.select([sys.stdin], [], [], wait_s)[0]
def fill(size):
    try:
        while not is_over(0.0):
            kept.append(ray.put(numpy.ones(size, dtype=numpy.uint8)))
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
        pass
fill(1 << 20)
while not is_over(0.02):
    fill(1 << 14)
    if not is_told:
        is_told = True
        print("full", flush=True)
"""


@contextmanager
def filled(cluster: RunningCluster) -> Iterator[None]:
    """By another job, to the last 16 KiB, which takes what becomes free, too; it takes its objects along at the end."""
    variables = environment() | cluster.variables
    words = [sys.executable, "-c", FILLS, cluster.address]
    with subprocess.Popen(words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        try:
            assert other.stdout.readline() == "full\n"
            yield
        finally:
            other.stdin.close()


@pytest.mark.engine
def test_a_run_goes_on_when_there_is_room_again(small_model: Path, tmp_path: Path) -> None:
    run_dir, groups = tmp_path / "run", 16  # a batch of fewer is small enough to go by value, past the store
    disk = json.dumps({"local_fs_capacity_threshold": 0.001})
    words = [f"model={small_model}", "steps=100000", f"groups_per_step={groups}", "checkpoint.every_steps=2", "evaluation.problems=4"]
    with ray_cluster(f"--object-store-memory={STORE}", f"--system-config={disk}") as cluster:
        run = Run(run_dir, str(RECIPE), f"run_dir={run_dir}", *words, address=cluster.address, **cluster.variables)
        try:
            run.wait_until(lambda: len(run.metrics()) >= 3, "a step after a checkpoint")
            follows = "an answer is lost with it: the run goes back to its last checkpoint, says what is missing, and goes on from it"
            with filled(cluster):
                recovery = Recovery(run, "object store full, and the disk under it", follows)
                run.wait_until(lambda: "no room in Ray's object store (" in run.events(), "the full store to be said")
                recovery.begins_here()
            recovery.wait()
            run.process.send_signal(signal.SIGTERM)  # it is to last until the store is full, however long that takes
            assert run.wait() == 128 + signal.SIGTERM, run.output()[-4000:]
        finally:
            run.close()
    check_end(run, groups_per_step=groups, goes_back=True)
    losses = [event.text for event in RunFolder.view(run_dir).read_events() if event.text.startswith("lost: ")]
    assert all(text.startswith("lost: an answer (") and "no room in Ray's object store (" in text for text in losses), losses
    assert losses and all("more free disk where Ray has its session" in text for text in losses)
