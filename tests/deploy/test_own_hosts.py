"""A cluster of two hosts from what `evenkeel deploy --local` prints, by the real `ray up` over ssh; a run on it is stopped and resumed.

The hosts are loopback addresses with an sshd, a home and a copy of the working tree each (deploy/fetch_sshd.sh fetches Debian's sshd).
Behaviours locked here: Ray lets nobody in without the token; workers are placed on both hosts; a real Prometheus with the shipped
configuration finds them, and Ray's own metrics; `ray job logs` has the run's output; `ray job stop` ends the run with a checkpoint of
the last finished step, although it tells every process of the job; another job goes on from there, and by itself after kill -9 of its
process that trains, with each prompt once; nothing stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from evenkeel.actors.metrics.step_metrics import by_worker
from evenkeel.actors.record.run_folder import RunFolder
from tests.deploy.loopback_hosts import SSHD
from tests.deploy.own_hosts import ADDRESSES, OwnCluster, free_ports, own_cluster, until
from tests.e2e.conftest import small_model as small_model
from tests.e2e.launch import ROOT, command_of, json_lines
from tests.failures.books import check_books

PROMETHEUS = ROOT / ".tools" / "prometheus" / "prometheus"
GROUPS, MORE = 4, 40
"""Of a step of small.yaml; steps of the second job."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not (SSHD / "usr" / "sbin" / "sshd").exists(), reason="no sshd: run deploy/fetch_sshd.sh (Debian's package)"),
]


@dataclass
class Story:
    """What the tests look at afterwards."""

    run_dir: Path
    without_token: int = 0
    """HTTP status of the dashboard's answer."""
    placed: dict[str, set[str]] = field(default_factory=dict)
    """Addresses of the hosts by process, while the first job ran."""
    scraped: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of Prometheus: value by host of a query; empty without one."""
    logs: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    lines_at_stop: list[dict[str, Any]] = field(default_factory=list)
    checkpoints_at_stop: list[int] = field(default_factory=list)
    left: dict[str, set[str]] = field(default_factory=dict)
    """As `placed`, after both jobs."""

    def metrics(self) -> list[dict[str, Any]]:
        return json_lines(self.run_dir / "metrics.jsonl")

    def steps(self) -> list[int]:
        return [line["step"] for line in self.metrics()]

    def ledger(self) -> list[dict[str, Any]]:
        return json_lines(self.run_dir / "ledger.jsonl")


@pytest.fixture(scope="module")
def story(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    shared = tmp_path_factory.mktemp("shared")
    story = Story(shared / "run")
    folder = Path(tempfile.mkdtemp(prefix="eh", dir="/tmp"))  # sockets of Ray and of ssh lie below it
    try:
        with own_cluster(folder, small_model) as cluster:
            _play(cluster, story, small_model, folder)
        yield story
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _play(cluster: OwnCluster, story: Story, model: Path, folder: Path) -> None:
    until(lambda: cluster.nodes() == set(ADDRESSES), "both hosts in the cluster", 900.0)
    try:
        cluster.get("/api/jobs/", with_token=False)
    except urllib.error.HTTPError as error:
        story.without_token = error.code
    (discovery,) = free_ports(1)
    settings = [
        *(f"model={model}", f"run_dir={story.run_dir}", "ray.address=auto", "rollout.workers=2", "checkpoint.every_steps=0"),
        *("metrics.bind=node", f"metrics.discovery_port={discovery}"),
    ]
    _submit(cluster, "first", "--retries", "1", "tests/e2e/small.yaml", *settings)
    until(
        lambda: len([line for line in story.metrics() if _workers(line) == {"0", "1"}]) >= 2,
        "two steps with groups of both workers", 1800.0, told=lambda: cluster.job("logs", "first"),
    )  # fmt: skip
    story.placed = _where(cluster)
    if PROMETHEUS.exists():
        with _prometheus(folder, discovery) as ask:
            workers, ray_nodes = 'evenkeel_rollout_generated_tokens_total{role="rollout"}', 'up{role="ray"} == 1'
            until(lambda: set(ask(workers)) == set(ADDRESSES) <= set(ask(ray_nodes)), "both hosts in Prometheus", 600.0)
            story.scraped = {"workers": ask(workers), "ray": ask(ray_nodes)}
    cluster.job("stop", "first", timeout_s=900.0)
    story.lines_at_stop = story.metrics()
    story.checkpoints_at_stop = [one.step for one in RunFolder(story.run_dir).checkpoints()]
    story.statuses["first"], story.logs["first"] = cluster.status("first"), cluster.job("logs", "first")
    again = (f"steps={len(story.lines_at_stop) + MORE}", "checkpoint.every_steps=2", "--retries", "1")
    _submit(cluster, "second", "--resume", str(story.run_dir), *again)
    until(lambda: _has_saved_beyond(story), "a checkpoint of the second job", 1800.0, told=lambda: cluster.job("logs", "second"))
    os.kill(_that_trains(cluster), signal.SIGKILL)
    until(lambda: cluster.status("second") not in ("PENDING", "RUNNING"), "the second job's end", 1800.0)
    story.statuses["second"], story.logs["second"] = cluster.status("second"), cluster.job("logs", "second")
    with contextlib.suppress(AssertionError):  # what is left then, the test names
        until(lambda: not any(_where(cluster).values()), "no process of the run", 600.0)
    story.left = _where(cluster)


def _submit(cluster: OwnCluster, name: str, *words: str) -> None:
    """As deploy/README.md has it."""
    run = f"cd ~/evenkeel && source .venv/bin/activate && exec evenkeel train {' '.join(words)}"
    environment = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}})
    cluster.job("submit", f"--submission-id={name}", "--no-wait", f"--runtime-env-json={environment}", "--", "bash", "-c", run)


def _has_saved_beyond(story: Story) -> bool:
    """The first job's checkpoint is not the newest any more."""
    return RunFolder(story.run_dir).checkpoints()[-1].step > story.checkpoints_at_stop[-1]


