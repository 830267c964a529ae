"""Confidence intervals of shares."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.stats import binomtest


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share of successes with its Wilson interval."""

    value: float
    low: float
    high: float
    n: int
    """Trials."""

    def __str__(self) -> str:
        if not self.n:
            return "unknown, n = 0"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}], n = {self.n}"


UNKNOWN = Proportion(math.nan, 0.0, 1.0, 0)
"""Of no trial."""


def wilson(successes: int, n: int, *, confidence: float = 0.95) -> Proportion:
    """Share of successes with its Wilson score interval, which keeps inside [0, 1] and holds near its ends too.

    Args:
        successes: 0 to n.
        n: trials, > 0.
        confidence: of the interval, two-sided, in (0, 1).
    Raises: ValueError if there was no trial, or more successes than trials.
    Source: Wilson (1927), J. Am. Stat. Assoc. 22; Brown, Cai, DasGupta (2001) recommend it for n > 40 as well as below.
    """
    if n <= 0:
        raise ValueError(f"{successes} of {n}: a share needs at least one trial")
    interval = binomtest(successes, n).proportion_ci(confidence_level=confidence, method="wilson")
    return Proportion(successes / n, float(interval.low), float(interval.high), n)
