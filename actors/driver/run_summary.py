"""How a run ended, for the command line."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from actors.metrics.held_out import Evaluation
from actors.processes import interrupts

ENDED_BY_ALARM = 3
"""Exit code of a run that was ended with a checkpoint by monitor.on_alarm = stop, or because dynamic sampling found too few groups; 1 and
2 are errors."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended."""

    steps: int
    before: Evaluation | None
    after: Evaluation | None
    seconds: float
    stopped_early: bool
    alarm: str = ""
    """Why the monitor, or a want of groups, ended it; empty: neither did."""
    ended_by: int | None = None
    """The signal that ended it before its last step."""

    @property
    def exit_code(self) -> int:
        """Exit code of `evenkeel train`, whose --help lists them."""
        if self.alarm:
            return ENDED_BY_ALARM
        return 0 if self.ended_by in (None, signal.SIGINT) else interrupts.exit_code(self.ended_by)
