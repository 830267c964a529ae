"""A real Prometheus over endpoints of a test: Debian's, put into .tools/prometheus by deploy/fetch_prometheus.sh."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from lab.ports import free_port

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / ".tools" / "prometheus"
needs_prometheus = pytest.mark.skipif(
    not (TOOLS / "prometheus").exists(), reason="no real Prometheus: run deploy/fetch_prometheus.sh (Debian's package)"
)
Ask = Callable[..., list[tuple[dict[str, str], float]]]
"""Gives labels and value of each series that a query has now, or at a unix time."""
SCRAPE_S = 1
"""Between two scrapes, and what one may take: one that is late takes its target's series away until the next."""


@contextmanager
def real_prometheus(discovery_url: str, folder: Path) -> Iterator[Ask]:
    """A server with the shipped configuration, pointed at a discovery and made faster."""
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"}
    job = next(job for job in config["scrape_configs"] if job["job_name"] == "evenkeel")
    job["http_sd_configs"] = [{"url": discovery_url, "refresh_interval": "1s"}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yml").write_text((ROOT / "deploy" / "alerts.yml").read_text())
    port = free_port()
    process = subprocess.Popen(
        [
            TOOLS / "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
            "--scrape.discovery-reload-interval=100ms",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def ask(expression: str, at: float | None = None) -> list[tuple[dict[str, str], float]]:
        asked = {"query": expression} | ({} if at is None else {"time": at})
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode(asked)
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:  # not up yet
            return []
        return [(one["metric"], float(one["value"][1])) for one in found]

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(timeout=20)


def until(question: Callable[[], bool], deadline_s: float = 40.0) -> bool:
    """Whether it holds before the deadline: a scrape comes when it comes."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if question():
            return True
        time.sleep(0.2)
    return False
