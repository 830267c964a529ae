"""timeline.jsonl: what each process of a run did when, a span a line, by the driver's clock.

    {"lane": "worker-0", "what": "sample", "begin": 1767225600.0, "end": 1767225601.5, "version": 3, "group": 17, "why": null}

Begin and end are unix times in seconds. Lines come in the order in which the driver heard of them. The file is bounded: when it has
_MOST_BYTES its older half is dropped. It belongs to no step, so that what a rollback has taken back stays in it.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenkeel.actors.carriers import LaneReport, Span
from evenkeel.actors.json_lines import JsonLines, append_whole

_MOST_BYTES = 64 << 20
# A half that couldn't be dropped is tried again after this part of _MOST_BYTES.
_TRIES = 16
# Reports of a lane from which the difference of its clock is taken: as many as hold for some minutes, in which clocks drift by less than a
# report takes on its way.
_REPORTS = 64
# Spans are handed to the disk when they are this old, seconds.
_WRITE_S = 1.0


@dataclass(frozen=True, slots=True)
class LaneSpan(Span):
    """A span with the lane that it stands in."""

    lane: str = ""

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> LaneSpan:
        """What a line says. Raises: KeyError, TypeError or ValueError for one that says something else."""
        begin, end = float(record["begin"]), float(record["end"])
        version, group = (None if record.get(name) is None else int(record[name]) for name in ("version", "group"))
        why = record.get("why")
        if not 0 <= begin <= end < 1e11:
            raise ValueError(f"no span: {begin} to {end}")
        return cls(str(record["what"]), begin, end, version, group, None if why is None else str(why), lane=str(record["lane"]))

    def record(self) -> dict[str, Any]:
        return {"lane": self.lane, **{name: value for name, value in asdict(self).items() if name != "lane"}}


class Timeline:
    """The driver's side: takes the reports of all lanes and puts them into the file, by one clock."""

    def __init__(self, write: Callable[[Sequence[LaneSpan]], object]) -> None:
        """Args: write: hands spans to the disk."""
        self._write, self._waiting = write, list[LaneSpan]()
        self._to_unix = time.time() - time.monotonic()
        self._written_at = time.monotonic()
        self._late: dict[str, deque[float]] = {}

    def take(self, report: LaneReport) -> None:
        """Take a report, in the moment in which it comes."""
        late = self._late.setdefault(report.lane, deque(maxlen=_REPORTS))
        late.append(time.monotonic() + self._to_unix - report.now)
        # The difference of both clocks, and the way of the report that came quickest: by so much at most spans are drawn too late.
        ahead = min(late)
        for span in report.spans:
            begin, end = round(span.begin + ahead, 6), round(span.end + ahead, 6)
            self._waiting.append(LaneSpan(span.what, begin, end, span.version, span.group, span.why, lane=report.lane))
        if time.monotonic() - self._written_at >= _WRITE_S:
            self.flush()

    def forget(self, lane: str | None = None) -> None:
        """Called when a process is gone for good: one that takes its name may have another clock. Args: lane: None: of all of them."""
        for name in [lane] if lane is not None else list(self._late):
            self._late.pop(name, None)

    def flush(self) -> None:
        """Hand over what waits."""
        self._written_at = time.monotonic()
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._write(waiting)


def append_spans(path: Path, spans: Sequence[LaneSpan], *, most_bytes: int = _MOST_BYTES) -> None:
    """Add lines; a file that is too large then loses its older half. Where the disk has no room for that it stays larger, and tries again
    when it has grown by a part. Raises: OSError, and the file is as it was."""
    content = "".join(json.dumps(span.record(), allow_nan=False) + "\n" for span in spans).encode()
    append_whole(path, content)
    size, part = path.stat().st_size, most_bytes // _TRIES
    if size > most_bytes and size // part > (size - len(content)) // part:
        with suppress(OSError):  # the lines are there: whoever wrote them again would have them twice
            _drop_half(path, most_bytes // 2)


def _drop_half(path: Path, kept_bytes: int) -> None:
    """Keep the newest whole lines. A reader sees the old file or the new one."""
    with path.open("rb") as file:
        file.seek(-kept_bytes, os.SEEK_END)
        file.readline()  # a part of one
        kept = file.read()
    newer = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        newer.write_bytes(kept)
        os.replace(newer, path)
    finally:
        newer.unlink(missing_ok=True)


def read_timeline(path: Path) -> list[LaneSpan]:
    """All spans of the file, in its order; a line that is being written is left out, and without the file there are none."""
    return JsonLines(path).read(LaneSpan.of_record)


def lane_order(lane: str) -> tuple[int, int, str]:
    """By which lanes are sorted for people: driver, service, ranks, workers; ranks and workers by their numbers."""
    name, _, number = lane.rpartition("-")
    first = next((i for i, start in enumerate(("driver", "service", "rank", "worker")) if lane.startswith(start)), 4)
    return first, int(number) if number.isdecimal() else 0, name or lane
