"""The controller's waits and interrupts, with parts that hang. Whole runs are in tests/e2e."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from actors.config import RunConfig
from actors.controller import Controller
from correction.errors import DeadlineExceeded
from tests.actors.cases import prompts


class Observer:
    """Keeps what a run would show."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, level: str, text: str) -> None:
        self.events.append(text)

    def phase(self, text: str) -> None: ...

    def waiting(self, text: str) -> None:
        self.events.append(text)

    def serve(self) -> None: ...


class SilentPool:
    """Never answers."""

    async def answer(self, *_: Any) -> Any:
        await asyncio.sleep(60.0)


class Receipts:
    async def receipts(self, version: int, *, deadline_s: float) -> None: ...


def controller(observer: Observer) -> Controller:
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
    run = Controller(config, Path("run"), None, observer)  # type: ignore[arg-type]
    run._step = run._version = 2
    run._held_out = prompts(0, 4)
    run._pool, run._sync = SilentPool(), Receipts()  # type: ignore[assignment]
    return run


def test_an_evaluation_beside_training_has_a_name_and_an_end() -> None:
    async def scenario() -> None:
        observer = Observer()
        run = controller(observer)
        run._evaluate_beside()
        assert run._evaluation is not None
        await asyncio.wait({run._evaluation}, timeout=10.0)
        await asyncio.sleep(0)
        *notices, failure = observer.events
        assert all(notice.endswith("s for evaluation beside step 3, weights v2 <- rollout workers") for notice in notices) and notices
        assert "evaluation beside step 3, weights v2 <- rollout workers: not done in 0 s" in failure

    asyncio.run(scenario())


def test_the_last_evaluation_waits_for_the_one_beside_it_and_has_an_end_of_its_own() -> None:
    async def scenario() -> None:
        observer = Observer()
        run = controller(observer)
        run._evaluate_beside()
        with pytest.raises(DeadlineExceeded, match=r"^evaluation after training, weights v2 <- rollout workers: not done"):
            await asyncio.wait_for(run._evaluate_now("after training"), 10.0)
        assert any("an evaluation beside training failed" in event for event in observer.events)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_training", [False, True], ids=["starting", "training"])
def test_an_interrupt_ends_a_start_at_once_and_training_after_its_step(monkeypatch: pytest.MonkeyPatch, is_training: bool) -> None:
    """A step that takes no end: training outlives the first interrupt, and the second ends it; a start ends with the first."""
    told: list[str] = []

    async def scenario() -> None:
        observer = Observer()
        run = controller(observer)

        async def start() -> None:
            run._is_training = is_training
            for interrupt in range(2):
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(0.05)
                told.append(f"outlived {interrupt + 1}")
            await asyncio.sleep(60.0)

        async def end() -> None:
            told.append("ended")

        monkeypatch.setattr(run, "_start", start)
        monkeypatch.setattr(run, "_end", end)
        await run.run()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(scenario(), 20.0))
    assert told == (["outlived 1", "ended"] if is_training else ["ended"])
