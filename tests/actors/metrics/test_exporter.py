"""Prometheus endpoints and service discovery, read by the client library's own parser and by a real Prometheus.

The real one is Debian's, put into .tools/prometheus by deploy/fetch_prometheus.sh; without it those tests are skipped by name.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from evenkeel.actors.metrics.catalogue import CATALOGUE, COUNTERS, Kind, Metric
from evenkeel.actors.metrics.exporter import DiscoveryServer, MetricsEndpoint
from evenkeel.actors.metrics.step_metrics import MetricError
from evenkeel.correction.errors import ConfigError
from tests.actors.metrics.real_prometheus import TOOLS, needs_prometheus, real_prometheus, until

ROOT = Path(__file__).parents[3]


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint("rollout", "0")
    yield endpoint
    endpoint.close()


@pytest.fixture
def discovery() -> Iterator[DiscoveryServer]:
    discovery = DiscoveryServer(run="one")
    yield discovery
    discovery.close()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def scrape(endpoint: MetricsEndpoint) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(fetch(f"http://{endpoint.target}/metrics"))}


def test_gauges_counters_and_families(endpoint: MetricsEndpoint) -> None:
    endpoint.publish({"time/step_s": 1.5, "held_out/accuracy": None, "reward/component/format": 0.25})
    endpoint.add("rollout/generated_tokens_total", 100)
    endpoint.add("rollout/generated_tokens_total", 20)
    families = scrape(endpoint)
    assert families["evenkeel_time_step_seconds"].samples[0].value == 1.5
    assert families["evenkeel_time_step_seconds"].documentation == CATALOGUE["time/step_s"].help
    tokens = families["evenkeel_rollout_generated_tokens"]
    assert (tokens.type, tokens.samples[0].name, tokens.samples[0].value) == ("counter", "evenkeel_rollout_generated_tokens_total", 120)
    part = families["evenkeel_reward_component"].samples[0]
    assert (part.labels, part.value) == ({"part": "format"}, 0.25)
    assert "evenkeel_held_out_accuracy_ratio" not in families  # absent is absent
    assert "process_resident_memory_bytes" in families


def test_staleness_is_a_histogram_that_adds_up_over_steps(endpoint: MetricsEndpoint) -> None:
    """Two steps, 20 tokens: 8 fresh, 8 one version old, 4 of eight and more; sum = 8 * 1 + 4 * 8."""
    endpoint.publish({"staleness/tokens/0": 5.0, "staleness/tokens/1": 5.0})
    endpoint.publish({"staleness/tokens/0": 3.0, "staleness/tokens/1": 3.0, "staleness/tokens/8+": 4.0})
    samples = scrape(endpoint)["evenkeel_staleness_versions"].samples
    buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
    totals = {sample.name.rpartition("_")[2]: sample.value for sample in samples if not sample.name.endswith("_bucket")}
    assert buckets == {"0.0": 8, "1.0": 16, "+Inf": 20}
    assert totals == {"count": 20, "sum": 40}


def test_an_unlisted_name_is_refused_and_changes_nothing(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(MetricError, match="nearest one is 'time/step_s'"):
        endpoint.publish({"weight_version": 3, "time/steps_s": 1.0})
    assert "evenkeel_weight_version" not in scrape(endpoint)


def test_two_endpoints_share_nothing(endpoint: MetricsEndpoint) -> None:
    other = MetricsEndpoint("rollout", "1")
    other.set("weight_version", 7)
    assert endpoint.target != other.target and "evenkeel_weight_version" not in scrape(endpoint)
    other.close()


def test_close_frees_the_port(endpoint: MetricsEndpoint) -> None:
    other = MetricsEndpoint("learner", "0")
    port = int(other.target.rpartition(":")[2])
    other.close()
    MetricsEndpoint("learner", "0", port=port).close()


def test_what_cannot_be_listened_on_is_said(endpoint: MetricsEndpoint, discovery: DiscoveryServer) -> None:
    taken = int(endpoint.target.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken}.*metrics.bind"):
        MetricsEndpoint("learner", "0", port=taken)
    with pytest.raises(ConfigError, match=f"metrics.discovery_port = {taken}"):
        DiscoveryServer(port=taken)
    with pytest.raises(ConfigError, match="an address that it can reach"):
        MetricsEndpoint("learner", "0", bind="0.0.0.0")


def test_discovery_lists_who_is_there(discovery: DiscoveryServer) -> None:
    discovery.register("rollout-0", "127.0.0.1:1", {"role": "rollout", "name": "0"})
    discovery.register("rollout-1", "127.0.0.1:2", {"role": "rollout", "name": "1"})
    discovery.register("rollout-0", "127.0.0.1:3", {"role": "rollout", "name": "0"})  # restarted, on another port
    discovery.deregister("rollout-1")
    discovery.deregister("never-there")
    assert json.loads(fetch(discovery.url)) == [{"targets": ["127.0.0.1:3"], "labels": {"role": "rollout", "name": "0", "run": "one"}}]


def test_who_hangs_up_before_the_answer_leaves_no_traceback(discovery: DiscoveryServer, capfd: pytest.CaptureFixture[str]) -> None:
    """A scrape that is given up says nothing in the run's terminal. The list is large, so that it doesn't go out with the first write."""
    for number in range(20_000):
        discovery.register(f"rollout-{number}", "127.0.0.1:1", {"role": "rollout", "name": str(number)})
    port = urllib.parse.urlsplit(discovery.url).port
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets the connection
            one.sendall(b"GET /sd HTTP/1.1\r\nHost: here\r\n\r\n")
            one.recv(1)
    assert len(json.loads(fetch(discovery.url))) == 20_000
    assert "Traceback" not in capfd.readouterr().err


def test_prometheus_names_are_conventional_and_unique() -> None:
    names = [metric.prometheus_name for metric in CATALOGUE.values()]
    assert len(set(names)) == len(names)
    for metric in CATALOGUE.values():
        assert metric.prometheus_name.startswith("evenkeel_") and metric.help.endswith(".")
        assert metric.kind is not Kind.COUNTER or metric.name.rstrip("/").endswith("_total")


def each_metric() -> dict[str, float]:
    """A value of each metric; of a family, of one member."""
    return {metric.name + (_a_member(metric) if metric.is_family else ""): 1.0 for metric in CATALOGUE.values()}


def _a_member(metric: Metric) -> str:
    return next(part for part in ("3", *metric.members.split("|"), "k1_token_rho", "x") if part and metric.has_member(part))


@needs_prometheus
def test_promtool_finds_nothing_to_say_about_the_names_of_any_metric(endpoint: MetricsEndpoint) -> None:
    """Prometheus' own naming conventions: units, suffixes, help."""
    endpoint.publish(each_metric())
    page = fetch(f"http://{endpoint.target}/metrics")
    assert page.count("# TYPE evenkeel_") == len(CATALOGUE)
    for given, code in ((page, 0), (page.replace("evenkeel_time_step_seconds", "evenkeel_time_step_milliseconds"), 3)):
        checked = subprocess.run([TOOLS / "promtool", "check", "metrics"], input=given, capture_output=True, text=True, check=False)
        assert checked.returncode == code, checked.stderr


