"""Ray's own autoscaler over a cluster on this machine: each node is a raylet, started by Ray's provider for tests when there is demand.

`ray.cluster_utils.AutoscalingCluster` is not used: its stop ends every Ray on the machine, and Ray's wheel lacks a file that it reads.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from lab.ports import free_port

_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
# What that provider calls its head.
_HEAD_TYPE = "ray.head.default"
# What a rollout worker asks for.
_RESOURCE = "rollout"
_HEAD_CPUS = 8
# After which a node without work is removed.
_IDLE_S = 6.0
_START_S = 90.0


class AutoscaledCluster:
    """A head, and one to `nodes` nodes that offer one unit of _RESOURCE each; asks for a token."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._temp = Path(tempfile.mkdtemp(prefix="ek-as-", dir="/tmp"))  # Ray's sockets lie below it, and their paths have to stay short
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        token = self._temp / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        """For whoever joins."""

    def _configuration(self) -> dict[str, Any]:
        provider = {"type": "external", "module": _PROVIDER, "gcs_address": self.address, "use_node_id_as_ip": True}
        node = {"CPU": 1, _RESOURCE: 1, "object_store_memory": 128 << 20}
        empty_lists = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
        more_lists = ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter")
        return {
            "cluster_name": "evenkeel",
            "max_workers": self._nodes,
            "upscaling_speed": 10.0,
            "idle_timeout_minutes": _IDLE_S / 60,
            "provider": provider | {"disable_node_updaters": True, "disable_launch_config_check": True},
            "available_node_types": {
                _HEAD_TYPE: {"resources": {"CPU": _HEAD_CPUS}, "node_config": {}, "max_workers": 0},
                "rollout": {"resources": node, "node_config": {}, "min_workers": 1, "max_workers": self._nodes},
            },
            "head_node_type": _HEAD_TYPE,
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            **{name: [] for name in (*empty_lists, *more_lists)},
            "file_mounts_sync_continuously": False,
        }

    def __enter__(self) -> AutoscaledCluster:
        configuration = self._temp / "autoscaler.json"
        configuration.write_text(json.dumps(self._configuration()))
        own = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": "0"}
        own |= {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}  # as in deploy/
        own |= {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "120"}
        ports = [f"--port={self._port}", f"--ray-client-server-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--node-ip-address=127.0.0.1", *ports),
            *(f"--num-cpus={_HEAD_CPUS}", f"--temp-dir={self._temp}", f"--autoscaling-config={configuration}"),
            *("--object-store-memory=300000000", "--include-dashboard=false", "--disable-usage-stats"),
        ]
        with (self._temp / "head.log").open("w") as log:
            self._head = subprocess.Popen(
                command, env=os.environ | self.variables | own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=self._temp
            )
        deadline = time.monotonic() + _START_S
        while not _listens(self._port):
            if self._head.poll() is not None or time.monotonic() > deadline:
                said = (self._temp / "head.log").read_text()[-2000:]
                self._end()
                raise RuntimeError(f"the head did not start:\n{said}")
            time.sleep(0.2)
        return self

    def kill_node(self, raylet_socket: str) -> None:
        """Kill a node's daemon and all that runs on it at once, as when a machine loses power.

        Args:
            raylet_socket: as ray.nodes() has it, "RayletSocketName".
        """
        (raylet,) = (p for p in self._processes() if "raylet" in p.name() and any(raylet_socket in word for word in p.cmdline()))
        doomed = [*raylet.children(recursive=True), raylet]
        for process in doomed:
            process.suspend()
        for process in doomed:
            process.kill()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        left = self._processes()
        if self._head.poll() is None:
            os.killpg(self._head.pid, signal.SIGTERM)
            try:
                self._head.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self._head.pid, signal.SIGKILL)
        left += [process for process in self._processes() if process not in left]
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(left, timeout=10)
        shutil.rmtree(self._temp, ignore_errors=True)

    def _processes(self) -> list[psutil.Process]:
        """Processes of this cluster: all whose command line names its session's folder, and their children."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                if f"{self._temp}/session_" in " ".join(process.cmdline()):
                    found |= {one.pid: one for one in (process, *process.children(recursive=True))}
            except psutil.Error:
                continue
        return list(found.values())


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
