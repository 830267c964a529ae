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

# Values of series at minutes 0, 1, 2 ... (AxN is N + 1 times A; A+BxN rises by B); and for each alert, at which minutes it fires or not.
RUN = '{job="evenkeel", run="one", instance="a:1", role="controller", name="0"}'
RESUMED = RUN.replace("a:1", "b:2")
NODE = '{job="evenkeel", run="one", role="ray", instance="n:1", name="0"}'
SERIES = {
    f"evenkeel_monitor_level{RUN}": "0x4 1x3 0x2 2x1 1x16 0x200",  # ok to 4, watch to 8, ok to 11, alarm to 13, watch to 30
    f"evenkeel_steps_skipped_total{RUN}": "0x19 3x200",
    f"up{RUN}": "1x39 0x3 1x200",
    f"evenkeel_step{RUN}": "1+1x60 61x45 62+1x150",  # stands from 60 to 106
    f"evenkeel_steps_returns_total{RUN}": "0x70 1x200",
    f"evenkeel_checkpoint_last_timestamp_seconds{RUN}": "0x200",  # promtool's time begins at 0
    f"evenkeel_pool_workers{RUN}": "2x19 0x15 2x200",
    f"evenkeel_pool_target_workers{RUN}": "2x79 4x35 2x200",
    f'evenkeel_pool_failures_total{{kind="engine_lost", {RUN[1:]}': "0x10 0+1x12 12x200",
    f'evenkeel_pool_failures_total{{kind="unreached", {RUN[1:]}': "0x200",
    f"evenkeel_sync_failures_total{RUN}": "0x50 2x2 6x200",
    f"evenkeel_reward_exceptions_total{RUN}": "0+4x30 124x200",
    f"evenkeel_reward_timeouts_total{RUN}": "0+1x30 31x200",
    f"evenkeel_rollout_finished_groups_total{RUN}": "0+4x200",
    f"evenkeel_groups_admitted_total{RUN}": "0+4x89 360x8 396+4x150",  # stands from minute 90 to 98
    f"evenkeel_groups_trained_total{RUN}": "0+2x260",
    f"evenkeel_groups_discarded_total{RUN}": "0+1x260",
    f"evenkeel_groups_outstanding{RUN}": "0+1x260",
    f"evenkeel_time_driver_late_seconds{RUN}": "0.1x29 2x14 0.1x200",
    f"evenkeel_time_service_late_seconds{RUN}": "0.1x200",
    f"evenkeel_files_failures_total{RUN}": "0x60 1x200",
    f"ray_node_disk_utilization_percentage{NODE}": "80x29 95x9 80x200",
    f"ray_node_mem_used{NODE}": "80x49 93x9 80x200",
    f"ray_node_mem_total{NODE}": "100x200",
}
FIRES: dict[str, dict[int, bool]] = {
    "EvenkeelAlarm": {3: False, 7: False, 11: False, 12: True, 13: True, 14: False, 28: False},
    "EvenkeelWatch": {8: False, 13: False, 23: False, 24: True},
    "EvenkeelUpdatesSkipped": {10: False, 22: True},
    "EvenkeelRunGone": {39: False, 41: False, 43: True, 45: False},
    "EvenkeelRunStands": {60: False, 90: False, 96: True, 110: False},
    "EvenkeelWentBack": {70: False, 72: True, 131: False},
    "EvenkeelCheckpointOld": {199: False},
    "EvenkeelNoWorkers": {25: False, 31: True, 37: False},
    "EvenkeelPoolShort": {30: False, 100: False, 111: True, 120: False},
    "EvenkeelPoolFails": {18: False, 24: True, 60: False},
    "EvenkeelSyncFails": {52: False, 55: True, 75: False},
    "EvenkeelUnscored": {29: True, 75: False},
    "EvenkeelBooksUnbalanced": {89: False, 94: False, 97: True, 105: False},
    "EvenkeelLoopLate": {35: False, 41: True, 46: False},
    "EvenkeelDiskRefuses": {60: False, 62: True, 80: False},
    "EvenkeelDiskFull": {33: False, 36: True, 41: False},
    "EvenkeelMemoryFull": {53: False, 56: True, 61: False},
}
# Labels of what fires besides its severity.
_OF_DRIVER = {"job": "evenkeel", "run": "one", "instance": "a:1", "role": "controller", "name": "0"}
_OF_NODE = {"run": "one", "instance": "n:1"}
_OTHERS: dict[str, dict[str, str]] = {
    "EvenkeelAlarm": {"run": "one"},
    "EvenkeelWatch": {"run": "one"},
    "EvenkeelPoolFails": {"run": "one", "kind": "engine_lost"},
    "EvenkeelDiskFull": _OF_NODE,
    "EvenkeelMemoryFull": _OF_NODE,
}


