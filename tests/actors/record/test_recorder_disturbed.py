"""What an recorder does when the disk is full, a view fails or hangs, or a view's end takes long: the run goes on, and it is told once."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record import metric_views
from evenkeel.actors.record import recorder as recorder_module
from evenkeel.actors.record.disk_writer import FileThread
from evenkeel.actors.record.metric_views import TrackerView
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.early_warning.monitor import State
from evenkeel.correction.errors import DeadlineExceeded
from tests.actors.metrics.test_metrics import scalars
from tests.actors.record.recorder_cases import CONFIG, WATCH, Seen, diagnosed, end_step, observe
from tests.actors.record.recorder_cases import seen as seen
from tests.actors.record.recorder_cases import write as write_steps
from tests.actors.simulated_time import simulate

WITH_TRACKER = CONFIG.model_copy(update={"metrics": CONFIG.metrics.model_copy(update={"views": ("my_views:show",)})})


def shown_by(monkeypatch: pytest.MonkeyPatch, show: Callable[..., Any]) -> None:
    """Have the tracker of WITH_TRACKER begun by this."""
    module = ModuleType("my_views")
    module.show = show  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_views", module)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "run", "x") as folder:
        folder.write_text("config.yaml", "name: x\nsteps: 10\n")
        yield folder


def test_a_full_disk_ends_nothing_and_costs_no_line(seen: Seen) -> None:
    """The kernel's own refusal; told once, and again when there is room. Samples as text are left out meanwhile."""
    folder = seen.folder
    for path in (folder.metrics_path, folder.monitor_path, folder.path / "clipped_tokens.jsonl"):
        path.symlink_to("/dev/full")
    samples = folder.path / "trajectories"
    samples.rmdir()
    samples.write_text("")  # nothing can be written below it

    async def scenario() -> None:
        await write_steps(seen.recorder, (1, diagnosed(state=State.OK)), (2, diagnosed(WATCH, state=State.WATCH)))
        assert folder.read_metrics() == []
        for path in (folder.metrics_path, folder.monitor_path, folder.path / "clipped_tokens.jsonl"):
            path.unlink()
        samples.unlink()
        samples.mkdir()
        await write_steps(seen.recorder, (3, diagnosed(state=State.OK)))

    asyncio.run(scenario())
    seen.settle()  # what the writing has told of itself
    assert [metrics.step for metrics in folder.read_metrics()] == [1, 2, 3]
    assert folder.read_monitor_events() == [WATCH]
    assert seen.line(3)["files/failures_total"] >= 3 and [path.name for path in folder.trajectory_files()] == ["step_000003.txt"]
    told = [event.text for event in seen.told() if "the disk" in event.text]
    assert ["does not take" in text for text in told] == [True, False] and "lines wait in memory" in told[0]


