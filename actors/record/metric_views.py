"""Where a step's metrics go besides the run folder's metrics.jsonl: TensorBoard, and Weights & Biases for those who ask for it.

Prometheus has a file of its own (exporter.py), since every actor serves it; the terminal and the report read the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.metric_kinds import Kind
from actors.metrics import StepMetrics, lookup
from correction.errors import ConfigError

if TYPE_CHECKING:
    from actors.config import MetricsConfig
    from actors.record.run_folder import RunFolder


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
        resumed_from = earlier[-1].step if earlier else None
        self._views: list[TensorBoardView | WandbView] = [TensorBoardView(folder.tensorboard_path, resumed_from=resumed_from)]
        if config.wandb_project:
            wandb = WandbView(project=config.wandb_project, name=folder.path.name, folder=folder.path, config=folder.read_config())
            self._views.append(wandb)

    def write(self, metrics: StepMetrics) -> None:
        for view in self._views:
            view.write(metrics)

    def close(self) -> None:
        for view in self._views:
            view.close()
