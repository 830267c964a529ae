"""What the controller counts, knows and listens to while it goes back to a checkpoint; all parts are played. Whole runs: tests/failures."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.carriers import DiscardReason, Ticket, WorkerSettings
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.driver.batches import BatchSource
from evenkeel.actors.driver.controller import Controller
from evenkeel.actors.driver.parts import StartingPoint
from evenkeel.actors.driver.recovery import Lost, Rollbacks
from evenkeel.actors.groups.ledger import Ledger
from evenkeel.actors.groups.snapshot import BookSnapshot
from evenkeel.actors.pool.pool import RolloutPool
from evenkeel.actors.record.disk_writer import DiskWriter
from evenkeel.correction.errors import ActorLost, DataError, DeadlineExceeded
from tests.actors.cases import contents, group, prompts
from tests.actors.driver.controller_cases import EventsRecorder, controller, nothing, source

STEPS = 10
"""Of the run that `controller` makes."""


class RollbackRecorder(EventsRecorder):
    def roll_back(self, totals: Any, step: int) -> None: ...

    def keep_scatter(self, scatter: Any) -> None: ...


def rolled_back_to(step: int, monkeypatch: pytest.MonkeyPatch) -> Controller:
    """A run whose newest checkpoint is of that step; nothing of it is in Ray."""
    run = controller(RollbackRecorder())
    monkeypatch.setattr("evenkeel.actors.driver.batches.open_ledger", lambda *_: SimpleNamespace(compare=lambda _: None))
    book = BookSnapshot(step, 2 * step, 2 * step, 0, (), ())
    none: dict[str, Any] = {"replacement": None, "lengths": None, "mixture": None}
    state = SimpleNamespace(step=step, weight_version=step, totals={}, elapsed_s=0.0, book=book, monitor={}, **none)
    point = StartingPoint(Path("model"), SimpleNamespace(), state)  # type: ignore[arg-type]

    async def finds(*_: Any) -> Any:
        return point, []

    run._folder = SimpleNamespace(path=Path("run"))  # type: ignore[assignment]
    run._rollbacks = SimpleNamespace(found=finds, allow=lambda *_, **__: None)  # type: ignore[assignment]
    run._pool = SimpleNamespace(serve=nothing_now, raise_on_failure=lambda: asyncio.sleep(60.0))  # type: ignore[assignment]
    monkeypatch.setattr(run, "_withdraw", nothing)

    async def start() -> None:
        run._source.service = SimpleNamespace(scatter=SimpleNamespace(_method_name="scatter", remote=nothing))

    monkeypatch.setattr(run, "_start_parts", start)
    run._source = source(run, None)
    return run


def nothing_now(*_: Any) -> None: ...


def playing(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def empty_step(run: Controller, step: int) -> None:
    """One of whose batch nothing was left."""
    run._empty_steps.note(step, SimpleNamespace(groups=()), SimpleNamespace(trained_tokens=0))  # type: ignore[arg-type]


def test_empty_steps_are_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """max_staleness + 3 in a row end a run. What is sampled again after a return are other answers: those before don't count."""

    async def scenario() -> None:
        run = rolled_back_to(2, monkeypatch)
        await run._open_book()
        for step in (3, 4, 5):
            empty_step(run, step)
        await run._roll_back()
        for step in (3, 4, 5):
            empty_step(run, step)
        with pytest.raises(DataError, match="nothing was learned in 4 steps in a row, up to step 6"):
            empty_step(run, 6)

    playing(scenario)


