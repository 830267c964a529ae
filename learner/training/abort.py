"""Aborts a pass over a batch before its next micro-batch, on all ranks before the same one.

SIGTERM may leave a run less time than a step takes. The step's gradients are given up then: until the optimizer changes them, the weights
are those of the last finished step. Ranks meet in collectives, so a rank that stopped just anywhere could let others wait for ever.
The caller therefore asks every rank where it can stop (`hold`), and the rank waits there; then it gives all ranks the largest of these
places (`release`). All ranks have equally many micro-batches, so a place means the same on each. That doesn't hold for pipeline stages: a
stage waits for another one in the middle of a micro-batch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from correction.errors import DeadlineExceeded, StepAborted

_RELEASED_S = 180.0
"""How long a held rank waits to be released. The caller may need that long: it asks ranks that it can't reach again."""


class Abort:
    """Whether a rank's call goes on. `hold` and `release` are called by another thread than the one that computes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._call = 0
        """Number of the abortable call that runs, or of the last one."""
        self._place: int | None = None
        """Number of micro-batches that the call has begun; None: the call is over, or has begun to change the weights."""
        self._held, self._released, self._end = 0, 0, 0
        """Numbers of the calls that were held last and released last, and the micro-batch before which the released one ends."""

    @contextmanager
    def during(self, call: int) -> Iterator[None]:
        """A call that may be aborted. Args: call: its number, larger than those of all calls before."""
        with self._changed:
            self._call, self._place = call, 0
        try:
            yield
        finally:
            self.too_late()

    def too_late(self) -> None:
        """From here the call goes on to its end: what follows changes the weights."""
        with self._changed:
            self._place = None

    @property
    def is_undecided(self) -> bool:
        """Whether the present call is held and not yet released."""
        return self._held == self._call != self._released

    def before_microbatch(self) -> None:
        """Wait while the call is held. Raises: StepAborted if the call has to end here; DeadlineExceeded if nobody released it in time."""
        with self._changed:
            if self._place is None:
                return
            if not self._changed.wait_for(lambda: not self.is_undecided, timeout=_RELEASED_S):
                raise DeadlineExceeded(f"a step was held for an abort, and nobody released it in {_RELEASED_S:g} s")
            if self._released == self._call and self._place >= self._end:
                raise StepAborted("the step was aborted before its update")
            self._place += 1

    def hold(self, call: int) -> int | None:
        """Have a call wait before its next micro-batch. The call may not have begun yet.

        Returns: number of that micro-batch; None if it is too late to abort the call.
        """
        with self._changed:
            if call < self._call or (call == self._call and self._place is None):
                return None
            self._held = call
            return self._place if call == self._call else 0

    def release(self, call: int, before: int | None) -> None:
        """Let a held call go on. Args: before: the micro-batch before which it ends; None: it isn't aborted."""
        with self._changed:
            self._released, self._end = call, sys.maxsize if before is None else before
            self._changed.notify_all()
