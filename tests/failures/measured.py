"""What a fault did, as a test measured it: a line each in the file that EVENKEEL_FAILURES names, for the table that table.py writes."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

FILE = "EVENKEEL_FAILURES"
REAL, PLAYED = "real processes", "played, virtual time"
"""How a fault is caused."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of the table."""

    fault: str
    follows: str
    """What the run does about it."""
    seconds: float | None
    """Until work goes on; None: none is held up."""
    again: str
    """What is done a second time."""
    how: str
    """REAL, PLAYED, or what is done to files."""

    def write(self) -> None:
        """If anybody asks for it."""
        if path := os.environ.get(FILE):
            with Path(path).open("a") as file:
                file.write(json.dumps(asdict(self)) + "\n")


class Watched(Protocol):
    """A run, from outside."""

    def steps(self) -> list[int]: ...

    def events(self) -> str: ...

    def wait_until(self, ready: object, what: str) -> None: ...


class Recovery:
    """Of a real run, from a fault on."""

    def __init__(self, run: Watched, fault: str, follows: str) -> None:
        """Make it as the fault comes."""
        self._run, self._fault, self._follows = run, fault, follows
        self._step, self._said = max(run.steps(), default=0), len(run.events())
        self._began = time.monotonic()

    def begins_here(self) -> None:
        """For a fault that the run has told, and goes back or ends for: what it has reached by now is no recovery. The time counts on."""
        self._step = max(self._run.steps(), default=0)

    def wait(self, *, steps: int = 1, by: Watched | None = None) -> None:
        """Until the run is so much further than it had been. Args: by: who has taken it up again in its folder, where it has ended."""
        run = by or self._run
        run.wait_until(lambda: max(run.steps(), default=0) >= self._step + steps, f"a step after: {self._fault}")
        seconds = time.monotonic() - self._began
        Measured(self._fault, self._follows, seconds, done_again(run.events()[self._said :], reached=self._step), REAL).write()


def done_again(events: str, *, reached: int = 0) -> str:
    """What a run's events say of work that is lost. Args: reached: the last step before the fault."""
    found = []
    if steps := re.search(r"steps (\d+) to (\d+) are done again", events):
        found.append(_counted(int(steps[2]) - int(steps[1]) + 1, "step"))
    elif retried := re.search(r"after step (\d+); it goes on from (?:the checkpoint of step (\d+)|its beginning)", events):
        found.append(_counted(int(retried[1]) - int(retried[2] or 0), "step"))
    elif resumed := re.search(r"going on from step (\d+) ", events):
        found.append(_counted(reached - int(resumed[1]), "step"))
    elif "no finished step is lost" in events:
        found.append("no step")
    if groups := re.search(r"others take its (\d+) groups?", events):
        found.append(_counted(int(groups[1]), "group"))
    elif requests := re.findall(r"group (\d+) is sampled again: ", events):
        found.append(_counted(len(set(requests)), "group"))
    elif found:
        found.append("the groups under way")
    return " and ".join(found) or "nothing"


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'s' * (number > 1)}"
