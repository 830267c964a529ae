"""A run on a Ray cluster that was there before it, and its metrics as Prometheus would find them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import RECIPE, ROOT, environment

pytestmark = pytest.mark.engine
RAY = str(Path(sys.executable).with_name("ray"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """A head node of its own, with one unit of the resource that a rollout worker asks for: (address, environment)."""
    port, temp = _free_port(), tempfile.mkdtemp(prefix="ekc-", dir="/tmp")
    variables = {**environment(), "RAY_AUTH_MODE": "disabled", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    ports = ["--min-worker-port=0", "--max-worker-port=0", f"--ray-client-server-port={_free_port()}"]
    command = [
        *(RAY, "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1"),
        *("--include-dashboard=false", "--num-cpus=4", '--resources={"rollout": 1}', f"--temp-dir={temp}", "--disable-usage-stats", *ports),
    ]
    head = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=temp)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert head.poll() is None, "ray start ended"
            time.sleep(0.5)
        yield f"127.0.0.1:{port}", variables
    finally:
        head.terminate()
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            head.kill()


def test_run_joins_a_cluster_and_its_actors_can_be_scraped(
    cluster: tuple[str, dict[str, str]], small_model: Path, tmp_path: Path
) -> None:
    """Every actor that joined is in the service discovery, serves evenkeel_ metrics, and the cluster outlives the run."""
    address, variables = cluster
    run_dir, output = tmp_path / "run", tmp_path / "output.txt"
    words = [str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", "steps=3", f"ray.address={address}"]
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "actors.commands.cli", "train", *words], env=variables, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT
        )
        roles: set[str] = set()
        scraped: set[str] = set()
        while process.poll() is None:
            for target in _targets(run_dir):
                roles.add(target["labels"]["role"])
                scraped |= _scrape(target)
            time.sleep(0.5)
    assert process.returncode == 0, output.read_text()[-3000:]
    assert roles == {"controller", "learner", "rollout"}
    assert scraped == {"controller", "learner", "rollout"}
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 3
    status = subprocess.run([RAY, "status", f"--address={address}"], env=variables, capture_output=True, check=False)
    assert status.returncode == 0, "the cluster must be there after the run"


def _targets(run_dir: Path) -> list[dict[str, Any]]:
    events = run_dir / "events.log"
    found = re.search(r"discovery at (http://\S+)", events.read_text()) if events.exists() else None
    if found is None:
        return []
    try:
        with urllib.request.urlopen(found[1], timeout=5) as answer:
            return list(json.load(answer))
    except OSError:
        return []  # the run is just starting or ending


def _scrape(target: dict[str, Any]) -> set[str]:
    """The target's role if its page has metrics of ours."""
    try:
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=5) as page:
            return {target["labels"]["role"]} if b"evenkeel_" in page.read() else set()
    except OSError:
        return set()
