"""Numbers of all steps of a run, as its report needs them: a column for each metric that is shown, and sums by worker.

As arrays, because a run of 150,000 steps with 300 metrics each has gigabytes of them as objects. They are read in one pass.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from actors.metrics.catalogue import CATALOGUE
from actors.metrics.step_metrics import StepMetrics, by_worker

_OF_WORKERS = "worker/"


@dataclass(slots=True)
class WorkerTotals:
    """What one rollout worker did, over all steps."""

    first_step: int
    last_step: int = 0
    groups: float = 0
    tokens: float = 0
    waits: float = 0.0
    """Sum of its shares of time waited."""
    steps_with_wait: int = 0

    def add(self, metrics: StepMetrics, name: str) -> None:
        self.last_step = metrics.step
        self.groups += metrics.get(f"worker/groups/{name}", 0)
        self.tokens += metrics[f"worker/tokens/{name}"]
        if math.isfinite(wait := metrics.get(f"worker/wait_share/{name}", math.nan)):
            self.waits, self.steps_with_wait = self.waits + wait, self.steps_with_wait + 1


class StepColumns:
    """The values that are finite, by metric, with the place of their steps."""

    def __init__(self, steps: Iterable[StepMetrics]) -> None:
        """Args: steps: in order; each is looked at once and not kept."""
        self.last: StepMetrics | None = None
        self.workers: dict[str, WorkerTotals] = {}
        """By name, in the order in which they came."""
        self._steps = array("q")
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        """Places in `_steps`, and values."""
        for metrics in steps:
            self._add(metrics)

    def _add(self, metrics: StepMetrics) -> None:
        place, self.last = len(self._steps), metrics
        self._steps.append(metrics.step)
        for name, value in metrics.items():
            if not name.startswith(_OF_WORKERS) and math.isfinite(value):
                places, values = self._columns.setdefault(name, (array("l"), array("d")))
                places.append(place)
                values.append(value)
        for name in by_worker(metrics, "tokens"):
            self.workers.setdefault(name, WorkerTotals(metrics.step)).add(metrics, name)

    def __len__(self) -> int:
        return len(self._steps)

    def values(self, name: str) -> list[float]:
        """Values of a metric, in the order of steps; steps without it are left out."""
        return self._columns[name][1].tolist() if name in self._columns else []

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps [n], values [n]) of a metric."""
        places, values = self._columns.get(name, (array("l"), array("d")))
        return np.array(self._steps, dtype=np.int64)[np.array(places, dtype=np.int64)], np.array(values)

    def members(self, family: str) -> list[str]:
        """Open parts of the names of a family of the catalogue, sorted."""
        return sorted(name[len(family) :] for name in self._columns if name.rpartition("/")[0] + "/" == family)

    def table(self, family: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(steps [n], values [n] by the open part of the name) of a family, at steps with any of its members; 0 where one is absent."""
        columns = {part: self._columns[family + part] for part in self.members(family)}
        rows = np.unique(np.concatenate([np.array(places, dtype=np.int64) for places, _ in columns.values()] or [np.array([], np.int64)]))
        found = {part: np.zeros(len(rows)) for part in columns}
        for part, (places, values) in columns.items():
            found[part][np.searchsorted(rows, np.array(places, dtype=np.int64))] = values
        return np.array(self._steps, dtype=np.int64)[rows], found


def those_of(names: Iterable[str]) -> Callable[[str], bool]:
    """Whether a metric is one of these, a member of one of their families, or of a worker. Args: names: of metrics and of families."""
    shown = {*names, *(name for name in CATALOGUE if name.startswith(_OF_WORKERS))}
    return lambda name: name in shown or name.rpartition("/")[0] + "/" in shown
