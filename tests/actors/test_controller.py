"""The controller's waits and interrupts, with parts that hang. Whole runs are in tests/e2e."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.config import RunConfig
from actors.controller import Controller
from actors.correction_service import PreparedBatch
from actors.observer import FinishedStep
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


class Loop:
    """A controller whose steps take a moment: the observer hears of a step when the learner is at work on the next one."""

    def __init__(self) -> None:
        self.log: list[str] = []
        observer = Observer()
        observer.step = self._told  # type: ignore[attr-defined]
        self.run = controller(observer)
        self.run._queue = SimpleNamespace(advance=self._call(([], {})))
        self.run._sync = SimpleNamespace(publish=self._nothing)  # type: ignore[assignment]
        self.run._ledger = SimpleNamespace(settle=lambda *_, **__: None)  # type: ignore[assignment]
        self.run._learner = SimpleNamespace(step=self._learn)  # type: ignore[assignment]
        self.run._next_batch = self._batch  # type: ignore[method-assign]
        self.run._compare_bits = lambda *_: self.log.append(f"note {self.run._step + 1}")  # type: ignore[method-assign]
        self.run._observe = lambda step: self.log.append(f"observe {step.number}")  # type: ignore[method-assign,assignment,return-value]
        self.run._evaluate_beside = lambda: None  # type: ignore[method-assign]

    @staticmethod
    def _call(answer: Any) -> Any:
        async def later(*_: Any) -> Any:
            return answer

        return SimpleNamespace(remote=later, _method_name="call")

    async def _nothing(self) -> None: ...

    async def _batch(self) -> PreparedBatch:
        self.log.append(f"batch {self.run._step + 1}")
        return SimpleNamespace(groups=[], corrected=None, correction=None)  # type: ignore[return-value]

    async def _learn(self, *_: Any, step: int) -> Any:
        self.log.append(f"learn {step + 1}")
        await asyncio.sleep(0.05)
        self.log.append(f"learned {step + 1}")

    def _told(self, step: FinishedStep, _: Any) -> None:
        self.log.append(f"told {step.number}")

    async def train(self) -> None:
        await self.run._train()
        self.run._tell()


def test_a_step_is_told_beside_the_next_one_but_before_anything_is_noted_of_that() -> None:
    """What is noted joins the next line that is told: noted of step 4 before step 3 is told, it would stand in step 3's line."""
    loop = Loop()
    loop.run._config = loop.run._config.model_copy(update={"steps": 5})
    asyncio.run(loop.train())
    steps = [["batch 3", "learn 3", "learned 3", "note 3"]]
    steps += [[f"batch {n}", f"learn {n}", f"observe {n - 1}", f"told {n - 1}", f"learned {n}", f"note {n}"] for n in (4, 5)]
    steps.append(["observe 5", "told 5"])
    assert loop.log == [entry for step in steps for entry in step]


def test_a_step_is_told_before_its_checkpoint_is_taken() -> None:
    """A resume goes on after that step: its line has to be there."""
    loop = Loop()

    async def flush() -> None:
        loop.log.append("flush")

    def checkpoint(step: int) -> None:
        raise OSError(f"checkpoint {step}")

    loop.run._observer.flush = flush  # type: ignore[method-assign]
    loop.run._folder = SimpleNamespace(checkpoint=checkpoint)  # type: ignore[assignment]
    settings = loop.run._config.checkpoint.model_copy(update={"every_steps": 1})
    loop.run._config = loop.run._config.model_copy(update={"checkpoint": settings})
    with pytest.raises(OSError, match="checkpoint 3"):
        asyncio.run(loop.train())
    assert loop.log[-2:] == ["told 3", "flush"]


def test_numbers_that_could_not_be_told_end_the_run() -> None:
    loop = Loop()

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    loop.run._observer.step = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space left"):
        asyncio.run(loop.train())
    assert "note 4" not in loop.log
