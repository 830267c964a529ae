"""The Grafana board: what its code makes, each of its queries asked of a real Prometheus, and the script that starts both.

No Grafana can be had where evenkeel is tested: its JSON is made by Grafana's own package, and was looked at by none.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import yaml

from deploy.grafana.board import BOARD, ROWS, board, threshold
from evenkeel.actors.metrics.catalogue import CATALOGUE, COUNTERS, Unit
from evenkeel.actors.metrics.exporter import DiscoveryServer, MetricsEndpoint
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.run_folder import RunFolder
from lab.ports import free_port
from tests.actors.metrics.real_prometheus import ROOT, SCRAPE_S, Ask, needs_prometheus, real_prometheus, until
from tests.deploy.board_queries import PLAIN, QUERIES, wanted


def test_the_file_is_what_the_code_makes() -> None:
    assert BOARD.read_text() == board(), "run: make docs"
    made = json.loads(board())
    drawn = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in made["panels"] if panel["type"] == "row"] == list(ROWS)
    assert sorted(target["expr"] for panel in drawn for target in panel["targets"]) == sorted(QUERIES.values())
    assert {variable["name"] for variable in made["templating"]["list"]} == {"run", "source"}
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in drawn), "within the board"


@pytest.mark.parametrize(
    ("alert", "value"),
    [
        ("EvenkeelAlarm", 2.0),
        ("EvenkeelWatch", 1.0),
        ("EvenkeelCheckpointOld", 21_600.0),
        ("EvenkeelLoopLate", 1.0),
        ("EvenkeelMemoryFull", 0.92),
        ("EvenkeelNoWorkers", 0.0),
        ("EvenkeelWentBack", 0.0),
    ],
)
def test_a_line_is_drawn_where_the_alert_fires(alert: str, value: float) -> None:
    (panel,) = (panel for panels in ROWS.values() for panel in panels if alert in panel.alerts)
    (drawn,) = (one for one in json.loads(board())["panels"] if one["title"] == panel.title)
    assert threshold(alert) == value
    assert value in [step["value"] for step in drawn["fieldConfig"]["defaults"]["thresholds"]["steps"]]


def test_each_alert_that_compares_with_a_number_has_its_line() -> None:
    """The others compare two series, which are drawn both, or say that a run is gone or stands."""
    rules = [rule["alert"] for group in yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    drawn = {alert for panels in ROWS.values() for panel in panels for alert in panel.alerts}
    assert set(rules) - drawn == {"EvenkeelRunGone", "EvenkeelRunStands", "EvenkeelPoolShort", "EvenkeelUnscored"}


def test_a_panel_has_one_unit() -> None:
    for panels in ROWS.values():
        for panel in panels:
            units = {PLAIN[place].unit for legend in panel.queries if (place := f"{panel.title}: {legend}") in PLAIN}
            assert len(units - {Unit.ONE}) <= 1, (panel.title, units)


@needs_prometheus
def test_each_query_has_a_series_and_the_value_of_metrics_jsonl(tmp_path: Path) -> None:
    """Of a run in which everything has happened that a metric tells of: each metric has a number of its own, so that one query in the place
    of another shows, and so does a number of the other run that this Prometheus sees. Numbers of Ray and of engines alone aren't
    there (tests/e2e/test_several_workers.py, tests/rollout/test_engine_metrics.py)."""
    names = [metric.name + part for metric in CATALOGUE.values() for part in (_parts(metric.name) if metric.is_family else [""])]
    numbers = {name: index + 0.25 for index, name in enumerate(names) if name != "step"}
    driver, worker, other = (MetricsEndpoint(role, "0") for role in ("controller", "rollout", "controller"))
    discovery = DiscoveryServer(run="one")
    try:
        for one in (driver, worker):
            discovery.register(one.target, one.target, one.labels)
        discovery.register(other.target, other.target, {**other.labels, "run": "other"})
        other.publish(dict.fromkeys(names, 7e6))
        with RunFolder.create(tmp_path / "run", "x") as folder, real_prometheus(discovery.url, tmp_path) as ask:
            folder.write_text("config.yaml", "steps: 10\n")
            driver.publish(dict.fromkeys(COUNTERS, 0.0) | {"step": 1})
            assert until(lambda: len(ask("evenkeel_step")) == 2), "scraped once with all counters at 0"
            folder.append_metrics(metrics := StepMetrics(2, numbers))
            driver.publish(metrics)
            at = 0.0

            def is_scraped() -> bool:
                nonlocal at
                at = time.time() - 2 * SCRAPE_S  # no scrape of that time is under way any more: a late one can't take a series away
                return [value for _, value in ask("sum(up)", at) + ask('evenkeel_step{run="one"}', at)] == [3.0, 2.0]

            assert until(is_scraped)
            (line,) = folder.read_metrics()
            _compare(partial(ask, at=at), line)
    finally:
        for server in (driver, worker, other, discovery):
            server.close()


def _parts(family: str) -> list[str]:
    """Last parts of a family's names in such a run."""
    metric = CATALOGUE[family]
    return [part for part in (*metric.members.split("|"), "0", "1", "1_token_rho") if part and metric.has_member(part)]


