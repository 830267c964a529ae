"""Whether the ledger of a run has each prompt once, read from the run's folder."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.metrics.step_metrics import StepMetrics
from actors.metrics.step_number import step_of
from actors.record.run_folder import RunFolder
from actors.state.json_lines import JsonLines
from actors.state.ledger import TRAINED

_CHUNK = 1 << 16
"""Positions whose bits are kept together."""
_LOOK = 10_000
"""Lines between two looks at the clock."""
_MOST_DIGITS = 18
_TOTALS = {"trained": "groups/trained_total", "discarded": "groups/discarded_total"}
"""Numbers of a step with which the ledger's are compared."""


@dataclass(frozen=True, slots=True)
class LedgerCheck:
    """Whether the ledger has each prompt once, and as many trained and discarded ones as the last step says. If a damaged ledger was set
    aside, this covers the time since then."""

    is_balanced: bool
    sentence: str


class LinesRead:
    """How much of the ledger is read, for whoever waits: ten million lines take a minute."""

    def __init__(self) -> None:
        self._count, self.newest = 0, time.monotonic()

    def add(self) -> None:
        self._count += 1
        if self._count % _LOOK == 0:
            self.newest = time.monotonic()

    def __str__(self) -> str:
        return f"{self._count:,} lines of the ledger are read"


class _Seen:
    """Prompts that have been met: a bit for each that ends in a number, as a task's do, so that ten million of them are 1.3 MB.

    Their order doesn't help: groups leave the queue in another order than they came, and a ledger that was set aside is read after the
    later one.
    """

    def __init__(self) -> None:
        self._bits: dict[tuple[str, int], bytearray] = {}
        self._others: set[str] = set()

    def add(self, prompt_id: str) -> bool:
        """Returns: whether it was there already."""
        number = prompt_id[prompt_id.rfind("/") + 1 :]
        if len(number) > _MOST_DIGITS or not number.isdecimal() or str(position := int(number)) != number:  # not 07, nor digits of Arabic
            is_there = prompt_id in self._others
            self._others.add(prompt_id)
            return is_there
        key = prompt_id[: -len(number)], position // _CHUNK
        bits = self._bits.get(key)
        if bits is None:
            bits = self._bits[key] = bytearray(_CHUNK // 8)
        byte, bit = position % _CHUNK >> 3, 1 << (position & 7)
        is_there = bool(bits[byte] & bit)
        bits[byte] |= bit
        return is_there


def check_ledger(folder: RunFolder, last: StepMetrics | None, read: LinesRead) -> LedgerCheck:
    """Check the ledger, and each one that a resume has set aside up to the step at which the next one began, as far as they can be read.

    Args:
        last: numbers of the run's last step; None: it has none.
        read: is told how far this is.
    """
    aside = _set_aside(folder.path)
    end = last.step + 1 if last else math.inf  # later ones are settled before the step's line was written, or done again
    seen, twice = _Seen(), set[str]()
    counted_in, begun_at, outcomes = list[Counter[str]](), list[float](), Counter[str]()
    for path in (folder.path / "ledger.jsonl", *aside):
        first, before = end, _trained_and_discarded(outcomes)
        for prompt, outcome, step in JsonLines(path).each(_settled):
            read.add()
            if step < end:
                first = min(first, step)
                outcomes[outcome] += 1
                if seen.add(prompt):
                    twice.add(prompt)
        counted_in.append(_trained_and_discarded(outcomes) - before)
        begun_at.append(first)
        end = first
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()) if count)
    once = f"{told}, each prompt once" if told else "no prompt is trained on or discarded yet"
    told = told or "none"
    if twice:
        named = ", ".join(sorted(twice)[:5])
        return LedgerCheck(False, f"NOT balanced: {len(twice)} prompts stand in the ledger twice, {named} among them ({told})")
    files = f"{' and '.join(path.name for path in aside)}, set aside as damaged by a resume"
    totals, in_ledger = _totals(last.finite()) if last else {}, _trained_and_discarded(outcomes)
    wrong = [kind for kind, total in totals.items() if total != in_ledger[kind]]
    if not wrong:
        return LedgerCheck(True, f"balanced: {once}" + (f"; {files}, counted" if aside else ""))
    earlier = _totals_before(folder, begun_at[0]) if aside else {}
    if earlier.keys() >= totals.keys() and all(total - earlier[kind] == counted_in[0][kind] for kind, total in totals.items()):
        since = " and ".join(f"{counted_in[0][kind]} {kind}" for kind in totals)
        lost = " and ".join(f"{sum(counted[kind] for counted in counted_in[1:])} of {earlier[kind]} {kind}" for kind in totals)
        told = f"{lost} before can be read in {files} ({told}, each prompt once)"
        return LedgerCheck(True, f"balanced from step {begun_at[0]:.0f} on, with {since}; {told}")
    say = " and ".join(f"{totals[kind]} groups {kind}, the ledger has {in_ledger[kind]}" for kind in wrong)
    return LedgerCheck(False, f"NOT balanced: the last step says {say} ({told})")


def _trained_and_discarded(outcomes: Counter[str]) -> Counter[str]:
    return Counter(trained=outcomes[TRAINED], discarded=outcomes.total() - outcomes[TRAINED])


def _totals(numbers: Mapping[str, float]) -> dict[str, int]:
    """Groups trained and discarded since the run began, as far as the numbers of a step say it."""
    return {kind: int(numbers[name]) for kind, name in _TOTALS.items() if name in numbers}


def _settled(record: Mapping[str, Any]) -> tuple[str, str, int]:
    """Prompt, what became of it, and the step, of a line of the ledger."""
    return str(record["prompt_id"]), str(record["outcome"]), step_of(record)


def _set_aside(folder: Path) -> list[Path]:
    """Damaged ledgers in whose place resumes have begun new ones (actors/state/ledger.py), the newest first."""
    numbers = {path: re.fullmatch(r"ledger\.damaged(?:-(\d+))?\.jsonl", path.name) for path in folder.glob("ledger.damaged*.jsonl")}
    known = [(int(found[1] or 1), path) for path, found in numbers.items() if found]
    return [path for _, path in sorted(known, reverse=True)]


def _totals_before(folder: RunFolder, step: float) -> dict[str, int]:
    """Groups trained and discarded until then; empty: no line says it."""
    if step <= 1:
        return dict.fromkeys(_TOTALS, 0)

    def of_that_step(record: dict[str, Any]) -> StepMetrics:
        if step_of(record) != step - 1:
            raise ValueError(f"not of step {step - 1}")
        return StepMetrics.of_record(record)

    return next((_totals(line.finite()) for line in JsonLines(folder.metrics_path).each(of_that_step)), {})
