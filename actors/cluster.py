"""The Ray cluster of a run: a private one on this machine, or one that is running already."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from actors.config import RunConfig
from actors.devices import shortage
from correction.errors import ConfigError

# Python warnings of third parties are about things that a user of evenkeel can't change.
_ENVIRONMENT = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONWARNINGS": "ignore"}
_NICER_BY = 10
"""By how much every actor but the learner's is nicer than it: at most a tenth of a core that the learner wants."""
_NICEST = 19
_LONGEST_TEMP_DIR = 40
"""Characters. Ray appends "/session_" with date, time and process id (44 at most) and "/sockets/plasma_store" (21); 107 are allowed."""
_CONNECT_S = 10.0


class Cluster:
    """Connects on entry, leaves on exit; a private cluster ends with this process, however it ends."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def __enter__(self) -> Cluster:
        settings = self._config.ray
        os.environ.update(_ENVIRONMENT)
        common: dict[str, Any] = {
            "logging_level": logging.ERROR,
            "log_to_driver": False,  # engines say much; what matters comes as an event or an error, and log_folder has the rest
            "runtime_env": {"env_vars": _ENVIRONMENT},
            "namespace": "evenkeel",
        }
        if settings.address is not None:
            try:
                _check_listening(settings.address)
                ray.init(address=settings.address, **common)
            except (OSError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"ray.address = {settings.address!r}: no Ray cluster answers there ({error}). Start one (deploy/README.md), "
                    f"or leave ray.address empty for a private one"
                ) from error
            return self
        workers = self._config.rollout.workers
        temp_dir = str(settings.temp_dir.resolve()) if settings.temp_dir else None
        if temp_dir is not None and len(temp_dir) > _LONGEST_TEMP_DIR:
            raise ConfigError(
                f"ray.temp_dir = {temp_dir}: {len(temp_dir)} characters, but Ray's sockets lie below it and the path of a socket has to "
                f"stay short. Choose a path of {_LONGEST_TEMP_DIR} characters, or shorter"
            )
        os.environ.setdefault("RAY_worker_niceness", "0")  # not Ray's 15: others give way to the learner by themselves, see give_way
        ray.init(
            num_cpus=settings.num_cpus or workers + self._config.learner.world_size + 1,
            resources={settings.rollout_resource: workers},
            include_dashboard=settings.include_dashboard,
            _temp_dir=temp_dir,
            **common,
        )
        return self

    def gpu_shortage(self) -> str | None:
        """A sentence, if what has joined the cluster so far has fewer GPUs than the run asks for."""
        return shortage(self._config, ray.cluster_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]

    @property
    def log_folder(self) -> Path:
        """Where the output of every actor of this node is."""
        node = ray._private.worker._global_node
        return Path(node.get_logs_dir_path()) if node is not None else Path("/tmp/ray/session_latest/logs")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ray.shutdown()


def give_way(actor: Any) -> None:
    """Have an actor, and what it starts from now on, leave a core to the learner's ranks when they want one.

    On a machine with few cores the learner is what a step waits for, and whoever shares a core with it delays the whole run: at equal
    priority a training step of the nano recipe took a sixth longer beside the rollouts than alone. On a cluster that was started elsewhere
    actors are at Ray's 15 already, which leaves little room; start its nodes with RAY_worker_niceness=0 if learner and rollouts share one.
    """
    actor.__ray_call__.remote(_raise_niceness)


def _raise_niceness(_: Any) -> None:
    for thread in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):                          # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread), min(_NICEST, os.getpriority(os.PRIO_PROCESS, int(thread)) + _NICER_BY))


def _check_listening(address: str) -> None:
    """Ray itself would look for a cluster that isn't there for minutes. Raises: OSError if nothing listens at host:port."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S):
            pass
