"""The head of a joined cluster dies, and nobody has kept what it knew: the run ends, says so, and goes on from its checkpoint elsewhere.

What Ray's GCS fault tolerance gives, which takes a Redis of its own, is not tested here.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.cluster import RunningCluster, ray_cluster
from tests.e2e.launch import RECIPE, Run
from tests.failures.books import check_books
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, GROUPS = 8, 4


def kill_head(cluster: RunningCluster, *, with_its_node: bool) -> None:
    """kill -9 of Ray's control service, as a driver on another node sees it; or of all that Ray has there, the driver's own node, too."""
    servers = [process.pid for process in cluster.head.processes("gcs_server")]
    everything = [process.pid for process in cluster.head.processes()]
    os.kill(cluster.head.main.pid, signal.SIGKILL)  # it would end the others in order
    for pid in everything if with_its_node else servers:
        if pid != cluster.head.main.pid:
            os.kill(pid, signal.SIGKILL)


def until_its_head_dies(run: Run, cluster: RunningCluster, *, after: int, with_its_node: bool) -> Recovery:
    """One sentence, which names the head, and a line that says how to go on. Returns: what that costs."""
    run.wait_until(lambda: len(run.metrics()) >= after, "a step after a checkpoint")
    follows = "the run ends and says so within a minute; a new head is started, and it is resumed by hand"
    recovery = Recovery(run, "head of a joined cluster killed", follows)
    kill_head(cluster, with_its_node=with_its_node)
    assert run.wait(150.0) == 1, run.output()[-4000:]
    recovery.begins_here()
    (said,) = re.findall(r"^evenkeel: .*", run.output(), re.MULTILINE)
    assert said.startswith(f"evenkeel: the head of the Ray cluster at {cluster.address} is gone"), run.output()[-4000:]
    assert f"evenkeel train --resume {run.run_dir}" in said and said.removeprefix("evenkeel: ") in run.events()
    assert "Traceback" not in run.output() and run.orphans(30.0) == []
    return recovery


def test_a_head_that_dies_ends_the_run_and_another_one_has_it_go_on(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [f"model={small_model}", f"steps={STEPS}", f"groups_per_step={GROUPS}", "checkpoint.every_steps=2", "evaluation.problems=4"]
    arguments = [str(RECIPE), f"run_dir={run_dir}", *words]
    recovery: Recovery | None = None
    for with_its_node in (False, True):
        with ray_cluster() as cluster:
            run = Run(run_dir, *arguments, address=cluster.address, **cluster.variables)
            try:
                if recovery is not None:
                    recovery.wait(by=run)
                recovery = until_its_head_dies(run, cluster, after=3 + 2 * with_its_node, with_its_node=with_its_node)
            finally:
                run.close()
        arguments = ["--resume", str(run_dir)]
    with ray_cluster() as cluster:
        run = Run(run_dir, *arguments, address=cluster.address, **cluster.variables)
        try:
            assert run.wait() == 0, run.output()[-4000:]
        finally:
            run.close()
    check_books(run, groups_per_step=GROUPS, steps=STEPS)
    assert run.events().count("going on from step") == 2
