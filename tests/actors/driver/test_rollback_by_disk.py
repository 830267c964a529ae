"""The way back to a checkpoint on a disk that is full, slow, or hangs."""

from __future__ import annotations

import asyncio
import errno
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.checkpoints import reader as checkpoint_reader
from evenkeel.actors.checkpoints.reader import newest_readable
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.driver import recovery as rollback
from evenkeel.actors.driver.recovery import Rollbacks
from evenkeel.actors.record.disk_waits import by_disk
from evenkeel.actors.record.disk_writer import DiskWriter
from evenkeel.actors.record.run_folder import Checkpoint, RunFolder
from evenkeel.correction.errors import DataError, DeadlineExceeded


async def waited_for(work: Any, *_: Any, **__: Any) -> Any:
    """For ever."""
    return await work


def test_a_full_disk_is_waited_for_before_the_run_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken back goes to another file of that disk. It is told each time; when it never takes it, the run ends with a sentence."""
    monkeypatch.setattr(rollback, "_DISK_AGAIN_S", 0.0)
    refusals, told = [2], list[str]()

    class Disk:
        async def result(self, job: Any) -> Any:
            return job()

        async def taken_back(self, take_back: Any, step_of: Any) -> Any:
            if refusals[0]:
                refusals[0] -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return "the point"

    folder: Any = SimpleNamespace(path=Path("run"), checkpoints=list, clear_partial_checkpoints=lambda **_: None)
    rollbacks, notify = Rollbacks(folder, None), lambda level, text: told.append(text)  # type: ignore[arg-type]
    assert asyncio.run(rollbacks.found(Path("model"), Disk(), notify, waited_for)) == "the point"  # type: ignore[arg-type, comparison-overlap]
    assert len(told) == 2 and "the run can't go back to its last checkpoint, and tries again in 0 s: [Errno 28]" in told[0]
    refusals[0] = 10**6
    with pytest.raises(DataError, match=r"run: the run can't go back to its last checkpoint: .*No space left"):
        asyncio.run(rollbacks.found(Path("model"), Disk(), notify, waited_for))  # type: ignore[arg-type]


def test_a_checkpoint_that_can_t_be_read_just_now_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stale handle on a network's disk is no damage: the run waits, and goes back to that checkpoint, not to the one before it."""
    monkeypatch.setattr(rollback, "_DISK_AGAIN_S", 0.0)
    refusals, told, disk = [2], list[str](), DiskWriter(lambda _: None)

    def read(checkpoint: Checkpoint, _: Any) -> Any:
        if refusals[0]:
            refusals[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle", str(checkpoint.path))
        return SimpleNamespace(step=checkpoint.step), []

    monkeypatch.setattr(checkpoint_reader, "_read", read)
    monkeypatch.setattr(rollback, "take_back", lambda folder, point, task: (point, []))
    with RunFolder.create(tmp_path / "run", "x") as folder:
        for step in (1, 2):
            with folder.checkpoint(step):
                pass
        rollbacks = Rollbacks(folder, None)  # type: ignore[arg-type]
        point, _ = asyncio.run(rollbacks.found(Path("model"), disk, lambda level, text: told.append(text), waited_for))
        assert point.step == 2 and [one.step for one in folder.checkpoints()] == [1, 2]
    assert len(told) == 2 and all("tries again in 0 s: [Errno 116] Stale file handle" in text and "step_000002" in text for text in told)
    disk.close(within_s=60.0)


def test_events_are_written_while_a_checkpoint_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hashes take minutes. The folder is taken back after what came before that, by the thread that writes."""
    is_written, order = threading.Event(), list[str]()
    disk = DiskWriter(lambda _: None)

    def read(*_: Any, **__: Any) -> Any:
        disk.do(lambda: (order.append("event"), is_written.set()))
        assert is_written.wait(20.0), "the disk's thread waits for the hashes"
        return SimpleNamespace()

    def take_back(folder: Any, point: Any, task: Any) -> Any:
        order.append(threading.current_thread().name)
        return SimpleNamespace(checkpoint=SimpleNamespace(hf=Path("hf")), state=SimpleNamespace(step=4)), []

    monkeypatch.setattr(rollback, "newest_readable", read)
    monkeypatch.setattr(rollback, "take_back", take_back)
    folder: Any = SimpleNamespace(path=Path("run"), checkpoints=lambda: ["a checkpoint"], clear_partial_checkpoints=lambda **_: None)
    point, said = asyncio.run(Rollbacks(folder, None).found(Path("model"), disk, lambda *_: None, waited_for))  # type: ignore[arg-type]
    assert (point.step, said, order) == (4, [], ["event", "run folder"])
    disk.close(within_s=60.0)


@pytest.mark.parametrize("what", ["files of the newest checkpoint", "rewind of the run's lines"])
def test_a_disk_that_hangs_on_the_way_back_ends_the_run_in_a_sentence(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """It says what was waited for and what to do, and does not try again for minutes."""
    is_back, disk = threading.Event(), DiskWriter(lambda _: None)
    waits = partial(by_disk, deadlines=DeadlinesConfig(checkpoint_s=0.1), notice=lambda _: None)

    def answers(of: str, found: Any) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            if of == what:
                is_back.wait(20.0)
            return found

        return call

    point = SimpleNamespace(checkpoint=SimpleNamespace(hf=Path("hf")), state=SimpleNamespace(step=4))
    monkeypatch.setattr(rollback, "newest_readable", answers("files of the newest checkpoint", point))
    monkeypatch.setattr(rollback, "take_back", answers("rewind of the run's lines", (point, [])))
    folder: Any = SimpleNamespace(path=Path("run"), checkpoints=lambda: [point], clear_partial_checkpoints=lambda **_: None)
    rollbacks = Rollbacks(folder, None)  # type: ignore[arg-type]

    async def scenario() -> None:
        try:
            await rollbacks.found(Path("model"), disk, lambda *_: None, waits)
        finally:
            is_back.set()

    follows = r"When that disk answers again, a resume goes on from the last checkpoint\. The deadline follows from deadlines.bytes_per_s$"
    with pytest.raises(DeadlineExceeded, match=rf"^{what} -> the run folder's disk: not done in 0 s\. {follows}"):
        asyncio.run(scenario())
    disk.close(within_s=60.0)


def test_each_checkpoint_that_is_read_has_a_whole_deadline(tmp_path: Path) -> None:
    """Which of them are damaged is found by reading them, and to read a large one takes minutes."""
    counted: list[float] = []
    with RunFolder.create(tmp_path / "run", "x") as folder:
        for step in (1, 2, 3):
            with folder.checkpoint(step):
                pass  # its state is missing

        async def noted(work: Any, what: str, *, counts_from: Any = lambda: 0.0) -> Any:
            counted.append(counts_from())
            try:
                return await work
            finally:
                counted.append(counts_from())

        disk = DiskWriter(lambda _: None)
        rollbacks = Rollbacks(folder, None)  # type: ignore[arg-type]
        with pytest.raises(DataError, match="none of its checkpoints can be read"):
            asyncio.run(rollbacks.found(Path("model"), disk, lambda *_: None, noted))
        disk.close(within_s=60.0)
        assert counted[:2] == [0.0, 0.0] and counted[3] > counted[2] > 0.0
        begun: list[int] = []
        with pytest.raises(DataError, match=r"step_000003, step_000002, step_000001"):
            newest_readable(folder, begins=lambda: begun.append(1))
        assert begun == [1, 1, 1]
