"""The Grafana board of a run, as code: `make docs` writes evenkeel.json beside this file from it, by Grafana's own package.

A row answers a question. Queries are made of the catalogue's names, and lines at which an alert fires are read from deploy/alerts.yml, so
that neither can say something else. Ray's own numbers (`ray_...`) come from Ray's endpoints. A run is told from others by the label `run`
that its discovery gives to each of its targets: the name of its folder, so that one that was resumed is the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models

from evenkeel.actors.metrics.catalogue import CATALOGUE, Kind, Metric
from evenkeel.actors.metrics.step_metrics import lookup
from evenkeel.correction.diagnostics.quantities import Unit

HERE = Path(__file__).parent
BOARD, ALERTS = HERE / "evenkeel.json", HERE.parent / "alerts.yml"
# Grafana's names of units.
_UNITS = {
    Unit.ONE: "short",
    Unit.SECONDS: "s",
    Unit.SHARE: "percentunit",
    Unit.BYTES: "bytes",
}
# Of the 24 columns of a board, a panel's; and its height.
_WIDTH, _HEIGHT = 8, 8


@dataclass(frozen=True)
class Panel:
    """One picture."""

    title: str
    queries: Mapping[str, str]
    """Legend -> PromQL; a legend in braces is a label."""
    unit: str = "short"
    alerts: Sequence[str] = field(default_factory=tuple)
    """Alerts whose thresholds are drawn in."""
    text: str = ""


def of(name: str) -> str:
    """A metric of the catalogue at the run's driver. Raises: MetricError for a name that isn't listed."""
    return _series(lookup(name))


def family(name: str) -> str:
    """All members of a family of the catalogue, at the run's driver."""
    return _series(CATALOGUE[name])


def _series(metric: Metric) -> str:
    return f'{metric.prometheus_name}{"_total" * (metric.kind is Kind.COUNTER)}{{run="$run", role="controller"}}'


def plain(title: str, *names: str, alerts: Sequence[str] = (), text: str = "") -> Panel:
    """Metrics of one unit as they are, with the catalogue's labels."""
    return Panel(title, {lookup(name).label: of(name) for name in names}, _UNITS.get(lookup(names[0]).unit, "short"), alerts, text)


def in_engines(name: str, over_ranks: str = "sum") -> str:
    """A metric of the engines, by worker."""
    return f'{over_ranks} by (name) ({name}{{run="$run", role="rollout"}})'


def rate(query: str, time: str = "15m") -> str:
    return f"increase({query}[{time}])"


