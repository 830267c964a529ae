"""The smallest part of a schedule's faults with which a run still fails.

Source: Zeller and Hildebrandt (2002), Simplifying and Isolating Failure-Inducing Input, IEEE TSE 28: delta debugging (ddmin).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrunk(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """A part of `items` that fails, and of which no smaller one does by leaving a single item out.

    Args: fails: for all of them, and for as many of their parts as one likes.
    """
    left, parts = list(items), 2
    if fails([]):
        return []
    while len(left) > 1:
        size = -(-len(left) // parts)
        chunks = [left[i : i + size] for i in range(0, len(left), size)]
        found = next((chunk for chunk in chunks if fails(chunk)), None)
        if found is not None:
            left, parts = found, 2
            continue
        without = range(len(chunks)) if len(chunks) > 2 else ()  # the rest of one half is the other
        rests = ([item for j, chunk in enumerate(chunks) if j != i for item in chunk] for i in without)
        found = next((rest for rest in rests if len(rest) < len(left) and fails(rest)), None)
        if found is not None:
            left, parts = found, max(parts - 1, 2)
        elif parts >= len(left):
            return left
        else:
            parts = min(len(left), 2 * parts)
    return left
