"""Views of a step's metrics besides the run folder's metrics.jsonl, those that metrics.views names: TensorBoard, trackers such as Weights &
Biases and MLflow, and the user's own.

Prometheus has a file of its own (exporter.py), since every actor serves it; the terminal and the report read the same numbers.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evenkeel.actors.json_lines import append_whole, last_step
from evenkeel.actors.metrics.catalogue import Kind
from evenkeel.actors.metrics.step_metrics import StepMetrics, lookup
from evenkeel.actors.record.disk_writer import FileThread
from evenkeel.actors.record.run_folder import TRACKER_ID
from evenkeel.correction.errors import ConfigError, counted
from evenkeel.rollout.limited_processes.child import LoadError, import_named

if TYPE_CHECKING:
    from evenkeel.actors.config import MetricsConfig
    from evenkeel.actors.record.run_folder import RunFolder

# Most steps that wait for a tracker; with more it counts as gone.
_MOST_STEPS = 1000
# Longest wait for a tracker's start; Weights & Biases itself gives up after 90 s.
_START_S = 180.0
CLOSE_S = 20.0
TENSORBOARD = "tensorboard"
# What a run is filed under unless a tracker's own variables say otherwise.
_PROJECT = "evenkeel"
# Of MLflow: characters that it takes in no name of a metric, characters of a parameter, and parameters of a call.
_NO_MLFLOW, _MLFLOW_PARAM, _MLFLOW_PARAMS = re.compile(r"[^\w./ :-]"), 6000, 100
_EVENTS = "events.out.tfevents."
# Event files of a process are read in the order of their names, and two may begin within a second.
_NUMBERS = itertools.count()


class TensorBoardView:
    """Scalars by step, in an event file of the run folder's tensorboard/; histogram buckets are left to the report.

    Each step is one write, which a full disk takes whole or not at all, so that it can be tried again: TensorBoard's own writer, once its
    thread has been refused, repeats that error for good.
    """

    def __init__(self, folder: Path, *, resumed_from: int | None = None, after: int | None = None) -> None:
        """
        Args:
            folder: where event files go.
            resumed_from: last step that counts; TensorBoard hides later ones of the broken run.
            after: `began` of the view before in this process; None: event files of earlier processes are looked for in the folder.
        """
        # TensorBoard reads the files in the order of their names, and only hides what it has read: the clock may have gone back.
        earlier = max(map(_began, folder.glob(f"{_EVENTS}*")), default=0) + 1 if after is None else after
        self.began = max(int(time.time()), earlier)
        """Number in the file's name, by which it comes after all that were there: seconds since 1970, unless those say less."""
        name = f"{_EVENTS}{self.began:010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS):06d}"
        self._path, self._purge, self._has_header = folder / name, None if resumed_from is None else resumed_from + 1, False
        self._described = set[str]()

    def write(self, metrics: StepMetrics) -> None:
        """Raises: OSError if the disk doesn't take it, and the file is as it was."""
        from tensorboard.compat.proto.event_pb2 import Event  # a third of a second; a command that writes no events doesn't pay it
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

        shown = {name: value for name, value in metrics.finite().items() if name != "step" and lookup(name).kind is not Kind.HISTOGRAM}
        plugin = SummaryMetadata.PluginData(plugin_name="scalars")
        told = {  # once a file: TensorBoard shows it beside the curve
            name: SummaryMetadata(summary_description=lookup(name).help, plugin_data=plugin) for name in shown.keys() - self._described
        }
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value, metadata=told.get(tag)) for tag, value in shown.items()])
        event = Event(wall_time=time.time(), step=metrics.step, summary=summary)
        append_whole(self._path, _records([event] if self._has_header else [*self._header(), event]))
        self._has_header = True
        self._described.update(told)

    def _header(self) -> list[Any]:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        version = Event(wall_time=time.time(), file_version="brain.Event:2")
        if self._purge is None:
            return [version]
        return [version, Event(wall_time=time.time(), step=self._purge, session_log=SessionLog(status=SessionLog.START))]

    hangs = False

    def close(self) -> None:
        """Does nothing: each step is in the file once it is written."""


