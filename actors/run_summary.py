"""How a run ended, for the command line."""

from __future__ import annotations

from dataclasses import dataclass

from actors.evaluation import Evaluation


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended."""

    steps: int
    before: Evaluation | None
    after: Evaluation | None
    seconds: float
    stopped_early: bool
    alarm: str = ""
    """Why the monitor ended it; empty: it didn't."""
    ended_by: int | None = None
    """The signal that ended it before its last step."""
