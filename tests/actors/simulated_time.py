"""asyncio in simulated time: a run of hours, with every await of the real code, in as long as its code takes."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from typing import Any


class SimulatedTime(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer as soon as nothing else is left to do."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:  # else time would jump to it, and the rest of the way to the next one would be real
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        if not self._ready and timers:  # type: ignore[attr-defined]
            self.now = max(self.now, timers[0]._when)
        super()._run_once()  # type: ignore[misc]


def simulate(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        runner.run(asyncio.wait_for(scenario(), 10_000.0))
