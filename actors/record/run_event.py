"""One line of a run's events.log."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import get_args

from evenkeel.actors.carriers import WaitNotice
from evenkeel.actors.processes.event_level import EventLevel
from evenkeel.correction.early_warning.monitor import State

_LEVELS: dict[str, EventLevel] = {level: level for level in get_args(EventLevel)}
LEVEL_OF_STATE: dict[State, EventLevel] = {State.OK: "info", State.WATCH: "watch", State.ALARM: "alarm"}
"""Levels of the early warning's events."""


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


_WAIT = "[waiting] "
"""Stands before a notice, which a line has as JSON, in the place of a text."""
_KIND = re.compile(rf"\[({'|'.join(kind for kind in EventKind if kind)})\] ")


@dataclass(frozen=True, slots=True)
class RunEvent:
    """What happened, and when."""

    time: str
    """ISO 8601, local time, to the second."""
    level: EventLevel
    text: str
    kind: EventKind = EventKind.NONE
    notice: WaitNotice | None = None
    """Of a wait; None: the event is of something else."""

    @classmethod
    def now(cls, level: EventLevel, message: str | WaitNotice, kind: EventKind = EventKind.NONE) -> RunEvent:
        if level not in _LEVELS:
            raise ValueError(f"event level {level!r}: use one of {', '.join(_LEVELS)}")
        time = datetime.now().isoformat(timespec="seconds")
        if isinstance(message, WaitNotice):
            return cls._of_wait(time, level, message)
        return cls(time, level, " ".join(message.split()), kind)

    @classmethod
    def _of_wait(cls, time: str, level: EventLevel, notice: WaitNotice) -> RunEvent:
        return cls(time, level, " ".join(str(notice).split()), notice=notice)

    @classmethod
    def parse(cls, line: str) -> RunEvent | None:
        """What `line` has written; None for anything else."""
        parts = line.split(None, 2)
        if len(parts) != 3 or (level := _LEVELS.get(parts[1])) is None:
            return None
        time, text = parts[0], parts[2]
        if found := _KIND.match(text):
            return cls(time, level, text[found.end() :], EventKind(found[1]))
        if text.startswith(_WAIT):
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # a line that was cut, or is no notice
                notice = WaitNotice(**json.loads(text.removeprefix(_WAIT)))
                if (type(notice.what), type(notice.seconds), type(notice.detail)) == (str, int, str):
                    return cls._of_wait(time, level, notice)
        return cls(time, level, text)

    @property
    def line(self) -> str:
        """For events.log, with its end."""
        kind = f"[{self.kind}] " if self.kind else ""
        said = f"{kind}{self.text}" if self.notice is None else f"{_WAIT}{json.dumps(asdict(self.notice))}"
        return f"{self.time} {self.level:7} {said}\n"
