"""Failures as text that can be played again, seeds in two processes, and the table of planted bugs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from tests.simulation.planted import BUGS, Bug, title
from tests.simulation.schedule import FaultSchedule, schedule_of
from tests.simulation.shrink import shrunk
from tests.simulation.world import PlayedRun, play

# Seeds that a process takes at a time.
_CHUNK = 25
LAST_EVENTS = 12


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed whose run broke a rule."""

    seed: int
    outcome: PlayedRun
    smallest: FaultSchedule
    """With the fewest faults that still fail."""

    def __str__(self) -> str:
        faults = [f"    {fault}" for fault in self.smallest.faults] or ["    none is needed"]
        events = [line for line in self.outcome.trace if " -> " not in line][-LAST_EVENTS:]
        return "\n".join(
            [
                f"seed {self.seed}: {self.outcome.violation}",
                f"  to play it again:  python -m tests.simulation --seed {self.seed} --trace",
                f"  the smallest schedule of faults that fails ({len(self.smallest.faults)} of {len(schedule_of(self.seed).faults)}):",
                *faults,
                f"  to play that:      python -m tests.simulation --trace --schedule '{self.smallest.text()}'",
                "  its last events:",
                *(f"    {line[:200]}" for line in events),
                *([self.outcome.where] if self.outcome.where else []),
            ]
        )


def failure_of(seed: int) -> Failure | None:
    """Play a seed. Returns: None if nothing was wrong."""
    schedule = schedule_of(seed)
    outcome = play(schedule)
    if not outcome.violation:
        return None
    faults = shrunk(schedule.faults, lambda part: bool(play(schedule.with_faults(part)).violation))
    smallest = schedule.with_faults(faults)
    return Failure(seed, play(smallest), smallest)


def _failures_of(seeds: Sequence[int]) -> list[Failure]:
    return [failure for seed in seeds if (failure := failure_of(seed)) is not None]


def failures(seeds: Sequence[int], *, processes: int = 1) -> Iterator[tuple[int, list[Failure]]]:
    """Play seeds, in their order. Returns: how many have been played, and what was wrong in the last ones, again and again."""
    chunks = [seeds[i : i + _CHUNK] for i in range(0, len(seeds), _CHUNK)]
    done = 0
    with contextlib.ExitStack() as stack:
        if processes > 1:
            pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=get_context("spawn")))
            results: Iterator[list[Failure]] = pool.map(_failures_of, chunks)
        else:
            results = map(_failures_of, chunks)
        for chunk, found in zip(chunks, results, strict=True):
            done += len(chunk)
            yield done, found


OUT_OF_DATE = ("TypeError", "AttributeError", "NameError")
"""What a planted bug raises whose functions have other arguments or names than the product's by now."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the simulation made of a planted bug."""

    bug: str
    seeds: int
    """Played until the first that showed it; 0: none did."""
    violation: str
    faults: int
    """In the smallest schedule."""


def first_shown(bug: Bug, seeds: Sequence[int]) -> tuple[int, str] | None:
    """Play seeds with the bug planted. Returns: the first that shows it, and what the simulation says; None if none does.

    Raises: AssertionError if what is planted no longer goes with the product's classes, and fails by itself.
    """
    with bug():
        shown = next(((seed, outcome.violation) for seed in seeds if (outcome := play(schedule_of(seed))).violation), None)
    assert shown is None or not any(name in shown[1] for name in OUT_OF_DATE), f"{title(bug)}: it is out of date: {shown}"
    return shown


def find(bug: Bug, seeds: Sequence[int]) -> Found:
    if (shown := first_shown(bug, seeds)) is None:
        return Found(title(bug), 0, "", 0)
    seed, violation = shown
    schedule = schedule_of(seed)
    with bug():
        faults = shrunk(schedule.faults, lambda part: bool(play(schedule.with_faults(part)).violation))
    return Found(title(bug), seeds.index(seed) + 1, violation, len(faults))


def _find(number: int, seeds: Sequence[int]) -> Found:
    return find(BUGS[number], seeds)


def table_of_planted_bugs(seeds: Sequence[int], *, processes: int) -> tuple[str, bool]:
    """Returns: a table in Markdown; whether all were found."""
    look = partial(_find, seeds=seeds)
    if processes > 1:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(look, range(len(BUGS))))
    else:
        found = [look(number) for number in range(len(BUGS))]
    rows = [f"| {one.bug} | {one.seeds or 'not found'} | {one.faults} | {_plain(one.violation)} |" for one in found]
    titles = ("planted bug", "seeds played until it showed", "faults it needs", "what the simulation says")
    head = ["| " + " | ".join(titles) + " |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]), all(one.seeds for one in found)


def _plain(text: str) -> str:
    first = " ".join(text.split())
    return (first if len(first) <= 160 else first[:157] + "...").replace("|", "/")