def test_a_run_of_500_workers_has_four_series_for_each_and_a_few_hundred_others(endpoint: MetricsEndpoint) -> None:
    """At the driver's endpoint; what a Prometheus has to hold follows from it."""
    by_worker = [name for name, metric in CATALOGUE.items() if metric.part == "worker"]
    endpoint.publish(dict.fromkeys(COUNTERS, 0.0) | each_metric() | {name + str(i): 1.0 for name in by_worker for i in range(500)})
    series = [sample for family in scrape(endpoint).values() for sample in family.samples if sample.name.startswith("evenkeel_")]
    of_workers = [sample for sample in series if sample.labels.get("worker", "").isdigit()]
    assert len(by_worker) == 4 and len(of_workers) == 4 * 500 and len(series) - len(of_workers) < 400


@needs_prometheus
def test_promtool_takes_the_shipped_configuration() -> None:
    checked = subprocess.run(
        [TOOLS / "promtool", "check", "config", ROOT / "deploy" / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "SUCCESS" in checked.stdout


@pytest.fixture
def prometheus(discovery: DiscoveryServer, tmp_path: Path) -> Iterator[Callable[[str], dict[str, float]]]:
    """A real server; gives {name label: value} of a query."""
    with real_prometheus(discovery.url, tmp_path) as ask:
        yield lambda expression: {labels.get("name", ""): value for labels, value in ask(expression)}


@needs_prometheus
def test_a_real_prometheus_finds_workers_and_sees_them_go(
    endpoint: MetricsEndpoint, discovery: DiscoveryServer, prometheus: Callable[[str], dict[str, float]]
) -> None:
    """Who comes and who goes between two looks is seen at once: Prometheus takes up what it has discovered every five seconds."""
    endpoint.add("rollout/generated_tokens_total", 1234)
    early, late = MetricsEndpoint("rollout", "1"), MetricsEndpoint("rollout", "2")
    for one in (endpoint, early):
        discovery.register(f"rollout-{one.labels['name']}", one.target, one.labels)
    assert until(lambda: prometheus('up{job="evenkeel"}') == {"0": 1.0, "1": 1.0})
    assert until(lambda: prometheus('evenkeel_rollout_generated_tokens_total{role="rollout"}') == {"0": 1234.0})
    early.close()  # gone, but nobody has said so: the target is down
    assert until(lambda: prometheus('up{job="evenkeel"}') == {"0": 1.0, "1": 0.0})
    discovery.deregister("rollout-1")
    discovery.register("rollout-2", late.target, late.labels)
    assert until(lambda: prometheus('up{job="evenkeel"}') == {"0": 1.0, "2": 1.0})
    late.close()
