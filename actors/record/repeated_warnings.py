"""Warnings that may come by the hundred: the first of a kind goes out at once, the others together, with their number and one example."""

from __future__ import annotations


class RepeatedWarnings:
    """Counts warnings by kind between two reports."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._waiting: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, example: str) -> str | None:
        """Add a warning. Returns: the text to report at once; None if it is only counted.

        Args:
            kind: in words, in the plural, such as "trajectories without a reward".
            example: this one, in words.
        """
        if kind not in self._known:
            self._known.add(kind)
            return f"{example} (further {kind} are counted, and reported once a step)"
        count, first = self._waiting.get(kind, (0, example))
        self._waiting[kind] = (count + 1, first)
        return None

    def take(self) -> list[str]:
        """One line for each kind with counted warnings; the counts start anew."""
        waiting, self._waiting = self._waiting, {}
        return [f"{kind}: {count} more, the first: {first}" for kind, (count, first) in waiting.items()]
