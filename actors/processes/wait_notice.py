"""The notice of a wait that goes on."""

from __future__ import annotations

from dataclasses import dataclass

NO_DEADLINE = " (no deadline)"
"""Behind the name of a wait that has no end, where its stacks are told of."""


@dataclass(frozen=True, slots=True)
class WaitNotice:
    """Something has not come yet."""

    what: str
    """Phase, both sides and version, as the wait has named them ("weight sync v12 -> worker 3")."""
    seconds: int
    """Since the wait began."""
    detail: str = ""
    """What exactly is missing; empty: not known."""

    def __str__(self) -> str:
        return f"waiting {self.seconds} s for {self.what}" + (f" ({self.detail})" if self.detail else "")
