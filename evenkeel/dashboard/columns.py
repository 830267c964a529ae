"""The numbers of all steps of a run: a column for each metric, and sums by worker, as arrays.

A run of 150,000 steps with 300 metrics each has gigabytes of them as objects. They are read in one pass, and a page that is open adds what
has come since. A line nearly always has names that were there before: a decoder that knows them gives its numbers, and nothing else is made
of it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any

import msgspec
import numpy as np
import orjson

from evenkeel.actors.json_lines import step_of
from evenkeel.actors.metrics.catalogue import CATALOGUE
from evenkeel.actors.metrics.step_metrics import StepMetrics, is_listed

_OF_WORKERS = "worker/"
_NUMBERS = frozenset({float, int})
_Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
# Steps after which numbers of workers are summed up.
_SUMMED_UP = 1024


@dataclass(slots=True)
class WorkerTotals:
    """What one rollout worker did, over all steps."""

    first_step: int
    last_step: int
    groups: float = 0
    tokens: float = 0
    waits: float = 0.0
    """Sum of its shares of time waited."""
    steps_with_wait: int = 0
    version: float | None = None
    """Version that it sampled with, when it was last told."""


class _Sums:
    """Numbers of workers, by their places in a row: what is there of each over all steps."""

    def __init__(self, width: int) -> None:
        self._steps, self._rows = array("q"), array("d")
        self.sums, self.counts = np.zeros(width), np.zeros(width, dtype=np.int64)
        self.first_step, self.last_step = np.zeros(width, dtype=np.int64), np.zeros(width, dtype=np.int64)
        self.last = np.zeros(width)

    def add(self, step: int, row: array[float]) -> None:
        self._steps.append(step)
        self._rows.extend(row)
        if len(self._steps) == _SUMMED_UP:
            self.sum_up()

    def sum_up(self) -> None:
        """Bring the sums up to the last step."""
        if not (steps := np.array(self._steps)).size:
            return
        rows = np.array(self._rows).reshape(len(steps), -1)
        there = np.isfinite(rows)
        seen, first, last = there.any(axis=0), there.argmax(axis=0), len(steps) - 1 - there[::-1].argmax(axis=0)
        self.first_step = np.where(seen & (self.counts == 0), steps[first], self.first_step)
        self.last_step = np.where(seen, steps[last], self.last_step)
        self.last = np.where(seen, rows[last, np.arange(rows.shape[1])], self.last)
        self.sums += np.where(there, rows, 0.0).sum(axis=0)
        self.counts += there.sum(axis=0)
        self._steps, self._rows = array("q"), array("d")


class _Block:
    """Steps whose lines have no other names than these; a number that a line lacks is NaN."""

    def __init__(self, names: Sequence[str], wanted: Callable[[str], bool]) -> None:
        self.names = {name: place for place, name in enumerate(names, 1)}
        self.kept = {name: i for i, name in enumerate(name for name in names if not name.startswith(_OF_WORKERS) and wanted(name))}
        """Numbers that are wanted, with their places in a row."""
        self.of_workers = {name: i for i, name in enumerate(name for name in names if name.startswith(_OF_WORKERS))}
        """Those of workers, with their places in a row of their own: they are summed up."""
        self._row = [*self.kept, *self.of_workers]
        # Two places at least, so that it gives a tuple: the first two are the step's.
        self._pick = itemgetter(0, 0, *(self.names[name] for name in self._row))
        numbers = [(f"f{place}", float, msgspec.field(name=name, default=math.nan)) for name, place in self.names.items()]
        # In the order in which lines have them, because then no name is searched for.
        line = msgspec.defstruct("Line", [("step", _Step), *numbers, ("non_finite", Any, None)], forbid_unknown_fields=True)
        self._decoder = msgspec.json.Decoder(line)
        self.steps, self._values, self.sums = array("q"), array("d"), _Sums(len(self.of_workers))

    def read(self, line: bytes) -> None:
        """Add a line. Raises: msgspec.MsgspecError, and nothing is added, unless it is one of these names alone."""
        step, _, *row = self._pick(msgspec.structs.astuple(self._decoder.decode(line)))
        self._add(step, array("d", row))

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Raises: OverflowError, and nothing is added."""
        self._add(step, array("d", [numbers.get(name, math.nan) for name in self._row]))

    def _add(self, step: int, row: array[float]) -> None:
        self.steps.append(step)
        self._values.extend(row[: len(self.kept)])
        if self.of_workers:
            self.sums.add(step, row[len(self.kept) :])

    def column(self, name: str) -> np.ndarray:
        """[n] values of a metric that is kept."""
        # An array can't grow while something looks into it: this is a copy.
        return np.frombuffer(self._values).reshape(-1, len(self.kept))[:, self.kept[name]].copy()

    def add_to(self, workers: dict[str, WorkerTotals]) -> None:
        """Add what workers did in these steps. Args: workers: those of steps before, by name."""
        of, sums = self.of_workers, self.sums
        sums.sum_up()
        for name in (name.removeprefix("worker/tokens/") for name in of if name.startswith("worker/tokens/")):
            if not sums.counts[at := of[f"worker/tokens/{name}"]]:
                continue
            one = workers.setdefault(name, WorkerTotals(int(sums.first_step[at]), 0))
            one.last_step = int(sums.last_step[at])
            one.tokens += float(sums.sums[at])
            if (groups := of.get(f"worker/groups/{name}")) is not None:
                one.groups += float(sums.sums[groups])
            if (version := of.get(f"worker/weight_version/{name}")) is not None and sums.counts[version]:
                one.version = float(sums.last[version])
            if (wait := of.get(f"worker/wait_share/{name}")) is not None:
                one.waits, one.steps_with_wait = one.waits + float(sums.sums[wait]), one.steps_with_wait + int(sums.counts[wait])


