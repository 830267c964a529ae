"""What `evenkeel deploy --local` prints, started by the real `ray up` on loopback hosts, and its jobs."""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.deployment.ray_clusters import local
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.shape import ModelShape
from evenkeel.recipe import load_config
from tests.deploy.loopback_hosts import Hosts, loopback_hosts
from tests.e2e.launch import RECIPE, ROOT, command_of

ADDRESSES = ("127.0.0.2", "127.0.0.3")
"""Not 127.0.0.1, for which Ray takes another address of the machine."""
# Ray's daemon ends when its agents are later, and 15 s are short on a machine that others use, too; so are 30 s for its head.
_PATIENCE = "RAY_agent_register_timeout_ms=600000 RAY_gcs_server_port_wait_time_s=600 RAY_NUM_REDIS_GET_RETRIES=600"
_RAY = str(Path(sys.executable).with_name("ray"))


@dataclass(frozen=True)
class OwnCluster:
    """A cluster that `ray up` has started."""

    hosts: Hosts
    dashboard: str
    """Its URL."""
    token: str
    variables: dict[str, str]
    """Of the user who has started it."""
    temp: Path
    """Ray's folder on the head."""

    def nodes(self) -> set[str]:
        """Addresses of those that are alive."""
        summary = json.loads(self.get("/nodes?view=summary"))["data"]["summary"]
        return {node["ip"] for node in summary if "ip" in node and node["raylet"]["state"] == "ALIVE"}  # one that has just come has none

    def get(self, path: str, *, with_token: bool = True) -> str:
        """Raises: urllib.error.HTTPError."""
        headers = {"Authorization": f"Bearer {self.token}"} if with_token else {}
        with urllib.request.urlopen(urllib.request.Request(self.dashboard + path, headers=headers), timeout=20) as answer:
            return str(answer.read().decode())

    def job(self, *words: str, timeout_s: float = 600.0) -> str:
        """`ray job WORDS`: what it says. Raises: AssertionError if it fails."""
        command = [_RAY, "job", words[0], f"--address={self.dashboard}", *words[1:]]
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
        return done.stdout + done.stderr

    def status(self, name: str) -> str:
        """Of a job, such as RUNNING."""
        return str(json.loads(self.get(f"/api/jobs/{name}"))["status"])

    def running(self, what: str) -> set[str]:
        """Addresses of the hosts on which a process with this in its command line lives."""
        return {address for address, processes in self.hosts.processes().items() if any(what in command_of(one) for one in processes)}


@contextmanager
def own_cluster(folder: Path, model: Path) -> Iterator[OwnCluster]:
    """For small.yaml with two workers.

    Args:
        folder: short; kept on both hosts' disks, which are this machine's.
        model: of the recipe.
    """
    with loopback_hosts(folder, ADDRESSES) as hosts:
        home, ports = folder / "user", free_ports(3)
        (home / ".ray").mkdir(parents=True)
        token = secrets.token_hex(32)
        (home / ".ray" / "auth_token").write_text(token)
        (home / ".ray" / "auth_token").chmod(0o600)
        for number, host in enumerate(hosts.homes.values()):
            _equip(host, folder / f"r{number}", hosts.programs)
        config = with_devices(load_config(RunConfig, RECIPE, [f"model={model}", "ray.address=auto", "rollout.workers=2"]), has_gpu=False)
        here = for_these_hosts(local(config, ModelShape.read(model), Gpus.parse("L4x1"), hosts=ADDRESSES), hosts, ports)
        (folder / "cluster.yaml").write_text(yaml.safe_dump(here))
        (folder / "u").mkdir()
        variables = os.environ | {
            "HOME": str(home),
            "PATH": f"{hosts.programs}:{os.environ['PATH']}",
            "RAY_TMPDIR": str(folder / "u"),
            "RAY_AUTH_MODE": "token",
            "RAY_UP_enable_autoscaler_v2": "0",
        }
        up = subprocess.run(
            [_RAY, "up", "--yes", "--no-config-cache", folder / "cluster.yaml"],
            env=variables, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False,
        )  # fmt: skip
        assert up.returncode == 0, up.stdout[-6000:] + up.stderr[-2000:]
        yield OwnCluster(hosts, f"http://127.0.0.1:{ports[1]}", token, variables, folder / "r0" / "ray")


def for_these_hosts(printed: dict[str, Any], hosts: Hosts, ports: tuple[int, ...]) -> dict[str, Any]:
    """What is printed with what its user has to put in, and no more: user and key, and the CPUs that the hosts have.

    evenkeel is installed on them already, and `ray stop` is left out: it ends every Ray of a machine, and these hosts are one machine.
    The ports are others than those that a Ray of somebody else may have here.
    """
    cluster = copy.deepcopy(printed)
    cluster["cluster_name"] = f"evenkeel-{ports[0]}"
    cluster["auth"] = {"ssh_user": hosts.user, "ssh_private_key": str(hosts.key)}
    cluster["setup_commands"] = []
    own = {
        "head": f"--node-ip-address={hosts.addresses[0]} --dashboard-port={ports[1]} --ray-client-server-port={ports[2]}",
        "worker": f"--node-ip-address={hosts.addresses[1]}",
    }
    for role, options in own.items():
        commands = cluster[f"{role}_start_ray_commands"]
        assert commands[0] == "evenkeel/.venv/bin/ray stop" and len(commands) == 2
        start = commands[1]
        for printed_part, part in ((":6379", f":{ports[0]}"), ("--port=6379", f"--port={ports[0]}")):
            start = start.replace(printed_part, part)
        start, count = re.subn(r"(?=--resources='\{\"rollout\": 1\}')", "--num-cpus=4 ", start)
        assert count == 1 and str(ports[0]) in start
        ours = "--min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0"
        cluster[f"{role}_start_ray_commands"] = [f"{start} {options} {ours}"]
    return cluster


def _equip(home: Path, temp: Path, programs: Path) -> None:
    """A host with evenkeel's environment, which takes the code from the working tree that `ray up` copies."""
    temp.mkdir()
    (home / "evenkeel").mkdir()
    (home / "evenkeel" / ".venv").symlink_to(sys.prefix)
    (home / ".bashrc").write_text(
        f"export PATH={programs}:$PATH RAY_TMPDIR={temp} {_PATIENCE}\nexport PYTHONPATH=$HOME/evenkeel:$HOME/evenkeel/tests/e2e\n"
    )


def until(question: Callable[[], bool], what: str, deadline_s: float, *, told: Callable[[], str] = str) -> None:
    """Raises: AssertionError with `what`, and what is `told`, when time is up."""
    end = time.monotonic() + deadline_s
    while not _is_true(question):
        assert time.monotonic() < end, f"not in {deadline_s:g} s: {what}\n{told()[-6000:]}"
        time.sleep(0.5)


def _is_true(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except (OSError, urllib.error.URLError):  # who is asked is not up yet
        return False


def free_ports(count: int) -> tuple[int, ...]:
    """Of 127.0.0.1."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return tuple(int(probe.getsockname()[1]) for probe in probes)
    finally:
        for probe in probes:
            probe.close()
