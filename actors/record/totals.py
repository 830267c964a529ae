"""Running totals of a run: each step's line has them, and a run that goes on from a checkpoint counts on from the totals in it."""

from __future__ import annotations

from collections.abc import Mapping

from evenkeel.actors.metrics.step_metrics import members
from evenkeel.correction.early_warning.monitor import Event, State

_OF_MONITOR = {State.WATCH: "monitor/watches_total/", State.ALARM: "monitor/alarms_total/"}
"""Families that count the monitor's events, by symptom."""


class RunTotals:
    """Counters of the whole run, by their names in the catalogue."""

    def __init__(self, totals: Mapping[str, float] | None = None) -> None:
        """Args: totals: of an earlier part of the run, see `all`."""
        self.go_on_from(totals or {})

    def go_on_from(self, totals: Mapping[str, float]) -> None:
        """Count on from these, whatever was counted here."""
        self._counted = dict(totals)
        self._raised = {kind + it: self._counted.pop(kind + it) for kind in _OF_MONITOR.values() for it in members(self._counted, kind)}

    def count(self, name: str, amount: float = 1) -> None:
        self._counted[name] = self._counted.get(name, 0.0) + amount

    def put(self, totals: Mapping[str, float]) -> None:
        """Totals that somebody else counts."""
        self._counted |= totals

    def warned(self, event: Event) -> None:
        if family := _OF_MONITOR.get(event.state):
            self._raised[family + event.name] = self._raised.get(family + event.name, 0.0) + 1

    def __getitem__(self, name: str) -> float:
        return self._counted.get(name, 0.0)

    @property
    def counted(self) -> dict[str, float]:
        """All but the monitor's, which grow when a step is diagnosed: that may be after the next one has begun."""
        return dict(self._counted)

    @property
    def of_monitor(self) -> dict[str, float]:
        return dict(self._raised)

    def all(self) -> dict[str, float]:
        """All counters, as a checkpoint keeps them."""
        return self._counted | self._raised
