"""Recorded runs (benchmarks/series): how they are stored, and how they ended."""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SERIES = Path(__file__).resolve().parents[1] / "benchmarks" / "series"
SMOOTHING = 5
"""Steps of the centred mean of the outcome."""
COLLAPSED_SHARE = 0.5
"""Share of the best outcome so far; a run below it counts as lost."""
# Series by the names that the files have, and by those of the diagnostics.
_SHARES = {f"{name}_fraction": f"{name}_share" for name in ("loss/clip", "rejected", "bad_update")}
LASTING = 10
"""Steps, up to the end of the record, that a run must have stayed lost."""

RecordedBatch = dict[str, list[Any]]
"""Trained tokens of a batch, end to end: `lengths` of the answers, and by token `behavior` and `proximal` (log mu, log pi_prox, nats) and
`advantages`."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A recorded run."""

    condition: str
    seed: int
    series: dict[str, list[float | None]]
    """By name, one value for each step; None where a step had none."""
    onset: int | None = None
    """Step at which its disturbance began."""
    batches: dict[int, RecordedBatch] = field(default_factory=dict)
    """By step, where they were recorded."""

    @property
    def outcome(self) -> list[float]:
        """Mean reward of what the weights of each step sample (with staleness they are trained some steps later)."""
        return [value or 0.0 for value in self.series["sampled_reward"]]

    @property
    def steps(self) -> int:
        return len(self.series["sampled_reward"])

    @property
    def collapse(self) -> int | None:
        return collapse_step(self.outcome)

    def numbers(self, step: int) -> dict[str, float]:
        """What a monitor is given at a step."""
        return {name: value for name, values in self.series.items() if (value := values[step]) is not None}


def load_runs(folder: Path = SERIES) -> list[RecordedRun]:
    """All recorded runs, by condition and seed."""
    runs = []
    for path in sorted(folder.glob("*.json.gz")):
        record = json.loads(gzip.decompress(path.read_bytes()))
        series = {_SHARES.get(name, name): values for name, values in record["series"].items()}
        batches = {int(step): batch for step, batch in record.get("batches", {}).items()}
        runs.append(RecordedRun(record["condition"], record["seed"], series, record["settings"]["onset"], batches))
    return runs


def write_run(
    path: Path,
    condition: str,
    seed: int,
    settings: dict[str, Any],
    series: dict[str, list[float | None]],
    batches: Mapping[int, RecordedBatch] | None = None,
) -> None:
    """Compressed JSON (Python's, which knows NaN), whose bytes depend on nothing but the numbers."""
    record = {"condition": condition, "seed": seed, "settings": settings, "series": series} | ({"batches": batches} if batches else {})
    text = json.dumps(record, separators=(",", ":"))
    partial = path.with_suffix(".partial")
    partial.write_bytes(gzip.compress(text.encode(), mtime=0))
    partial.rename(path)


def collapse_step(outcome: Sequence[float]) -> int | None:
    """First step from which on the smoothed outcome stays under half of its best until then; None for a run that didn't collapse."""
    half = SMOOTHING // 2
    smooth = [statistics.fmean(outcome[max(0, k - half) : k + half + 1]) for k in range(len(outcome))]
    best = list(itertools.accumulate(smooth, max))
    is_lost = [value < COLLAPSED_SHARE * top for value, top in zip(smooth, best, strict=True)]
    lost = len(list(itertools.takewhile(bool, reversed(is_lost))))
    return len(outcome) - lost if lost >= LASTING else None
