"""What Prometheus asks a run's driver: the run's numbers, and where the endpoints of its actors are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from evenkeel.actors.carriers import ActorInfo
from evenkeel.actors.metrics.exporter import DiscoveryServer, MetricsEndpoint, listen_address


class DriverEndpoint:
    """The driver's own endpoint, and the service discovery. Neither is open before `serve`."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self.workers: dict[str, str] = {}
        """Rollout workers that are up: name -> key in the service discovery."""

    def serve(self, bind: str, discovery_port: int) -> str:
        """Open both; needs a running Ray. Args: as in MetricsConfig. Returns: URL of the service discovery."""
        address = listen_address(bind)
        self._discovery = DiscoveryServer(address, discovery_port)
        self._open.callback(self._discovery.close)
        self._own = MetricsEndpoint("controller", "0", bind=address)
        self._open.callback(self._own.close)
        self._discovery.register("controller-0", self._own.target, self._own.labels)
        return self._discovery.url

    def joined(self, info: ActorInfo) -> None:
        self._discovery.register(info.key, info.target, {"role": info.role, "name": info.name})
        if info.role == "rollout":
            self.workers[info.name] = info.key

    def left(self, worker: str) -> None:
        """A rollout worker is gone: its numbers are forgotten."""
        self._discovery.deregister(self.workers.pop(worker, ""))
        self._own.keep_only("worker", self.workers)

    def publish(self, metrics: Mapping[str, float]) -> None:
        """Numbers of a step or of an evaluation; of workers, those that are up."""
        self._own.publish(dict(metrics))
        self._own.keep_only("worker", self.workers)

    def close(self) -> None:
        self._open.close()
