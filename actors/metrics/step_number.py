"""The number of a step in a line of a run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST_STEPS = 1 << 53
"""Whole numbers below have a double of their own, as plots need it."""


def step_of(record: Mapping[str, Any]) -> int:
    """Step of a line's object. Raises: KeyError, TypeError or ValueError if it has none."""
    step = record["step"]
    if type(step) is not int or not 0 <= step < _MOST_STEPS:
        raise ValueError(f"step = {step}: no number of a step")
    return step
