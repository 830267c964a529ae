"""The view of the pool and the books: who samples and with which weights, what is under way, what became of every group, what failed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from evenkeel.actors.metrics.catalogue import Kind
from evenkeel.actors.metrics.step_metrics import StepMetrics, lookup
from evenkeel.actors.record.run_folder import EventKind
from evenkeel.dashboard.charts import chart_of, slice_of
from evenkeel.dashboard.curves import POOL_CURVES
from evenkeel.dashboard.open_run import OpenRun

_BOOK = ("groups/admitted_total", "groups/trained_total", "groups/discarded_total", "groups/outstanding")
# Counters of what is no failure.
_WORK = frozenset({*_BOOK, "rollout/generated_tokens_total", "rollout/finished_groups_total"})
MOST_WAITS = 12
# What the run has said of a worker last; of one that is up its steps say more.
_TOLD = re.compile(r"rollout (?:worker )?(\S+) (is up|leaves|has left|is gone)\b")
_STATES = {"leaves": "leaving", "has left": "left", "is gone": "lost"}


def pool(run: OpenRun, asked: Mapping[str, str]) -> dict[str, Any]:
    """Args: asked: `from` and `to` as the overview."""
    steps, last = run.steps, run.steps.last
    return {
        "charts": [chart for curves in POOL_CURVES if (chart := chart_of(curves, steps, slice_of(asked))) is not None],
        "steps": [1, max(1, last.step if last else 1)],
        "workers": _workers(run, last),
        "book": None if last is None else _book(last),
        "counters": [] if last is None else _counters(last),
        "waits": _waits(run),
    }


def _workers(run: OpenRun, last: StepMetrics | None) -> list[dict[str, Any]]:
    step = last.step if last else 0
    workers = run.steps.workers
    total = sum(worker.tokens for worker in workers.values())
    here, told = "to the last step" if step >= run.config.get("steps", math.inf) else "samples", _told(run)
    return [
        {
            "name": name,
            "state": told.get(name) or (here if worker.last_step == step else f"nothing since step {worker.last_step}"),
            "version": worker.version,
            "steps": [worker.first_step, worker.last_step],
            "groups": worker.groups,
            "tokens": worker.tokens,
            "share": worker.tokens / total if total else None,
            "waits": worker.waits / worker.steps_with_wait if worker.steps_with_wait else None,
        }
        for name, worker in workers.items()
    ]


def _told(run: OpenRun) -> dict[str, str]:
    """Which workers leave, have left, or were lost, by name."""
    found: dict[str, str] = {}
    for event in run.folder.read_events():
        if event.kind is EventKind.RESUMED:  # names begin again
            found.clear()
        if (told := _TOLD.match(event.text)) is not None:
            found[told[1]] = _STATES.get(told[2], "")
    return found


def _book(last: StepMetrics) -> dict[str, Any]:
    """What became of all groups, and whether they add up: admitted = trained + discarded + under way."""
    admitted, trained, discarded, outstanding = (last.get(name) for name in _BOOK)
    counts = (admitted, trained, discarded, outstanding)
    is_balanced = None if None in counts else admitted == trained + discarded + outstanding  # type: ignore[operator]
    return {"admitted": admitted, "trained": trained, "discarded": discarded, "outstanding": outstanding, "is_balanced": is_balanced}


def _counters(last: StepMetrics) -> list[dict[str, Any]]:
    """Running totals of what went wrong or was given up, those above 0 first."""
    found = [
        {"name": name, "value": value, "text": lookup(name).text(value), "help": lookup(name).help}
        for name, value in last.items()
        if name != "step" and lookup(name).kind is Kind.COUNTER and name not in _WORK
    ]
    return sorted(found, key=lambda row: (row["value"] == 0, row["name"]))


def _waits(run: OpenRun) -> list[dict[str, Any]]:
    """What the run has waited for, the longest wait of each, longest first."""
    found: dict[str, dict[str, Any]] = {}
    for event in run.folder.read_events():
        if (notice := event.notice) is not None:
            before = found.get(notice.what, {"seconds": 0, "notices": 0})
            found[notice.what] = {
                "what": notice.what,
                "seconds": max(notice.seconds, before["seconds"]),
                "notices": before["notices"] + 1,
                "detail": notice.detail,
                "time": event.time,
            }
    return sorted(found.values(), key=lambda row: -row["seconds"])[:MOST_WAITS]
