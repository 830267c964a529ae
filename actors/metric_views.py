"""Where a step's metrics go besides the run folder's metrics.jsonl: TensorBoard, and Weights & Biases for those who ask for it.

Prometheus has a file of its own (exporter.py), since every actor serves it; the terminal and the report read the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from actors.metrics import CATALOGUE, Kind, StepMetrics
from correction.errors import ConfigError


class MetricsView(Protocol):
    """Something that shows the metrics of a step."""

    def write(self, metrics: StepMetrics) -> None: ...

    def close(self) -> None: ...


def json_line(metrics: StepMetrics) -> str:
    """One line of metrics.jsonl, without the line end: strict JSON; values that aren't finite stand under "non_finite" as words."""
    record: dict[str, Any] = metrics.finite()
    non_finite = metrics.non_finite()
    if non_finite:
        record["non_finite"] = non_finite
    return json.dumps(record, allow_nan=False)


def parse_json_line(line: str) -> StepMetrics:
    """The metrics of a line that `json_line` wrote; names that a newer or older catalogue doesn't list are left out.

    Raises: json.JSONDecodeError or KeyError for anything else than such a line.
    """
    record: Mapping[str, Any] = json.loads(line)
    metrics = StepMetrics(record["step"])
    values = {name: value for name, value in record.items() if name not in ("step", "non_finite")}
    values |= {name: float(word) for name, word in record.get("non_finite", {}).items()}
    for name, value in values.items():
        if is_listed(name):
            metrics.set(name, value)
    return metrics


def is_listed(name: str) -> bool:
    """True for a metric of the catalogue and for a member of one of its families."""
    if name in CATALOGUE and not name.endswith("/"):
        return True
    stem, _, rest = name.rpartition("/")
    return bool(rest) and stem + "/" in CATALOGUE


class TensorBoardView:
    """Scalars by step, in the run folder's tensorboard/; histogram buckets are left to the report."""

    def __init__(self, folder: Path, *, resumed_from: int | None = None) -> None:
        """Args: folder: where event files go. resumed_from: last step that counts; TensorBoard hides later ones of the broken run."""
        from torch.utils.tensorboard import SummaryWriter  # half a second; a command that writes no events doesn't pay it

        purge = None if resumed_from is None else resumed_from + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=20)

    def write(self, metrics: StepMetrics) -> None:
        for name, value in metrics.finite().items():
            if name != "step" and not _is_histogram(name):
                self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()


class WandbView:
    """Weights & Biases, off by default; the package is imported here only, and only when `metrics.wandb_project` is set."""

    def __init__(self, *, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"metrics.wandb_project = {project!r}: the package wandb is not installed. "
                f"Install it with `pip install 'evenkeel[wandb]'`, or leave metrics.wandb_project empty."
            ) from error
        self._run: Any = wandb.init(project=project, name=name, dir=str(folder), config=dict(config), resume="allow", id=folder.name)

    def write(self, metrics: StepMetrics) -> None:
        # An evaluation may arrive after later steps; W&B refuses steps that go back, so the step is a value like others.
        self._run.log(dict(metrics.finite()))

    def close(self) -> None:
        self._run.finish()


def _is_histogram(name: str) -> bool:
    stem = name.rpartition("/")[0] + "/"
    return stem in CATALOGUE and CATALOGUE[stem].kind is Kind.HISTOGRAM
