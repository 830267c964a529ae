"""Whether an engine lives: a short probe of its scheduler every few seconds, and what its processes compute meanwhile.

The probe is SGLang's own (/health_generate does the same): a request of one token under a name that the scheduler knows, which it answers
after its next forward pass if it has work, and by sampling if it has none. While it is paused for new weights it samples nothing, but
answers what it is asked about itself. Any sign of the scheduler counts as an answer.

A scheduler that gives none may be in a long forward pass: a prefill of a large model takes a CPU a minute. So a scheduler that computes has
ten times as long. So has one that waits for a kernel: SGLang compiles many of a GPU's when it first wants them, in processes of their own,
and of a machine's engines that want the same one all but one wait for a lock. One that does neither has stopped, or waits for something
that never comes. If the owner itself was stopped for a while, that counts as one missed probe at most, so no engine is lost by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import psutil

MISSES = 3
"""An engine that computes nothing is lost after this many probes in a row without an answer, each a third of the limit long."""
_MISSES_AT_WORK = 10 * MISSES
# Probes per limit_s while they are answered.
_PROBES = 6
# Share of a processor: a process that uses more counts as computing.
_LEAST_SHARE = 0.05
_LOOK_S = 0.1
# Processes of which at least one runs while a kernel is compiled (by ninja, with nvcc).
_COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "cudafe++", "cc1plus", "ninja"})


async def until_engine_lost(
    probe: Callable[[float], Awaitable[bool]],
    cpu_s: Callable[[], Sequence[float]],
    *,
    limit_s: float,
    is_excused: Callable[[], bool],
    compiles: Callable[[], bool] = lambda: False,
    silent: Callable[[float], None] = lambda _: None,
) -> str:
    """Returns why, when the engine has missed its heartbeat.

    Args:
        probe: whether the engine gives a sign within so many seconds.
        cpu_s: processor seconds that each of its ranks has used. One rank that stands still holds up all others, whatever they do.
        limit_s: seconds without an answer after which an engine that computes nothing is lost.
        is_excused: whether the engine waits for others and can't answer; such a wait has a deadline of its own.
        compiles: whether a kernel is compiled on this machine, for which an engine that computes nothing may be waiting.
        silent: called after each probe with the part of limit_s, in seconds, that an engine without a sign of life has used up.
    """
    missed = stood = 0
    while True:
        used_s = cpu_s()
        if is_excused() or await probe(limit_s / MISSES) or is_excused():
            missed = stood = 0
            silent(0.0)
            await asyncio.sleep(limit_s / _PROBES)
            continue
        missed += 1
        least_s = min(now - before for before, now in zip(used_s, cpu_s(), strict=True))
        computes = least_s > _LEAST_SHARE * limit_s / MISSES or compiles()
        stood = 0 if computes else stood + 1
        silent(limit_s * max(stood / MISSES, missed / _MISSES_AT_WORK))
        of = "its processes" if len(used_s) == 1 else f"one of its {len(used_s)} ranks"
        if stood >= MISSES:
            return f"it missed its heartbeat: no answer to {missed} probes, and {of} computed nothing in the last {limit_s:g} s"
        if missed >= _MISSES_AT_WORK:
            waited_s = missed * limit_s / MISSES
            why = "though its processes compute or a kernel is compiled"
            return f"it missed its heartbeat: no answer to {missed} probes in {waited_s:.0f} s, {why}"


class SchedulerProbe:
    """Asks SGLang's scheduler for a sign of life, unless it has given one since it was asked last."""

    def __init__(self, manager: Any, is_paused: Callable[[], bool]) -> None:
        """Args: manager: SGLang's tokenizer manager. is_paused: whether the scheduler may be paused; it samples nothing then."""
        self._manager, self._is_paused = manager, is_paused
        self._seen = manager.last_receive_tstamp

    async def __call__(self, deadline_s: float) -> bool:
        if self._gave_a_sign():
            return True
        was_paused = self._is_paused()
        asking = asyncio.ensure_future(self._manager.get_internal_state() if was_paused else self._one_token())
        clock = asyncio.get_running_loop().time
        until = clock() + deadline_s
        try:
            while not self._gave_a_sign():
                if clock() >= until or self._is_paused() != was_paused:  # paused or resumed meanwhile: the next probe asks in the other way
                    return clock() < until
                await asyncio.sleep(_LOOK_S)
            return True
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asking

    async def _one_token(self) -> None:
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
        from sglang.srt.managers.io_struct import GenerateReqInput

        name = f"{HEALTH_CHECK_RID_PREFIX}_{uuid.uuid4().hex}"
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        request = GenerateReqInput(rid=name, input_ids=[0], sampling_params=sampling, log_metrics=False)
        try:
            await anext(self._manager.generate_request(request, None))
        finally:
            self._manager.rid_to_state.pop(name, None)

    def _gave_a_sign(self) -> bool:
        before, self._seen = self._seen, self._manager.last_receive_tstamp
        return bool(self._seen != before)


def processor_seconds(pids: Iterable[int]) -> list[float]:
    """Seconds of processor time that each of these processes has used so far; 0 for one that has ended."""
    found = []
    for pid in pids:
        found.append(0.0)
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            found[-1] = times.user + times.system
    return found


def kernels_are_compiled() -> bool:
    """Whether a compiler of kernels runs on this machine, whoever started it: an engine that stands still may wait for what it makes."""
    return any(process.info["name"] in _COMPILERS for process in psutil.process_iter(["name"]))
