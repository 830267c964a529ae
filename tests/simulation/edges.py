"""Where a simulated run meets the product: what is played stands in for the product's own as long as the run lasts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import evenkeel.actors.groups.tokens
import evenkeel.actors.pool.rollout_worker
import evenkeel.actors.processes.pacing
import evenkeel.actors.service.correction_service
import evenkeel.learner.hf.folder
import evenkeel.learner.weights.checkpoint_files
import evenkeel.learner.weights.file_sums
from evenkeel.actors.checkpoints import reader as checkpoint_reader
from evenkeel.actors.driver import recovery as lost_parts
from evenkeel.actors.processes import signals
from evenkeel.actors.record import disk_writer
from evenkeel.correction.early_warning.monitor import Event, State
from evenkeel.rollout.rewards.rewards import RewardError
from tests.simulation import parts
from tests.simulation.books import Books
from tests.simulation.disk import Disk, SimulatedFileThread
from tests.simulation.engine import FaultyEngine, SimulatedSampler
from tests.simulation.faults import Faults
from tests.simulation.processes import HERE
from tests.simulation.schedule import FaultSchedule


@contextlib.contextmanager
def doubles(schedule: FaultSchedule, disk: Disk, faults: Faults, books: Books) -> Iterator[None]:
    service, worker = evenkeel.actors.service.correction_service, evenkeel.actors.pool.rollout_worker
    payloads = evenkeel.actors.groups.tokens
    nothing: Callable[..., Any] = lambda *_, **__: None  # noqa: E731
    does_nothing: Any = SimpleNamespace(set=nothing, add=nothing, publish=nothing, close=nothing, register=nothing, target="127.0.0.1:1")
    does_nothing.registry = does_nothing
    endpoint = lambda *_, **__: does_nothing  # noqa: E731
    with contextlib.ExitStack() as stack:
        for place, name, double in (
            (worker.Sampler, "start", partial(_start_sampler, schedule, faults, books)),
            (worker, "MetricsEndpoint", endpoint),
            (service, "MetricsEndpoint", endpoint),
            (service, "token_sample", nothing),  # of tensors that nobody computes here
            (service, "correct", parts.corrected),
            (service, "defer", parts.corrected),
            (service, "diagnose", parts.diagnosed),
            (service.CorrectionService, "observe", partialmethod(_observed, faults, service.CorrectionService.observe)),
            (service, "clipped_tokens", parts.not_clipped),
            (signals, "handled_in", partial(_handled_in, faults)),
            (disk_writer, "FileThread", partial(SimulatedFileThread, disk)),
            (evenkeel.actors.processes.pacing.LoopClock, "start", nothing),  # nothing is late; ticks would be half of all events
            (lost_parts, "_LOOK_S", 3.0),  # each second, as it is, whether all parts are there would be a third of all calls
            (evenkeel.learner.weights.file_sums, "_side_by_side", map),
            (evenkeel.learner.weights.checkpoint_files, "check_readable", nothing),
            (evenkeel.learner.hf.folder, "check_trainable", nothing),
            (checkpoint_reader, "load_tokenizer", nothing),
            (worker, "own_folder", lambda: contextlib.nullcontext(Path("temporary"))),
            (worker, "remove", nothing),
            (payloads, "_INLINE_BYTES", 0 if schedule.references else payloads._INLINE_BYTES),
        ):
            stack.enter_context(mock.patch.object(place, name, double))
        yield


@contextlib.contextmanager
def _handled_in(faults: Faults, loop: Any, handle: Callable[[int], None]) -> Iterator[None]:
    faults.interrupt = handle
    try:
        yield
    finally:
        faults.interrupt = None


async def _observed(service: Any, faults: Faults, observe: Callable[..., Any], step: int, *of: Any) -> Any:
    found = await observe(service, step, *of)
    if found is None or not faults.alarms:
        return found
    faults.alarms -= 1
    return replace(found, events=(Event(step, "k3_kl", State.ALARM, 0.008, 8.0, "k3_kl = 0.008"),))


async def _start_sampler(
    schedule: FaultSchedule, faults: Faults, books: Books, model: Path, config: Any, *, version: int = 0, **_: Any
) -> SimulatedSampler:
    """Raises: RewardError while no answer can be scored, in a run that has had scores. (A new one's start is refused then.)"""
    process = HERE.get()
    assert process is not None
    if faults.has_scored and faults.judge_is_down():
        await asyncio.sleep(process.cluster.delay(f"{process.name} sample", 0.5, 10.0))
        raise RewardError("rollout.reward (exact_match): the reward took longer than its deadline", is_set_up=True)
    await faults.befalls_start()
    engine = FaultyEngine(process, config, version, books.are_given)
    await asyncio.sleep(process.cluster.delay(f"{process.name} engine", 1.0, 8.0))
    played = {entry.name for entry in config.entries if entry.environment is not None}
    return SimulatedSampler(engine, config.sampling.samples_per_group, schedule.unscored, faults, played)