def _began(path: Path) -> int:
    """Time at which an event file was begun, by its name; 0: another program's."""
    number = path.name.removeprefix(_EVENTS).partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() else 0


def _records(events: Sequence[Any]) -> bytes:
    """Events as the bytes of an event file."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    content = io.BytesIO()
    writer = RecordWriter(content)
    for event in events:
        writer.write(event.SerializeToString())
    return content.getvalue()


@dataclass(frozen=True)
class ShownRun:
    """What a tracker is told of the run that it shows. Where it sends numbers, and by which key, it reads in its own environment variables:
    neither a recipe nor the run's folder has them."""

    name: str
    """Of the run's folder."""
    folder: Path
    config: Mapping[str, Any]
    """config.yaml, without the values of ray.env, which may be keys."""
    id: str
    """16 hexadecimal digits, the same after a resume: names are not unique, and may have characters that an id must not."""


class Tracker(Protocol):
    """What a function that metrics.views names returns. It is called in a thread of its own; its first error is reported, and the end of
    its calls."""

    def write(self, step: int, numbers: Mapping[str, float]) -> object:
        """Take a step's finite numbers, by name of docs/metrics.md, or an evaluation's, which may come after those of later steps. After
        a return to a checkpoint steps come again."""

    def close(self) -> object:
        """The run has ended, or stops here to be resumed."""


class _Wandb:
    """Its variables say whose and which project it is (WANDB_ENTITY, WANDB_PROJECT), by which key, and whether offline (WANDB_MODE)."""

    def __init__(self, run: ShownRun) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        self._run = wandb.init(project=project, name=run.name, dir=str(run.folder), config=dict(run.config), resume="allow", id=run.id)
        self.close = self._run.finish

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})  # a value like others: it refuses steps that go back, as an evaluation's may