def test_a_filter_that_was_given_up_takes_no_group_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are alike in their rewards."""

    async def scenario() -> None:
        run = rolled_back_to(2, monkeypatch)
        run._config = run._config.model_copy(update={"dynamic_sampling": True})
        alike = tuple(group(Ticket(number, one, 2), rewards=(1.0, 1.0)) for number, one in enumerate(prompts(4, 6), 4))
        found, _ = await run._rollbacks.found()  # type: ignore[call-arg]
        found.state.book = BookSnapshot(2, 6, 4, 0, (), alike)
        for filters, discarded in ((True, 2), (False, 0)):
            run._source.book.filters = filters
            await run._roll_back()
            book = run._source.book
            drawn = book.draw(2, 6)
            assert (len(drawn), book.discarded_by_reason[DiscardReason.UNIFORM]) == (2 - discarded, discarded)

    playing(scenario)


def test_a_failure_of_the_pool_takes_the_run_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts until all is withdrawn. If it still counted then, the way back would end by it before its first step, each time."""

    async def scenario() -> None:
        run = rolled_back_to(2, monkeypatch)
        monkeypatch.delattr(run, "_withdraw")
        settings = WorkerSettings(run._config.rollout, Path("model"), run._held_out[0], bind="127.0.0.1", resource="rollout")
        pool = RolloutPool(settings, run._config.deadlines, run._source.book, run._source.changes, run._recorder)
        monkeypatch.setattr(pool, "_replenish", lambda: None)
        run._pool, run._sync, started = pool, SimpleNamespace(close=nothing), 0  # type: ignore[assignment]
        start_parts = run._start_parts

        async def start() -> None:
            nonlocal started
            started += 1
            await start_parts()

        async def trains(**_: Any) -> None:
            if started == 1:
                pool.fail(ActorLost("load <- rollout worker: the actor's process has died"))
                await asyncio.sleep(60.0)
            run._step, run._is_trained = STEPS, True

        async def who(*_: Any) -> Lost:
            return Lost(("correction service",))

        monkeypatch.setattr(run, "_start_parts", start)
        monkeypatch.setattr(run, "_until_trained", trains)
        monkeypatch.setattr(run, "_evaluate_last", nothing)
        monkeypatch.setattr("evenkeel.actors.driver.controller.raise_when_lost", lambda *_: asyncio.sleep(60.0))
        monkeypatch.setattr("evenkeel.actors.driver.controller.lost_among", who)
        summary = await run._until_done()
        assert (summary.steps, started, run._generation, pool.generation) == (STEPS, 2, 1, 1)

    playing(scenario)


@pytest.mark.parametrize(("saved", "is_over"), [(STEPS, True), (STEPS - 2, False)], ids=["all steps", "an older one: the last is damaged"])
def test_a_run_that_goes_back_knows_whether_all_is_trained(monkeypatch: pytest.MonkeyPatch, saved: int, is_over: bool) -> None:
    """A part dies in the evaluation after training, and again after the return, once too often. With all steps saved the run ends in
    order, without that evaluation; with steps to do again it has failed, and must not say that it is done."""

    async def scenario() -> None:
        run = rolled_back_to(saved, monkeypatch)
        deaths = 0

        async def trained(**_: Any) -> None:
            if deaths:
                raise ActorLost("once more")
            run._step, run._is_trained = STEPS, True

        async def dies() -> None:
            nonlocal deaths
            deaths += 1
            raise ActorLost("in the evaluation")

        async def who(*_: Any) -> Lost:
            return Lost(("correction service",))

        def allow(lost: Lost, error: BaseException, **_: Any) -> None:
            if str(error) == "once more":
                raise ActorLost("the 4th death") from error

        monkeypatch.setattr(run, "_until_trained", trained)
        monkeypatch.setattr(run, "_evaluate_last", dies)
        monkeypatch.setattr("evenkeel.actors.driver.controller.lost_among", who)
        run._rollbacks.allow = allow  # type: ignore[method-assign]
        if is_over:
            summary = await run._until_done()
            assert summary.steps == STEPS and summary.after is None
        else:
            with pytest.raises(ActorLost, match="the 4th death"):
                await run._until_done()
            assert run._step == saved

    playing(scenario)


