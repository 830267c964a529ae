"""What an observer does when the disk is full, a view fails or hangs, or a view's end takes long: the run goes on, and it is told once."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record import metric_views
from evenkeel.actors.record.file_thread import FileThread
from evenkeel.actors.record.metric_views import WandbView
from evenkeel.actors.record.observer import Observer
from evenkeel.correction.early_warning.monitor import State
from evenkeel.correction.errors import DeadlineExceeded
from tests.actors.metrics.test_metrics import scalars
from tests.actors.record.observer_cases import WATCH, Seen, diagnosed, write
from tests.actors.record.observer_cases import seen as seen
from tests.actors.simulated_time import simulate


def test_a_full_disk_ends_nothing_and_costs_no_line(seen: Seen) -> None:
    """The kernel's own refusal; told once, and again when there is room. Samples as text are left out meanwhile."""
    folder = seen.folder
    for path in (folder.metrics_path, folder.monitor_path, folder.path / "clipped_tokens.jsonl"):
        path.symlink_to("/dev/full")
    samples = folder.path / "trajectories"
    samples.rmdir()
    samples.write_text("")  # nothing can be written below it

    async def scenario() -> None:
        await write(seen.observer, (1, diagnosed(state=State.OK)), (2, diagnosed(WATCH, state=State.WATCH)))
        assert folder.read_metrics() == []
        for path in (folder.metrics_path, folder.monitor_path, folder.path / "clipped_tokens.jsonl"):
            path.unlink()
        await write(seen.observer, (3, diagnosed(state=State.OK)))

    asyncio.run(scenario())
    seen.settle()  # what the writing has told of itself
    assert [metrics.step for metrics in folder.read_metrics()] == [1, 2, 3]
    assert folder.read_monitor_events() == [WATCH]
    assert seen.line(3)["files/failures_total"] >= 3
    told = [event.text for event in folder.read_events() if "the disk" in event.text]
    assert ["does not take" in text for text in told] == [True, False] and "No space left on device" in told[0]