_UNBALANCED = " - ".join(of(f"groups/{name}_total") for name in ("admitted", "trained", "discarded")) + f" - {of('groups/outstanding')}"
_ANSWERS = 'evenkeel_engine_request_seconds_bucket{run="$run"}'
ROWS: dict[str, list[Panel]] = {
    "Is it learning?": [
        plain("Reward", "reward/mean", "reward/accuracy", "held_out/reward"),
        plain(
            "Held-out accuracy", "held_out/accuracy", "held_out/wilson_low", "held_out/wilson_high", text="With its 95 % Wilson interval."
        ),
        plain("Gradient norm", "learner/grad_norm"),
        plain("Entropy", "learner/entropy"),
        plain("Length of answers", "length/sampled_tokens", "length/trained_tokens"),
        plain("Groups without a gradient", "groups/no_gradient_share"),
    ],
    "Who waits for whom?": [
        plain("Share of the time that each side waits", "wait/learner_share", "wait/rollout_share"),
        plain("A step's time", "time/step_s", "time/train_s", "wait/learner_s", "time/generate_s", "time/reward_s", "time/sync_s"),
        plain("Tokens a second", "throughput/rollout_tokens_per_s", "throughput/learner_tokens_per_s"),
        plain("Steps", "step", text="EvenkeelRunStands fires when it stands for half an hour."),
        Panel("Workers that wait", {"{{worker}}": family("worker/wait_share/")}, "percentunit"),
        plain("How long an engine stands still for new weights", "time/pause_s"),
    ],
    "What do the engines do?": [
        Panel(
            "Requests in each engine",
            {"{{name}} runs": in_engines("sglang_num_running_reqs"), "{{name}} waits": in_engines("sglang_num_queue_reqs")},
            text="Many that wait: the engine is full, and more slots don't help.",
        ),
        Panel(
            "KV cache in use, and found in the prefix cache",
            {"{{name}} in use": in_engines("sglang_token_usage", "max"), "{{name}} found": in_engines("sglang_cache_hit_rate", "max")},
            "percentunit",
            text="Near 1 in use, requests are retracted and read again.",
        ),
        Panel(
            "How long an answer takes",
            {f"{share} of answers": f"histogram_quantile({share}, sum by (le) (rate({_ANSWERS}[5m])))" for share in ("0.5", "0.95")},
            "s",
        ),
    ],
    "Is the policy drifting?": [
        plain("Early warning: 0 ok, 1 watch, 2 alarm", "monitor/level", alerts=["EvenkeelWatch", "EvenkeelAlarm"]),
        plain("Mismatch of the engines (k3)", "mismatch/k3", "mismatch_and_staleness/k3"),
        plain("Effective sample size", "rho/ess"),
        plain("Tokens rejected", "rejection/rejected_share", "rejection/truncated_share"),
        plain("Staleness", "staleness/mean", "staleness/max"),
        Panel("Updates left out", {"in 15 minutes": rate(of("steps/skipped_total"))}, alerts=["EvenkeelUpdatesSkipped"]),
    ],
    "Is the pool healthy?": [
        plain("Rollout workers", "pool/workers", "pool/current_workers", "pool/target_workers", alerts=["EvenkeelNoWorkers"]),
        plain("Slots, and what waits for one", "pool/slots", "pool/used_slots", "pool/waiting_groups"),
        Panel(
            "Failures in half an hour",
            {"{{kind}}": f"sum by (kind) (increase({family('pool/failures_total/')}[30m]))"},
            alerts=["EvenkeelPoolFails"],
        ),
        Panel("Weight updates that failed", {"in 15 minutes": rate(of("sync/failures_total"))}, alerts=["EvenkeelSyncFails"]),
        Panel("Version of each worker's weights", {"{{worker}}": family("worker/weight_version/")}),
        Panel("Changes of size by the load", {"{{cause}}": family("pool/scaled_total/")}),
    ],
    "Are the books balanced?": [
        Panel("admitted - trained - discarded - outstanding", {"groups": _UNBALANCED}, alerts=["EvenkeelBooksUnbalanced"]),
        plain("Groups", "groups/admitted_total", "groups/trained_total", "groups/discarded_total", "groups/lost_total"),
        plain("Under way", "groups/outstanding", "groups/finished"),
        Panel(
            "Answers not scored in half an hour",
            {
                "not scored": f"{rate(of('reward/exceptions_total'), '30m')} + {rate(of('reward/timeouts_total'), '30m')}",
                "groups finished, above which EvenkeelUnscored fires": rate(of("rollout/finished_groups_total"), "30m"),
            },
        ),
        Panel(
            "Returns to a checkpoint and replacements in an hour",
            {"returns": rate(of("steps/returns_total"), "1h"), "correction services": rate(of("service/replaced_total"), "1h")},
            alerts=["EvenkeelWentBack"],
        ),
        Panel(
            "Age of the newest checkpoint",
            {"age": f"time() - {of('checkpoint/last_time_s')}"},
            "s",
            alerts=["EvenkeelCheckpointOld"],
        ),
    ],
    "Is a disk or memory filling?": [
        Panel("Memory of the run's processes", {"{{role}} {{name}}": 'process_resident_memory_bytes{run="$run", role!="ray"}'}, "bytes"),
        Panel(
            "Memory of the nodes",
            {"{{instance}}": 'ray_node_mem_used{run="$run"} / ray_node_mem_total{run="$run"}'},
            "percentunit",
            alerts=["EvenkeelMemoryFull"],
        ),
        Panel("Object store", {"{{instance}} {{Location}}": 'sum by (instance, Location) (ray_object_store_memory{run="$run"})'}, "bytes"),
        Panel(
            "Disk of Ray's session",
            {"{{instance}}": 'ray_node_disk_utilization_percentage{run="$run"}'},
            "percent",
            alerts=["EvenkeelDiskFull"],
        ),
        Panel(
            "Writes that the run folder's disk refused", {"in 15 minutes": rate(of("files/failures_total"))}, alerts=["EvenkeelDiskRefuses"]
        ),
        plain("How late event loops are", "time/driver_late_s", "time/service_late_s", "time/rollout_late_s", alerts=["EvenkeelLoopLate"]),
    ],
}


def threshold(alert: str) -> float:
    """The number with which an alert's rule compares last."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    (expression,) = (rule["expr"] for rule in rules if rule["alert"] == alert)
    number = re.findall(r"[<>=]=?\s*([\d.]+(?:\s*\*\s*[\d.]+)*)", expression)[-1]
    return math.prod(map(float, number.split("*")))


def _drawn(panel: Panel) -> timeseries.Panel:
    told = (
        timeseries.Panel()
        .title(panel.title)
        .unit(panel.unit)
        .height(_HEIGHT)
        .span(_WIDTH)
        .datasource(models.DataSourceRef(type_val="prometheus", uid="$source"))
        .span_nulls(True)  # a step may take longer than Prometheus' interval
        .legend(
            common.VizLegendOptions().display_mode(kinds.LegendDisplayMode.LIST).placement(kinds.LegendPlacement.BOTTOM).show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI))
    )
    if panel.text:
        told = told.description(panel.text)
    for number, (legend, query) in enumerate(panel.queries.items()):
        told = told.with_target(prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + number)))
    if panel.alerts:
        lines = [models.Threshold(value=threshold(alert), color="red") for alert in panel.alerts]
        steps = [models.Threshold(value=None, color="transparent"), *lines]
        told = told.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        told = told.thresholds_style(common.GraphThresholdsStyleConfig().mode(kinds.GraphTresholdsStyleMode.DASHED))
    return told


def board() -> str:
    """The board as JSON, in which every number of a version or an id is fixed: the same text from the same data."""
    runs = (
        dashboard.QueryVariable("run")
        .label("Run")
        .query("label_values(evenkeel_step, run)")
        .datasource(models.DataSourceRef(type_val="prometheus", uid="$source"))
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )
    made = (
        dashboard.Dashboard("evenkeel: a run")
        .uid("evenkeel")
        .tags(["evenkeel"])
        .refresh("10s")
        .time("now-3h", "now")
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(runs)
    )
    for question, panels in ROWS.items():
        made = made.with_row(dashboard.Row(question))
        for panel in panels:
            made = made.with_panel(_drawn(panel))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


if __name__ == "__main__":
    BOARD.write_text(board())
