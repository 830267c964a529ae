"""A Ray cluster that is there before a run, and the run's metrics as Prometheus would find them."""

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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.launch import environment

RAY = str(Path(sys.executable).with_name("ray"))
OPEN = {"RAY_AUTH_MODE": "disabled"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def ray_cluster() -> Iterator[str]:
    """The address of a head node of its own, with one unit of the resource that a rollout worker asks for."""
    port, temp = _free_port(), tempfile.mkdtemp(prefix="ekc-", dir="/tmp")
    variables = environment() | OPEN | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
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
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            head.kill()


def is_up(address: str) -> bool:
    status = subprocess.run([RAY, "status", f"--address={address}"], env=environment() | OPEN, capture_output=True, check=False)
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
