"""How the command ends a run that a signal has ended."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel import training as train
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.driver.controller import RunSummary
from evenkeel.actors.processes import disk, signals
from evenkeel.actors.processes.disk import DiskLate
from evenkeel.correction.errors import DataError
from tests.evenkeel.disk_clock import notice_first


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize(
    ("error", "within_s", "reports", "ends_in"),
    [(signals.Interrupted(signal.SIGTERM), 2.0, 0, (60.0, 143)), (DataError("a row"), 30.0, 1, (600.0, 1))],
    ids=["SIGTERM", "its own error"],
)
def test_a_run_that_a_signal_ended_at_once_waits_two_seconds_for_its_disk(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, within_s: float, reports: int, ends_in: tuple[float, int], hangs: bool
) -> None:
    """The run's event loop has taken the signal, and the process may be killed in seconds: no time for a report either.

    What hangs then has a minute, or ten, until the process ends with the code that it would have had.
    """
    closed, reported, left = list[float](), list[object](), list[tuple[float, int]]()
    monkeypatch.setattr(signals, "end_within", lambda seconds, code, hangs: left.append((seconds, code)))

    def ends(text: str) -> None:
        raise error

    config = SimpleNamespace(steps=3, name="x", model="m", deadlines=DeadlinesConfig(), batch_arithmetic=lambda: "4 groups")
    recorder = SimpleNamespace(
        event=lambda *_: None,
        keep_event=lambda *_: None,
        phase=ends,
        close=lambda *, within_s: closed.append(within_s),
        hangs=lambda: hangs,
    )
    folder: Any = SimpleNamespace(path="run", checkpoints=list)
    monkeypatch.setattr(train, "TerminalView", lambda *_, **__: SimpleNamespace(close=lambda: None, event=lambda *_: None))
    monkeypatch.setattr(train, "Recorder", lambda *_: recorder)
    monkeypatch.setattr(train, "Controller", lambda *_, **__: None)
    monkeypatch.setattr(train, "_report", reported.append)
    monkeypatch.setattr(train, "StackCollector", lambda *_: None)
    with pytest.raises(type(error)):
        train._run_in(folder, config, None, [], None)  # type: ignore[arg-type]
    assert closed == [within_s] and len(reported) == reports and left == [ends_in] * hangs


@pytest.mark.parametrize("comes_from", ["itself", "three checkpoints"])
def test_an_error_of_a_disk_that_hangs_is_raised_without_it(monkeypatch: pytest.MonkeyPatch, comes_from: str) -> None:
    """Neither the list of checkpoints nor a report keeps it from being said."""
    is_back, reported = threading.Event(), list[object]()
    what = "files of the newest checkpoint -> the run folder's disk"
    late = DiskLate(f"{what}: not done in 1800 s", what=what)

    def ends(text: str) -> None:
        if comes_from == "itself":
            raise late
        raise DataError("3 checkpoints in a row failed") from late

    config = SimpleNamespace(steps=3, name="x", model="m", deadlines=DeadlinesConfig(), batch_arithmetic=lambda: "4 groups")
    nothing: Any = lambda *_, **__: None  # noqa: E731
    recorder = SimpleNamespace(event=nothing, keep_event=nothing, phase=ends, close=nothing, hangs=lambda: False)
    folder: Any = SimpleNamespace(path="run", checkpoints=lambda: is_back.wait(60.0))
    monkeypatch.setattr(train, "TerminalView", lambda *_, **__: SimpleNamespace(close=nothing, event=nothing))
    monkeypatch.setattr(train, "Recorder", lambda *_: recorder)
    monkeypatch.setattr(train, "Controller", nothing)
    monkeypatch.setattr(train, "_report", reported.append)
    monkeypatch.setattr(train, "StackCollector", lambda *_: None)
    monkeypatch.setattr(train, "_LISTED_S", 0.1)
    with pytest.raises(DiskLate if comes_from == "itself" else DataError):
        train._run_in(folder, config, None, [], None)  # type: ignore[arg-type]
    assert not is_back.is_set() and not reported
    is_back.set()


def test_a_run_whose_last_lines_could_not_be_written_has_not_done_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had said that all is done and saved, and then its disk was late for the lines of the last steps: a signal that comes now ends it
    by its own code, not as a run that is done, so that whoever has sent it resumes it."""
    nothing: Any = lambda *_, **__: None  # noqa: E731

    def ends(text: str) -> None:
        signals.all_is_done(0)
        raise DiskLate("lines of the last steps -> the run folder's disk: not done in 1800 s")

    config = SimpleNamespace(steps=3, name="x", model="m", deadlines=DeadlinesConfig(), batch_arithmetic=lambda: "4 groups")
    recorder = SimpleNamespace(event=nothing, keep_event=nothing, phase=ends, close=nothing, hangs=lambda: False)
    folder: Any = SimpleNamespace(path="run", checkpoints=list)
    monkeypatch.setattr(train, "TerminalView", lambda *_, **__: SimpleNamespace(close=nothing, event=nothing))
    monkeypatch.setattr(train, "Recorder", lambda *_: recorder)
    monkeypatch.setattr(train, "StackCollector", nothing)
    monkeypatch.setattr(train, "Controller", nothing)
    with signals.guarded():
        with pytest.raises(DiskLate):
            train._run_in(folder, config, None, [], None)  # type: ignore[arg-type]
        assert signals.code_after(signal.SIGTERM) == 143


