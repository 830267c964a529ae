"""Where a step's metrics go besides the run folder's metrics.jsonl: TensorBoard, and Weights & Biases for those who ask for it.

Prometheus has a file of its own (exporter.py), since every actor serves it; the terminal and the report read the same numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from actors.metrics import Kind, StepMetrics, is_listed, lookup
from correction.errors import ConfigError
from correction.monitor import Event, State
from correction.quantities import current_name

if TYPE_CHECKING:
    from actors.config import MetricsConfig
    from actors.record.run_folder import RunFolder


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
    for name, value in ((current_name(name), value) for name, value in values.items()):
        if is_listed(name):
            metrics.set(name, value)
    return metrics


def event_line(event: Event) -> str:
    """One line of monitor.jsonl, without the line end: strict JSON; values that aren't finite stand there as words."""
    words = {name: str(value) for name, value in (("value", event.value), ("growth", event.growth)) if not math.isfinite(value)}
    return json.dumps(asdict(event) | words, allow_nan=False)


def parse_event_line(line: str) -> Event | None:
    """The event of a line that `event_line` wrote; None for anything else, such as a torn line."""
    try:
        record = json.loads(line)
        numbers = {name: float(record[name]) for name in ("value", "growth")}
        return Event(**{**record, **numbers, "name": current_name(record["name"]), "state": State(record["state"])})
    except (ValueError, KeyError, TypeError):
        return None


class TensorBoardView:
    """Scalars by step, in the run folder's tensorboard/; histogram buckets are left to the report."""

    def __init__(self, folder: Path, *, resumed_from: int | None = None) -> None:
        """Args: folder: where event files go. resumed_from: last step that counts; TensorBoard hides later ones of the broken run."""
        from torch.utils.tensorboard import SummaryWriter  # half a second; a command that writes no events doesn't pay it

        purge = None if resumed_from is None else resumed_from + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=20)

    def write(self, metrics: StepMetrics) -> None:
        for name, value in metrics.finite().items():
            if name != "step" and lookup(name).kind is not Kind.HISTOGRAM:
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


class MetricViews:
    """The views of one run, by its settings; steps and evaluations go to all of them."""

    def __init__(self, folder: RunFolder, config: MetricsConfig) -> None:
        """Raises: ConfigError if Weights & Biases is asked for and not installed."""
        earlier = folder.read_metrics()    # a resumed run's, already rewound to its checkpoint
        self._views: list[MetricsView] = [TensorBoardView(folder.tensorboard_path, resumed_from=earlier[-1].step if earlier else None)]
        if config.wandb_project:
            wandb = WandbView(project=config.wandb_project, name=folder.path.name, folder=folder.path, config=folder.read_config())
            self._views.append(wandb)

    def step(self, metrics: StepMetrics) -> None:
        """Show a step."""
        for view in self._views:
            view.write(metrics)

    def evaluation(self, metrics: StepMetrics) -> None:
        """Show a held-out evaluation, at the step whose weights answered."""
        self.step(metrics)

    def close(self) -> None:
        """Write out what is left, and close."""
        for view in self._views:
            view.close()
