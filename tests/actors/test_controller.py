"""The controller's waits and interrupts, with parts that hang. Whole runs are in tests/e2e."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

from actors.carriers import PreparedBatch
from actors.config import RunConfig
from actors.controller import Controller
from correction.errors import DeadlineExceeded
from tests.actors.cases import prompts


class Observer:
    """Keeps what a run would show."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.phases: list[str] = []

    def event(self, level: str, text: str) -> None:
        self.events.append(text)

    def phase(self, text: str) -> None: ...

    def doing(self, text: str) -> None:
        self.phases.append(text)

    def waiting(self, text: str) -> None:
        self.events.append(text)

    def serve(self) -> None: ...

    def trained(self) -> None: ...


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


def test_an_interrupt_during_the_last_evaluation_leaves_that_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps are done and saved: the run ends as usual, without a number after training, and without waiting for it."""

    async def scenario() -> None:
        observer = Observer()
        run = controller(observer)

        async def endless(when: str) -> None:
            asyncio.get_running_loop().call_later(0.05, signal.raise_signal, signal.SIGTERM)
            await asyncio.sleep(60.0)

        monkeypatch.setattr(run, "_evaluate_now", endless)
        with run._handled_interrupts():
            assert await run._evaluate_last() is None
        assert observer.events == ["interrupted (SIGTERM): leaving out the evaluation after training"]
        assert run.ended_by == signal.SIGTERM

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


class Loop:
    """A controller whose steps take a moment: the observer hears of a step when the learner is at work on the next one."""

    def __init__(self) -> None:
        self.log: list[str] = []
        observer = Observer()
        observer.end_step = lambda number, *_: SimpleNamespace(number=number)  # type: ignore[attr-defined]
        observer.tell = lambda step, _: self.log.append(f"told {step.number}")  # type: ignore[attr-defined]
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

    async def train(self) -> None:
        await self.run._train()
        self.run._tell()


def test_a_step_is_told_beside_the_next_one_but_before_anything_is_noted_of_that() -> None:
    """The learner has its work first; what is noted of a step comes before its end, so that it stands in its line."""
    loop = Loop()
    loop.run._config = loop.run._config.model_copy(update={"steps": 5})
    asyncio.run(loop.train())
    steps = [["batch 3", "learn 3", "learned 3", "note 3"]]
    steps += [[f"batch {n}", f"learn {n}", f"observe {n - 1}", f"told {n - 1}", f"learned {n}", f"note {n}"] for n in (4, 5)]
    steps.append(["observe 5", "told 5"])
    assert loop.log == [entry for step in steps for entry in step]


def test_the_first_sync_takes_nothing_out_of_the_queue() -> None:
    """After a resume it holds discarded prompts that the ledger doesn't know yet; they belong to the first step's line."""

    async def scenario() -> None:
        loop = Loop()
        run = loop.run
        run._queue = None
        run._pool = SimpleNamespace(first_worker=loop._nothing, follow=lambda _: None)  # type: ignore[assignment]

        async def receipts(version: int, *, deadline_s: float) -> None:
            loop.log.append(f"receipts {version}")

        run._sync = SimpleNamespace(publish=loop._nothing, receipts=receipts)  # type: ignore[assignment]
        await run._first_sync()
        assert loop.log == [f"receipts {run._version}"]

    asyncio.run(scenario())


def test_a_step_is_told_while_its_successor_waits_for_a_batch() -> None:
    """A terminal that shows the step before last for as long as a batch takes would mislead."""
    loop = Loop()
    loop.run._config = loop.run._config.model_copy(update={"steps": 4})

    async def late() -> PreparedBatch:
        await asyncio.sleep(0.3)
        return await loop._batch()

    service = SimpleNamespace(next_batch=SimpleNamespace(remote=lambda _: late()))
    loop.run._service = service
    loop.run._next_batch = MethodType(Controller._next_batch, loop.run)  # type: ignore[method-assign]
    asyncio.run(loop.train())
    assert loop.log[4:] == ["observe 3", "told 3", "batch 4", "learn 4", "learned 4", "note 4", "observe 4", "told 4"]


def test_the_phase_is_that_of_the_step() -> None:
    """Not what came before training: the line stands below the live panel until the next one."""
    loop = Loop()
    loop.run._config = loop.run._config.model_copy(update={"steps": 3})
    service = SimpleNamespace(next_batch=SimpleNamespace(remote=lambda _: loop._batch()))
    loop.run._service = service
    loop.run._next_batch = MethodType(Controller._next_batch, loop.run)  # type: ignore[method-assign]
    asyncio.run(loop.train())
    expected = ["step 3: waiting for its batch; rollouts go on", "step 3 in training; rollouts go on"]
    assert loop.run._observer.phases == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("fails", [False, True], ids=["flushed", "flush fails"])
def test_the_last_step_is_told_whatever_ends_the_run(fails: bool) -> None:
    """What came just before the end is what one wants to read: the third batch never comes. A failing flush doesn't hide that."""
    loop = Loop()
    flushed: list[str] = []

    async def batch() -> PreparedBatch:
        if loop.run._step == 4:
            raise DeadlineExceeded("batch of version 4")
        return await loop._batch()

    async def flush() -> None:
        flushed.append(loop.log[-1])
        if fails:
            raise RuntimeError("no connection")

    async def run() -> None:
        try:
            await loop.run._train()
        finally:
            await loop.run._end()

    loop.run._next_batch = batch  # type: ignore[method-assign]
    loop.run._observer.flush = flush  # type: ignore[method-assign]
    loop.run._learner = SimpleNamespace(step=loop._learn, kill=list)  # type: ignore[assignment]
    loop.run._sync = SimpleNamespace(publish=loop._nothing, close=loop._nothing)  # type: ignore[assignment]
    loop.run._pool = SimpleNamespace(stop=loop._nothing)  # type: ignore[assignment]
    with pytest.raises(DeadlineExceeded):
        asyncio.run(run())
    assert flushed == ["told 4"]


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

    loop.run._observer.tell = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space left"):
        asyncio.run(loop.train())
    assert "note 4" not in loop.log