def test_who_ends_a_run_at_once_is_told_where_it_is(tmp_path: Path) -> None:
    """Also without a checkpoint, when there is no command that goes on. Of an error the sentence alone is said then."""
    recorder: Any = SimpleNamespace(keep_event=lambda *_: None)
    folder: Any = SimpleNamespace(path=tmp_path, checkpoints=list)
    ended: list[BaseException] = [signals.Interrupted(signal.SIGINT), DataError("a row")]
    for error in ended:
        train._keep_failure(error, recorder, folder, 3)
    assert [getattr(error, "__notes__", []) for error in ended] == [[f"run folder: {tmp_path}, without a checkpoint"], []]


def test_a_machine_without_a_thread_left_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last look at the run's checkpoints, which a thread would take, is left out."""
    error = DataError("a row")

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    nothing: Any = lambda *_, **__: None  # noqa: E731
    monkeypatch.setattr(train.DaemonThreads, "submit", refused)
    recorder: Any = SimpleNamespace(keep_event=nothing)
    train._keep_failure(error, recorder, SimpleNamespace(path="run"), 3)  # type: ignore[arg-type]
    assert not getattr(error, "__notes__", [])

    def fails(place: str) -> None:
        if place == "Ray's shutdown":
            raise error

    with pytest.raises(DataError, match="a row"):
        run_in(monkeypatch, fails)


