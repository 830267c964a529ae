"""What a call from actor to actor costs when nobody does anything: Ray's own part of what the control plane takes."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import psutil
import ray

_CALLS = 300
# Pause between two calls. Without it calls would share the wake-ups of Ray's threads, which calls of a run don't.
_PAUSE_S = 0.01


class _Idle:
    async def pid(self) -> int:
        return os.getpid()

    async def nothing(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CallFloor:
    """CPU seconds of a call."""

    caller_s: float
    callee_s: float

    @classmethod
    async def measured(cls) -> CallFloor:
        """Measure calls from this process to an actor, one after the other; the processes' use without calls is subtracted."""
        actor = ray.remote(_Idle).options(num_cpus=0, max_concurrency=64).remote()
        processes = psutil.Process(), psutil.Process(await actor.pid.remote())
        idle, busy = await _used(processes, asyncio.sleep), await _used(processes, lambda _: actor.nothing.remote())
        ray.kill(actor)
        return cls(*(max(0.0, (with_calls - without) / _CALLS) for with_calls, without in zip(busy, idle, strict=True)))

    def __str__(self) -> str:
        return f"a call that does nothing takes {self.caller_s * 1e3:.1f} ms of the caller and {self.callee_s * 1e3:.1f} ms of the called"


async def _used(processes: tuple[psutil.Process, psutil.Process], call: Any) -> list[float]:
    """CPU seconds of each process for all the calls and the pauses between them."""
    before = [sum(process.cpu_times()[:2]) for process in processes]
    for _ in range(_CALLS):
        await call(0)
        await asyncio.sleep(_PAUSE_S)
    return [sum(process.cpu_times()[:2]) - used for process, used in zip(processes, before, strict=True)]
