"""Curves as the page draws them: few points of each, with all that is said beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from evenkeel.actors.metrics.catalogue import CATALOGUE
from evenkeel.actors.metrics.step_metrics import lookup
from evenkeel.correction.diagnostics.quantities import Unit
from evenkeel.dashboard.columns import StepColumns, drawn_points, running_mean
from evenkeel.dashboard.curves import Curves

MOST_POINTS = 600
"""Points of a curve, which is more than a chart has pixels; a narrower part of the steps has all of its own."""


def slice_of(asked: Mapping[str, str]) -> tuple[float, float]:
    """The steps that are meant. Raises: ValueError for words that are no numbers."""
    return float(asked.get("from") or -math.inf), float(asked.get("to") or math.inf)


def _curve(
    name: str, label: str, x: np.ndarray, y: np.ndarray, shown: tuple[float, float], *, is_logarithmic: bool, is_count: bool
) -> dict[str, Any] | None:
    """What is drawn of a metric: single steps, and their running mean over a 25th of all on either side.

    Args: x: [n] steps. y: [n]. shown: the steps that are drawn.
    Returns: None if there are none.
    """
    last = None if not len(y) else lookup(name).text(float(y[-1]))
    if is_logarithmic:
        x, y = x[y > 0], y[y > 0]
    smooth = running_mean(np.log(y) if is_logarithmic else y, max(1, len(y) // 25))
    smooth = np.exp(smooth) if is_logarithmic else smooth
    inside = (x >= shown[0]) & (x <= shown[1])
    is_smoothed = not is_count and len(y) > 25
    x, y, smooth = x[inside], y[inside], smooth[inside]
    if not len(y):
        return None
    at = drawn_points(y, MOST_POINTS)
    return {
        "name": name,
        "label": label,
        "last": last,
        "x": x[at],
        "y": y[at],
        "smooth": smooth[at].astype(np.float32) if is_smoothed else None,
    }


def chart_of(curves: Curves, steps: StepColumns, shown: tuple[float, float]) -> dict[str, Any] | None:
    """A chart; None if the run has none of its numbers. Args: shown: the steps that are drawn."""
    found = []
    for name in curves.names:
        if name in CATALOGUE and CATALOGUE[name].is_family:
            of = [(name + part, part) for part in steps.members(name)]
        else:
            of = [(name, lookup(name).label)]
        found += [
            _curve(one, label, *steps.series(one), shown, is_logarithmic=curves.is_logarithmic, is_count=curves.is_count)
            for one, label in of
        ]
    series = [one for one in found if one is not None]
    if not series:
        return None
    return {
        "title": curves.title,
        "unit": curves.y_label or curves.unit.value,
        "caption": curves.caption,
        "is_logarithmic": curves.is_logarithmic,
        "is_share": curves.unit is Unit.SHARE,
        "is_count": curves.is_count,
        "series": series,
    }
