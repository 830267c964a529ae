"""A checkpoint counts when all of it is written; what goes wrong beside training is raised where somebody looks."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.config import CheckpointConfig, DeadlinesConfig
from actors.record import run_folder
from actors.record.checkpoint_writer import CheckpointWriter
from actors.record.run_folder import RunFolder
from correction.errors import DataError


class Learner:
    """Writes when it is allowed to, where it thinks the folder is."""

    def __init__(self, *, elsewhere: bool = False) -> None:
        self.may_write = asyncio.Event()
        self.elsewhere = elsewhere

    async def begin_save(self, state: Path, hf: Path, *, deadline_s: float) -> None:
        assert state.is_absolute() and hf.is_absolute()
        self.hf = hf

    async def saved(self, *, deadline_s: float) -> None:
        await self.may_write.wait()
        if not self.elsewhere:
            (self.hf / "config.json").write_text("{}")


class State:
    def save(self, folder: Path) -> None:
        (folder / "controller.pickle").write_bytes(b"state")


async def state() -> Any:
    return State()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "run")


def writer(folder: RunFolder, saved: list[str]) -> CheckpointWriter:
    observer: Any = SimpleNamespace(saved=lambda path, seconds: saved.append(path.name))
    return CheckpointWriter(folder, observer, CheckpointConfig(keep=1), DeadlinesConfig())


def test_training_goes_on_while_a_checkpoint_is_written(folder: RunFolder) -> None:
    async def scenario() -> None:
        saved: list[str] = []
        one, learner = writer(folder, saved), Learner()
        await one.begin(3, learner, state)  # type: ignore[arg-type]
        await one.finished(at_once=True)
        assert folder.checkpoints() == [] == saved, "it is under way, and nobody has waited for it"
        learner.may_write.set()
        await one.finished()
        assert [checkpoint.step for checkpoint in folder.checkpoints()] == [3] and saved == ["step_000003"]
        await one.begin(4, learner, state)  # type: ignore[arg-type]
        await one.finished()
        assert [checkpoint.step for checkpoint in folder.checkpoints()] == [4], "one is kept"

    asyncio.run(scenario())


@pytest.mark.parametrize("at_once", [True, False])
def test_what_went_wrong_is_raised_and_leaves_no_checkpoint(folder: RunFolder, at_once: bool) -> None:
    """The ranks of another node have written to a folder of theirs."""

    async def scenario() -> None:
        one, learner = writer(folder, []), Learner(elsewhere=True)
        await one.begin(3, learner, state)  # type: ignore[arg-type]
        learner.may_write.set()
        while at_once and list((folder.path / "checkpoints").iterdir()):
            await asyncio.sleep(0.01)
        with pytest.raises(DataError, match="the learner's node wrote elsewhere"):
            await one.finished(at_once=at_once)
        assert list((folder.path / "checkpoints").iterdir()) == []

    asyncio.run(scenario())


def test_an_abandoned_checkpoint_leaves_nothing(folder: RunFolder) -> None:
    async def scenario() -> None:
        one = writer(folder, [])
        await one.begin(3, Learner(), state)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        one.abandon()
        with pytest.raises(asyncio.CancelledError):
            await one.finished()
        assert list((folder.path / "checkpoints").iterdir()) == []

    asyncio.run(scenario())


def test_nothing_that_waits_for_the_disk_is_done_on_the_event_loop(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders, the pickle, the syncs, the removal of what is too old; while a disk hangs the run goes on."""
    threads: dict[str, set[int]] = {}

    def noted(module: Any, name: str) -> None:
        plain = getattr(module, name)

        def called(*arguments: Any, **named: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return plain(*arguments, **named)

        monkeypatch.setattr(module, name, called)

    for module, name in ((run_folder, "_fsync"), (shutil, "rmtree"), (Path, "mkdir"), (State, "save"), (RunFolder, "prune_checkpoints")):
        noted(module, name)

    async def scenario() -> None:
        one, learner = writer(folder, []), Learner()
        learner.may_write.set()
        for step in (3, 4):
            await one.begin(step, learner, state)  # type: ignore[arg-type]
            await one.finished()
        assert [checkpoint.step for checkpoint in folder.checkpoints()] == [4]

    asyncio.run(scenario())
    assert set(threads) == {"_fsync", "rmtree", "mkdir", "save", "prune_checkpoints"}
    assert [name for name, where in threads.items() if threading.get_ident() in where] == []
