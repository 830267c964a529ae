"""The first view: curves of all steps, held-out accuracy, events and alarms on the same axis, and the run in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
import yaml

from evenkeel.actors.metrics.step_metrics import StepMetrics, accuracies_of_tasks, lookup, pass_at_most
from evenkeel.actors.record.run_folder import EventKind, RunEvent
from evenkeel.actors.record.terminal import usual_mismatch_of
from evenkeel.dashboard import facts
from evenkeel.dashboard.charts import MOST_POINTS, chart_of, slice_of
from evenkeel.dashboard.columns import StepColumns
from evenkeel.dashboard.curves import CURVES, STALENESS, Curves
from evenkeel.dashboard.open_run import OpenRun

MOST_EVENTS = 200
# How an event names the step at which it is.
_STEP = re.compile(r"^step (\d+)\b|\bafter (\d+) steps?\b|\bstep_(\d{6,})\b")


def overview(run: OpenRun, asked: Mapping[str, str]) -> dict[str, Any]:
    """Args: asked: `from` and `to`, the steps that are drawn (all of them); `more`, names of further metrics, with commas between."""
    steps, config, evaluations = run.steps, run.config, run.evaluations
    left_out = run.left_out
    events, warnings = run.folder.read_events(), run.folder.read_monitor_events()
    usual = usual_mismatch_of(run.folder)
    shown = slice_of(asked)
    own = [_own_curve(name) for name in asked.get("more", "").split(",") if name in steps.names]
    charts = [chart for curves in (*own, *CURVES) if (chart := chart_of(curves, steps, shown)) is not None]
    return {
        "status": facts.status(steps, config),
        "headline": facts.headline(evaluations),
        "summary": facts.summary_rows(steps, evaluations, config, usual),
        "tiles": _tiles(steps),
        "steps": [1, max(1, int(config.get("steps", 1)), steps.last.step if steps.last else 1)],
        "accuracy": _accuracy(evaluations, shown),
        "charts": charts,
        "staleness": _staleness(steps, shown),
        "usual": None if usual is None else f"Usual at staleness 0 ({usual.text}): up to {usual.high:.1e} nats.",
        "marks": _marks(events, shown),
        "warnings": [{"step": w.step, "state": w.state, "text": w.message} for w in warnings[-MOST_EVENTS:]],
        "notable": [_row(e) for e in events if e.level in ("warning", "error")][-MOST_EVENTS:],
        "events": [_row(e) for e in events[-MOST_EVENTS:]],
        "counts": {"warnings": len(warnings), "notable": sum(e.level in ("warning", "error") for e in events), "events": len(events)},
        "workers": facts.worker_rows(steps),
        "slowest": facts.slowest_rows(run.folder),
        "clipped": facts.clipped_rows(run.folder, left_out.append),
        "names": steps.names,
        "config": yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        "left_out": left_out,
    }


def _own_curve(name: str) -> Curves:
    """A chart for any metric that the user asks for."""
    metric = lookup(name)
    return replace(CURVES[0], title=name, names=(name,), y_label=metric.shown_unit, caption=metric.help)


def _tiles(steps: StepColumns) -> list[dict[str, str]]:
    """What one looks at first: (label, value)."""
    last = steps.last
    if last is None:
        return []
    names = ("reward/mean", "time/step_s", "wait/learner_share", "wait/rollout_share", "staleness/mean", "mismatch_and_staleness/k3")
    return [{"name": name, "label": lookup(name).label, "value": lookup(name).text(last[name])} for name in names if name in last]


def _accuracy(evaluations: Sequence[StepMetrics], shown: tuple[float, float]) -> dict[str, Any]:
    """Held-out accuracy, pass@k of the largest k, and each task's accuracy, with 95 % Wilson intervals: rows [step, value, low, high]."""
    rows, best, k, tasks = [], [], None, dict[str, list[list[float]]]()
    for metrics in evaluations:
        if "held_out/accuracy" in metrics and shown[0] <= metrics.step <= shown[1]:
            value = metrics["held_out/accuracy"]
            rows.append([metrics.step, value, *(metrics.get(f"held_out/wilson_{end}", value) for end in ("low", "high"))])
            if (found := pass_at_most(metrics)) is not None:
                k = max(found[0], k or 0)
                best.append([metrics.step, *found[1:]])
            for name, share in accuracies_of_tasks(metrics).items():
                tasks.setdefault(name, []).append([metrics.step, *share])
    return {"accuracy": rows, "pass": best, "k": k, "tasks": list(tasks.items())}


def _staleness(steps: StepColumns, shown: tuple[float, float]) -> dict[str, Any] | None:
    """Shares of trained tokens by staleness."""
    x, found = steps.table(STALENESS)
    inside = (x >= shown[0]) & (x <= shown[1])
    x = x[inside]
    ages = sorted((age for age in found if age.rstrip("+").isdecimal()), key=lambda age: int(age.rstrip("+")))
    if not len(x) or not ages:
        return None
    starts = np.arange(0, len(x), 1 + (len(x) - 1) // MOST_POINTS)  # of as many steps each, so that there are few enough
    counts = np.array([np.add.reduceat(found[age][inside], starts) for age in ages])
    shares = counts / np.maximum(counts.sum(axis=0), 1.0)
    return {"x": x[starts], "ages": ages, "shares": list(shares)}


def _row(event: RunEvent) -> dict[str, str]:
    return {"time": event.time, "level": event.level, "text": event.text}


def _marks(events: Sequence[RunEvent], shown: tuple[float, float]) -> list[dict[str, Any]]:
    """Events that belong on the axis of steps: what isn't only information, and what ends, saves or resumes a run.

    A line of events.log has a time. Those that name a step are there; the others between them, by their time.
    """
    times = [_seconds(event) for event in events]
    named = [next((int(n) for n in found.groups() if n), None) if (found := _STEP.search(event.text)) else None for event in events]
    anchors = [(time, step) for time, step in zip(times, named, strict=True) if step is not None]
    # A resume goes back: between its anchors the later one counts.
    known = np.array([time for time, _ in anchors]), np.array([float(step) for _, step in anchors])
    order = np.argsort(known[0], kind="stable")
    known = known[0][order], known[1][order]
    marks = list[dict[str, Any]]()
    for event, time, step in zip(events, times, named, strict=True):
        if event.level == "info" and event.kind is EventKind.NONE:
            continue
        at = float(step) if step is not None else float(np.interp(time, *known)) if len(known[0]) else 0.0
        if shown[0] <= at <= shown[1]:
            kind = event.kind.value if event.level == "info" else event.level
            marks.append({"step": round(at, 2), "kind": kind, "time": event.time, "text": event.text})
    return marks[-1000:]


def _seconds(event: RunEvent) -> float:
    try:
        return datetime.fromisoformat(event.time).timestamp()
    except ValueError:
        return 0.0
