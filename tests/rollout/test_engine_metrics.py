"""SGLang's own metrics of a real engine at its worker's endpoint, as a real Prometheus gets them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from evenkeel.actors.metrics.exporter import DiscoveryServer, MetricsEndpoint
from lab.background_loop import BackgroundLoop
from tests.actors.metrics.real_prometheus import TOOLS, needs_prometheus, real_prometheus, until
from tests.deploy.board_queries import QUERIES

pytestmark = pytest.mark.engine
OF_ENGINES = r"sglang_\w+|evenkeel_engine_\w+"
DECODED = 'sglang_per_stage_req_latency_seconds_count{stage="prefill_forward"}'


@pytest.fixture
def endpoint(shared_engine: Any) -> Iterator[MetricsEndpoint]:
    """As rollout worker 7 has it."""
    endpoint = MetricsEndpoint("rollout", "7")
    endpoint.registry.register(shared_engine.metrics)
    yield endpoint
    endpoint.close()


def page(endpoint: MetricsEndpoint) -> str:
    with urllib.request.urlopen(f"http://{endpoint.target}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def samples(endpoint: MetricsEndpoint) -> dict[tuple[str, str], float]:
    """(name, stage) -> value."""
    of = [one for family in text_string_to_metric_families(page(endpoint)) for one in family.samples]
    return {(one.name, one.labels.get("stage", "")): one.value for one in of if not one.name.startswith("process_")}


def sample(engine: Any, loop: BackgroundLoop, prompts: int) -> None:
    async def answers() -> None:
        await asyncio.gather(*(engine.generate([1, 2, 3 + i], max_tokens=4, ignore_stop=True) for i in range(prompts)))

    loop.run(answers())


def test_each_request_is_counted_and_the_cache_has_the_size_that_was_asked_for(
    endpoint: MetricsEndpoint, shared_engine: Any, engine_loop: BackgroundLoop
) -> None:
    counted = ("sglang_queue_time_seconds_count", "")
    before = samples(endpoint)
    sample(shared_engine, engine_loop, 5)
    assert until(lambda: samples(endpoint)[counted] >= before.get(counted, 0.0) + 5), "and the engine's own heartbeat"
    after = samples(endpoint)
    assert after["sglang_max_total_num_tokens", ""] == shared_engine.config.max_total_tokens == 65_536
    whole = ("evenkeel_engine_request_seconds_count", "")
    assert after[whole] - before[whole] == 5, "answers alone"
    assert after["evenkeel_engine_request_seconds_sum", ""] > before["evenkeel_engine_request_seconds_sum", ""]
    taken = after["sglang_weight_memory_usage_bytes", ""]
    assert taken == round(taken), "SGLang says GB, by how much less memory was free afterwards, of which others take and give, too"


def test_a_worker_has_two_hundred_series_of_its_engine_which_nobody_else_has(endpoint: MetricsEndpoint) -> None:
    """So 500 workers have 100,000; a label more than a rank's number, or a histogram more, would be seen here. None has a path.
    Of an engine that has answered nothing yet it is half as many: stages of requests come with them."""
    mine = [line for line in page(endpoint).splitlines() if line.startswith("sglang_")]
    labels = {name for line in mine for name in line.partition("{")[2].partition("}")[0].replace('"', "").split(",") if name.count("=")}
    assert len(mine) == len(set(mine)) and 80 < len(mine) < 230
    names = {name.partition("=")[0] for name in labels}
    assert (
        {"tp_rank", "le", "stage", "category", "mode", "phase"}
        <= names
        <= {"tp_rank", "le", "stage", "category", "mode", "phase", "source"}
    )


@needs_prometheus
def test_promtool_finds_nothing_to_say_about_them(endpoint: MetricsEndpoint) -> None:
    checked = subprocess.run([TOOLS / "promtool", "check", "metrics"], input=page(endpoint), capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr + checked.stdout


@needs_prometheus
def test_a_real_prometheus_knows_whose_engine_it_is(
    endpoint: MetricsEndpoint, shared_engine: Any, engine_loop: BackgroundLoop, tmp_path: Path
) -> None:
    """And answers each query of the board about engines with one series of it."""
    discovery = DiscoveryServer(run="one")
    discovery.register("rollout-7", endpoint.target, endpoint.labels)
    with real_prometheus(discovery.url, tmp_path) as ask:
        sample(shared_engine, engine_loop, 1)
        wanted = samples(endpoint)["sglang_per_stage_req_latency_seconds_count", "prefill_forward"]
        assert until(lambda: [(one["role"], one["name"], value) for one, value in ask(DECODED)] == [("rollout", "7", wanted)])
        asked = [query.replace("$run", "one") for query in QUERIES.values() if re.search(OF_ENGINES, query)]
        assert len(asked) >= 6 and until(lambda: all(len(ask(query)) == 1 for query in asked)), {query: ask(query) for query in asked}
        assert {one.get("name", "7") for query in asked for one, _ in ask(query)} == {"7"}
    discovery.close()
