"""One line of a run's events.log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

_LEVELS = ("info", "watch", "warning", "alarm", "error")


class EventKind(StrEnum):
    """What an event says of the run's end. Most say nothing of it; a line has the kind of the others in brackets, before the text."""

    NONE = ""
    ENDING = "ending"
    """A signal or an alarm has asked for the end; the run has not ended yet."""
    SAVED = "saved"
    """A checkpoint is whole."""
    STOPPED = "stopped"
    """A signal has ended the run at once."""
    RESUMED = "resumed"
    """The run goes on from a checkpoint: what events before say of its end is over."""


_EARLIER = {
    EventKind.ENDING: re.compile(r"interrupted \(|.*, as monitor\.on_alarm = stop asks for$"),
    EventKind.SAVED: re.compile(r"checkpoint .+ in [\d.]+ s$"),
    EventKind.STOPPED: re.compile(r"ended at once by "),
    EventKind.RESUMED: re.compile(r"going on from step \d+ \("),
}
"""How the lines of these kinds read in runs that wrote no kind."""
_KIND = re.compile(rf"\[({'|'.join(kind for kind in EventKind if kind)})\] ")


@dataclass(frozen=True, slots=True)
class RunEvent:
    """What happened, and when."""

    time: str
    """ISO 8601, local time, to the second."""
    level: str
    """info, warning or error; watch or alarm, from the early warning."""
    text: str
    kind: EventKind = EventKind.NONE

    @classmethod
    def now(cls, level: str, text: str, kind: EventKind = EventKind.NONE) -> RunEvent:
        if level not in _LEVELS:
            raise ValueError(f"event level {level!r}: use one of {', '.join(_LEVELS)}")
        return cls(datetime.now().isoformat(timespec="seconds"), level, " ".join(text.split()), kind)

    @classmethod
    def parse(cls, line: str) -> RunEvent | None:
        """What `line` has written; None for anything else."""
        parts = line.split(None, 2)
        if len(parts) != 3 or parts[1] not in _LEVELS:
            return None
        time, level, text = parts
        if found := _KIND.match(text):
            return cls(time, level, text[found.end() :], EventKind(found[1]))
        earlier = (kind for kind, pattern in _EARLIER.items() if pattern.match(text))
        return cls(time, level, text, next(earlier, EventKind.NONE))

    @property
    def line(self) -> str:
        """For events.log, with its end."""
        kind = f"[{self.kind}] " if self.kind else ""
        return f"{self.time} {self.level:7} {kind}{self.text}\n"
