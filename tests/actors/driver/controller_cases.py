"""A controller in the middle of a run, whose parts are played one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evenkeel.actors.carriers import WaitNotice
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.batches import BatchSource
from evenkeel.actors.driver.controller import Controller
from evenkeel.actors.driver.evaluation import Evaluations
from evenkeel.actors.groups.ledger import LedgerMark
from tests.actors.cases import prompts


class EventsRecorder:
    """Keeps what a run would show."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.evaluations = 0
        self.pending = ["line of step 2"]
        self.disk = SimpleNamespace(room=nothing, do=lambda job: job(), result=done_at_once)

    def event(self, level: str, text: str, kind: str = "") -> None:
        self.events.append(f"[{kind}] {text}" if kind else text)

    def phase(self, text: str) -> None: ...

    def doing(self, text: str) -> None: ...

    def waiting(self, notice: WaitNotice) -> None:
        self.events.append(str(notice))

    def serve(self) -> None: ...

    def trained(self, *_: Any) -> None: ...

    def did(self, *_: Any) -> None: ...

    def end_step(self, *_: Any) -> None: ...

    def stop_waiting(self) -> None: ...

    def abandon(self) -> None: ...

    def evaluated(self, *_: Any) -> None:
        self.evaluations += 1

    async def flush(self) -> None:
        self.pending = []


def source(run: Controller, service: Any) -> BatchSource:
    """With a ledger without a line."""
    ledger: Any = SimpleNamespace(flush=lambda *_: LedgerMark(), compare=lambda _: None, hand_out=lambda _: None)
    recorder: Any = SimpleNamespace(event=run._recorder.event, waiting=lambda _: None, did=lambda _: None)
    made = BatchSource(run._config, run._point, ledger, recorder)
    made.service = service
    return made


class SilentPool:
    """Never answers."""

    async def answer(self, *_: Any) -> Any:
        await asyncio.sleep(60.0)

    def learner_waits(self, *_: Any) -> None: ...

    def turns_so_far(self) -> list[Any]:
        return []

    def last_progress(self) -> float:
        return 0.0


class Receipts:
    version = 2

    async def receipts(self, version: int, *, deadline_s: float) -> None: ...


def controller(recorder: EventsRecorder) -> Controller:
    """At step 2 of 10, version 2."""
    config = RunConfig.model_validate(
        {
            "model": "model",
            "steps": 10,
            "groups_per_step": 2,
            "evaluation": {"every_steps": 2},
            "deadlines": {"evaluation_s": 0.5, "notice_s": 0.2},
            "rollout": {
                "task": {"kind": "reasoning_gym", "dataset": "chain_sum"},
                "reward": {"kind": "exact_match"},
                "engine": {"device": "cpu"},
            },
        }
    )
    run = Controller(config, Path("run"), None, recorder)  # type: ignore[arg-type]
    run._step = run._version = 2
    run._held_out = prompts(0, 4)
    run._pool, run._sync = SilentPool(), Receipts()  # type: ignore[assignment]
    settings = config.evaluation, config.deadlines, SilentPool(), run._held_out, recorder
    run._evaluations = Evaluations(*settings, steps=config.steps, correct_at=config.correct_at)  # type: ignore[arg-type]
    return run


async def nothing(*_: Any, **__: Any) -> None: ...


async def done_at_once(job: Callable[[], Any]) -> Any:
    return job()
