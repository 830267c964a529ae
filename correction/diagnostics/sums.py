"""What the diagnostics of a batch are made of: sums, extremes and histograms, which add up over shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest

from ..batch import DecisionCounts


@dataclass(frozen=True, slots=True)
class DiagnosticSums:
    """The part of one shard. `a + b` is that of both together; a few hundred numbers, picklable, to be gathered by any means."""

    added: dict[str, float]
    """Sums over tokens, units or sequences."""
    largest: dict[str, float]
    """Maxima; a minimum is that of the negative."""
    histograms: dict[str, tuple[float, ...]]
    """Tokens, or sums over them, by staleness or bucket; the shorter of two ends in zeros."""
    counts: DecisionCounts | None = None
    """How often each criterion and each bound took hold."""

    def __add__(self, other: DiagnosticSums) -> DiagnosticSums:
        added = {name: self.added.get(name, 0.0) + other.added.get(name, 0.0) for name in {**self.added, **other.added}}
        names = {**self.largest, **other.largest}
        largest = {name: max(self.largest.get(name, -math.inf), other.largest.get(name, -math.inf)) for name in names}
        histograms = {}
        for name in {**self.histograms, **other.histograms}:
            both = zip_longest(self.histograms.get(name, ()), other.histograms.get(name, ()), fillvalue=0.0)
            histograms[name] = tuple(a + b for a, b in both)
        counts = self.counts or other.counts if self.counts is None or other.counts is None else self.counts + other.counts
        return DiagnosticSums(added, largest, histograms, counts)

    def __radd__(self, other: int) -> DiagnosticSums:
        """The sum for the built-in `sum`, which begins with 0."""
        return self if other == 0 else NotImplemented
