"""What a run does about the monitor's alarms, as `monitor.on_alarm` says, and about answers that grow long (`monitor.length_decay`).
Decided here; the controller does it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from evenkeel.actors.carriers import EventLevel
from evenkeel.actors.checkpoints.state import AnswerLengths, Replacement
from evenkeel.actors.config import EarlyWarningConfig
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.early_warning.monitor import SYMPTOMS, Event, State
from evenkeel.correction.early_warning.replacement import breaks_at_an_alarm

_NOT_EASED_BY_BOUNDS = {symptom.name for symptom in SYMPTOMS if not symptom.is_eased_by_bounds}


@dataclass(frozen=True, slots=True)
class AlarmAction:
    """What to do now."""

    text: str
    """Line for the run's events: what is done, and because of what."""
    replacement: Replacement | None = None
    """Go on with this; None: end with a checkpoint."""


class AlarmResponse:
    """Takes alarms as they come and decides once what to do.

    The correction is replaced at the first alarm only. With on_alarm = stop every alarm ends the run: one that was resumed goes on until
    the next.
    """

    def __init__(self, monitor: EarlyWarningConfig, correction: CorrectionConfig, earlier: Replacement | None = None) -> None:
        """
        Args:
            correction: as configured.
            earlier: of the run that is resumed. It holds while `correction` is what was configured then; another one replaces it.
        """
        self._monitor, self._configured, self._earlier = monitor, correction, earlier
        self.replacement = earlier if earlier is not None and earlier.configured == correction else None
        self._pending: list[Event] = []

    @property
    def correction(self) -> CorrectionConfig:
        """The correction to go on with."""
        return self.replacement.correction if self.replacement else self._configured

    def notes(self) -> list[tuple[EventLevel, str]]:
        """Events of the start: level and sentence."""
        notes: list[tuple[EventLevel, str]] = []
        if self.replacement is not None:
            put = "the correction is the one that an earlier alarm has put in place; set another `correction` to leave it"
            notes.append(("info", put))
        elif self._earlier is not None:
            changed = "the correction is the configured one, which has changed since an earlier alarm put another in its place"
            notes.append(("info", changed))
        if self._monitor.on_alarm != "none":
            notes.append(("info", f"at the first alarm of the early warning: {self._plan()}"))
        after = self._monitor.after_alarm(self._configured)
        if after is not None and (reason := breaks_at_an_alarm(after)) is not None:
            fails = f"what monitor.on_alarm = {self._monitor.on_alarm} puts in place would not hold at an alarm: {reason}"
            notes.append(("warning", fails))
        return notes

    def take(self, events: Iterable[Event]) -> None:
        """Note the alarms among the monitor's events."""
        self._pending += [event for event in events if event.state is State.ALARM and self._is_answered(event)]

    @property
    def has_some(self) -> bool:
        """Whether there are alarms that `decide` has not seen yet."""
        return bool(self._pending)

    def decide(self) -> AlarmAction | None:
        """What to do about the alarms since the last call; None: nothing."""
        alarms, self._pending = self._pending, []
        if not alarms:
            return None
        because = f"alarm of {alarms[0].name} at step {alarms[0].step}"
        if self._monitor.on_alarm == "stop":
            return AlarmAction(f"{because}: {self._plan()}, as monitor.on_alarm = stop asks for")
        correction = self._monitor.after_alarm(self._configured)
        if correction is None or self.replacement is not None:
            return None
        self.replacement = Replacement(self._configured, correction)
        return AlarmAction(f"{because}: {self._plan()}, from the next batch that is begun", self.replacement)

    def _plan(self) -> str:
        monitor = self._monitor
        if monitor.on_alarm == "stop":
            return "the run ends with a checkpoint"
        if monitor.on_alarm == "switch_preset":
            return f"the correction becomes preset {monitor.preset}"
        return f"the correction's bounds are tightened by {monitor.tighten_factor:g}"

    def _is_answered(self, event: Event) -> bool:
        return self._monitor.on_alarm != "tighten" or event.name not in _NOT_EASED_BY_BOUNDS


def after_batch(lengths: AnswerLengths, mean_tokens: float, monitor: EarlyWarningConfig) -> tuple[AnswerLengths, str]:
    """What `monitor.length_decay` makes of one more trained batch, and what to say: nothing, unless the learning rate falls.

    Args: mean_tokens: of the batch's answers.
    """
    rule, usual = monitor.length_decay, monitor.thresholds
    if rule is None:
        return lengths, ""
    if len(lengths.first) < usual.skip_steps + usual.baseline_steps:
        return replace(lengths, first=(*lengths.first, mean_tokens)), ""
    level = statistics.median(lengths.first[usual.skip_steps :])
    in_a_row = lengths.long_batches + 1 if mean_tokens > rule.above * level else 0
    scale = max(lengths.rate_scale * rule.factor, rule.least)
    if in_a_row < rule.steps or scale >= lengths.rate_scale:
        return replace(lengths, long_batches=in_a_row), ""
    said = (
        f"answers grow long: {mean_tokens:.0f} tokens on average, and in {rule.steps} batches in a row more than {rule.above:g} times the "
        f"level of the start, {level:.0f}; the learning rate is {scale:.3g} of its schedule's from the next step on"
    )
    return replace(lengths, long_batches=0, rate_scale=scale), said
