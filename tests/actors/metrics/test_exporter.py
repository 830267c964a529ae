"""Prometheus endpoints and service discovery, read by the client library's own parser and by a real Prometheus.

The real one is Debian's, put into .tools/prometheus by deploy/fetch_prometheus.sh; without it those tests are skipped by name.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from evenkeel.actors.metrics.catalogue import CATALOGUE, Kind
from evenkeel.actors.metrics.exporter import DiscoveryServer, MetricsEndpoint
from evenkeel.actors.metrics.step_metrics import MetricError
from evenkeel.correction.errors import ConfigError
from lab.ports import free_port

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / ".tools" / "prometheus"
needs_prometheus = pytest.mark.skipif(
    not (TOOLS / "prometheus").exists(), reason="no real Prometheus: run deploy/fetch_prometheus.sh (Debian's package)"
)


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint("rollout", "0")
    yield endpoint
    endpoint.close()


@pytest.fixture
def discovery() -> Iterator[DiscoveryServer]:
    discovery = DiscoveryServer()
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
    assert json.loads(fetch(discovery.url)) == [{"targets": ["127.0.0.1:3"], "labels": {"role": "rollout", "name": "0"}}]


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


@needs_prometheus
def test_promtool_takes_the_shipped_configuration() -> None:
    checked = subprocess.run(
        [TOOLS / "promtool", "check", "config", ROOT / "deploy" / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "SUCCESS" in checked.stdout


@needs_prometheus
def test_promtool_lints_what_is_served(endpoint: MetricsEndpoint) -> None:
    """Every metric of the catalogue at once, against Prometheus' own naming rules."""
    for metric in CATALOGUE.values():
        members = ("1", "ratio_token_rho", *metric.members.split("|")) if metric.is_family else ("",)
        endpoint.set(metric.name + next(filter(metric.has_member, members)), 1.0)
    page = fetch(f"http://{endpoint.target}/metrics")
    linted = subprocess.run([TOOLS / "promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    ours = [line for line in (linted.stdout + linted.stderr).splitlines() if "evenkeel" in line]
    assert ours == []


@pytest.fixture
def prometheus(discovery: DiscoveryServer, tmp_path: Path) -> Iterator[Callable[[str], dict[str, float]]]:
    """A real server with the shipped configuration, pointed at our discovery and made faster; gives {name label: value} of a query."""
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    job = next(job for job in config["scrape_configs"] if job["job_name"] == "evenkeel")
    job["http_sd_configs"] = [{"url": discovery.url, "refresh_interval": "1s"}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        [
            TOOLS / "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
            "--scrape.discovery-reload-interval=100ms",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def query(expression: str) -> dict[str, float]:
        try:
            answer = json.loads(fetch(f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})))
        except OSError:  # not up yet
            return {}
        return {result["metric"].get("name", ""): float(result["value"][1]) for result in answer["data"]["result"]}

    yield query
    process.terminate()
    process.wait(timeout=20)


def until(question: Callable[[], bool], deadline_s: float = 40.0) -> bool:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if question():
            return True
        time.sleep(0.2)
    return False


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