class _Mlflow:
    """Its variables say where (MLFLOW_TRACKING_URI; without it mlflow.db in the run's folder) and which experiment it is
    (MLFLOW_EXPERIMENT_NAME)."""

    def __init__(self, run: ShownRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder / 'mlflow.db'}")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        before = self._client.search_runs([experiment], f"tags.evenkeel_run = '{run.id}'", max_results=1)
        if before:
            self._id = before[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=run.name, tags={"evenkeel_run": run.id}).info.run_id
        settings = iter([Param(key, str(value)[:_MLFLOW_PARAM]) for key, value in _settings(run.config)])
        while some := list(islice(settings, _MLFLOW_PARAMS)):
            self._client.log_batch(self._id, params=some)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, metrics=[Metric(_NO_MLFLOW.sub("_", name), value, now, step) for name, value in numbers.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their whole keys."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_TRACKERS: Mapping[str, tuple[str, Callable[[ShownRun], Tracker]]] = {"wandb": ("Weights & Biases", _Wandb), "mlflow": ("MLflow", _Mlflow)}


def check_views(views: Sequence[str]) -> None:
    """Raises: ConfigError if a package is not installed, or a function of the user's can't be imported."""
    for view in views:
        if view != TENSORBOARD:
            _opener(view)


def _opener(view: str) -> tuple[str, Callable[[ShownRun], Tracker]]:
    """What a tracker is called, and what begins it. Raises: ConfigError."""
    if view not in _TRACKERS:
        try:
            return view, import_named("metrics.views", view, None, "a function")
        except LoadError as error:
            raise ConfigError(str(error)) from error
    if find_spec(view) is None:  # it is imported where it is used: that takes a second
        raise ConfigError(
            f"metrics.views has {view}: its package is not installed. Install it with `pip install 'evenkeel[{view}]'`, or leave it out"
        )
    return _TRACKERS[view]


class TrackerView:
    """A tracker, by a thread of its own: a call that fails or never comes back keeps neither a run's start, nor its lines, nor its end."""

    def __init__(self, name: str, begin: Callable[[], Tracker], notify: Callable[[str], object]) -> None:
        """
        Args:
            name: for messages.
            notify: called, once, when it takes no steps any more.
        """
        self._name, self._notify, self._is_open, self._lock = name, notify, True, threading.Lock()
        self._thread = FileThread(name)
        self._tracker: Tracker | None = None
        self._began = time.monotonic()

        def first() -> None:
            self._tracker = begin()

        self._thread.do(partial(self._try, first))

    def write(self, metrics: StepMetrics) -> None:
        """Hand a step over. The first error, of whatever kind, is reported and is the end of this view, as are too many steps that wait:
        what shows a run must not end it."""
        if self._thread.waiting >= _MOST_STEPS:
            self._give_up(f"{_MOST_STEPS} of them wait for it")
        if self._tracker is None and time.monotonic() - self._began > _START_S:
            self._give_up(f"its start is not done in {_START_S:.0f} s")
        if self._is_open:
            numbers = {name: value for name, value in metrics.finite().items() if name != "step"}
            self._thread.do(partial(self._try, lambda: self._begun.write(metrics.step, numbers)))

    @property
    def _begun(self) -> Tracker:
        assert self._tracker is not None, "the thread's first job, without which this view has been given up"
        return self._tracker

    def close(self, *, within_s: float | None = None) -> None:
        """Args: within_s: for what waits, and for the tracker's own end; None: CLOSE_S."""
        self._thread.do(partial(self._try, lambda: self._begun.close()))
        if self._thread.end(within_s=CLOSE_S if within_s is None else within_s):
            return
        steps = self._thread.waiting - 2  # besides its own end, and the thread's
        if steps >= 0:
            self._give_up(f"it does not answer, and {counted(steps, 'step')} more wait for it")

    @property
    def hangs(self) -> bool:
        """Whether, after `close`, a call of the tracker's has not come back."""
        return self._thread.is_under_way

    def _try(self, call: Callable[[], object]) -> None:
        if self._is_open:
            try:
                call()
            except (Exception, SystemExit) as error:
                self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        with self._lock:
            is_first, self._is_open = self._is_open, False
        if is_first:
            self._notify(f"{self._name} gets no more steps of this run; all of them are in its folder: {why}")


def _kept_id(path: Path) -> str:
    """The run's id: what the file holds, or a new one, which is written there."""
    kept = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    if not kept:
        kept = os.urandom(8).hex()
        path.write_text(f"{kept}\n", encoding="utf-8")
    return kept


View = TensorBoardView | TrackerView


def open_views(folder: RunFolder, config: MetricsConfig, notify: Callable[[str], object]) -> list[View]:
    """The views of a run, by its settings; steps and evaluations go to all of them.

    Args: notify: called, in whatever thread, when one of them is dropped.
    Raises: ConfigError as check_views; OSError.
    """
    trackers = [_opener(view) for view in config.views if view != TENSORBOARD]
    views: list[View] = []
    if TENSORBOARD in config.views:
        # Of a resumed run: its lines have been taken back to the checkpoint that it goes on from.
        views.append(TensorBoardView(folder.tensorboard_path, resumed_from=last_step(folder.metrics_path) or None))
    if trackers:
        of_run = folder.read_config()
        if environment := of_run.get("ray", {}).get("env"):
            of_run["ray"]["env"] = sorted(environment)
        shown = ShownRun(folder.path.name, folder.path, of_run, _kept_id(folder.path / TRACKER_ID))
        views += [TrackerView(name, partial(begin, shown), notify) for name, begin in trackers]
    return views


def views_from_an_earlier_step(views: Sequence[View], folder: RunFolder, step: int) -> list[View]:
    """The views for a run that has gone back to the checkpoint of this step. TensorBoard hides later steps by a new file; trackers get
    the steps once more. No file is read, because an event loop waits for this."""
    later = partial(TensorBoardView, folder.tensorboard_path, resumed_from=step)
    return [later(after=view.began) if isinstance(view, TensorBoardView) else view for view in views]