def run_in(
    monkeypatch: pytest.MonkeyPatch, at: Callable[[str], object], checkpoints: Callable[[], Any] = list, **deadlines: float
) -> tuple[RunSummary, list[tuple[str, str, str]], str]:
    """A run of nine steps whose parts do nothing. Args: at: called where it ends something, with the place.

    Returns: its summary, its events (level, text, kind), and its last words.
    """
    told, shown = list[tuple[str, str, str]](), list[str]()
    controller = SimpleNamespace(summary=None)
    nothing: Any = lambda *_, **__: None  # noqa: E731

    def run(_: Any, *, silence_s: float) -> RunSummary:
        assert silence_s == config.deadlines.driver_s
        controller.summary = RunSummary(9, None, None, 60.0, stopped_early=False)
        at("the event loop's end")
        return controller.summary

    @contextlib.contextmanager
    def cluster(_: Any) -> Iterator[Any]:
        yield SimpleNamespace(own_daemons={}, head_address=None, log_folder="logs")
        at("Ray's shutdown")

    def event(level: str, text: Any, kind: str = "") -> None:
        told.append((level, str(text), kind))

    description = SimpleNamespace(description="each question once")
    said: Any = {"evaluation": description, "batch_arithmetic": lambda: "4 groups"}
    config: Any = SimpleNamespace(steps=9, name="x", model="m", ray=None, deadlines=DeadlinesConfig(**deadlines), **said)
    close: Any = lambda *, within_s: at("the last lines")  # noqa: E731
    recorder = SimpleNamespace(event=event, keep_event=event, phase=nothing, close=close, hangs=lambda: False)
    folder: Any = SimpleNamespace(path="run", checkpoints=checkpoints, event=event)
    monkeypatch.setattr(train, "TerminalView", lambda *_, **__: SimpleNamespace(close=lambda text="": shown.append(text), event=event))
    monkeypatch.setattr(train, "Recorder", lambda *_: recorder)
    monkeypatch.setattr(train, "Controller", lambda *_, **__: controller)
    monkeypatch.setattr(train, "Cluster", cluster)
    monkeypatch.setattr(train, "run_controller", run)
    monkeypatch.setattr(train, "_report", lambda _: at("the report"))
    for name in ("_look_at_nodes", "register_stack_dump", "StackCollector"):
        monkeypatch.setattr(train, name, lambda *_: SimpleNamespace(half_over=None))
    for name in ("ends_with_own_ray", "ends_with_the_head"):
        monkeypatch.setattr(train, name, lambda *_: contextlib.nullcontext())
    summary = train._run_in(folder, config, None, [], None)  # type: ignore[arg-type]
    (text,) = shown
    return summary, told, text


@pytest.mark.parametrize("where", ["the event loop's end", "Ray's shutdown", "the last lines", "the report"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_all_is_saved_keeps_the_exit_code(monkeypatch: pytest.MonkeyPatch, number: int, where: str) -> None:
    """It ends what is still to end, without the report, and is told; nothing says that a resume has anything to do."""

    def at(place: str) -> None:
        if place == where:
            raise signals.Interrupted(number)

    summary, told, text = run_in(monkeypatch, at)
    assert summary.exit_code == 0
    assert told[-1] == ("info", f"ended by {signals.NAMES[number]} after all was saved", "")
    assert text.startswith("done: 9 steps in 60 s") and "--resume" not in text


@pytest.mark.parametrize("where", ["the report", "the newest and the best checkpoint"])
def test_a_disk_that_hangs_after_all_is_saved_is_told_and_keeps_the_exit_code(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    is_back = threading.Event()

    def hangs(place: str) -> list[Any]:
        if place == where:
            is_back.wait(60.0)
        return []

    monkeypatch.setattr(disk, "_COMPUTES_S", 0.0)
    notice_first(monkeypatch, where)
    try:
        checkpoints = partial(hangs, "the newest and the best checkpoint")
        summary, told, text = run_in(monkeypatch, hangs, checkpoints, checkpoint_s=0.1)
    finally:
        is_back.set()
    assert summary.exit_code == 0 and text.startswith("done: 9 steps in 60 s")
    *waits, late = [said for level, said, _ in told if level == "warning"]
    assert waits and all(re.fullmatch(rf"waiting \d+ s for {where} -> the run folder's disk", said) for said in waits)
    remedy = "evenkeel report run writes it" if where == "the report" else "They are in run"
    assert re.fullmatch(rf"{where} -> the run folder's disk: not done in \d+ s[;.] {remedy}", late)


def test_ctrl_c_in_the_last_look_at_a_disk_that_hangs_shows_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def checkpoints() -> Any:
        raise signals.Interrupted(signal.SIGINT)

    summary, _, text = run_in(monkeypatch, lambda place: None, checkpoints)
    assert summary.exit_code == 0 and text == "done: 9 steps in 60 s"
