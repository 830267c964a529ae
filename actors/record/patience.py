"""What a disk doesn't take does not end a run: it is told once, counted, and lines are tried again, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

_MOST = 100_000
"""Lines that wait in memory; older ones are given up."""


class PatientWriter:
    """All that the observer writes into a run's folder goes through one of these."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        """Args: tell: takes a sentence when the disk begins to refuse, and when it takes lines again."""
        self._tell = tell
        self._waiting: deque[Callable[[], object]] = deque(maxlen=_MOST)
        self._refuses = False
        self.failures = 0
        """Attempts so far that the disk has refused."""

    def line(self, append: Callable[..., object], *arguments: Any) -> None:
        """Append a line by append(*arguments), after those that wait."""
        self._waiting.append(partial(append, *arguments))
        while self._waiting:
            if not self._attempt(self._waiting[0]):
                return
            self._waiting.popleft()
        if self._refuses:
            self._refuses = False
            self._tell("the disk takes what the run writes again; no line is lost")

    def file(self, write: Callable[..., object], *arguments: Any) -> None:
        """Write a file by write(*arguments); one that the disk doesn't take is left out."""
        self._attempt(partial(write, *arguments))

    def _attempt(self, write: Callable[[], object]) -> bool:
        try:
            write()
        except OSError as error:
            self.failures += 1
            if not self._refuses:
                self._refuses = True
                self._tell(f"the disk does not take what the run writes ({error}): lines wait in memory, samples as text are left out")
            return False
        return True
