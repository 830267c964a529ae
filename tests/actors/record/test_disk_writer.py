"""A disk that is slow, or refuses, delays and ends nothing: what is written waits in order, is bounded, and is told."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from evenkeel.actors.carriers import WaitNotice
from evenkeel.actors.driver.evaluation import evaluate
from evenkeel.actors.groups.ledger import Ledger
from evenkeel.actors.json_lines import JsonLines
from evenkeel.actors.processes import disk
from evenkeel.actors.record import disk_writer
from evenkeel.actors.record.disk_writer import DiskWriter, FileThread
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.early_warning.monitor import State
from evenkeel.correction.errors import DeadlineExceeded
from evenkeel.rollout.config import AnswerSampling
from tests.actors.cases import contents, prompts
from tests.actors.driver.test_evaluation import Answers
from tests.actors.record.recorder_cases import Seen, diagnosed, observe, write


class Gate:
    """A disk on which whatever waits for it waits until it opens."""

    def __init__(self) -> None:
        self._is_open, self.has_one = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self.has_one.set()
        assert self._is_open.wait(60.0), "who waits here keeps the one from going on who would open it"

    def open(self) -> None:
        self._is_open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def writer(told: list[str]) -> Iterator[DiskWriter]:
    writer = DiskWriter(told.append)
    yield writer
    writer.close(within_s=60.0)


def test_steps_go_on_while_the_disk_takes_its_time_for_one_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """The held-out answers are being flushed; twenty steps are told on the event loop meanwhile, which would stand otherwise."""
    monkeypatch.setattr(os, "fsync", gate)

    async def scenario(folder: RunFolder, seen: Seen) -> None:
        result = await evaluate(Answers([1.0, 0.0]), prompts(0, 2), AnswerSampling(), step=0, correct_at={"": 1.0})
        seen.recorder.evaluated(result, prompts(0, 2))
        steps = asyncio.create_task(write(seen.recorder, *((step, diagnosed(state=State.OK)) for step in range(1, 21))))
        while "step 20/10" not in seen.screen.getvalue():
            await asyncio.sleep(0.01)
        assert gate.has_one.is_set() and not steps.done(), "a flush, which a checkpoint waits for, is through when the disk is"
        assert folder.read_metrics() == []
        gate.open()
        await steps
        assert [metrics.step for metrics in folder.read_metrics()] == list(range(1, 21))

    with RunFolder.create(tmp_path / "run", "x") as folder:
        seen = observe(folder)
        asyncio.run(scenario(folder, seen))
        seen.recorder.close()


def test_what_waits_for_a_slow_disk_is_bounded(
    writer: DiskWriter, gate: Gate, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten jobs: files are left out. Twenty: a step waits until there is room. Lines are lost in neither case."""
    monkeypatch.setattr(disk_writer, "_MOST_BEFORE_A_FILE", 10)
    monkeypatch.setattr(disk_writer, "_MOST_BEFORE_A_STEP", 20)
    lines, sample = JsonLines(tmp_path / "lines"), tmp_path / "sample"

    async def scenario() -> None:
        writer.do(gate)
        gate.has_one.wait()
        for step in range(11):
            writer.line(step, lines.append, {"step": step})
        await writer.room()
        writer.file(sample.write_text, "left out")
        for step in range(11, 21):
            writer.line(step, lines.append, {"step": step})
        room = asyncio.create_task(writer.room())
        await asyncio.sleep(0.3)
        assert not room.done() and not sample.exists()
        gate.open()
        await room
        await writer.done()
        writer.file(sample.write_text, "written")
        await writer.done()

    asyncio.run(scenario())
    assert lines.read(lambda record: record["step"]) == list(range(21)) and sample.read_text() == "written" and writer.failures == 1
    assert told == ["the disk is slow: 11 writes into the run folder wait for it; samples as text are left out meanwhile"]


