"""A Ray cluster that is there before a run, and the run's metrics as Prometheus would find them."""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.launch import environment

RAY = str(Path(sys.executable).with_name("ray"))
OPEN = {"RAY_AUTH_MODE": "disabled"}
"""Of a cluster that lets everybody in."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class RunningCluster:
    """A head node."""

    address: str
    variables: dict[str, str]
    """By which its users know themselves to it."""


@contextmanager
def ray_cluster(*, asks_for_token: bool = True) -> Iterator[RunningCluster]:
    """A head node of its own, with one unit of the resource that a rollout worker asks for."""
    port, temp = _free_port(), tempfile.mkdtemp(prefix="ekc-", dir="/tmp")
    token = Path(temp) / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    users = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)} if asks_for_token else OPEN
    variables = environment() | users | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    ports = ["--min-worker-port=0", "--max-worker-port=0", f"--ray-client-server-port={_free_port()}"]
    command = [
        *(RAY, "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1"),
        *("--include-dashboard=false", "--num-cpus=4", '--resources={"rollout": 1}', f"--temp-dir={temp}", "--disable-usage-stats", *ports),
    ]
    head = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=temp)
    try:
        deadline = time.monotonic() + 240.0
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert head.poll() is None and time.monotonic() < deadline, "ray start ended, or took four minutes"
            time.sleep(0.5)
        yield RunningCluster(f"127.0.0.1:{port}", users)
    finally:
        head.terminate()
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            head.kill()


def is_up(cluster: RunningCluster) -> bool:
    variables = environment() | cluster.variables
    status = subprocess.run([RAY, "status", f"--address={cluster.address}"], env=variables, capture_output=True, check=False)
    return status.returncode == 0


def scraped_roles(run_dir: Path) -> tuple[set[str], set[str]]:
    """Roles of the actors in the service discovery at this moment, and those of them whose page has metrics of ours."""
    targets = _targets(run_dir)
    return {target["labels"]["role"] for target in targets}, set[str]().union(*map(_scrape, targets))


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
