"""The head of a joined cluster hangs, and listens still: the run says so, and is through when the head is woken."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.cluster import RunningCluster, ray_cluster
from tests.e2e.launch import ALL_INTERFACES, JOINED, RECIPE, Run, listening, reach_by_name, reach_of_the_page
from tests.failures.books import check_books
from tests.failures.measured import REAL, Measured

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, GROUPS = 12, 4
HANGS_S = 45.0
"""Ray's processes end when the head has given no sign for a minute."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """Of a head that listens where other machines reach it."""
    with ray_cluster(host="127.0.0.2") as there:
        yield there


@pytest.fixture(scope="module")
def run(cluster: RunningCluster, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run_dir = tmp_path_factory.mktemp("head") / "run"
    words = [f"model={small_model}", f"steps={STEPS}", f"groups_per_step={GROUPS}", "checkpoint.every_steps=2", "evaluation.problems=4"]
    words.append("weight_sync.transport=broadcast")
    run = Run(run_dir, str(RECIPE), f"run_dir={run_dir}", *words, address=cluster.address, **cluster.variables)
    try:
        run.wait_until(lambda: len(run.metrics()) >= 1, "a step")
        yield run
    finally:
        run.close()


def test_the_page_names_whatever_listens_for_a_run_on_a_cluster(run: Run, cluster: RunningCluster) -> None:
    """docs/security.md, of the run's processes and of the head's, with the interfaces on which they listen."""
    page = reach_of_the_page(JOINED)
    found = reach_by_name(run.listening() | listening(cluster.head.processes()), page)
    assert not found.keys() - page.keys(), "docs/security.md doesn't name them"
    assert {"gcs_server", "raylet", "evenkeel", "RolloutWorker", "LearnerRank", "sglang::scheduler"} <= found.keys()
    assert not {name: widest for name, widest in found.items() if widest > page[name]}, "more is open than the page says"
    assert not {name for name, widest in found.items() if page[name] == ALL_INTERFACES > widest}, "less is open than the page says"


def test_groups_of_torch_listen_on_the_nodes_own_address_alone(run: Run, cluster: RunningCluster) -> None:
    """That by which weights are broadcast. On all interfaces an actor has one port, which is Ray's."""

    def of_learner() -> set[str]:
        return {address for _, address in listening(cluster.head.processes("LearnerRank"))}

    run.wait_until(lambda: "127.0.0.2" in of_learner(), "the group's store")
    for name in ("LearnerRank", "RolloutWorker"):
        (process,) = cluster.head.processes(f"ray::{name}")
        listeners = [one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        ports = [one.port for one in listeners if one.ip in ("::", "0.0.0.0")]
        assert len(ports) == 1, name


def test_a_head_that_hangs_is_told_and_waited_for(run: Run, cluster: RunningCluster) -> None:
    servers = [process.pid for process in cluster.head.processes("gcs_server")]
    folder, before = RunFolder.view(run.run_dir), max(run.steps())
    began = time.monotonic()
    for pid in servers:
        os.kill(pid, signal.SIGSTOP)
    try:
        run.wait_until(lambda: " hangs: it listens, " in run.events(), "that the head hangs", timeout_s=120.0)
        told_s, meanwhile = time.monotonic() - began, max(run.steps()) - before
        time.sleep(max(0.0, HANGS_S - told_s))
    finally:
        for pid in servers:
            os.kill(pid, signal.SIGCONT)
    assert run.wait() == 0, run.output()[-4000:]
    said = [event.text for event in folder.read_events() if "the head of the Ray cluster" in event.text]
    assert len(said) == 2 and said[0].startswith(f"the head of the Ray cluster at {cluster.address} hangs: "), said
    assert " answers again, " in said[1]
    check_books(run, groups_per_step=GROUPS, steps=STEPS)
    assert "The run goes back to" not in run.events() and run.orphans(30.0) == []
    follows = f"said after {told_s:.0f} s; the run goes on with what it has ({meanwhile} steps until then), and ends in order"
    Measured(f"head of a joined cluster stopped for {HANGS_S:.0f} s", follows, None, "nothing", REAL).write()
