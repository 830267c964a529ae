"""What a run does about the monitor's alarms, as `monitor.on_alarm` says. Decided here; the controller does it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actors.config import RunConfig
from correction.config import CorrectionConfig
from correction.monitor import Event, State

_MADE_WORSE_BY_BOUNDS = ("rejected_fraction", "broken_tokens")
"""Symptoms that narrower bounds would only add to."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """The correction that an alarm has put in the place of the configured one; saved with a checkpoint."""

    configured: CorrectionConfig
    correction: CorrectionConfig


@dataclass(frozen=True, slots=True)
class Action:
    """What to do now."""

    text: str
    """For the run's events: what, and because of what."""
    replacement: Replacement | None = None
    """Go on with this; None: end with a checkpoint."""


class AlarmResponse:
    """Takes alarms as they come and says once what to do.

    A replacement is made at the first alarm and never again; each alarm stops, so that a resumed run goes on until the next one.
    """

    def __init__(self, config: RunConfig, earlier: Replacement | None = None) -> None:
        """earlier: of the run that is resumed. It holds while `correction` is configured as it was then: who changes that, decides anew."""
        self._config = config
        self.replacement = earlier if earlier is not None and earlier.configured == config.correction else None
        self._pending: list[Event] = []

    @property
    def correction(self) -> CorrectionConfig:
        """By which to go on."""
        return self.replacement.correction if self.replacement else self._config.correction

    def take(self, events: Iterable[Event]) -> None:
        """Note the alarms among the monitor's events."""
        self._pending += [event for event in events if event.state is State.ALARM and self._is_answered(event)]

    def decide(self) -> Action | None:
        """What to do about the alarms since the last call; None: nothing."""
        alarms, self._pending = self._pending, []
        if not alarms:
            return None
        monitor, because = self._config.monitor, f"alarm of {alarms[0].name} at step {alarms[0].step}"
        if monitor.on_alarm == "stop":
            return Action(f"{because}: ending with a checkpoint, as monitor.on_alarm = stop asks for")
        correction = self._config.correction_after_alarm()
        if correction is None or self.replacement is not None:
            return None
        self.replacement = Replacement(self._config.correction, correction)
        what = f"to preset {monitor.preset}" if monitor.preset else f"to bounds tightened by {monitor.tighten_factor:g}"
        return Action(f"{because}: the correction changes {what}, from the next batch that is begun", self.replacement)

    def _is_answered(self, event: Event) -> bool:
        return self._config.monitor.on_alarm != "tighten" or event.name not in _MADE_WORSE_BY_BOUNDS