def test_a_disk_that_hangs_after_the_last_evaluation_is_not_told_as_one_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is evaluated; what fails is to write it, and that is said."""

    async def scenario() -> None:
        run = rolled_back_to(STEPS, monkeypatch)

        async def trained(**_: Any) -> None:
            run._step, run._is_trained = STEPS, True

        async def hangs() -> None:
            raise DeadlineExceeded("lines of the last steps -> the run folder's disk: not done in 1800 s")

        async def who(*_: Any) -> Lost:
            return Lost()

        def allow(lost: Lost, error: BaseException, **_: Any) -> None:
            raise error

        run._recorder.flush, run._rollbacks.allow = hangs, allow  # type: ignore[method-assign]
        monkeypatch.setattr(run, "_until_trained", trained)
        monkeypatch.setattr(run, "_evaluate_last", nothing)
        monkeypatch.setattr("evenkeel.actors.driver.controller.lost_among", who)
        with pytest.raises(DeadlineExceeded, match="the run folder's disk"):
            await run._until_done()
        assert not [text for text in run._recorder.events if "left out" in text]  # type: ignore[attr-defined]

    playing(scenario)


def test_a_signal_while_it_goes_back_for_the_last_evaluation_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no evaluation to leave out, and nobody would hear of the signal before the parts are up again."""
    told: list[str] = []

    async def scenario() -> None:
        run = rolled_back_to(STEPS, monkeypatch)
        run._recorder.events = told  # type: ignore[attr-defined]
        run._shutdown.is_training, run._is_trained = False, True

        async def dies(*_: Any) -> None:
            raise ActorLost("in the evaluation")

        async def start_again() -> None:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(60.0)

        async def who(*_: Any) -> Lost:
            return Lost(("learner rank 0",))

        starts = iter([nothing, start_again])
        monkeypatch.setattr(run, "_start_parts", lambda: next(starts)())
        monkeypatch.setattr(run, "_until_trained", nothing)
        monkeypatch.setattr(run._evaluations, "whole", dies)
        monkeypatch.setattr("evenkeel.actors.driver.controller.lost_among", who)
        with run._shutdown.handled():
            await run._until_done()

    with pytest.raises(asyncio.CancelledError):
        playing(scenario)
    assert told[-1] == "[ending] interrupted (SIGTERM): ending at once; a resume goes on from step 10"


@pytest.mark.parametrize("comes", ["as it goes back", "before, in the step"])
def test_a_signal_ends_a_run_that_has_lost_a_part_without_starting_it_again(monkeypatch: pytest.MonkeyPatch, comes: str) -> None:
    """A start may take minutes, and whoever sends SIGTERM kills in seconds: what a resume takes is on disk already."""
    told: list[str] = []

    async def scenario() -> None:
        run = rolled_back_to(2, monkeypatch)
        run._recorder.events = told  # type: ignore[attr-defined]
        run._checkpoints._saved_step = 2

        async def trains(**_: Any) -> None:
            run._shutdown.is_training = True
            if comes == "before, in the step":
                signal.raise_signal(signal.SIGTERM)
                await asyncio.sleep(0.05)
            raise ActorLost("the service is gone")

        async def start_again() -> None:
            assert comes == "as it goes back", "all parts are started for a step that is on disk"
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(60.0)

        async def who(*_: Any) -> Lost:
            return Lost(("correction service",))

        starts = iter([nothing, start_again])
        monkeypatch.setattr(run, "_start_parts", lambda: next(starts)())
        monkeypatch.setattr("evenkeel.actors.driver.controller.raise_when_lost", lambda *_: asyncio.sleep(60.0))
        monkeypatch.setattr(run, "_until_trained", trains)
        monkeypatch.setattr("evenkeel.actors.driver.controller.lost_among", who)
        with run._shutdown.handled():
            await run._until_done()

    with pytest.raises(asyncio.CancelledError):
        playing(scenario)
    last = "[ending] interrupted (SIGTERM): ending at once" if comes == "as it goes back" else "not saved: the service is gone"
    assert told[-1] == f"{last}; a resume goes on from step 2"


