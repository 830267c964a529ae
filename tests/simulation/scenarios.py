"""Scenarios: what befalls a run, and what must be true at its end. A table of them stands in place of tests of single calls.

What holds in any run (the balance, the bound of staleness, no group trained twice ...) books.py checks in these, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.schedule import Fault, FaultSchedule
from tests.simulation.world import PlayedRun, play

Count = int | range
"""How often: exactly, or within a range."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """By default the run goes through with one driver, loses no worker, discards no prompt, and doesn't go back."""

    faults: tuple[Fault, ...]
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Fields of FaultSchedule that aren't those of `PLAIN`."""
    lost: Count = 0
    """Workers that are lost."""
    discarded: Count = 0
    returns: Count = 0
    services: Count = 0
    """Services that are replaced."""
    drivers: int = 1
    ends: str = ""
    """What the first driver ends with, a pattern, and all else is of that one; empty: all steps are done."""
    told: Mapping[str, Count] = field(default_factory=dict)
    """Pattern -> how many events and calls have it."""
    between: tuple[tuple[str, str, float, float], ...] = ()
    """(pattern, pattern, least, most): virtual seconds from the first event with the one to the next with the other."""


PLAIN = FaultSchedule(
    seed=3,
    workers=2,
    groups_per_step=4,
    max_staleness=1,
    steps=4,
    checkpoint_every=1,
    evaluate_every=0,
    dynamic_sampling=False,
    broadcasts=False,
    forwards=False,
    unscored=0.0,
    faults=(),
)
_LOST, _DISCARDED, _BACK, _SERVICE = "is gone: ", r"\) is discarded, ", "The run goes back to", "A new one goes on after"


def check(scenario: Scenario) -> PlayedRun:
    """Play it. Raises: AssertionError naming what isn't true at its end."""
    run = play(replace(PLAIN, **scenario.shape, faults=scenario.faults))
    trace = run.trace
    if scenario.ends:
        end = next(i for i, line in enumerate(trace) if "world: driver 0 has ended: " in line)
        trace = trace[: end + 1]
        assert re.search(scenario.ends, trace[-1]), f"it ends otherwise: {trace[-1]}"
    else:
        assert (run.violation, run.steps) == ("", scenario.shape.get("steps", PLAIN.steps)), run.where
        assert run.drivers == scenario.drivers
    counts = {_LOST: scenario.lost, _DISCARDED: scenario.discarded, _BACK: scenario.returns, _SERVICE: scenario.services}
    for pattern, count in {**counts, **scenario.told}.items():
        lines = [line for line in trace if re.search(pattern, line)]
        is_right = len(lines) in count if isinstance(count, range) else len(lines) == count
        assert is_right, f"{pattern!r}: {len(lines)} times, in place of {count}: {lines[:5]}"
    for first, then, least, most in scenario.between:
        seconds = seconds_between(run, first, then)
        assert least <= seconds <= most, f"{seconds:.1f} s from {first!r} to {then!r}, in place of {least:g} to {most:g}"
    return run


def seconds_between(run: PlayedRun, first: str, then: str) -> float:
    began = next(i for i, line in enumerate(run.trace) if re.search(first, line))
    ended = next(line for line in run.trace[began + 1 :] if re.search(then, line))
    return float(ended.split()[0]) - float(run.trace[began].split()[0])