def _that_trains(cluster: OwnCluster) -> int:
    """The job's process that `--retries` looks after, on the head."""
    (child,) = (one.pid for one in cluster.hosts.processes()[ADDRESSES[0]] if "evenkeel.cli" in command_of(one))
    return child


def _where(cluster: OwnCluster) -> dict[str, set[str]]:
    return {what: cluster.running(what) for what in ("ray::RolloutWorker", "sglang::scheduler", "ray::LearnerRank", "evenkeel train")}


def _workers(line: dict[str, Any]) -> set[str]:
    return {name for name, groups in by_worker(line, "groups").items() if groups}


@contextlib.contextmanager
def _prometheus(folder: Path, discovery: int) -> Iterator[Any]:
    """A real one with the shipped configuration, but for the port; gives {host: value} of a query."""
    shipped = (ROOT / "deploy" / "prometheus.yml").read_text()
    config = yaml.safe_load(shipped.replace("127.0.0.1:9400", f"{ADDRESSES[0]}:{discovery}"))
    config |= {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "rule_files": []}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    where = (f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}")
    command = [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}", *where]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(query: str) -> dict[str, float]:
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(url, timeout=5) as answer:
            found = json.load(answer)["data"]["result"]
        return {result["metric"]["instance"].rpartition(":")[0]: float(result["value"][1]) for result in found}

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_nobody_is_let_in_without_the_token(story: Story) -> None:
    assert story.without_token == 401


def test_workers_are_placed_on_both_hosts(story: Story) -> None:
    """Each host offers one unit of what a worker asks for; the driver is where the job was put, on the head."""
    assert story.placed["ray::RolloutWorker"] == set(ADDRESSES)
    assert story.placed["sglang::scheduler"] == set(ADDRESSES), "with their engines"
    assert len(story.placed["ray::LearnerRank"]) == 1
    assert story.placed["evenkeel train"] == {ADDRESSES[0]}


@pytest.mark.skipif(not PROMETHEUS.exists(), reason="no real Prometheus: run deploy/fetch_prometheus.sh (Debian's package)")
def test_a_real_prometheus_finds_the_workers_of_both_hosts(story: Story) -> None:
    assert set(story.scraped["workers"]) == set(ADDRESSES) and min(story.scraped["workers"].values()) > 0
    assert story.scraped["ray"] == dict.fromkeys(ADDRESSES, 1.0)


def test_a_stopped_job_has_saved_its_last_step(story: Story) -> None:
    """Its only checkpoint is that of its end. Every process of the job is told, the parent that passes it on to its child as well."""
    last = story.lines_at_stop[-1]["step"]
    assert story.statuses["first"] == "STOPPED"
    assert story.checkpoints_at_stop == [last]
    assert story.logs["first"].count("interrupted (SIGTERM): ending with a checkpoint") == 1
    assert "ending at once" not in story.logs["first"]


def test_another_job_goes_on_from_there(story: Story) -> None:
    steps = [line["step"] for line in story.metrics()]
    assert story.statuses["second"] == "SUCCEEDED"
    assert steps == list(range(1, len(story.lines_at_stop) + MORE + 1))
    assert f"step {steps[-1]}" in story.logs["second"]
    told = [event.text for event in RunFolder(story.run_dir).read_events()]
    (retried,) = [text for text in told if "(retry" in text]
    assert retried.startswith("the run's process was killed by SIGKILL after step ") and retried.endswith("(retry 1 of 1)")
    resumed_from = [step for text in told for step in re.findall(r"going on from step (\d+)", text)]
    first, then = map(int, resumed_from[:2])
    assert story.checkpoints_at_stop[-1] == first < then < steps[-1], "not from the first job's, nor was there nothing left to do"
    check_books(story, groups_per_step=GROUPS, steps=steps[-1])


def test_nothing_of_the_run_stays_behind(story: Story) -> None:
    """Soon after the second job's end, by the kind of process and host."""
    assert story.left == {what: set() for what in story.placed}