def lines_after_a_refusal(writer: DiskWriter, path: Path) -> list[int]:
    """Two are refused, as there is no such folder; a flush that comes when it is there tries them once more."""
    lines = JsonLines(path / "later" / "lines")

    async def scenario() -> None:
        for step in (1, 2):
            writer.line(step, lines.append, {"step": step})
        await writer.done()
        lines.path.parent.mkdir()
        await writer.done()

    asyncio.run(scenario())
    return lines.read(lambda record: record["step"])


def test_a_flush_tries_what_the_disk_has_refused_once_more(writer: DiskWriter, tmp_path: Path) -> None:
    """A checkpoint that finds room again must not be the last thing on disk: its lines would be lost with the process."""
    assert lines_after_a_refusal(writer, tmp_path) == [1, 2]


def test_what_can_not_be_told_of_the_disk_costs_no_line(tmp_path: Path) -> None:
    """The terminal's log is on the same full disk."""

    def tell(_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = DiskWriter(tell)
    assert lines_after_a_refusal(writer, tmp_path) == [1, 2] and writer.close(within_s=60.0) == ""


def test_what_goes_wrong_otherwise_is_raised_at_the_flush_and_keeps_no_later_line(writer: DiskWriter, tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "lines")
    for step, value in ((1, 0.5), (2, float("inf")), (3, 0.5)):
        writer.line(step, lines.append, {"step": step, "value": value})
    with pytest.raises(ValueError, match="JSON compliant"):
        asyncio.run(writer.done())
    asyncio.run(writer.done())
    assert lines.read(lambda record: record["step"]) == [1, 3]


def test_a_run_that_goes_back_writes_no_line_of_later_steps_any_more(writer: DiskWriter, gate: Gate, tmp_path: Path) -> None:
    """Not those that are on their way, which are there before the folder is taken back, nor those that a full disk has refused."""
    slow, full = JsonLines(tmp_path / "slow"), JsonLines(tmp_path / "full")
    refusing = type("Refusing", (JsonLines,), {"append": lambda self, *records: JsonLines.append(self, *records)})(full.path)
    full.path.symlink_to("/dev/full")

    async def scenario() -> None:
        for step in (1, 2, 3):
            writer.line(step, refusing.append, {"step": step})
        writer.do(gate)
        for step in (1, 2, 3):
            writer.line(step, slow.append, {"step": step})
        back = asyncio.create_task(writer.taken_back(lambda: slow.rewind(1), lambda _: 1))
        await asyncio.sleep(0)
        gate.open()
        assert await back == 2
        full.path.unlink()
        writer.line(2, slow.append, {"step": 2})
        await writer.done()

    asyncio.run(scenario())
    assert (slow.read(lambda record: record["step"]), full.read(lambda record: record["step"])) == ([1, 2], [1])


def test_what_can_not_be_written_in_the_end_is_said(gate: Gate, tmp_path: Path) -> None:
    full = DiskWriter(lambda _: None)
    for step in (1, 2):
        full.line(step, JsonLines(Path("/dev/full")).append, {"step": step})
    assert full.close(within_s=60.0) == (
        "2 lines of the run folder's files are lost: its disk refuses them ([Errno 28] No space left on device)"
    )
    hung = DiskWriter(lambda _: None)
    hung.do(gate)
    gate.has_one.wait()
    hung.do(lambda: None)
    assert "are lost: its disk did not take them in 0 s" in hung.close(within_s=0.0)


@pytest.mark.parametrize("has_room", [True, False])
def test_lines_that_find_no_room_in_memory_are_counted_and_told(
    has_room: bool, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five lines where three may wait: the disk takes the last three, and the two before them are named. Without a disk all are lost."""
    monkeypatch.setattr(disk_writer, "_MOST", 3)
    writer, lines = DiskWriter(told.append), JsonLines(tmp_path / "later" / "lines")

    async def scenario() -> None:
        for step in range(1, 6):
            writer.line(step, lines.append, {"step": step})
        await writer.done()
        if has_room:
            lines.path.parent.mkdir()
            await writer.done()

    asyncio.run(scenario())
    assert lines.read(lambda record: record["step"]) == ([3, 4, 5] if has_room else [])
    why = f"[Errno 2] No such file or directory: '{lines.path}'"
    lost = f"5 lines of the run folder's files are lost: its disk refuses them ({why})"
    assert writer.close(within_s=60.0) == ("" if has_room else lost)
    assert told[1:] == [
        "3 lines wait for the disk, as many as may: from now on the oldest are lost",
        *(["the disk takes what the run writes again; the oldest 2 of the lines that waited are lost"] if has_room else []),
    ]


def test_a_job_after_the_end_is_done_at_once() -> None:
    thread, done = FileThread(), list[int]()
    thread.do(lambda: done.append(1))
    assert thread.end(within_s=60.0)
    thread.do(lambda: done.append(2))
    assert done == [1, 2]


def test_a_job_that_would_end_the_process_ends_neither_that_nor_its_thread() -> None:
    """As a package may whose service is gone; others wait for the jobs after it."""
    thread, done = FileThread(), list[int]()
    thread.do(lambda: sys.exit(1))
    thread.do(lambda: done.append(1))
    with pytest.raises(RuntimeError, match=r"SystemExit\(1\)"):
        asyncio.run(asyncio.wait_for(thread.done(), 60.0))
    assert done == [1] and thread.end(within_s=60.0)


def test_the_ledgers_lines_are_handed_over_and_are_there_at_a_flush(tmp_path: Path) -> None:
    """A step doesn't wait for them; a checkpoint does, whoever has written them by then."""
    path, jobs = tmp_path / "ledger.jsonl", []
    ledger = Ledger(path, hand_over=jobs.append)
    for step in (1, 2):
        ledger.hand_out([f"train/0/{step}"])
        ledger.settle(step, trained=[f"train/0/{step}"], discarded=[], contents=contents(step, step))
    assert not path.exists()
    assert ledger.flush().lines == 2 == len(path.read_text().splitlines())
    ledger.hand_out(["train/0/3"])
    ledger.settle(3, trained=["train/0/3"], discarded=[], contents=contents(3, 3))
    for job in jobs:
        job()
    assert len(path.read_text().splitlines()) == 3 and ledger.flush().bytes == path.stat().st_size


def test_a_rewind_that_a_full_disk_refuses_can_be_made_again(tmp_path: Path) -> None:
    lines, aside = JsonLines(tmp_path / "lines"), tmp_path / "aside"
    lines.append(*({"step": step} for step in (1, 2, 3)))
    aside.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as refused:
        lines.rewind(1, to=aside)
    assert refused.value.errno == errno.ENOSPC and lines.read(lambda record: record["step"]) == [1, 2, 3]
    aside.unlink()
    assert lines.rewind(1, to=aside) == 2 and lines.read(lambda record: record["step"]) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aside", "lines"]


def test_the_disk_of_a_start_is_waited_for_with_words_and_an_end(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is an event loop, and a terminal to show it on. The deadline may become known, and begin anew, as the work goes on."""
    monkeypatch.setattr(disk, "_NOTICE_S", 0.05)
    assert disk.by_disk_at_start(lambda: 7, "a number") == 7
    with pytest.raises(OSError, match="Stale"):
        disk.by_disk_at_start(partial(refuse, errno.ESTALE), "a number")
    told, began = list[WaitNotice](), time.monotonic()
    limits, beginnings = iter([60.0, 60.0]), iter([began, began])
    with pytest.raises(DeadlineExceeded) as caught:
        disk.by_disk_at_start(
            gate,
            "a number",
            limit_s=lambda: next(limits, 0.3),
            counts_from=lambda: next(beginnings, began + 0.2),
            detail=lambda: f"{len(told)} times",
            say=told.append,
        )
    assert time.monotonic() - began >= 0.5 and disk.is_disk_late(caught.value)
    assert len(told) >= 4 and (told[2].what, told[2].detail) == ("a number -> the run folder's disk", "2 times")
    said = f"a number -> the run folder's disk: not done in {caught.value.seconds:.0f} s ({len(told)} times). When that disk answers again"
    assert str(caught.value).startswith(said)


def refuse(number: int) -> None:
    raise OSError(number, os.strerror(number))
