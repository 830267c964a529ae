"""Checkpoints that were set aside: the newest stays until there is a newer one; the oldest make room for the next, if that is enough."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenkeel.actors.checkpoints import writer as checkpoint_writer
from evenkeel.actors.record.run_folder import RunFolder
from tests.actors.checkpoints.test_checkpoint_writer import Learner, folder, state, writer

__all__ = ["folder"]
GONE = "{}, a damaged checkpoint that was set aside, is removed: {}"


def damaged(folder: RunFolder, *names: str) -> None:
    """Set aside at some time, the first of the names the longest ago."""
    for age, name in enumerate(reversed(names)):
        path = folder.path / "checkpoints" / name
        (path / "hf").mkdir(parents=True)
        (path / "hf/model.safetensors").write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))


def kept(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in (folder.path / "checkpoints").iterdir())


def test_of_damaged_checkpoints_the_newest_is_kept_once_there_is_a_whole_one(folder: RunFolder) -> None:
    """Whatever its step: the run may have gone back far."""
    damaged(folder, "step_000009.damaged", "step_000003.damaged", "step_000003.damaged-2", "step_000002.damaged")
    damaged(folder, own := "step_000001.damaged.mine")

    async def scenario() -> None:
        told: list[str] = []
        one, learner = writer(folder, [], told), Learner()
        await one.begin(4, learner, state)  # type: ignore[arg-type]
        assert len(kept(folder)) == 6, "while there is nothing newer they stay"
        learner.may_write.set()
        await one.finished()
        assert kept(folder) == [own, "step_000002.damaged", "step_000004"]
        gone = ["step_000009.damaged", "step_000003.damaged", "step_000003.damaged-2"]
        assert told == [GONE.format(name, "a newer one is kept to be looked at") for name in gone]

    asyncio.run(scenario())


ALL = ["step_000001.damaged", "step_000002.damaged", "step_000003.damaged"]


@pytest.mark.parametrize(
    ("free", "left"), [(850, ALL[2:]), (950, ALL[1:]), (750, []), (749, ALL)], ids=["two of them", "one", "all", "too little"]
)
def test_damaged_checkpoints_make_room_for_the_next_one(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, free: int, left: list[str]
) -> None:
    """A checkpoint needs 1050 bytes, and each of them has 100: the oldest go first, the newest last, and none of them in vain."""
    damaged(folder, *ALL)
    monkeypatch.setattr(
        checkpoint_writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=free + 100 * (3 - len(set(kept(folder)) & set(ALL))))
    )

    async def scenario() -> None:
        told: list[str] = []
        one, learner = writer(folder, [], told), Learner()
        learner.may_write.set()
        await one.begin(4, learner, state)  # type: ignore[arg-type]
        await one.finished()
        is_saved = left != ALL
        removed = [GONE.format(name, "the next checkpoint needs the room") for name in ALL if name not in left]
        assert told[: len(removed)] == removed and (len(told) > len(removed) and "Make room on that disk" in told[-1]) is not is_saved
        newest = [name for name in left if is_saved][-1:] or left
        assert kept(folder) == [*newest, *["step_000004"] * is_saved]

    asyncio.run(scenario())


def test_damaged_checkpoints_that_can_t_be_removed_hide_no_want_of_room(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged(folder, *ALL)
    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    async def scenario() -> None:
        told: list[str] = []
        monkeypatch.setattr(shutil, "rmtree", refused)
        await writer(folder, [], told).begin(4, Learner(), state)  # type: ignore[arg-type]
        assert "set aside could not all be removed: [Errno 13] Permission denied" in told[0] and ALL[0] in told[0]
        assert len(told) == 2 and "Make room on that disk" in told[1] and kept(folder) == ALL

    asyncio.run(scenario())


def test_each_that_is_removed_is_told_also_if_the_next_one_can_t_be(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged(folder, *ALL)
    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", lambda _: SimpleNamespace(free=800))
    really = shutil.rmtree

    def refused(path: Path) -> None:
        if path.name == ALL[1]:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        really(path)

    async def scenario() -> None:
        told: list[str] = []
        monkeypatch.setattr(shutil, "rmtree", refused)
        await writer(folder, [], told).begin(4, Learner(), state)  # type: ignore[arg-type]
        assert told[0] == GONE.format(ALL[0], "the next checkpoint needs the room")
        assert "could not all be removed: [Errno 13] Permission denied" in told[1] and ALL[1] in told[1] and kept(folder) == ALL[1:]

    asyncio.run(scenario())
