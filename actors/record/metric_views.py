"""Views of a step's metrics besides the run folder's metrics.jsonl: TensorBoard, and Weights & Biases for those who ask for it.

Prometheus has a file of its own (exporter.py), since every actor serves it; the terminal and the report read the same numbers.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenkeel.actors.json_lines import append_whole, last_step
from evenkeel.actors.metrics.catalogue import Kind
from evenkeel.actors.metrics.step_metrics import StepMetrics, lookup
from evenkeel.actors.record.disk_writer import FileThread
from evenkeel.actors.record.run_folder import WANDB_ID
from evenkeel.correction.errors import ConfigError, counted

if TYPE_CHECKING:
    from evenkeel.actors.config import MetricsConfig
    from evenkeel.actors.record.run_folder import RunFolder

# Most steps that wait for Weights & Biases; with more it counts as gone.
_MOST_STEPS = 1000
# Longest wait for the start of Weights & Biases, which itself gives up after 90 s.
_START_S = 180.0
CLOSE_S = 20.0
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


def wandb_for(project: str) -> Any:
    """The package wandb. Raises: ConfigError if it is not installed."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"metrics.wandb_project = {project!r}: the package wandb is not installed. "
            f"Install it with `pip install 'evenkeel[wandb]'`, or leave metrics.wandb_project empty."
        ) from error
    return wandb


class WandbView:
    """Weights & Biases, off by default; the package is imported here only, and only when `metrics.wandb_project` is set.

    Its calls run in a thread of their own: one that fails or never comes back keeps neither the run's start, nor its lines, nor its end.
    """

    def __init__(self, *, project: str, name: str, folder: Path, config: Mapping[str, Any], notify: Callable[[str], object]) -> None:
        """
        Args:
            folder: of the run, which keeps its id: names are not unique, and may have characters that an id must not.
            notify: called, once, when it takes no steps any more.
        Raises: ConfigError if the package is not installed; OSError.
        """
        wandb, run_id = wandb_for(project), _kept_id(folder / WANDB_ID)
        self._notify, self._is_open, self._lock = notify, True, threading.Lock()
        self._thread = FileThread("Weights & Biases")
        self._run: Any = None
        self._began = time.monotonic()

        def begin() -> None:
            self._run = wandb.init(project=project, name=name, dir=str(folder), config=dict(config), resume="allow", id=run_id)

        self._thread.do(partial(self._try, begin))

    def write(self, metrics: StepMetrics) -> None:
        """Hand a step over. The first error, of whatever kind, is reported and is the end of this view, as are too many steps that wait: a
        service that shows a run must not end it."""
        if self._thread.waiting >= _MOST_STEPS:
            self._give_up(f"{_MOST_STEPS} of them wait for it")
        if self._run is None and time.monotonic() - self._began > _START_S:
            self._give_up(f"its start is not done in {_START_S:.0f} s")
        if self._is_open:
            # An evaluation may arrive after later steps; W&B refuses steps that go back, so the step is a value like others.
            self._thread.do(partial(self._try, lambda: self._run.log(dict(metrics.finite()))))

    def close(self, *, within_s: float | None = None) -> None:
        """Args: within_s: for what waits, and for the package's own end; None: CLOSE_S."""
        self._thread.do(partial(self._try, lambda: self._run.finish()))
        if self._thread.end(within_s=CLOSE_S if within_s is None else within_s):
            return
        steps = self._thread.waiting - 2  # besides its own end, and the thread's
        if steps >= 0:
            self._give_up(f"it does not answer, and {counted(steps, 'step')} more wait for it")

    @property
    def hangs(self) -> bool:
        """Whether, after `close`, a call of the package's has not come back."""
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
            self._notify(f"Weights & Biases gets no more steps of this run; all of them are in its folder: {why}")


def _kept_id(path: Path) -> str:
    """The run's id: what the file holds, or a new one, which is written there."""
    kept = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    if not kept:
        kept = os.urandom(8).hex()
        path.write_text(f"{kept}\n", encoding="utf-8")
    return kept


View = TensorBoardView | WandbView


def open_views(folder: RunFolder, config: MetricsConfig, notify: Callable[[str], object]) -> list[View]:
    """The views of a run, by its settings; steps and evaluations go to all of them.

    Args: notify: called, in whatever thread, when one of them is dropped.
    Raises: ConfigError if Weights & Biases is asked for and not installed.
    """
    # Of a resumed run: its lines have been taken back to the checkpoint that it goes on from.
    last = last_step(folder.metrics_path) or None
    views: list[View] = [TensorBoardView(folder.tensorboard_path, resumed_from=last)]
    if config.wandb_project:
        of_run = folder.read_config()
        views.append(WandbView(project=config.wandb_project, name=folder.path.name, folder=folder.path, config=of_run, notify=notify))
    return views


def views_from_an_earlier_step(views: Sequence[View], folder: RunFolder, step: int) -> list[View]:
    """The views for a run that has gone back to the checkpoint of this step. TensorBoard hides later steps by a new file; W&B draws the
    steps once more. No file is read, because an event loop waits for this."""
    later = partial(TensorBoardView, folder.tensorboard_path, resumed_from=step)
    return [later(after=view.began) if isinstance(view, TensorBoardView) else view for view in views]
