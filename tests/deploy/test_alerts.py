"""deploy/alerts.yml: its metrics are in the catalogue, and promtool's own rule tests say when each alert fires.

promtool is Debian's, put into .tools/prometheus by deploy/fetch_prometheus.sh; without it that test is skipped by name.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from evenkeel.actors.metrics.catalogue import CATALOGUE, Kind

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "alerts.yml"
PROMTOOL = ROOT / ".tools" / "prometheus" / "promtool"

# Minutes 0 to 30 of one run (AxN is N + 1 times A): ok to 4, watch to 8, ok to 11, alarm to 13, watch to 30; 3 skipped steps at 20.
LEVELS = "0x4 1x3 0x2 2x1 1x16"
SKIPPED = "0x19 3x10"
FIRES = {
    "EvenkeelAlarm": {3: False, 7: False, 11: False, 12: True, 13: True, 14: False, 28: False},
    "EvenkeelWatch": {8: False, 13: False, 23: False, 24: True},
    "EvenkeelUpdatesSkipped": {10: False, 22: True},
}


def test_the_rules_speak_of_metrics_that_there_are() -> None:
    """Their metrics are exported, and the configuration names the file."""
    names = {name for rule in rules() for name in re.findall(r"evenkeel_\w+", rule["expr"])}
    exported = {metric.prometheus_name + ("_total" if metric.kind is Kind.COUNTER else "") for metric in CATALOGUE.values()}
    assert names and names <= exported
    assert {rule["alert"] for rule in rules()} == set(FIRES)
    assert yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["rule_files"] == [ALERTS.name]


@pytest.mark.skipif(not PROMTOOL.exists(), reason="no promtool: run deploy/fetch_prometheus.sh (Debian's package)")
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    labels = {"job": "evenkeel", "instance": "a:1"}
    summaries = {rule["alert"]: rule["annotations"]["summary"].replace("{{ $labels.instance }}", "a:1") for rule in rules()}
    severity = {rule["alert"]: rule["labels"]["severity"] for rule in rules()}
    checks = [
        {
            "eval_time": f"{minute}m",
            "alertname": alert,
            "exp_alerts": [{"exp_labels": {**labels, "severity": severity[alert]}, "exp_annotations": {"summary": summaries[alert]}}]
            if fires
            else [],
        }
        for alert, minutes in FIRES.items()
        for minute, fires in minutes.items()
    ]
    name = '{job="evenkeel", instance="a:1"}'
    given = [
        {"series": f"evenkeel_monitor_level{name}", "values": LEVELS},
        {"series": f"evenkeel_steps_skipped_total{name}", "values": SKIPPED},
    ]
    tests = {"rule_files": [str(ALERTS)], "tests": [{"interval": "1m", "input_series": given, "alert_rule_test": checks}]}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(tests))
    for words in (["check", "rules", str(ALERTS)], ["test", "rules", str(path)]):
        checked = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert "SUCCESS" in checked.stdout


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