def _compare(ask: Ask, line: StepMetrics) -> None:
    without = []
    for place, query in QUERIES.items():
        found = ask(query.replace("$run", "one"))
        if not found:
            without.append(query)
        if place in PLAIN:
            assert sorted(value for _, value in found) == wanted(place, line) != [], place
        elif query.startswith("increase("):
            assert all(value > 0 for _, value in found), place
    assert without and all(re.search("ray_node_|ray_object_|sglang_|_engine_", query) for query in without)
    assert len(PLAIN) >= 40
    (memory,) = (query for query in QUERIES.values() if query.startswith("process_resident_memory_bytes"))
    assert [labels["run"] for labels, _ in ask(memory.replace("$run", "one"))] == ["one", "one"]
    books = [line[f"groups/{name}_total"] for name in ("admitted", "trained", "discarded")]
    (balance,) = (query for query in QUERIES.values() if query.count(" - ") == 3)
    assert ask(balance.replace("$run", "one"))[0][1] == books[0] - books[1] - books[2] - line["groups/outstanding"]


@needs_prometheus
@pytest.mark.parametrize("has_grafana", [False, True])
def test_the_script_starts_prometheus_on_loopback_and_takes_it_along_when_it_ends(tmp_path: Path, has_grafana: bool) -> None:
    """Grafana it starts where there is one, here a stand-in: it takes a relative path for one below its home, where nobody may write, and
    ends, and Prometheus with it. Without one the script says how to do without."""
    port = free_port()
    variables = os.environ | {"EVENKEEL_PROMETHEUS_PORT": str(port), "EVENKEEL_OBSERVE_DATA": os.path.relpath(tmp_path, ROOT)}
    if has_grafana:
        (stand_in := tmp_path / "grafana-server").write_text(f"#!/bin/sh\nenv | grep ^GF_PATHS_ >{tmp_path}/paths\nexec sleep 60\n")
        stand_in.chmod(0o755)
        variables["PATH"] = f"{tmp_path}:{variables['PATH']}"
    with subprocess.Popen([ROOT / "deploy" / "observe.sh"], env=variables, stdout=subprocess.PIPE, text=True) as script:

        def jobs() -> set[str]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/status/config", timeout=5) as answer:
                    return {job["job_name"] for job in yaml.safe_load(json.load(answer)["data"]["yaml"])["scrape_configs"]}
            except OSError:
                return set()

        try:
            assert until(lambda: jobs() == {"evenkeel"} and (tmp_path / "paths").exists() == has_grafana)
        finally:
            script.send_signal(signal.SIGTERM)
        told = script.stdout.read() if script.stdout else ""
        assert script.wait(20) == 143 and jobs() == set()
    assert f"Prometheus: http://127.0.0.1:{port}" in told and "Grafana" in told
    assert (tmp_path / "prometheus").is_dir()
    paths = dict(line.split("=", 1) for line in (tmp_path / "paths").read_text().splitlines()) if has_grafana else {}
    for name in ("DATA", "LOGS", "PLUGINS") if has_grafana else ():
        assert Path(paths[f"GF_PATHS_{name}"]).is_relative_to(tmp_path / "grafana"), name
