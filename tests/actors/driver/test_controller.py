"""The controller's waits and interrupts, with parts that hang. Whole runs are in tests/e2e."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from actors.carriers import PreparedBatch, QueueSettlement
from actors.config import DeadlinesConfig, RunConfig
from actors.driver.batch_source import BatchSource
from actors.driver.controller import Controller
from actors.driver.evaluation import Evaluations
from actors.part_carriers import WaitNotice
from actors.processes.stopwatch import Phase
from correction.errors import DeadlineExceeded, StepAborted
from tests.actors.cases import FakeActor, prompts


class RecordingObserver:
    """Keeps what a run would show."""

    def __init__(self, *, flush_fails: bool = False) -> None:
        self.events: list[str] = []
        self.phases: list[str] = []
        self.evaluations = 0
        self.flush_fails = flush_fails
        self.pending, self.written = ["line of step 2"], list[str]()
        self.disk = SimpleNamespace(room=nothing, do=lambda job: job(), result=done_at_once)
        self.steps = self

    def event(self, level: str, text: str, kind: str = "") -> None:
        self.events.append(f"[{kind}] {text}" if kind else text)

    def phase(self, text: str) -> None: ...

    def doing(self, text: str) -> None:
        self.phases.append(text)

    def waiting(self, notice: WaitNotice) -> None:
        self.events.append(str(notice))

    def serve(self) -> None: ...

    def trained(self) -> None: ...

    def end_step(self, *_: Any) -> None: ...

    def stop_waiting(self) -> None: ...

    def abandon(self) -> None: ...

    def evaluated(self, *_: Any) -> None:
        self.evaluations += 1

    async def flush(self) -> None:
        if self.flush_fails:
            raise RuntimeError("no connection")
        self.pending, self.written = [], self.written + self.pending


class UnaskedQueue:
    """Fails when anything is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the queue was asked: {name}")


def source(run: Controller, service: Any) -> BatchSource:
    """With a queue and a ledger that nobody asks."""
    with mock.patch("actors.driver.batch_source.make_queue"):
        made = BatchSource(run._config, run._point, mock.Mock(), mock.Mock(event=run._observer.event))
    made.service = service
    return made


class SilentPool:
    """Never answers."""

    async def answer(self, *_: Any) -> Any:
        await asyncio.sleep(60.0)

    def learner_waits(self, version: int, wait: Phase) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_moving(self) -> bool:
        return False

    def last_progress(self) -> float:
        return 0.0


class Receipts:
    version = 2

    async def receipts(self, version: int, *, deadline_s: float) -> None: ...


def controller(observer: RecordingObserver) -> Controller:
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
    settings = config.evaluation, config.deadlines, SilentPool(), run._held_out, observer
    run._evaluations = Evaluations(*settings, steps=config.steps)  # type: ignore[arg-type]
    return run


@pytest.mark.parametrize("is_training", [False, True], ids=["starting", "training"])
def test_an_interrupt_ends_a_start_at_once_and_training_after_its_step(monkeypatch: pytest.MonkeyPatch, is_training: bool) -> None:
    """A step that takes no end: training outlives the first interrupt, and the second ends it; a start ends with the first."""
    told: list[str] = []

    async def scenario() -> None:
        observer = RecordingObserver()
        run = controller(observer)

        async def start() -> None:
            run._shutdown.is_training = is_training
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
        observer = RecordingObserver()
        run = controller(observer)

        async def endless(*_: Any) -> None:
            asyncio.get_running_loop().call_later(0.05, signal.raise_signal, signal.SIGTERM)
            await asyncio.sleep(60.0)

        monkeypatch.setattr(run._evaluations, "whole", endless)
        with run._shutdown.handled():
            assert await run._evaluate_last() is None
        assert observer.events == ["[ending] interrupted (SIGTERM): leaving out the evaluation after training"]
        assert run.ended_by == signal.SIGTERM

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_saves_without_the_step_under_way_and_ctrl_c_with_it(number: int) -> None:
    """Who sends SIGTERM may kill in a few seconds; the learner ends the step when it is asked to."""

    async def scenario() -> None:
        observer = RecordingObserver()
        run = controller(observer)
        saved: list[int] = []
        is_aborted = asyncio.Event()

        async def learn(_: Any) -> Any:
            asyncio.get_running_loop().call_later(0.05, signal.raise_signal, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_aborted.wait(), 0.5)
                raise StepAborted("before its update")
            return "a result"

        async def abort() -> None:
            is_aborted.set()

        async def save_with_retries(step: int, save: Any) -> None:
            saved.append(step)

        async def settle(*_: Any, **__: Any) -> tuple[dict[str, int], list[Any]]:
            return {}, []

        run._shutdown.is_training = True
        run._source, run._learner = source(run, FakeActor(Service())), SimpleNamespace(abort=abort)  # type: ignore[assignment]
        run._source.settle, run._learn_and_publish = settle, learn  # type: ignore[method-assign]
        run._steps = SimpleNamespace(  # type: ignore[assignment]
            report_during=lambda work, **_: work, end_step=lambda _: None, stop_waiting=observer.stop_waiting
        )
        run._empty_steps = SimpleNamespace(note=lambda *_: None)  # type: ignore[assignment]
        run._checkpoints = SimpleNamespace(  # type: ignore[assignment]
            finished=nothing, save_with_retries=save_with_retries, saved_step=1, is_due=lambda step: False
        )
        with run._shutdown.handled():
            await run._train_and_save()
        of_step = "step 3 was aborted; a resume trains on its groups"
        assert (saved, of_step in observer.events) == (([2], True) if number == signal.SIGTERM else ([3], False))

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


class Service:
    """Has a batch for whoever asks."""

    async def next_batch(self, version: int) -> Any:
        return SimpleNamespace(corrected=None, correction=None, version=version)