@pytest.mark.parametrize("hangs", ["its list of checkpoints", "their files"])
def test_a_loss_is_told_before_the_disk_is_waited_for_and_a_disk_that_hangs_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """By the sentence of that wait, also where a checkpoint was under way, which is left."""
    told, is_back, disk = list[str](), threading.Event(), DiskWriter(lambda _: None)

    def listed() -> list[Any]:
        if hangs == "its list of checkpoints":
            is_back.wait(20.0)
        return [SimpleNamespace(step=2)]

    async def scenario() -> None:
        run = rolled_back_to(2, monkeypatch)
        monkeypatch.delattr(run, "_withdraw")
        monkeypatch.setattr(DeadlinesConfig, "disk_s", 0.1)
        run._recorder.events = told  # type: ignore[attr-defined]
        run._folder.checkpoints = listed  # type: ignore[method-assign]
        run._folder.clear_partial_checkpoints = lambda **_: None  # type: ignore[method-assign]
        run._recorder.disk = disk
        run._rollbacks = Rollbacks(run._folder, None)  # type: ignore[arg-type]
        for end in ("withdraw", "stop"):
            setattr(run._pool, end, nothing)
        run._sync, writing = SimpleNamespace(close=nothing), asyncio.create_task(asyncio.sleep(60.0))  # type: ignore[assignment]
        monkeypatch.setattr(run._checkpoints, "_writing", writing)
        monkeypatch.setattr("evenkeel.actors.driver.controller._END_S", 0.1)
        monkeypatch.setattr("evenkeel.actors.driver.recovery.newest_readable", lambda *_, **__: is_back.wait(20.0))

        async def dies() -> None:
            raise ActorLost("its process is gone")

        lost = iter([Lost(("learner rank 0",))])

        async def who(*_: Any) -> Lost:
            return next(lost, Lost())

        monkeypatch.setattr(run, "_start", nothing)
        monkeypatch.setattr(run, "_start_parts", dies)
        monkeypatch.setattr("evenkeel.actors.driver.controller.lost_among", who)
        try:
            await run.run()
        finally:
            is_back.set()

    with pytest.raises(DeadlineExceeded, match=r"^files of the newest checkpoint -> the run folder's disk: not done in .* a resume goes"):
        playing(scenario)
    assert told[0] == "lost: learner rank 0 (its process is gone); going back to the last checkpoint"
    disk.close(within_s=60.0)


def test_nothing_is_read_before_the_disk_is_through_with_what_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that it completes after that would be newer than the one that the run goes on from."""

    async def scenario() -> None:
        run, order = rolled_back_to(2, monkeypatch), list[str]()
        found = run._rollbacks.found

        async def off_disk() -> None:
            await asyncio.sleep(0.01)
            order.append("the disk is through")

        async def finds(*given: Any) -> Any:
            order.append("found")
            return await found(*given)

        monkeypatch.setattr(run._checkpoints, "off_disk", off_disk)
        run._rollbacks.found = finds  # type: ignore[method-assign, assignment]
        await run._roll_back()
        assert order == ["the disk is through", "found"]

    playing(scenario)


def test_a_flush_that_nobody_waits_for_any_more_is_over_before_the_ledger_is_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its thread can't be stopped. What it wrote after the cut would stand in the ledger twice."""
    is_writing, is_back = threading.Event(), threading.Event()

    async def scenario() -> None:
        run = controller(RollbackRecorder())
        run._recorder.disk = DiskWriter(lambda _: None)
        run._source, folder = source(run, None), SimpleNamespace(path=tmp_path)
        run._source.ledger = ledger = Ledger(tmp_path / "ledger.jsonl", hand_over=lambda write: None)
        append = ledger._append

        def slow(lines: bytes) -> None:
            is_writing.set()
            is_back.wait(20.0)
            append(lines)

        monkeypatch.setattr(ledger, "_append", slow)
        monkeypatch.setattr(run, "_train", nothing)
        monkeypatch.setattr(run._checkpoints, "save_with_retries", nothing)
        ledger.hand_out(["train/0/0"])
        ledger.settle(1, trained=["train/0/0"], discarded=[], contents=contents(1, 1))
        saving = asyncio.create_task(run._train_and_save())
        await asyncio.to_thread(is_writing.wait, 20.0)
        saving.cancel()
        opening = asyncio.create_task(BatchSource.opened(run._config, run._point, folder, run._recorder, run._by_disk))  # type: ignore[arg-type]
        await asyncio.wait({opening}, timeout=0.1)
        is_back.set()
        assert (await opening).ledger.flush().bytes == 0
        await asyncio.wait({saving})
        await asyncio.get_running_loop().shutdown_default_executor()
        assert (tmp_path / "ledger.jsonl").read_bytes() == b""
        run._recorder.disk.close(within_s=60.0)

    playing(scenario)
