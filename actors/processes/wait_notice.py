"""What is said of a wait that goes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LongWait:
    """A wait so long that the stacks of all processes are wanted."""

    what: str
    """As in a WaitNotice."""
    has_deadline: bool = True
    """Half of its deadline has passed; False: it has none."""

    def __str__(self) -> str:
        return f"half of the time for {self.what} is over" if self.has_deadline else f"a long wait for {self.what} (no deadline)"


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