async def nothing(*_: Any, **__: Any) -> None: ...


async def done_at_once(job: Callable[[], Any]) -> Any:
    return job()


def test_a_disk_that_hangs_ends_the_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for room for its lines as long as a flush does: told meanwhile, and not for ever."""
    observer = RecordingObserver()
    run = controller(observer)
    monkeypatch.setattr(DeadlinesConfig, "disk_s", 0.1)
    observer.disk.room = lambda: asyncio.sleep(60.0)
    with pytest.raises(DeadlineExceeded, match="room for the lines of step 3 -> the run folder's disk: not done in 0 s"):
        asyncio.run(asyncio.wait_for(run._next_batch(), 5.0))


def test_the_phase_is_that_of_the_step() -> None:
    """Not what came before training: the line stands below the live panel until the next one."""

    async def scenario() -> None:
        observer = RecordingObserver()
        run = controller(observer)
        run._source, run._learner = source(run, FakeActor(Service())), SimpleNamespace(step=nothing)  # type: ignore[assignment]
        await run._learn(await run._next_batch())
        assert observer.phases == ["step 3: waiting for its batch; rollouts go on", "step 3 in training; rollouts go on"]

    asyncio.run(scenario())


def test_the_ranks_have_their_places_before_a_worker_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks Ray first gets the GPUs: engines would take those of the learner's. So the order of these calls is the contract."""

    async def scenario() -> None:
        run, done = controller(RecordingObserver()), list[str]()

        async def reserve(config: RunConfig) -> Any:
            assert config is run._config
            done.append("ranks ask")
            await asyncio.sleep(0.0)
            done.append("ranks have")

        run._task, run._folder = SimpleNamespace(held_out_prompts=lambda: prompts(0, 4)), mock.Mock()  # type: ignore[assignment]
        monkeypatch.setattr("actors.driver.controller.reserve", reserve)
        monkeypatch.setattr("actors.driver.controller.outline_folder", lambda _: [None])
        monkeypatch.setattr(run, "_make_queue", nothing)
        monkeypatch.setattr(run, "_start_pool", lambda: done.append("workers ask"))
        await run._start()
        assert done == ["ranks ask", "ranks have", "workers ask"]

    asyncio.run(scenario())


def test_the_first_sync_takes_nothing_out_of_the_queue() -> None:
    """After a resume it holds discarded prompts that the ledger doesn't know yet; they belong to the first step's line. Here it fails when
    anything is asked of it."""

    async def scenario() -> None:
        run = controller(RecordingObserver())
        asked: list[int] = []

        async def receipts(version: int, *, deadline_s: float, is_one_enough: bool) -> None:
            assert is_one_enough, "nodes may come one after another, each long after the one before"
            asked.append(version)

        run._pool = SimpleNamespace(members=SimpleNamespace(first_worker=nothing), follow=lambda _: None)  # type: ignore[assignment]
        run._sync = SimpleNamespace(publish=nothing, receipts=receipts)  # type: ignore[assignment]
        run._source = UnaskedQueue()  # type: ignore[assignment]
        await run._first_sync()
        assert asked == [run._version]

    asyncio.run(scenario())


def test_a_step_is_told_before_its_checkpoint_is_taken() -> None:
    """A resume goes on after that step: its line has to be there."""

    async def scenario() -> None:
        observer = RecordingObserver()
        run = controller(observer)
        written: dict[int, list[str]] = {}

        async def begin(step: int, *_: Any) -> None:
            written[step] = list(observer.written)

        run._checkpoints = SimpleNamespace(finished=nothing, begin=begin)  # type: ignore[assignment]
        run._learner = SimpleNamespace()  # type: ignore[assignment]
        await run._save()
        assert written == {2: ["line of step 2"]}

    asyncio.run(scenario())


@pytest.mark.parametrize("fails", [False, True], ids=["flushed", "flush fails"])
def test_the_last_steps_are_flushed_whatever_ends_the_run(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A failing flush stands in a warning, and doesn't hide what ended the run."""

    async def scenario() -> None:
        observer = RecordingObserver(flush_fails=fails)
        run = controller(observer)

        async def start() -> None:
            raise DeadlineExceeded("batch of version 4")

        monkeypatch.setattr(run, "_start", start)
        del run._pool, run._sync
        run._source = source(run, None)  # there is a queue by then, and no service
        with pytest.raises(DeadlineExceeded, match="batch of version 4"):
            await run.run()
        assert observer.written == ([] if fails else ["line of step 2"])
        assert observer.events == (["lines of the last steps: given up (no connection)"] if fails else [])

    asyncio.run(scenario())


def test_a_step_s_line_says_what_the_ways_of_its_groups_took() -> None:
    """The service answers after 0.2 s of the learner's waiting, all of which is hand-over: the groups had come before."""

    class Prepared:
        async def next_batch(self, version: int) -> Any:
            await asyncio.sleep(0.2)
            return mock.Mock(spec=PreparedBatch, group_ids=(0, 1), prompt_ids=("a", "b"))

    class Queue:
        async def advance(self, *_: Any) -> Any:
            return QueueSettlement([], {"admitted": 4, "trained": 2, "discarded": 0, "in_flight": 2, "finished": 0, "drawn": 0}, [])

    noted: dict[str, float] = {}

    async def scenario() -> None:
        one = source(controller(RecordingObserver()), FakeActor(Prepared()))
        one.queue, one._observer.note = FakeActor(Queue()), noted.update  # type: ignore[method-assign]
        batch = await one.next(2, SilentPool())  # type: ignore[arg-type]
        await one.settle(3, batch, version=3, published=3)

    asyncio.run(scenario())
    assert set(noted) == {"wait/handover_s"} and noted["wait/handover_s"] >= 0.2
