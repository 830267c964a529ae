"""Prometheus: endpoints of workers, ranks and the driver, and their list, which the driver serves as HTTP service discovery.

Each actor serves its own numbers on a port of its own, with its own registry (nothing global, so that a restarted or doubly
imported actor starts clean). Run, role and name of the actor are target labels that discovery attaches; they are not on every metric.
Ray's nodes, whose endpoints are Ray's own, are in the list with the role "ray".
Listening addresses are 127.0.0.1 unless metrics.bind says otherwise: the pages have no authentication.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as PrometheusFamily
from prometheus_client.registry import Collector

from evenkeel.actors.carriers import ActorInfo
from evenkeel.actors.metrics.catalogue import Kind, Metric
from evenkeel.actors.metrics.step_metrics import lookup, member
from evenkeel.correction.errors import ConfigError

_ANY_ADDRESS = ("", "0.0.0.0", "::")


class MetricsEndpoint(Collector):
    """The numbers of one actor at http://BIND:PORT/metrics, by catalogue name; `evenkeel_...` names are made from those.

    Thread-safe: actors set numbers on their own threads while Prometheus scrapes on the server's.
    """

    def __init__(self, role: str, name: str, bind: str = "127.0.0.1", port: int = 0) -> None:
        """Args:
            role: kind of actor ("controller", "rollout", "learner", "correction"); a label of the target.
            name: which one of its role; a label of the target.
            bind: address to listen on.
            port: 0 takes a free one, so that several actors share a node.
        Raises: ConfigError if the address can't be listened on, or Prometheus couldn't know where to scrape.
        """
        _refuse_any_address(bind)
        self.labels = {"role": role, "name": name}
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()
        self.registry = CollectorRegistry(auto_describe=False)
        """What the page is made of; an actor adds collectors of metrics that others name."""
        self.registry.register(self)
        ProcessCollector(registry=self.registry)  # process_cpu_seconds_total, process_resident_memory_bytes, ...
        try:
            self._server, self._thread = start_http_server(port, addr=bind, registry=self.registry)
        except OSError as error:
            raise ConfigError(f"metrics endpoint of {role} {name}: can't listen on {bind}:{port}: {error}. Set metrics.bind.") from error
        self.target = f"[{bind}]:{self._server.server_port}" if ":" in bind else f"{bind}:{self._server.server_port}"

    def set(self, name: str, value: float | None) -> None:
        """Show a gauge's value, or a counter's running total; None leaves it as it is. Raises: MetricError for an unlisted name."""
        self.publish({name: value})

    def add(self, name: str, amount: float) -> None:
        """Raise a counter by `amount`, >= 0. Raises: MetricError for an unlisted name."""
        lookup(name)
        with self._lock:
            self._values[name] = self._values.get(name, 0.0) + amount

    def publish(self, values: Mapping[str, float | None]) -> None:
        """Show many numbers, a whole step's metrics for one; histogram buckets are added to what came before."""
        kinds = {name: lookup(name).kind for name in values}
        with self._lock:
            for name, value in values.items():
                if value is None:
                    continue
                before = self._values.get(name, 0.0) if kinds[name] is Kind.HISTOGRAM else 0.0
                self._values[name] = before + value

    def keep_only(self, part: str, members: Collection[str]) -> None:
        """Forget the values of all members but these, in each family that has a value for each `part` ("worker")."""
        with self._lock:
            listed = [(name, lookup(name)) for name in self._values]
            for name in [name for name, metric in listed if metric.part == part and name.removeprefix(metric.name) not in members]:
                del self._values[name]

    def collect(self) -> Iterable[PrometheusFamily]:
        """What a scrape gets; called by the registry."""
        with self._lock:
            values = dict(self._values)
        by_metric: dict[str, tuple[Metric, dict[str, float]]] = {}
        for name, value in values.items():
            metric = lookup(name)
            by_metric.setdefault(metric.name, (metric, {}))[1][member(name)] = value
        return [_family(metric, members) for metric, members in by_metric.values()]

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


def _family(metric: Metric, members: Mapping[str, float]) -> PrometheusFamily:
    if metric.kind is Kind.HISTOGRAM:
        return _histogram(metric, members)
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.prometheus_name, metric.help, labels=[metric.part] if metric.is_family else [])
    for part, value in members.items():
        family.add_metric([part] if metric.is_family else [], value)
    return family


def _histogram(metric: Metric, members: Mapping[str, float]) -> PrometheusFamily:
    """Integer buckets: member "2" counts values of exactly 2, and "4+" those of 4 and more; the sum takes "4+" as 4."""
    counts = sorted((int(part.rstrip("+")), part.endswith("+"), count) for part, count in members.items())
    cumulative, total, running_sum = [], 0.0, 0.0
    for bound, is_open, count in counts:
        total += count
        running_sum += bound * count
        if not is_open:
            cumulative.append((str(float(bound)), total))
    cumulative.append(("+Inf", total))
    family = HistogramMetricFamily(metric.prometheus_name, metric.help)
    family.add_metric([], cumulative, running_sum)
    return family


