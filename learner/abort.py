"""Ending a pass over a batch before its next micro-batch, on all ranks before the same one.

SIGTERM may leave a run less time than a step takes. What its gradients would have become is given up then: the weights are those of the
last finished step until the optimizer changes them. Ranks meet in collectives, so one that stopped where it stands could let others wait
for ever. Whoever aborts therefore asks every rank where it can stop (`hold`), which then waits there, and gives all of them the largest of
these places (`release`). Ranks pass through equally many micro-batches, and so agree on what a place means. Pipeline stages don't: one
waits in the middle of a micro-batch for what another makes of it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from correction.errors import DeadlineExceeded, StepAborted

_RELEASED_S = 180.0
"""How long a rank waits to be released: whoever can't be reached is asked again for half a minute, twice, each time for 10 s."""


class Abort:
    """Whether a rank's call goes on. `hold` and `release` are called by another thread than the one that computes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._call = 0
        """Number of the abortable call under way, or of the last one."""
        self._place: int | None = None
        """Micro-batches that the call has begun; None: it is over, or has begun to change the weights."""
        self._held, self._released, self._end = 0, 0, 0
        """Numbers of the calls that were held and released last, and the micro-batch before which that one ends."""

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
        """The call under way is held, and not released yet."""
        return self._held == self._call != self._released

    def before_microbatch(self) -> None:
        """Raises: StepAborted where the call is to end; DeadlineExceeded if it was held, and is not released."""
        with self._changed:
            if self._place is None:
                return
            if not self._changed.wait_for(lambda: not self.is_undecided, timeout=_RELEASED_S):
                raise DeadlineExceeded(f"a step that was to be aborted was held for {_RELEASED_S:g} s, and nobody has released it")
            if self._released == self._call and self._place >= self._end:
                raise StepAborted("the step was aborted before its update")
            self._place += 1

    def hold(self, call: int) -> int | None:
        """Have a call wait before its next micro-batch, also one that has not begun yet.

        Returns: number of that micro-batch; None if the call can't be aborted any more.
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