class StepColumns:
    """The values that are finite, by metric, with the place of their steps."""

    def __init__(self, steps: Iterable[Mapping[str, Any]] = (), *, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Args: steps: StepMetrics, or lines of metrics.jsonl, in order; each is looked at once and not kept.
        wanted: which metrics are kept; those of workers always are."""
        self._wanted = wanted
        self._last: Mapping[str, Any] | bytes | None = None
        self._blocks: list[_Block] = []
        for metrics in steps:
            self.add(metrics)

    def add_line(self, line: bytes) -> None:
        """Add a line of metrics.jsonl. Raises: as `add`, and orjson.JSONDecodeError."""
        try:
            if self._blocks:
                self._blocks[-1].read(line)
                self._last = line
                return
        except msgspec.MsgspecError:  # it has a name more, or is none of ours
            pass
        self.add(orjson.loads(line))

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a step. Args: record: StepMetrics or a line of metrics.jsonl, whose names that the catalogue doesn't list are left out.

        Raises: KeyError, ValueError, TypeError or OverflowError for anything else, and nothing is added.
        """
        step = step_of(record)
        numbers = {name: value for name, value in record.items() if name != "step" and is_listed(name)}
        for name, value in numbers.items():
            if type(value) not in _NUMBERS:
                raise TypeError(f"{name} = {value!r}: no number")
        known = self._blocks[-1].names if self._blocks else {}
        has_more = not self._blocks or not numbers.keys() <= known.keys()
        block = _Block([*{**known, **numbers}], self._wanted) if has_more else self._blocks[-1]
        block.add(step, numbers)
        if has_more:
            self._blocks.append(block)
        self._last = record

    def __len__(self) -> int:
        return sum(len(block.steps) for block in self._blocks)

    @property
    def workers(self) -> dict[str, WorkerTotals]:
        """Workers by name, in the order in which they came."""
        found: dict[str, WorkerTotals] = {}
        for block in self._blocks:
            block.add_to(found)
        return dict(sorted(found.items(), key=lambda one: (one[1].first_step, len(one[0]), one[0])))

    @property
    def last(self) -> StepMetrics | None:
        """The last step's values that are finite, without those of workers; None: there is no step."""
        if self._last is None:
            return None
        record = orjson.loads(self._last) if isinstance(self._last, bytes) else self._last
        numbers = {name: value for name, value in record.items() if is_listed(name) and not name.startswith(_OF_WORKERS)}
        return StepMetrics(record["step"], {name: value for name, value in numbers.items() if name != "step" and math.isfinite(value)})

    @property
    def names(self) -> list[str]:
        """Metrics that a step has, sorted."""
        return sorted(self._blocks[-1].kept) if self._blocks else []

    @property
    def _steps(self) -> np.ndarray:
        return np.concatenate([np.array([], dtype=np.int64), *(np.array(block.steps) for block in self._blocks)])

    def _column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(places of steps [n], in order, values [n]) of a metric."""
        of = [block.column(name) if name in block.kept else np.full(len(block.steps), math.nan) for block in self._blocks]
        values = np.concatenate([np.array([]), *of])
        places = np.flatnonzero(np.isfinite(values))
        return places, values[places]

    def values(self, name: str) -> list[float]:
        """Values of a metric, in the order of steps; steps without it are left out."""
        found: list[float] = self._column(name)[1].tolist()
        return found

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps [n], values [n]) of a metric."""
        places, values = self._column(name)
        return self._steps[places], values

    def members(self, family: str) -> list[str]:
        """Open parts of the names of a family of the catalogue, sorted."""
        return [name[len(family) :] for name in self.names if name.startswith(family) and "/" not in name[len(family) :]]

    def table(self, family: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(steps [n], values [n] by the open part of the name) of a family, at steps with any of its members; 0 where one is absent."""
        columns = {part: self._column(family + part) for part in self.members(family)}
        rows = np.unique(np.concatenate([np.array([], dtype=np.int64), *(places for places, _ in columns.values())]))
        found = {part: np.zeros(len(rows)) for part in columns}
        for part, (places, values) in columns.items():
            found[part][np.searchsorted(rows, places)] = values
        return self._steps[rows], found


def those_of(names: Iterable[str]) -> Callable[[str], bool]:
    """Whether a metric is one of these, a member of one of their families, or of a worker. Args: names: of metrics and of families."""
    shown = {*names, *(name for name in CATALOGUE if name.startswith(_OF_WORKERS))}
    joined = tuple(name for name in shown if name.endswith("_"))
    return lambda name: name in shown or name.rpartition("/")[0] + "/" in shown or name.startswith(joined)


def running_mean(values: np.ndarray, half_width: int) -> np.ndarray:
    """Mean over up to 2 half_width + 1 neighbours; fewer at the ends, so that nothing is made up there. [n] -> [n]"""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half_width, 0), np.minimum(index + half_width + 1, len(values))
    return np.asarray((sums[last] - sums[first]) / (last - first))


def drawn_points(values: np.ndarray, most: int) -> np.ndarray:
    """Indices of those that are drawn, of a curve of any length: the first, the last, and the lowest and highest of each part.

    [n] -> [at most `most` + 2]
    """
    if len(values) <= most:
        return np.arange(len(values))
    width = -(-2 * len(values) // most)
    parts = np.pad(values, (0, -len(values) % width), mode="edge").reshape(-1, width)
    begins = np.arange(0, len(values), width)
    ends = np.concatenate([begins + parts.argmin(axis=1), begins + parts.argmax(axis=1)])
    return np.unique([0, *ends, len(values) - 1])
