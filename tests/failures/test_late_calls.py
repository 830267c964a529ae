"""Calls that come later than their callers wait, to the correction service. They are made again, and all of them arrive in the end.

All actors are real ones, in a real Ray, whose calls are held up from outside; engines and the learner replay.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from benchmarks.control_plane_actors import ReplayedRun, ReplayedShape
from benchmarks.late_calls import LateCalls
from evenkeel.actors.driver.recovery import while_they_answer
from evenkeel.actors.processes.supervision import unless_failed
from evenkeel.actors.record.run_folder import EventKind
from tests.e2e.launch import ROOT
from tests.failures.impatient import PATIENCE_S, impatient
from tests.failures.measured import REAL, Measured
from tests.ray_sessions import leave_ray

pytestmark = pytest.mark.slow

GROUPS, STEPS = 4, 8
LATE_S = 4 * PATIENCE_S
"""Longer than any of them waits, and shorter than what makes a part that is asked whether it lives a dead one."""


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of the actors of a Ray of its own, in which nobody waits for long."""
    monkeypatch.setattr("evenkeel.actors.pool.pool.ANSWER_S", PATIENCE_S)
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}, "worker_process_setup_hook": impatient}
    with tempfile.TemporaryDirectory(prefix="ek", dir="/tmp", ignore_cleanup_errors=True) as folder:
        quiet = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
        ray.init(num_cpus=4, _temp_dir=folder, runtime_env=environment, **quiet)
        try:
            yield Path(folder) / "session_latest" / "logs"
        finally:
            leave_ray()


@asynccontextmanager
async def late(actor: Any) -> AsyncIterator[None]:
    """From its beginning on nobody's call reaches the actor, for LATE_S; at its end they all have."""
    try:
        calls = LateCalls(await actor.__ray_call__.remote(lambda _: os.getpid()))
    except PermissionError:
        pytest.skip("the kernel lets nobody stop a thread here")

    async def hold() -> None:
        try:
            await asyncio.sleep(LATE_S)
        finally:
            calls.end()

    holding = asyncio.create_task(hold())
    try:
        yield
    finally:
        await holding


class ImpatientRun(ReplayedRun):
    """Its driver asks as a run's does."""

    def __init__(self) -> None:
        super().__init__(ReplayedShape(workers=2, groups=GROUPS, tokens=50, rate=5e3, steps=STEPS, hosts=1), profile="")
        self.recorder.event = lambda level, text, kind=EventKind.NONE: self.said.append(str(text))  # type: ignore[method-assign]
        self.said: list[str] = []
        self._source.ask = self._ask  # type: ignore[method-assign]
        self.trained: list[tuple[str, ...]] = []
        """Prompts, by step."""

    async def _ask(self, method: Any, *arguments: Any, **_: Any) -> Any:
        notify = lambda _, text: self.said.append(text)  # noqa: E731
        call, parts = partial(method.remote, *arguments), self._source.parts
        return await while_they_answer(parts, call, method._method_name, deadline_s=PATIENCE_S, notify=notify)

    async def feeding(self) -> None:
        prompts = map(self._prompt, itertools.count())
        feeding = self.pool.feed(prompts, [], self._source.ledger.hand_out, self.recorder.admitted)
        await asyncio.gather(feeding, self.pool.raise_on_failure())

    async def step(self) -> None:
        step, learner = len(self.trained), self.learner
        batch = await self._source.next(learner.version, learner, self.pool, step=step)
        result = await learner.step(batch.corrected, batch.correction, step=step)
        await self.sync.publish()
        self._source.settle(step, batch, version=learner.version, published=learner.version)
        self.service.observe.remote(step, batch.version, result)
        self.trained.append(tuple(group.prompt_id for group in batch.groups))


def check_the_books(run: ImpatientRun) -> None:
    """admitted = trained + discarded + under way, each prompt once, in full steps."""
    assert [len(of_step) for of_step in run.trained] == [GROUPS] * STEPS
    book = run._source.book
    counts, trained = book.counts(), [prompt for of_step in run.trained for prompt in of_step]
    assert (counts["trained"], counts["discarded"]) == (len(trained), 0)
    assert counts["admitted"] == counts["trained"] + sum(counts[place] for place in ("in_flight", "finished", "drawn"))
    positions = sorted(int(prompt.rpartition("/")[2]) for prompt in [*trained, *book.outstanding()])
    assert positions == list(range(counts["admitted"])), "lost or doubled"


def test_calls_that_are_given_up_and_made_again_do_their_work_once(logs: Path) -> None:
    async def scenario() -> ImpatientRun:
        run = ImpatientRun()
        await run.join()

        async def steps() -> None:
            while len(run.trained) < 3:
                await run.step()
            began = time.monotonic()
            async with late(run.service):
                await run.step()
            seconds = time.monotonic() - began
            while len(run.trained) < 5:
                await run.step()
            while len(run.trained) < STEPS:
                await run.step()
            fault = f"calls to the correction service late by {LATE_S:g} s, {LATE_S / PATIENCE_S:g} times what callers wait"
            Measured(fault, "they are made again; all arrive, and each does its work once", seconds, "nothing", REAL).write()

        try:
            await unless_failed(steps(), run.feeding())
            return run
        finally:
            await run.close()

    run = asyncio.run(asyncio.wait_for(scenario(), 300.0))
    check_the_books(run)
    told = "\n".join([*run.said, *(path.read_text(errors="replace") for path in logs.glob("worker-*.err"))])
    assert "the late part answers again; the call is repeated" in told, "the service was asked again and again"