def test_tensorboard_on_a_full_disk_ends_nothing_and_lacks_no_step(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes step 1, refuses 2 to 4, in which the run goes back and ends as well, and has all of them when there is room."""
    recorder, events = seen.recorder, seen.folder.tensorboard_path

    async def scenario() -> None:
        await write_steps(recorder, (1, diagnosed(state=State.OK)))
        (file,) = events.iterdir()
        file.rename(seen.folder.path / "aside")
        file.symlink_to("/dev/full")
        await write_steps(recorder, *((step, diagnosed(state=State.OK)) for step in (2, 3, 4)))
        recorder.close()
        file.unlink()
        (seen.folder.path / "aside").rename(file)
        await write_steps(recorder, (5, diagnosed(state=State.OK)))
        seen.folder.rewind(4)
        with monkeypatch.context() as patch:
            patch.setattr(type(seen.folder), "read_metrics", lambda _: pytest.fail("on the event loop, for as long as the disk takes"))
            recorder.roll_back({}, 4)
        await write_steps(recorder, (5, diagnosed(WATCH, state=State.WATCH)))

    asyncio.run(scenario())
    seen.settle()  # what the writing has told of itself
    assert scalars(events, "monitor/level") == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1)], "step 5 as it was done again"
    told = [event.text for event in seen.told() if "the disk" in event.text]
    assert ["does not take" in text for text in told] == [True, False], "once each, though other files took their lines all the time"


def test_a_tracker_that_fails_is_told_once_and_left_out(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors are no news of the disk, whatever their kind, and neither a flush nor the way back to a checkpoint ends by them."""
    tried, ended = list[int](), list[int]()

    def write(step: int, numbers: Mapping[str, float]) -> None:
        tried.append(step)
        if len(tried) > 1:
            raise ConnectionError("the service is down")

    shown_by(monkeypatch, lambda _: SimpleNamespace(write=write, close=lambda: ended.append(1)))
    seen = observe(folder, config=WITH_TRACKER)
    asyncio.run(write_steps(seen.recorder, *((step, diagnosed(state=State.OK)) for step in (1, 2, 3))))
    seen.recorder.close()
    assert not seen.recorder.hangs() and ended == [], "it is left out"
    assert tried == [1, 2] and [line.step for line in seen.folder.read_metrics()] == [1, 2, 3]
    (told,) = seen.told()
    assert told.level == "warning" and told.text.endswith("in its folder: ConnectionError: the service is down")


class AtOnce(FileThread):
    """Does each job where it is handed over."""

    def do(self, job: Callable[[], object]) -> None:
        job()


@pytest.mark.parametrize("error", [ConnectionError("the service is down"), SystemExit(1)])
def test_a_tracker_that_does_not_start_stops_no_start(error: BaseException, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a resume or a retry. It fails at once, before anything else of the recorder is used."""

    def show(_: object) -> None:
        raise error

    shown_by(monkeypatch, show)
    monkeypatch.setattr(metric_views, "FileThread", AtOnce)
    seen = observe(folder, config=WITH_TRACKER)
    asyncio.run(write_steps(seen.recorder, (1, None)))
    (told,) = seen.told()
    assert told.level == "warning" and told.text.endswith(f"all of them are in its folder: {type(error).__name__}: {error}")
    monkeypatch.undo()
    seen.recorder.close()


def test_a_tracker_whose_start_hangs_is_given_up(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that makes the recorder doesn't wait for it at all."""
    goes_on, called = threading.Event(), list[str]()
    tracker: Any = SimpleNamespace(write=lambda *_: called.append("write"), close=lambda: called.append("close"))
    view = TrackerView("x", lambda: tracker if goes_on.wait(60.0) else None, seen.recorder.waiting)
    view.write(StepMetrics(1, {}))
    monkeypatch.setattr(metric_views, "_START_S", 0.0)
    view.write(StepMetrics(2, {}))
    goes_on.set()
    view.close()
    assert not view.hangs and called == [], "it is given up"
    seen.settle()
    (told,) = seen.told()
    assert told.text.endswith("its folder: its start is not done in 0 s")


@pytest.fixture
def tracker_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Its first call opens a FIFO that nobody reads; steps that it was given."""
    os.mkfifo(fifo := tmp_path / "service")
    given = list[int]()

    def write(step: int, numbers: Mapping[str, float]) -> None:
        given.append(step)
        fifo.open("w").close()

    shown_by(monkeypatch, lambda _: SimpleNamespace(write=write, close=lambda: pytest.fail("it is left")))
    yield given
    os.close(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))  # lets the thread go


def test_a_tracker_that_hangs_holds_nothing_up(folder: RunFolder, tracker_that_hangs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the lines of the run's folder, nor a flush, which a checkpoint waits for, nor the end."""
    monkeypatch.setattr(metric_views, "CLOSE_S", 0.2)
    seen = observe(folder, config=WITH_TRACKER)
    asyncio.run(write_steps(seen.recorder, *((step, diagnosed(state=State.OK)) for step in (1, 2, 3))))
    until(lambda: bool(tracker_that_hangs))
    assert tracker_that_hangs == [1] and [line.step for line in seen.folder.read_metrics()] == [1, 2, 3]
    seen.recorder.close()
    (told,) = seen.told()
    assert told.text.endswith("its folder: it does not answer, and 2 steps more wait for it")
    assert seen.recorder.hangs()


def test_a_tracker_that_uploads_at_the_end_is_not_given_up(seen: Seen) -> None:
    """It has every step; that its own end takes long is no error, and the process waits for it."""
    uploads, tried = threading.Event(), list[int]()
    tracker: Any = SimpleNamespace(write=lambda step, _: tried.append(step), close=lambda: uploads.wait(60.0))
    view = TrackerView("x", lambda: tracker, partial(seen.recorder.event, "warning"))
    view.write(StepMetrics(1, {}))
    view.write(StepMetrics(2, {}))
    until(lambda: len(tried) == 2)
    view.close(within_s=0.1)
    assert view.hangs and tried == [1, 2]
    uploads.set()
    until(lambda: not view.hangs)
    seen.settle()
    assert list(seen.told()) == []


def test_what_waits_for_a_tracker_is_bounded(seen: Seen, tracker_that_hangs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_views, "_MOST_STEPS", 2)
    view = TrackerView("x", lambda: import_module("my_views").show(None), partial(seen.recorder.event, "warning"))
    view.write(StepMetrics(1, {}))
    until(lambda: bool(tracker_that_hangs))
    for step in range(2, 7):
        view.write(StepMetrics(step, {}))
    seen.settle()
    (told,) = seen.told()
    assert told.text.endswith("its folder: 2 of them wait for it")


def test_a_flush_has_an_end_that_counts_from_the_last_line(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two deadlines of a step and that of a kept batch after the newest line. A long way of slow steps is none: each line counts anew."""
    limits = CONFIG.deadlines.model_copy(update={"step_s": 100.0})
    recorder = observe(folder, config=CONFIG.model_copy(update={"deadlines": limits})).recorder
    monkeypatch.setattr(recorder.disk, "done", lambda: asyncio.sleep(0))  # its thread knows nothing of simulated time

    async def scenario() -> None:
        for step in (1, 2, 3):
            end_step(recorder, step, asyncio.sleep(90.0 * step, diagnosed(state=State.OK)))
        await recorder.flush()
        assert asyncio.get_running_loop().time() == pytest.approx(270.0)
        end_step(recorder, 4, loads=asyncio.sleep(900.0, {}))
        with pytest.raises(DeadlineExceeded, match="numbers of the last steps: not done in 800 s"):
            await recorder.flush()
        await asyncio.sleep(200.0)
        await recorder.flush()  # what it waits for goes on

    simulate(scenario)
    recorder.close()
    assert [line.step for line in folder.read_metrics()] == [1, 2, 3, 4]


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60.0
    while not holds() and time.monotonic() < ends:
        time.sleep(0.01)
    assert holds()


def test_a_view_is_closed_when_all_steps_are_in_it_and_one_that_can_not_be_ends_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that writes to it: a disk that takes its time for earlier lines has it written to after the run's end."""
    done, gate = list[object](), threading.Event()

    class Broken:
        hangs = False

        def write(self, metrics: StepMetrics) -> None:
            done.append(metrics.step)

        def close(self) -> None:
            done.append("closed")
            raise RuntimeError("no connection")

    monkeypatch.setattr(recorder_module, "open_views", lambda *_: [Broken()])
    seen = observe(folder)
    seen.recorder.roll_back({}, 0)
    seen.recorder.disk.do(lambda: gate.wait(60.0))

    async def scenario() -> None:
        end_step(seen.recorder, 1)
        await asyncio.sleep(0.3)
        assert done == []
        threading.Timer(0.3, gate.set).start()

    asyncio.run(scenario())
    seen.recorder.close()
    assert done == [1, "closed"]
    (told,) = seen.told()
    assert (told.level, told.text) == ("warning", "Broken was not closed in order: no connection")
