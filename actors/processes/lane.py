"""What a process does, as spans of time: a bounded ring, always on. Its report travels with answers that go to the driver anyway.

A span that is lost with its answer, or pushed out of the ring, leaves a gap: nothing is known of that time, and nothing is made up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from evenkeel.actors.carriers import LaneReport, Span

# Spans that wait for the next report. A worker has about three for each group, and reports at each weight sync or heartbeat.
_MOST = 4096


def worker_lane(name: str) -> str:
    """Lane of a rollout worker. Args: name: of the worker."""
    return f"worker-{name}"


class Lane:
    """The spans of one process. One thread, or one event loop, uses it; spans may overlap.

    Times are of a clock that never goes back, moved once to unix time, when the lane is made.
    """

    def __init__(self, name: str, *, waits_for: str = "") -> None:
        """
        Args:
            name: of the lane in timeline.jsonl.
            waits_for: what the process waits for when nothing is under way: that time is a span "wait". Empty: it is not known what the
                process does then.
        """
        self.name, self._waits_for = name, waits_for
        self.made_at = time.monotonic()
        self._to_unix = time.time() - self.made_at
        self._spans: deque[Span] = deque(maxlen=_MOST)
        self._under_way = 0
        self._since = self.made_at  # when it was made, or what came last under way ended, or that was last reported

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A block in which something is under way, whose spans are added by `add`."""
        if not self._under_way:
            self._end_wait()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            self._since = time.monotonic()

    @contextmanager
    def span(self, what: str, *, version: int | None = None, group: int | None = None, why: str | None = None) -> Iterator[None]:
        """A block that is a span. Args: as the fields of Span. One that ends with an error has its class for a `why`."""
        with self.busy():
            began = time.monotonic()
            try:
                yield
            except BaseException as error:
                why = type(error).__name__
                raise
            finally:
                self.add(what, began, time.monotonic(), version=version, group=group, why=why)

    def add(
        self, what: str, begin: float, end: float, *, version: int | None = None, group: int | None = None, why: str | None = None
    ) -> None:
        """Add a span that is over. Args: begin, end: time.monotonic() of this process; the others as the fields of Span."""
        self._spans.append(Span(what, begin + self._to_unix, end + self._to_unix, version, group, why))

    def report(self) -> LaneReport:
        """What there is to tell since the last report, which has to reach the driver at once: it learns from it how clocks differ."""
        if not self._under_way:
            self._end_wait()
        spans = tuple(self._spans)
        self._spans.clear()
        return LaneReport(self.name, time.monotonic() + self._to_unix, spans)

    def _end_wait(self) -> None:
        since, self._since = self._since, time.monotonic()
        if self._waits_for and self._since > since:
            self.add("wait", since, self._since, why=self._waits_for)