def test_tensorboard_on_a_full_disk_ends_nothing_and_lacks_no_step(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes step 1, refuses 2 to 4, in which the run goes back and ends as well, and has all of them when there is room."""
    observer, events = seen.observer, seen.folder.tensorboard_path

    async def scenario() -> None:
        await write(observer, (1, diagnosed(state=State.OK)))
        (file,) = events.iterdir()
        file.rename(seen.folder.path / "aside")
        file.symlink_to("/dev/full")
        await write(observer, *((step, diagnosed(state=State.OK)) for step in (2, 3, 4)))
        observer.close()
        file.unlink()
        (seen.folder.path / "aside").rename(file)
        await write(observer, (5, diagnosed(state=State.OK)))
        seen.folder.rewind(4)
        with monkeypatch.context() as patch:
            patch.setattr(type(seen.folder), "read_metrics", lambda _: pytest.fail("on the event loop, for as long as the disk takes"))
            observer.roll_back({}, 4)
        await write(observer, (5, diagnosed(WATCH, state=State.WATCH)))

    asyncio.run(scenario())
    seen.settle()  # what the writing has told of itself
    assert scalars(events, "monitor/level") == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1)], "step 5 as it was done again"
    told = [event.text for event in seen.folder.read_events() if "the disk" in event.text]
    assert ["does not take" in text for text in told] == [True, False], "once each, though other files took their lines all the time"


def test_weights_and_biases_that_fails_is_told_once_and_left_out(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors are no news of the disk, whatever their kind, and neither a flush nor the way back to a checkpoint ends by them."""
    tried, ended = list[dict[str, float]](), list[int]()

    def log(numbers: dict[str, float]) -> None:
        tried.append(numbers)
        if len(tried) > 1:
            raise ConnectionError("the service is down")

    run = SimpleNamespace(log=log, finish=lambda: ended.append(1))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    view = WandbView(project="p", name="x", folder=seen.folder.path, config={}, notify=partial(seen.observer.event, "warning"))
    seen.observer.steps._views.append(view)
    asyncio.run(write(seen.observer, *((step, diagnosed(state=State.OK)) for step in (1, 2, 3))))
    view.close()
    assert not view.hangs and ended == [], "it is left out"
    seen.settle()
    assert [numbers["step"] for numbers in tried] == [1, 2] and [line.step for line in seen.folder.read_metrics()] == [1, 2, 3]
    (told,) = seen.folder.read_events()
    assert told.level == "warning" and told.text.endswith("in its folder: ConnectionError: the service is down")


class AtOnce(FileThread):
    """Does each job where it is handed over."""

    def do(self, job: Callable[[], object]) -> None:
        job()


@pytest.mark.parametrize("error", [ConnectionError("the service is down"), SystemExit(1)])
def test_weights_and_biases_that_does_not_start_stops_no_start(
    error: BaseException, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a resume or a retry. It fails at once, before anything else of the observer is used."""

    def init(**_: object) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setattr(metric_views, "FileThread", AtOnce)
    config = seen.observer._config
    config = config.model_copy(update={"metrics": config.metrics.model_copy(update={"wandb_project": "p"})})
    observer = Observer(config, seen.folder, seen.observer._view)
    observer.steps._show(StepMetrics(1, {"time/step_s": 1.0}))
    asyncio.run(observer.disk.done())
    (told,) = seen.folder.read_events()
    assert told.level == "warning" and told.text.endswith(f"all of them are in its folder: {type(error).__name__}: {error}")


def test_weights_and_biases_whose_start_hangs_is_given_up(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that makes the observer doesn't wait for it at all."""
    goes_on, called = threading.Event(), list[str]()
    run = SimpleNamespace(log=lambda _: called.append("log"), finish=lambda: called.append("finish"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run if goes_on.wait(60.0) else None))
    view = WandbView(project="p", name="x", folder=seen.folder.path, config={}, notify=seen.observer.waiting)
    view.write(StepMetrics(1, {}))
    monkeypatch.setattr(metric_views, "_START_S", 0.0)
    view.write(StepMetrics(2, {}))
    goes_on.set()
    view.close()
    assert not view.hangs and called == [], "it is given up"
    seen.settle()
    (told,) = seen.folder.read_events()
    assert told.text.endswith("its folder: its start is not done in 0 s")


@pytest.fixture
def wandb_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Its first call opens a FIFO that nobody reads; steps that it was given."""
    os.mkfifo(fifo := tmp_path / "service")
    given = list[int]()

    def log(numbers: dict[str, float]) -> None:
        given.append(int(numbers["step"]))
        fifo.open("w").close()

    run = SimpleNamespace(log=log, finish=lambda: pytest.fail("it is left"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    yield given
    os.close(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))  # lets the thread go


def test_weights_and_biases_that_hangs_holds_nothing_up(seen: Seen, wandb_that_hangs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the lines of the run's folder, nor a flush, which a checkpoint waits for, nor the end."""
    view = WandbView(project="p", name="x", folder=seen.folder.path, config={}, notify=partial(seen.observer.event, "warning"))
    seen.observer.steps._views.append(view)
    asyncio.run(write(seen.observer, *((step, diagnosed(state=State.OK)) for step in (1, 2, 3))))
    until(lambda: bool(wandb_that_hangs))
    assert wandb_that_hangs == [1] and [line.step for line in seen.folder.read_metrics()] == [1, 2, 3]
    view.close(within_s=0.2)
    monkeypatch.setattr(view, "close", partial(view.close, within_s=0.2))
    seen.settle()
    (told,) = seen.folder.read_events()
    assert told.text.endswith("its folder: it does not answer, and 2 steps more wait for it")
    seen.observer.close()
    assert seen.observer.hangs()


def test_weights_and_biases_that_uploads_at_the_end_is_not_given_up(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has every step; that its own end takes long is no error, and the process waits for it."""
    uploads, tried = threading.Event(), list[int]()
    run = SimpleNamespace(log=lambda numbers: tried.append(int(numbers["step"])), finish=lambda: uploads.wait(60.0))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    view = WandbView(project="p", name="x", folder=seen.folder.path, config={}, notify=partial(seen.observer.event, "warning"))
    view.write(StepMetrics(1, {}))
    view.write(StepMetrics(2, {}))
    until(lambda: len(tried) == 2)
    view.close(within_s=0.1)
    assert view.hangs and tried == [1, 2]
    uploads.set()
    until(lambda: not view.hangs)
    seen.settle()
    assert list(seen.folder.read_events()) == []


def test_what_waits_for_weights_and_biases_is_bounded(seen: Seen, wandb_that_hangs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_views, "_MOST_STEPS", 2)
    view = WandbView(project="p", name="x", folder=seen.folder.path, config={}, notify=partial(seen.observer.event, "warning"))
    view.write(StepMetrics(1, {}))
    until(lambda: bool(wandb_that_hangs))
    for step in range(2, 7):
        view.write(StepMetrics(step, {}))
    assert view._thread.waiting == 2
    seen.settle()
    (told,) = seen.folder.read_events()
    assert told.text.endswith("its folder: 2 of them wait for it")


def test_a_flush_has_an_end_that_counts_from_the_last_line(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two deadlines of a step and that of a kept batch after the newest line. A long way of slow steps is none: each line counts anew."""
    observer = seen.observer
    monkeypatch.setattr(observer.disk, "done", lambda: asyncio.sleep(0))  # its thread knows nothing of simulated time
    limits = observer._config.deadlines.model_copy(update={"step_s": 100.0})
    observer.steps._config = observer._config.model_copy(update={"deadlines": limits})

    async def scenario() -> None:
        for step in (1, 2, 3):
            metrics, slow = StepMetrics(step, {"time/step_s": 1.0}), asyncio.sleep(90.0, diagnosed(state=State.OK))
            now = observer.steps._write_when_known(metrics, {}, {}, asyncio.sleep(0, {}), slow, observer.steps._writing)
            observer.steps._writing = asyncio.create_task(now)
        await observer.steps.flush()
        assert observer.steps._written_at == asyncio.get_running_loop().time() == 270.0
        observer.steps._writing = asyncio.create_task(asyncio.sleep(1e4))
        with pytest.raises(DeadlineExceeded, match="numbers of the last steps: not done in 800 s"):
            await observer.steps.flush()
        assert not observer.steps._writing.done(), "what it waits for goes on"
        observer.steps.abandon()

    simulate(scenario)


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60.0
    while not holds() and time.monotonic() < ends:
        time.sleep(0.01)
    assert holds()


def test_a_view_is_closed_when_all_steps_are_in_it_and_one_that_can_not_be_ends_nothing(seen: Seen) -> None:
    """By the thread that writes to it: a disk that takes its time for earlier lines has it written to after the run's end."""
    done, gate = list[object](), threading.Event()

    class Broken:
        hangs = False

        def write(self, metrics: StepMetrics) -> None:
            done.append(metrics.step)

        def close(self) -> None:
            done.append("closed")
            raise RuntimeError("no connection")

    observer = seen.observer
    observer.steps._views.append(Broken())  # type: ignore[arg-type]
    observer.roll_back({}, 0)
    observer.disk.do(lambda: gate.wait(60.0))
    observer.steps._show(StepMetrics(1, {"time/step_s": 1.0}))
    threading.Timer(0.3, gate.set).start()
    observer.close()
    assert done == [1, "closed"]
    (told,) = seen.folder.read_events()
    assert (told.level, told.text) == ("warning", "Broken was not closed in order: no connection")
