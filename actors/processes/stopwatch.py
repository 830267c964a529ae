"""How long the phases of a step take, by the event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Phase:
    """One stretch of a step: measured once, and read by all who need it."""

    began: float
    """Event-loop time (s)."""
    seconds: float = 0.0
    """How long it took; 0 while it lasts."""


class Stopwatch:
    """Seconds by phase since the last reading. One task uses it; phases don't overlap a reading."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        clock = asyncio.get_running_loop().time
        phase = Phase(clock())
        try:
            yield phase
        finally:
            phase.seconds = clock() - phase.began
            self._seconds[name] = self._seconds.get(name, 0.0) + phase.seconds

    def read(self) -> dict[str, float]:
        """Seconds by phase, and start anew."""
        seconds, self._seconds = self._seconds, {}
        return seconds