def test_the_rules_speak_of_metrics_that_there_are() -> None:
    """Their metrics are exported, and the configuration names the file."""
    names = {name for rule in rules() for name in re.findall(r"evenkeel_\w+", rule["expr"])}
    assert len(names) >= 15
    exported = {metric.prometheus_name + ("_total" if metric.kind is Kind.COUNTER else "") for metric in CATALOGUE.values()}
    assert names and names <= exported
    assert {rule["alert"] for rule in rules()} == set(FIRES)
    assert yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["rule_files"] == [ALERTS.name]


@pytest.mark.skipif(not PROMTOOL.exists(), reason="no promtool: run deploy/fetch_prometheus.sh (Debian's package)")
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    by_name = {rule["alert"]: rule for rule in rules()}
    checks = [
        {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": [_alert(by_name[alert])] if fires else []}
        for alert, minutes in FIRES.items()
        for minute, fires in minutes.items()
    ]
    old = {"eval_time": "361m", "alertname": "EvenkeelCheckpointOld", "exp_alerts": [_alert(by_name["EvenkeelCheckpointOld"])]}
    given = [{"series": series, "values": values} for series, values in SERIES.items()]
    aged = [{"series": f"evenkeel_checkpoint_last_timestamp_seconds{RUN}", "values": "0x400"}]
    # Resumed in another process, whose first step is finished at minute 60, and stands from then on.
    resumed = [{"series": f"evenkeel_step{RUN}", "values": "_x60 35x45"}]
    stands = [(67, []), (90, []), (99, [_alert(by_name["EvenkeelRunStands"])])]
    new = [{"eval_time": f"{minute}m", "alertname": "EvenkeelRunStands", "exp_alerts": alerts} for minute, alerts in stands]
    # On watch before a resume and after it, when the driver has another port: five minutes and five are ten of one run.
    through = [{"series": f"evenkeel_monitor_level{RUN}", "values": "1x4 stale"}]
    through += [{"series": f"evenkeel_monitor_level{RESUMED}", "values": "_x4 1x20"}]
    watched = [(9, []), (11, [_alert(by_name["EvenkeelWatch"])])]
    after = [{"eval_time": f"{minute}m", "alertname": "EvenkeelWatch", "exp_alerts": alerts} for minute, alerts in watched]
    parts = [(given, checks), (aged, [old]), (resumed, new), (through, after)]
    cases = [{"interval": "1m", "input_series": series, "alert_rule_test": wanted} for series, wanted in parts]
    tests = {"rule_files": [str(ALERTS)], "tests": cases}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(tests))
    for words in (["check", "rules", str(ALERTS)], ["test", "rules", str(path)]):
        checked = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert "SUCCESS" in checked.stdout


def _alert(rule: dict[str, Any]) -> dict[str, Any]:
    """As it fires."""
    labels = _OTHERS.get(rule["alert"], _OF_DRIVER)
    told = {name: re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text) for name, text in rule["annotations"].items()}
    return {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": told}


def test_each_alert_has_a_section_that_says_what_it_means_what_to_look_at_and_what_to_do() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE))
    assert list(sections) == [rule["alert"] for rule in rules()], "in the order of the file"
    for rule in rules():
        assert "un {{ $labels.run }}" in rule["annotations"]["summary"], "the run, by the word that the board has for it"
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert all(f"**{word}.**" in sections[rule["alert"]] for word in ("Means", "Look at", "Do")), rule["alert"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
