"""Which points of a long curve the report draws, and their running mean."""

from __future__ import annotations

import numpy as np

MOST_POINTS = 5000
"""Of a curve. Of a longer one, which has more points than the picture has pixels, the first and the last are drawn, and the lowest and the
highest of each part."""


def running_mean(values: np.ndarray, half_width: int) -> np.ndarray:
    """Mean over up to 2 half_width + 1 neighbours; fewer at the ends, so that nothing is made up there. [n] -> [n]"""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half_width, 0), np.minimum(index + half_width + 1, len(values))
    return np.asarray((sums[last] - sums[first]) / (last - first))


def drawn_points(values: np.ndarray) -> np.ndarray:
    """Indices of those that are drawn, of a curve of any length. [n] -> [at most MOST_POINTS + 2]"""
    if len(values) <= MOST_POINTS:
        return np.arange(len(values))
    parts = np.array_split(np.arange(len(values)), MOST_POINTS // 2)
    ends = [part[pick(values[part])] for part in parts for pick in (np.argmin, np.argmax)]
    return np.unique([0, *ends, len(values) - 1])
