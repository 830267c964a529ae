"""A run's folder that is looked at while it grows: what has come since is read, and all anew where a resume has cut a file."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec

from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.errors import counted
from evenkeel.dashboard.columns import StepColumns

# Bytes before the place up to which a file was read: where they are others now, it was cut and has grown again.
_REMEMBERED = 64
_BUFFER_BYTES = 1 << 20
_NOT_OURS = (ValueError, KeyError, TypeError, OverflowError)


class GrowingLines:
    """A file that grows by whole lines; a resume cuts it, and the last line may be torn for good or still being written."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._before = path, 0, b""

    def is_cut(self) -> bool:
        """Whether what was read isn't there any more; the next `new` begins at the first line then."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._at - _REMEMBERED))
                is_cut = file.read(min(self._at, _REMEMBERED)) != self._before
        except FileNotFoundError:
            is_cut = self._at > 0
        if is_cut:
            self._at, self._before = 0, b""
        return is_cut

    def new(self) -> Iterator[bytes]:
        """Whole lines that have come since."""
        with suppress(FileNotFoundError), self._path.open("rb", buffering=_BUFFER_BYTES) as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                self._before = line[-_REMEMBERED:] if len(line) >= _REMEMBERED else (self._before + line)[-_REMEMBERED:]
                yield line


_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class _Span(msgspec.Struct):
    """A line of timeline.jsonl (LaneSpan), read in a tenth of the time: a run of some thousand steps has half a million of them."""

    lane: str
    what: str
    begin: float
    end: float
    version: _Number | None = None
    group: _Number | None = None
    why: str | None = None


_SPANS = msgspec.json.Decoder(_Span)


class Spans:
    """The spans of a timeline.jsonl up to now, as columns."""

    def __init__(self, path: Path) -> None:
        self._lines = GrowingLines(path)
        self._clear()

    def _clear(self) -> None:
        self.begin, self.end = array("d"), array("d")
        self.version, self.group = array("q"), array("q")
        """-1: none."""
        self.kind = array("l")
        """Place in `kinds`."""
        self.kinds: list[tuple[str, str, str]] = []
        """Lane, what, and why (empty: not told)."""
        self.left_out = 0
        """Lines that are no spans."""
        self._places: dict[tuple[str, str, str], int] = {}

    def read(self) -> None:
        """Add what has come since."""
        if self._lines.is_cut():
            self._clear()
        for line in self._lines.new():
            try:
                span = _SPANS.decode(line)
                if not 0 <= span.begin <= span.end < 1e11:
                    raise ValueError("no times of a span")
            except ValueError:  # msgspec's are some
                self.left_out += 1
                continue
            kind = span.lane, span.what, span.why or ""
            if (place := self._places.get(kind)) is None:
                place = self._places[kind] = len(self.kinds)
                self.kinds.append(kind)
            self.kind.append(place)
            self.begin.append(span.begin)
            self.end.append(span.end)
            self.version.append(-1 if span.version is None else span.version)
            self.group.append(-1 if span.group is None else span.group)


class OpenRun:
    """A run that the page shows. Its methods may be called in any thread, one after the other."""

    def __init__(self, path: Path, *, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """
        Args: wanted: which metrics are read of all steps.
        Raises: ConfigError if it is no run folder, or its config.yaml is damaged; OSError if the disk doesn't give that."""
        self.folder = RunFolder.view(path)
        self.lock = threading.RLock()
        """Whoever reads several things that belong together has it."""
        self._config: dict[str, Any] = {}
        self._config_state: tuple[int, int] | None = None
        self._lines, self._steps = GrowingLines(self.folder.metrics_path), StepColumns(wanted=wanted)
        self._wanted, self._no_steps, self._no_evaluations = wanted, 0, 0
        self._spans = Spans(self.folder.timeline_path)
        assert self.config is not None

    @property
    def name(self) -> str:
        """That of its folder."""
        return self.folder.path.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, read again when a resume has written it."""
        with self.lock:
            state = _state(self.folder.path / "config.yaml")
            if state != self._config_state:
                self._config, self._config_state = self.folder.read_config(), state
            return self._config

    @property
    def steps(self) -> StepColumns:
        """All numbers of all steps up to now."""
        with self.lock:
            if self._lines.is_cut():
                self._steps, self._no_steps = StepColumns(wanted=self._wanted), 0
            for line in self._lines.new():
                try:
                    self._steps.add_line(line)
                except _NOT_OURS:  # torn, or another's
                    self._no_steps += 1
            return self._steps

    @property
    def spans(self) -> Spans:
        """All spans of the timeline up to now."""
        with self.lock:
            self._spans.read()
            return self._spans

    @property
    def evaluations(self) -> list[StepMetrics]:
        """All held-out evaluations up to now, in order of their steps."""
        with self.lock:
            lines = sum(1 for _ in GrowingLines(self.folder.evaluations_path).new())
            found = self.folder.read_evaluations()
            self._no_evaluations = lines - len(found)
            return found

    @property
    def left_out(self) -> list[str]:
        """Of the lines of steps and evaluations, as they were read last, those that can't be: a sentence for each file that has any."""
        folder = self.folder
        return [*lines_left_out(self._no_steps, folder.metrics_path), *lines_left_out(self._no_evaluations, folder.evaluations_path)]

    def pulse(self) -> str:
        """Something else whenever the run has written."""
        names = ("metrics.jsonl", "evaluations.jsonl", "monitor.jsonl", "events.log", "timeline.jsonl", "config.yaml", "scatter.npz")
        return "-".join(f"{size:x}.{changed:x}" for size, changed in (_state(self.folder.path / name) for name in names))


def lines_left_out(lines: int, path: Path) -> list[str]:
    """A sentence that says so of a file's damaged lines, if it has any."""
    said = f"{path} has {counted(lines, 'line')} that can't be read, damaged or another program's: the page leaves out what they say."
    return [said] if lines > 0 else []


def _state(path: Path) -> tuple[int, int]:
    """(bytes, time of the last change) of a file; zeros: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns
