"""A checkpoint counts when all of it is written; one that fails is told, tried again, and ends the run only with two others in a row."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.checkpoints.writer import CheckpointWriter
from evenkeel.actors.config import CheckpointConfig, DeadlinesConfig
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.errors import ActorLost, ActorUnavailable, DataError, LedgerError


class Learner:
    """Writes when it is allowed to, where it thinks the folder is."""

    def __init__(self, *, elsewhere: bool = False, fails: Sequence[Exception | None] = ()) -> None:
        """fails: what each of the first attempts ends with."""
        self.may_write = asyncio.Event()
        self.elsewhere = elsewhere
        self.fails = list(fails)

    async def begin_save(self, state: Path, hf: Path, *, deadline_s: float) -> None:
        assert state.is_absolute() and hf.is_absolute()
        self.hf = hf

    async def checkpoint_bytes(self, *, deadline_s: float) -> int:
        return 1000

    async def saved(self, **_: Any) -> None:
        await self.may_write.wait()
        if self.fails and (error := self.fails.pop(0)):
            raise error
        if not self.elsewhere:
            (self.hf / "config.json").write_text("{}")


class WrittenState:
    def save(self, folder: Path) -> None:
        (folder / "controller.json").write_bytes(b"state")


async def state() -> Any:
    return WrittenState()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "run")


def writer(folder: RunFolder, saved: list[str], events: list[str] | None = None, *, checkpoint_s: float = 600.0) -> CheckpointWriter:
    """Args: saved, events: what it reports is appended to them."""
    events = events if events is not None else []
    told: dict[str, Any] = {"event": lambda level, text: events.append(text), "waiting": events.append}
    recorder: Any = SimpleNamespace(saved=lambda path, *_: saved.append(path.name), **told)
    deadlines = DeadlinesConfig(checkpoint_s=checkpoint_s)
    return CheckpointWriter(folder, recorder, CheckpointConfig(keep=1, every_steps=5), deadlines, begins_at=0, pause_s=0.0)


async def train(one: CheckpointWriter, learner: Any, steps: range) -> list[int]:
    """As the controller does. Returns: the steps after which it took a checkpoint."""
    taken = []
    for step in steps:
        await one.finished(at_once=True)
        if one.is_due(step):
            taken.append(step)
            await one.begin(step, learner, state)
            await one.finished()
    return taken


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
def test_what_went_wrong_is_told_and_leaves_no_checkpoint(folder: RunFolder, at_once: bool) -> None:
    """The ranks of another node have written to a folder of theirs."""

    async def scenario() -> None:
        told: list[str] = []
        one, learner = writer(folder, [], told), Learner(elsewhere=True)
        await one.begin(3, learner, state)  # type: ignore[arg-type]
        learner.may_write.set()
        while at_once and list((folder.path / "checkpoints").iterdir()):
            await asyncio.sleep(0.01)
        while not told:
            await one.finished(at_once=at_once)
            await asyncio.sleep(0)
        assert "the checkpoint of step 3 failed (1 of 3 in a row end the run), and is tried again after the next step" in told[0]
        assert "the learner's node wrote elsewhere" in told[0]
        assert list((folder.path / "checkpoints").iterdir()) == []

    asyncio.run(scenario())


FULL = OSError(errno.ENOSPC, "No space left on device")
LATE = DataError("learner rank 1: a checkpoint could not be written: I/O error")


def test_a_checkpoint_that_fails_is_tried_again_after_the_next_step(folder: RunFolder) -> None:
    """Two fail, the third is there; two more failures after that are again the first and the second in a row."""

    async def scenario() -> None:
        saved: list[str] = []
        told: list[str] = []
        one, learner = writer(folder, saved, told), Learner(fails=[FULL, LATE, None, LATE, FULL, None])
        learner.may_write.set()
        assert await train(one, learner, range(1, 13)) == [5, 6, 7, 10, 11, 12]
        assert saved == ["step_000007", "step_000012"] and one.saved_step == 12
        assert [text.split("(")[1][:1] for text in told] == ["1", "2", "1", "2"]
        assert "No space left on device" in told[0] and "learner rank 1" in told[1]

    asyncio.run(scenario())


def test_three_in_a_row_end_the_run(folder: RunFolder) -> None:
    async def scenario() -> None:
        one, learner = writer(folder, []), Learner(fails=[FULL, LATE, FULL])
        learner.may_write.set()
        with pytest.raises(DataError, match=r"3 checkpoints in a row failed, the last after step 7: .*No space left on device"):
            await train(one, learner, range(1, 9))

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["begin_save", "state"])
def test_what_fails_before_anything_is_written_counts_alike(folder: RunFolder, where: str) -> None:
    async def scenario() -> None:
        told: list[str] = []
        one, learner = writer(folder, [], told), Learner()
        learner.may_write.set()

        async def fails(*_: Any, **__: Any) -> Any:
            raise FULL

        if where == "begin_save":
            learner.begin_save = fails  # type: ignore[method-assign]
        await one.begin(3, learner, fails if where == "state" else state)  # type: ignore[arg-type]
        assert "No space left" in told[0] and list((folder.path / "checkpoints").iterdir()) == []
        assert one.is_due(4), "tried again"

    asyncio.run(scenario())


def test_books_out_of_balance_end_the_run_at_once(folder: RunFolder) -> None:
    async def unbalanced() -> Any:
        raise LedgerError("train/0/7 lost")

    async def scenario() -> None:
        with pytest.raises(LedgerError, match="train/0/7 lost"):
            await writer(folder, []).begin(3, Learner(), unbalanced)  # type: ignore[arg-type]

    asyncio.run(scenario())


@pytest.mark.parametrize("phase", ["begin_save", "saved"])
def test_a_learner_that_is_lost_takes_the_run_back_also_from_its_third_failure(folder: RunFolder, phase: str) -> None:
    """A rank that is gone, or has missed the call, is no failure of the disk's: it must not end the run, nor be waited for."""

    async def scenario() -> None:
        told: list[str] = []
        one, learner = writer(folder, [], told), Learner(fails=[FULL, FULL])
        learner.may_write.set()
        assert await train(one, learner, range(5, 7)) == [5, 6] and len(told) == 2

        async def fails(*_: Any, **__: Any) -> Any:
            raise ActorLost("rank 1: not begun")

        setattr(learner, phase, fails)
        with pytest.raises(ActorLost, match="not begun"):
            await train(one, learner, range(7, 8))
        assert len(told) == 2 and list((folder.path / "checkpoints").iterdir()) == []
        assert one.is_due(8), "it is still owed, if the run needn't go back"

    asyncio.run(scenario())


def test_a_rank_that_can_not_be_reached_is_asked_again_for_what_it_has_written(folder: RunFolder) -> None:
    """Beside training: no rank has missed anything."""

    async def scenario() -> None:
        told: list[str] = []
        one, learner = writer(folder, [], told), Learner(fails=[ActorUnavailable("rank 1: it can't be reached"), None])
        learner.may_write.set()
        assert await train(one, learner, range(5, 7)) == [5, 6]
        assert one.saved_step == 6 and len(told) == 1 and "can't be reached" in told[0]

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["checkpoint_bytes", "state", "begin_save"])
def test_what_can_not_be_reached_just_now_is_lost_to_the_copy_alone(folder: RunFolder, where: str) -> None:
    """All ranks copy once, in one order. The queue's contents, the monitor and the size of a checkpoint are asked for again."""

    async def fails(*_: Any, **__: Any) -> Any:
        raise ActorUnavailable("learner rank 0: it can't be reached")

    async def scenario() -> None:
        told: list[str] = []
        one, learner = writer(folder, [], told), Learner()
        learner.may_write.set()
        if where != "state":
            setattr(learner, where, fails)
        beginning = one.begin(3, learner, fails if where == "state" else state)  # type: ignore[arg-type]
        if where == "begin_save":
            with pytest.raises(ActorUnavailable):
                await beginning
        else:
            await beginning
            assert one.is_due(4) and len(told) == 1 and "can't be reached" in told[0]

    asyncio.run(scenario())


def test_at_the_end_a_checkpoint_is_insisted_on(folder: RunFolder) -> None:
    """The one under way is of an earlier step; that of the last step fails once."""

    async def scenario() -> None:
        saved: list[str] = []
        one, learner = writer(folder, saved), Learner(fails=[None, LATE, None])
        learner.may_write.set()
        await one.begin(3, learner, state)  # type: ignore[arg-type]
        await one.save_with_retries(5, lambda: one.begin(5, learner, state))  # type: ignore[arg-type]
        assert saved == ["step_000003", "step_000005"]
        await one.save_with_retries(5, lambda: pytest.fail("it is there"))

    asyncio.run(scenario())


def test_an_abandoned_checkpoint_leaves_nothing(folder: RunFolder) -> None:
    async def scenario() -> None:
        one = writer(folder, [])
        await one.begin(3, Learner(), state)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        one.abandon()
        await one.finished()  # there is nothing to wait for
        await one.off_disk()
        assert list((folder.path / "checkpoints").iterdir()) == []

    asyncio.run(scenario())
