"""What says of a wait that it is long. Not in supervision.py, which needs Ray: the parent of `--retries` has none."""

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
