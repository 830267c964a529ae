"""Checkpoints on a disk that is slow, hangs, or is full: the event loop goes on, and what can't be written is a failed checkpoint."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.carriers import WaitNotice
from evenkeel.actors.checkpoints import writer as checkpoint_writer
from evenkeel.actors.processes.supervision import HALF_OVER, LongWait
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.ranks.learner_rank_actor import LearnerRankActor
from evenkeel.actors.record import run_folder
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.errors import DataError, DeadlineExceeded
from evenkeel.learner.weights.file_sums import read_manifest_of_files, verify
from tests.actors.cases import FakeActor
from tests.actors.checkpoints.test_checkpoint_writer import Learner, WrittenState, folder, state, train, writer
from tests.actors.simulated_time import simulate
from tests.failures.measured import Measured

__all__ = ["folder"]


def test_nothing_that_waits_for_the_disk_is_done_on_the_event_loop(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders, the state, the checksums, the syncs, the removal of what is too old; while a disk hangs the run goes on."""
    threads: dict[str, set[int]] = {}

    def noted(module: Any, name: str) -> None:
        plain = getattr(module, name)

        def called(*arguments: Any, **named: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return plain(*arguments, **named)

        monkeypatch.setattr(module, name, called)

    of_a_folder = ((run_folder, "flush_to_disk"), (run_folder, "seal"), (RunFolder, "prune_checkpoints"))
    of_paths = ((Path, "mkdir"), (Path, "stat"), (Path, "is_file"), (Path, "resolve"))
    for module, name in (*of_a_folder, *of_paths, (shutil, "rmtree"), (shutil, "disk_usage"), (WrittenState, "save")):
        noted(module, name)

    async def scenario() -> None:
        one, learner = writer(folder, []), Learner()
        learner.may_write.set()
        for step in (3, 4):
            await one.begin(step, learner, state)  # type: ignore[arg-type]
            await one.finished()

    asyncio.run(scenario())
    monkeypatch.undo()
    assert [checkpoint.step for checkpoint in folder.checkpoints()] == [4]
    of_the_disk = {"flush_to_disk", "rmtree", "mkdir", "stat", "is_file", "resolve", "disk_usage"}
    assert set(threads) == {*of_the_disk, "save", "seal", "prune_checkpoints"}
    assert [name for name, where in threads.items() if threading.get_ident() in where] == []


def test_a_slow_disk_is_waited_for_during_training(folder: RunFolder) -> None:
    """Two deadlines pass, and the third wait finds it written; meanwhile a checkpoint that is due is owed, not begun."""

    async def scenario() -> None:
        saved: list[str] = []
        told: list[str] = []
        late = DeadlineExceeded("checkpoint <- learner: not on disk after 600 s")
        one, learner = writer(folder, saved, told), Learner(fails=[late, late])
        await one.begin(4, learner, state)  # type: ignore[arg-type]
        assert not one.is_due(5), "the one before is under way"
        learner.may_write.set()
        await one.finished()
        assert saved == ["step_000004"] and len(told) == 2 and "step 4 is still being written, and training goes on" in told[1]
        assert one.is_due(6), "the one of step 5 is owed"
        learner.fails = [late, late, late]
        await one.begin(6, learner, state)  # type: ignore[arg-type]
        await one.finished()
        assert "step 6 failed (1 of 3" in told[-1] and one.saved_step == 4

    asyncio.run(scenario())


ON_DISK = {
    "free space": (shutil, "disk_usage"),
    "its folder": (Path, "mkdir"),
    "its path": (Path, "resolve"),
    "its files": (Path, "is_file"),
    "its state": (WrittenState, "save"),
    "its manifest": (run_folder, "seal"),
}


@pytest.mark.parametrize("part", ON_DISK)
def test_a_disk_that_hangs_is_a_failed_checkpoint(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Each wait has a name and a deadline, and the third ends the run. What the disk does when it comes back completes no checkpoint."""
    module, name = ON_DISK[part]
    is_back, plain = threading.Event(), getattr(module, name)

    def hangs(*arguments: Any, **named: Any) -> Any:
        is_back.wait(20.0)
        return plain(*arguments, **named)

    async def scenario() -> None:
        told: list[str] = []
        one, learner = writer(folder, [], told, checkpoint_s=0.05), Learner()
        learner.may_write.set()
        monkeypatch.setattr(module, name, hangs)
        waits = r"3 checkpoints in a row failed, the last after step 5: checkpoint of step 5 \(.*\) -> the run folder's disk: not done in"
        try:
            with pytest.raises(DataError, match=waits):
                await asyncio.wait_for(one.save_with_retries(5, lambda: one.begin(5, learner, state)), 10.0)  # type: ignore[arg-type]
        finally:
            is_back.set()
        assert len(told) == 2 and f"checkpoint of step 5 ({part}) -> the run folder's disk: not done in" in told[0]
        one.abandon()
        await one.off_disk()

    asyncio.run(scenario())
    assert list((folder.path / "checkpoints").iterdir()) == []


class Rank:
    """Its part is on disk `takes_s` after it was copied. Rank 0 writes the model's folder as well."""

    def __init__(self, number: int, takes_s: float) -> None:
        self.number, self.takes_s, self.at = number, takes_s, math.inf
        self.hf: Path | None = None

    async def begin_save(self, number: int, folder: Path, hf: Path) -> None:
        self.at, self.hf = asyncio.get_running_loop().time() + self.takes_s, None if self.number else hf

    async def begun(self) -> int:
        return 0

    async def checkpoint_bytes(self) -> int:
        return 1000

    async def is_saved(self) -> bool:
        is_saved = asyncio.get_running_loop().time() >= self.at
        if is_saved and self.hf is not None:
            (self.hf / "config.json").write_text("{}")
            self.hf = None  # it is asked again as long as another rank writes
        return is_saved


async def inline(function: Any, *arguments: Any) -> Any:
    """In the place of asyncio.to_thread: simulated time would run on while a thread works."""
    return function(*arguments)


class Said(list[tuple[float, Any]]):
    """What a run says while a checkpoint is waited for, with its time."""

    def append(self, what: Any) -> None:
        super().append((asyncio.get_running_loop().time(), what))

    def notices(self) -> list[tuple[float, WaitNotice]]:
        return [(at, what) for at, what in self if isinstance(what, WaitNotice)]


def ranks(*take_s: float) -> LearnerGroup:
    return LearnerGroup([FakeActor(Rank(number, one)) for number, one in enumerate(take_s)], version=0, step_s=1800.0)


@pytest.mark.parametrize("at_end", [True, False], ids=["at the end, after Ctrl-C or SIGTERM", "while training goes on"])
def test_a_rank_whose_disk_hangs_is_told_from_the_first_half_minute_on(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, at_end: bool
) -> None:
    """By its name, without half a minute of silence; with the stacks at half of each deadline; and there is an end. Before, it was silent
    for each of nine times checkpoint_s, 80 minutes with 60 GB."""
    monkeypatch.setattr(asyncio, "to_thread", inline)
    told, stacks = Said(), Said()

    async def scenario() -> None:
        HALF_OVER.set(stacks.append)
        one, learner = writer(folder, [], told, checkpoint_s=180.0), ranks(0.0, math.inf, 0.0)  # type: ignore[arg-type]
        if at_end:
            with pytest.raises(DataError, match=r"^3 checkpoints in a row failed.*\(the ranks' parts\) <- learner: not done in 180 s"):
                await one.save_with_retries(5, lambda: one.begin(5, learner, state))
            return
        await one.begin(5, learner, state)
        while not one.is_due(6):  # the next steps, a second each
            await asyncio.sleep(1.0)
            await one.finished(at_once=True)

    simulate(scenario)
    name, attempts = "checkpoint of step 5 (the ranks' parts) <- learner", 9 if at_end else 3
    assert {(notice.what, notice.detail) for _, notice in told.notices()} == {(name, "not written by rank 1")}
    times = [0.0, *(at for at, _ in told)]
    assert all(later - earlier < 31.1 for earlier, later in itertools.pairwise(times)), times  # the end at the next look, a second later
    assert times[-1] == pytest.approx(180.0 * attempts, abs=31.0)
    assert [wait for _, wait in stacks] == [LongWait(name)] * attempts
    assert [round(at) % 180 for at, _ in stacks] == [90] * attempts
    late = [text for _, text in told if isinstance(text, str) and "still being written, and training goes on" in text]
    assert len(late) == attempts * 2 // 3 and all("not written by rank 1" in text for text in late)
    assert list((folder.path / "checkpoints").iterdir()) == []


def test_a_slow_rank_is_waited_for_and_no_other_is_named(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "to_thread", inline)
    told, saved = Said(), list[str]()

    async def scenario() -> None:
        one, learner = writer(folder, saved, told), ranks(50.0, 100.0)  # type: ignore[arg-type]
        await one.save_with_retries(5, lambda: one.begin(5, learner, state))
        assert 100.0 <= asyncio.get_running_loop().time() < 101.0

    simulate(scenario)
    assert saved == ["step_000005"]
    details = [(round(at), notice.seconds, notice.detail) for at, notice in told.notices()]
    assert details == [(30, 30, "not written by rank 0, rank 1"), (60, 60, "not written by rank 1"), (90, 90, "not written by rank 1")]


def test_a_rank_says_in_the_middle_of_a_step_whether_its_part_is_written() -> None:
    """A call that waits for the end of a step would count a long step as a slow disk."""
    assert LearnerRankActor.is_saved.__ray_concurrency_group__ == "heartbeat"  # type: ignore[attr-defined]


def test_after_a_disk_that_hung_the_next_checkpoint_is_whole(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work that comes back late is done before that of the next checkpoint, whose files it would remove."""
    is_back, plain = threading.Event(), run_folder.seal
    is_first = iter([True])

    def hangs_once(*arguments: Any) -> Any:
        if next(is_first, False):
            is_back.wait(20.0)
        return plain(*arguments)

    async def scenario() -> None:
        told: list[str] = []
        saved: list[str] = []
        one, learner = writer(folder, saved, told, checkpoint_s=1.0), Learner()
        learner.may_write.set()
        monkeypatch.setattr(run_folder, "seal", hangs_once)
        assert await train(one, learner, range(5, 6)) == [5] and "(its manifest)" in told[0]
        asyncio.get_running_loop().call_later(0.1, is_back.set)
        assert await train(one, learner, range(6, 7)) == [6]
        assert saved == ["step_000006"] and one.saved_step == 6 and len(told) == 1

    asyncio.run(scenario())
    checkpoint = folder.checkpoints()[-1]
    assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["step_000006"]
    assert verify(checkpoint.path, read_manifest_of_files(checkpoint.path)) == []
    follows = "that checkpoint counts as failed at its deadline; when the disk is back, the one after the next step is whole"
    Measured("disk hangs at a checkpoint", follows, None, "nothing", "a call that doesn't return").write()


@pytest.mark.parametrize("phase", ["seal", "flush_to_disk"])
def test_a_checkpoint_that_is_abandoned_while_its_thread_completes_it_is_none(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """The sums and syncs of a large one take minutes. Whoever goes back waits until the thread is through, and finds nothing new."""
    is_there, is_back, plain = threading.Event(), threading.Event(), getattr(run_folder, phase)

    def hangs(*arguments: Any) -> Any:
        is_there.set()
        is_back.wait(20.0)
        return plain(*arguments)

    async def scenario() -> None:
        saved: list[str] = []
        one, learner = writer(folder, saved), Learner()
        learner.may_write.set()
        monkeypatch.setattr(run_folder, phase, hangs)
        await one.begin(100, learner, state)  # type: ignore[arg-type]
        assert await asyncio.to_thread(is_there.wait, 20.0)
        one.abandon()
        waiting = asyncio.create_task(one.off_disk())
        await asyncio.wait({waiting}, timeout=0.1)
        assert not waiting.done(), "its thread is still at it"
        is_back.set()
        await waiting
        assert saved == [] and list((folder.path / "checkpoints").iterdir()) == []
        await one.finished()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_without_room_nothing_is_begun(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """First by the learner's word, then by the size of the last checkpoint."""
    free = [1049]
    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))

    async def scenario() -> None:
        told: list[str] = []
        one, learner = writer(folder, [], told), Learner()
        learner.may_write.set()
        await one.begin(1, learner, state)  # type: ignore[arg-type]
        assert f"{folder.path}: 9.77e-07 GiB are free, but a checkpoint needs 9.78e-07 GiB. Make room on that disk" in told[0]
        assert not hasattr(learner, "hf") and list((folder.path / "checkpoints").iterdir()) == []
        free[0] = 1050
        await one.begin(2, learner, state)  # type: ignore[arg-type]
        await one.finished()
        size = sum(path.stat().st_size for path in folder.checkpoints()[-1].path.rglob("*") if path.is_file())
        assert size < 1000
        free[0] = int(size * 1.05)
        await one.begin(3, learner, state)  # type: ignore[arg-type]
        assert len(told) == 2

    asyncio.run(scenario())


def test_a_real_full_disk(tmp_path: Path) -> None:
    """A file system of 2 MiB: two checkpoints don't find room, the third does, when something has been removed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        folder = RunFolder.create(disk / "run", "run")
        (disk / "ballast").write_bytes(bytes(1 << 20))

        class Writes(Learner):
            async def saved(self, **_: Any) -> None:
                (self.hf / "config.json").write_text("{}")
                (self.hf / "model.safetensors").write_bytes(os.urandom(3 << 19))

        async def scenario() -> None:
            told, saved = list[str](), list[str]()
            one, learner = writer(folder, saved, told), Writes()
            for step in (5, 6, 7):
                if step == 7:
                    (disk / "ballast").unlink()
                assert await train(one, learner, range(step, step + 1)) == [step]
            assert saved == ["step_000007"] and ["No space left on device" in text for text in told] == [True, True]

        asyncio.run(scenario())
        checkpoint = folder.checkpoints()[-1]
        assert verify(checkpoint.path, read_manifest_of_files(checkpoint.path)) == []
        folder.close()
        follows = "training goes on; a checkpoint is tried again after each step, and the third in a row that fails ends the run"
        Measured("disk full at a checkpoint", follows, None, "nothing", "a file system of 2 MiB").write()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
