"""Records how long an event loop stood still, and what it was doing while it was late: stacks of its thread, and garbage collections."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from types import FrameType

_LATE_S = 0.05
_EVERY_S = 0.01
# Of a stack: the innermost.
_FRAMES = 4
_SHOWN = 6
_TICK_S = 0.001


class LateLoop:
    """Of the loop and the thread in which it is made. A second thread looks, which needs the interpreter's lock: what holds that for
    long is seen once it lets go."""

    def __init__(self) -> None:
        self._thread, self._loop = threading.get_ident(), asyncio.get_running_loop()
        self._beat, self._used = time.monotonic(), time.thread_time()
        self._stacks: Counter[str] = Counter()
        # Seconds of each full garbage collection.
        self._collected: list[float] = []
        self._began = 0.0
        self._cpu_s, self._waited_s = 0.0, 0.0
        self._is_over = threading.Event()
        gc.callbacks.append(self._collects)
        self._tick()
        threading.Thread(target=self._watch, daemon=True).start()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._beat > _LATE_S:
            self._waited_s += now - self._beat
            self._cpu_s += time.thread_time() - self._used
        self._beat, self._used = now, time.thread_time()
        if not self._is_over.is_set():
            self._loop.call_later(_EVERY_S, self._tick)

    def _collects(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began = time.monotonic()
        elif info["generation"] == 2:
            self._collected.append(time.monotonic() - self._began)

    def _watch(self) -> None:
        while not self._is_over.wait(_EVERY_S):
            if time.monotonic() - self._beat > _LATE_S and (frame := sys._current_frames().get(self._thread)) is not None:
                self._stacks[_told(frame)] += 1

    def end(self) -> str:
        """What was seen."""
        self._is_over.set()
        gc.callbacks.remove(self._collects)
        collected = ", ".join(f"{seconds:.2f} s" for seconds in self._collected) or "none"
        late = f"{self._waited_s:.2f} s in waits of more than {_LATE_S:g} s, {self._cpu_s:.2f} s of them on a processor"
        lines = [f"  driver's loop: {late}; full garbage collections: {collected}"]
        lines += [f"    {times} x {stack}" for stack, times in self._stacks.most_common(_SHOWN)]
        return "\n".join(lines)


def _told(frame: FrameType) -> str:
    parts = traceback.extract_stack(frame)[-_FRAMES:]
    return " > ".join(f"{part.filename.rpartition('/')[2]}:{part.lineno} {part.name}" for part in parts)


class LongestHalt:
    """The longest time for which the loop in which it is made ran nothing that was due."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._ticking = asyncio.create_task(self._tick())

    def end(self) -> float:
        """Returns: that time since it was made, s."""
        self._ticking.cancel()
        return self._longest_s

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self._longest_s = max(self._longest_s, time.monotonic() - began - _TICK_S)
