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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lab.ports import free_port
from tests.e2e.launch import command_of, environment

RAY = str(Path(sys.executable).with_name("ray"))
OPEN = {"RAY_AUTH_MODE": "disabled"}
"""Of a cluster that lets everybody in."""


@dataclass
class Node:
    """One of a cluster, with one unit of the resource that a rollout worker asks for: `ray start`, and all that it has started."""

    main: subprocess.Popen[bytes]
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    """Its processes, as far as anybody has looked."""

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Those that are alive and have this in their command line; also of a parent that is gone, if they were seen before."""
        with suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.main.pid)
            self.seen |= {process.pid: process for process in [main, *main.children(recursive=True)]}
        for known in list(self.seen.values()):
            with suppress(psutil.NoSuchProcess):
                self.seen |= {process.pid: process for process in known.children(recursive=True)}
        return [process for process in self.seen.values() if process.is_running() and word in command_of(process)]

    def end(self) -> None:
        """In order if it can, and whatever is left by process id."""
        left = self.processes()
        self.main.terminate()
        try:
            self.main.wait(30)
        except subprocess.TimeoutExpired:
            self.main.kill()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@dataclass
class RunningCluster:
    """A head node, and others that were added."""

    address: str
    variables: dict[str, str]
    """By which its users know themselves to it."""
    head: Node
    added: list[Node] = field(default_factory=list)

    def add_node(self, address: str = "127.0.0.2", *words: str, inside: Sequence[str] = ()) -> Node:
        """Args: address: of this machine, and another one than the head's. words: of `ray start`. inside: of a command that becomes it."""
        command = [*inside, RAY, "start", "--block", f"--address={self.address}", f"--node-ip-address={address}", *_OF_NODE, *words]
        node = _started(command, environment() | self.variables | _PATIENCE)
        self.added.append(node)
        return node

    def look(self) -> dict[str, Any]:
        """Live `nodes`; what jobs hold: live `actors` by class, states of `placement_groups`, resources that are `there` and `free`."""
        variables = environment() | self.variables
        told = subprocess.run([sys.executable, "-c", _LOOK, self.address], env=variables, capture_output=True, text=True, check=True)
        return dict(json.loads([line for line in told.stdout.splitlines() if line.startswith("{")][-1]))  # Ray's own lines stand around it


_LOOK = """
import json, sys, ray
from ray.util.placement_group import placement_group_table
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(json.dumps({
    "nodes": sum(one["Alive"] for one in ray.nodes()),
    "actors": sorted(one["ActorClassName"] for one in ray._private.state.actors().values() if one["State"] != "DEAD"),
    "placement_groups": [one["state"] for one in placement_group_table().values()],
    "there": ray.cluster_resources(), "free": ray.available_resources(),
}))
"""
_OF_NODE = ("--num-cpus=4", '--resources={"rollout": 1}', "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0")


_PATIENCE = {
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_agent_register_timeout_ms": "180000",  # Ray's daemon ends when its agents are later, and 15 s are short on a busy machine
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_prestart_worker_first_driver": "0",  # processes that no actor of a run can use: these have an environment
}


def _started(command: list[str], variables: Mapping[str, str]) -> Node:
    return Node(subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/tmp"))


@contextmanager
def ray_cluster(*words: str, asks_for_token: bool = True, host: str = "127.0.0.1", **of_nodes: str) -> Iterator[RunningCluster]:
    """A head node of its own.

    Args:
        words: of `ray start`.
        host: of the head; on 127.0.0.1 Ray listens there alone, on any other address on all interfaces.
        of_nodes: variables of its nodes.
    """
    port, temp = free_port(), tempfile.mkdtemp(prefix="ekc-", dir="/tmp")
    token = Path(temp) / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    users = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)} if asks_for_token else OPEN
    command = [
        *(RAY, "start", "--head", "--block", f"--port={port}", f"--node-ip-address={host}", f"--ray-client-server-port={free_port()}"),
        *("--include-dashboard=false", f"--temp-dir={temp}", *_OF_NODE, *words),
    ]
    head = _started(command, environment() | users | _PATIENCE | of_nodes)
    cluster = RunningCluster(f"{host}:{port}", users, head)
    try:
        deadline = time.monotonic() + 240.0
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((host, port)) == 0:
                    break
            assert head.main.poll() is None and time.monotonic() < deadline, "ray start ended, or took four minutes"
            time.sleep(0.5)
        yield cluster
    finally:
        for node in [*cluster.added, head]:
            node.end()


def is_up(cluster: RunningCluster) -> bool:
    variables = environment() | cluster.variables
    status = subprocess.run([RAY, "status", f"--address={cluster.address}"], env=variables, capture_output=True, check=False)
    return status.returncode == 0


def scraped_roles(run_dir: Path) -> tuple[set[str], set[str]]:
    """Roles of the actors in the service discovery at this moment, and those of them whose page has metrics of ours."""
    targets = [target for target in _targets(run_dir) if target["labels"]["role"] != "ray"]  # a node's page is Ray's
    return {target["labels"]["role"] for target in targets}, set[str]().union(*map(_scrape, targets))


def _targets(run_dir: Path) -> list[dict[str, Any]]:
    events = run_dir / "events.log"
    found = re.findall(r"discovery at (http://\S+)", events.read_text()) if events.exists() else []
    if not found:
        return []
    try:
        with urllib.request.urlopen(found[-1], timeout=5) as answer:  # a resumed run has its predecessor's line, too
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
