"""The Ray cluster of a run: a private one on this machine, or one that is running already."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from actors.config import RunConfig
from correction.errors import ConfigError

# Python warnings of third parties are about things that a user of evenkeel can't change.
_ENVIRONMENT = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONWARNINGS": "ignore"}


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
                ray.init(address=settings.address, **common)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"ray.address = {settings.address!r}: no Ray cluster answers there ({error}). Start one (deploy/README.md), "
                    f"or leave ray.address empty for a private one"
                ) from error
            return self
        workers = self._config.rollout.workers
        ray.init(
            num_cpus=settings.num_cpus or workers + self._config.learner.world_size + 1,
            resources={settings.rollout_resource: workers},
            include_dashboard=settings.include_dashboard,
            _temp_dir=str(Path(settings.temp_dir).resolve()) if settings.temp_dir else None,
            **common,
        )
        return self

    @property
    def log_folder(self) -> Path:
        """Where the output of every actor of this node is."""
        node = ray._private.worker._global_node
        return Path(node.get_logs_dir_path()) if node is not None else Path("/tmp/ray/session_latest/logs")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ray.shutdown()