class DiscoveryServer:
    """Prometheus HTTP service discovery: a JSON list of the endpoints that exist now, at `url`.

    Prometheus asks again every refresh_interval, so that workers that join and leave need no change to its configuration.
    """

    def __init__(self, bind: str = "127.0.0.1", port: int = 0, run: str = "", nodes: Callable[[], Mapping[str, str]] = dict) -> None:
        """Args:
            run: name of the run, a label of every target.
            nodes: "host:port" of the nodes' own endpoints -> name of the node, asked each time.
        Raises: ConfigError if the address can't be listened on.
        """
        self._run, self._nodes = run, nodes
        self._targets: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._server = _discovery_at(bind, port, self._handler())
        self._server.daemon_threads = True
        self.url = f"http://{bind}:{self._server.server_port}/sd"
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus-discovery", daemon=True)
        self._thread.start()

    def register(self, key: str, target: str, labels: Mapping[str, str]) -> None:
        """Add an endpoint ("host:port") under a key, or move the one that had it (a restarted actor has a new port)."""
        with self._lock:
            self._targets[key] = self._entry(target, labels)

    def deregister(self, key: str) -> None:
        """Take an endpoint off the list, if it is there."""
        with self._lock:
            self._targets.pop(key, None)

    def targets(self) -> list[dict[str, Any]]:
        """The list as Prometheus gets it."""
        of_ray = [self._entry(target, {"role": "ray", "name": name}) for target, name in self._nodes().items()]
        with self._lock:
            return [*self._targets.values(), *of_ray]

    def _entry(self, target: str, labels: Mapping[str, str]) -> dict[str, Any]:
        return {"targets": [target], "labels": {"run": self._run} | {name: str(value) for name, value in labels.items()}}

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        discovery = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(discovery.targets()).encode()
                with suppress(ConnectionError):  # who has asked may be gone: that is nothing for the run's terminal
                    self.send_response(200)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Requests of Prometheus are not logged."""

        return Handler


class DriverEndpoint:
    """The driver's own endpoint, and the service discovery. Neither is open before `serve`."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self.workers: dict[str, str] = {}
        """Rollout workers that are up: name -> key in the service discovery."""

    def serve(self, bind: str, discovery_port: int, run: str) -> str:
        """Open both; needs a running Ray. Args: as in MetricsConfig; name of the run. Returns: URL of the service discovery."""
        address = listen_address(bind)
        self._discovery = DiscoveryServer(address, discovery_port, run, _nodes_of_ray)
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


def _discovery_at(bind: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    """Raises: ConfigError if the address can't be listened on."""
    try:
        return ThreadingHTTPServer((bind, port), handler)
    except OSError as error:
        at, is_taken = f"can't listen on {bind}:{port}: {error}", error.errno in (errno.EADDRINUSE, errno.EACCES)
        if is_taken:
            raise ConfigError(f"metrics.discovery_port = {port}: {at}. Choose another port, or 0 for any free one.") from error
        raise ConfigError(f"metrics.bind = {bind!r}: {at}. Set it to an address of this machine, or to node.") from error


def _refuse_any_address(bind: str) -> None:
    if bind in _ANY_ADDRESS:
        raise ConfigError(f"metrics.bind = {bind!r}: Prometheus needs an address that it can reach. Bind to that one (metrics.bind=node).")


def check_addresses(bind: str, discovery_port: int, *, has_cluster: bool) -> None:
    """Whether a run's driver can serve its numbers here, before there is a Ray. Nothing stays open.

    Args:
        bind, discovery_port: as in MetricsConfig.
        has_cluster: the run joins a cluster, which alone knows what "node" means.
    Raises: ConfigError, as the run would when it opens them.
    """
    _refuse_any_address(bind)
    if bind != "node" or not has_cluster:
        _discovery_at("127.0.0.1" if bind == "node" else bind, discovery_port, BaseHTTPRequestHandler).server_close()


def listen_address(bind: str) -> str:
    """`metrics.bind` as an address: "node" means this node's own, as other nodes reach it."""
    return node_address() if bind == "node" else bind


def _nodes_of_ray() -> dict[str, str]:
    """Where each node of Ray exports its own numbers: memory, disk, object store. Ray itself lists them only where its dashboard runs."""
    import ray

    try:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
    except Exception:  # its control service is away: the run's own endpoints are listed without it
        return {}
    return {f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}": node["NodeName"] for node in nodes if node["Alive"]}


def node_address() -> str:
    """This node's address in its Ray cluster."""
    import ray  # which a look at the addresses doesn't need

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
