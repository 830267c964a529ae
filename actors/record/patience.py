"""What a disk doesn't take does not end a run: it is told once, counted, and lines are tried again, in their order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

_MOST = 100_000
"""Lines that wait in memory for a file; older ones are given up."""


class PatientWriter:
    """All that the observer writes into a run's folder goes through one of these."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        """Args: tell: takes a sentence when the disk begins to refuse, and when it takes everything again."""
        self._tell = tell
        self._waiting: dict[str, deque[Callable[[], object]]] = defaultdict(lambda: deque(maxlen=_MOST))
        self._refused: set[str] = set()
        """Kinds of files whose last attempt failed: one folder that can't be written is no news at each step, and keeps nothing else."""
        self.failures = 0
        """Attempts so far that the disk has refused."""

    def line(self, append: Callable[..., object], *arguments: Any) -> None:
        """Append a line by append(*arguments), a method, after those that wait for it; whatever waits is tried again."""
        self._waiting[append.__qualname__].append(partial(append, *arguments))
        for kind, waiting in self._waiting.items():
            while waiting and self._attempt(kind, waiting[0]):
                waiting.popleft()

    def file(self, write: Callable[..., object], *arguments: Any) -> None:
        """Write a file by write(*arguments), a method; one that the disk doesn't take is left out."""
        self._attempt(write.__qualname__, partial(write, *arguments))

    def _attempt(self, kind: str, write: Callable[[], object]) -> bool:
        try:
            write()
        except OSError as error:
            self.failures += 1
            if not self._refused:
                self._tell(f"the disk does not take what the run writes ({error}): lines wait in memory, samples as text are left out")
            self._refused.add(kind)
            return False
        if self._refused:
            self._refused.discard(kind)
            if not self._refused:
                self._tell("the disk takes what the run writes again; no line is lost")
        return True
