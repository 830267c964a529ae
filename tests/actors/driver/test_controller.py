"""The controller's order, waits and interrupts, in whole runs in virtual time (tests/simulation): what such a run tells, and what it asks
of its parts. Runs in real time are in tests/e2e."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenkeel.actors.carriers import PreparedBatch, StoredGroup
from evenkeel.actors.checkpoints.writer import CheckpointWriter
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.batches import BatchSource
from evenkeel.actors.driver.parts import StartingPoint
from evenkeel.actors.groups.ledger import Ledger
from evenkeel.actors.record.disk_writer import DiskWriter
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.errors import DataError
from evenkeel.rollout.trajectory import GroupFacts
from tests.actors.cases import FakeActor, facts, prompts
from tests.simulation import processes
from tests.simulation.parts import Notes
from tests.simulation.schedule import Fault, FaultSchedule
from tests.simulation.test_simulation_of_runs import run_of_one_worker
from tests.simulation.world import PlayedRun, World, play

PLAIN = replace(run_of_one_worker(steps=4, groups_per_step=2, faults=()), evaluate_every=2)
"""A run that nothing befalls, with a checkpoint after each step."""
STEP_2 = "info: step 2 in training; rollouts go on"


def told(run: PlayedRun, *, driver: int = 0) -> list[tuple[float, str]]:
    """Seconds and text of all that happened while this driver of the run was there."""
    lines = [(float(seconds), text) for seconds, text in (line.split(" ", 1) for line in run.trace)]
    ends = [0, *(i + 1 for i, (_, text) in enumerate(lines) if text.startswith("world: driver ") and "has ended" in text)]
    return lines[ends[driver] : ends[driver + 1]]


def texts(run: PlayedRun, *, driver: int = 0) -> list[str]:
    return [text for _, text in told(run, driver=driver)]


def moment(text: str, run: PlayedRun) -> float:
    """Virtual seconds at which the first driver says, or asks, this for the first time."""
    return next(seconds for seconds, line in told(run) if line.startswith(text))


def interrupted(name: str, *at: float) -> PlayedRun:
    run = play(PLAIN.with_faults([Fault(seconds, "stop_driver", what=name) for seconds in at]))
    assert (run.violation, run.steps) == ("", 4), "and a resume has trained the rest"
    asked = ["info: ending", "world: CorrectionService 0 is dead"]
    assert [text for text in texts(run) if text in asked][:2] == asked, "an interrupted driver ends what it has started"
    return run


def test_an_interrupt_ends_a_start_at_once() -> None:
    at = moment("driver -> RolloutWorker 0.start", play(PLAIN)) + 0.1
    run = interrupted("SIGINT", at)
    assert (texts(run)[-1], told(run)[-1][0]) == ("world: driver 0 has ended: stopped", pytest.approx(at, abs=0.1))
    assert "warning: interrupted (Ctrl-C): ending at once; there is no checkpoint yet" in texts(run)
    assert "info: sending the first weights to the engines" not in texts(run)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_sigterm_saves_without_the_step_under_way_and_ctrl_c_with_it(name: str) -> None:
    """Who sends SIGTERM may kill in a few seconds; the learner ends the step when it is asked to."""
    run = interrupted(name, moment(STEP_2, play(PLAIN)) + 0.1)
    is_aborted = "warning: step 2 was aborted; a resume trains on its groups" in texts(run)
    saved = [text for text in texts(run) if text.endswith("is told to be complete")]
    assert (is_aborted, "world: step 2 is settled" in texts(run)) == ((True, False) if name == "SIGTERM" else (False, True))
    assert saved[-1] == f"world: step_00000{1 if name == 'SIGTERM' else 2} is told to be complete"
    assert not any(text.startswith("info: step 3") for text in texts(run))
    first = next(text for text in texts(run, driver=1) if text.startswith("info: step "))
    assert first.startswith(f"info: step {2 if name == 'SIGTERM' else 3}: ")


def test_a_second_interrupt_ends_training_in_the_middle_of_its_step() -> None:
    at = moment(STEP_2, play(PLAIN)) + 0.1
    run = interrupted("SIGINT", at, at + 0.5)
    assert (texts(run)[-1], told(run)[-1][0]) == ("world: driver 0 has ended: stopped", pytest.approx(at + 0.5, abs=0.1))
    assert "world: step 1 is settled" in texts(run) and "world: step 2 is settled" not in texts(run)


def test_an_interrupt_during_the_last_evaluation_leaves_that_out() -> None:
    """All steps are done and saved: the run ends as usual, without a number after training, and without waiting for it."""
    plain = play(PLAIN)
    at = moment("info: evaluating after training", plain) + 0.5
    assert plain.virtual_s > at + 1.0
    run = interrupted("SIGTERM", at)
    assert "warning: interrupted (SIGTERM): leaving out the evaluation after training" in texts(run)
    assert (run.drivers, texts(run)[-1], run.virtual_s) == (1, "world: driver 0 has ended: ", pytest.approx(at, abs=0.5))


def test_a_disk_that_hangs_ends_the_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for room for its lines as long as a flush does: told meanwhile, and not for ever."""
    rooms, room, deadlines = list[DiskWriter](), DiskWriter.room, PLAIN.config.deadlines

    async def hangs_from_the_third_on(writer: DiskWriter) -> None:
        rooms.append(writer)
        await (room(writer) if len(rooms) < 3 else asyncio.Event().wait())

    monkeypatch.setattr(DiskWriter, "room", hangs_from_the_third_on)
    run = play(PLAIN)
    what = "room for the lines of step 3 -> the run folder's disk"
    assert f"{what}: not done in {deadlines.disk_s:.0f} s" in run.violation
    notices = [text for text in texts_until_the_end(run) if what in text]
    assert f"info: waiting {deadlines.notice_s:.0f} s for {what}" in notices


def texts_until_the_end(run: PlayedRun) -> list[str]:
    """Also of a run that was found to be wrong, whose driver's end nobody has told."""
    return [line.split(" ", 1)[1] for line in run.trace]


def test_the_phase_is_that_of_the_step() -> None:
    """Not what came before training: the line stands below the live panel until the next one."""
    phases = [text for text in texts(play(PLAIN)) if text.startswith("info: step ")]
    both = "info: step {0}: waiting for its batch; rollouts go on", "info: step {0} in training; rollouts go on"
    assert phases == [text.format(step) for step in range(1, 5) for text in both]


def test_the_ranks_have_their_places_before_a_worker_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks Ray first gets the GPUs: engines would take those of the learner's. So the order of these calls is the contract."""
    asked, reserve = list[RunConfig](), processes.anywhere

    async def after_half_a_minute(config: RunConfig) -> Any:
        asked.append(config)
        await asyncio.sleep(30.0)
        return await reserve(config)

    first = "driver -> RolloutWorker 0"
    assert moment(first, play(PLAIN)) < 1.0
    monkeypatch.setattr(processes, "anywhere", after_half_a_minute)
    run = play(PLAIN)
    assert (run.violation, asked) == ("", [PLAIN.config]) and 30.0 <= moment(first, run) < 31.0


def test_nobody_asks_the_service_before_training() -> None:
    """After a resume the book holds discarded prompts that the ledger doesn't know yet; they belong to the first step's line."""
    saved = moment("world: step_000001 is told to be complete", play(PLAIN))
    run = play(PLAIN.with_faults([Fault(saved + 0.1, "crash_driver")]))
    lines = texts(run, driver=1)
    asked = [line for line in lines[: lines.index("info: training")] if line.startswith("driver -> CorrectionService")]
    assert (run.violation, run.drivers) == ("", 2)
    assert {line.rpartition(".")[2] for line in asked} - {"__ray_ready__", "heartbeat"} == set()


def test_training_begins_when_one_engine_has_the_first_weights() -> None:
    """Nodes may come one after another, each long after the one before."""
    run = play(replace(PLAIN, workers=2).with_faults([Fault(0.0, "late_call", lasts=40.0, what="update_weights")]))
    assert not run.violation and moment("info: evaluating before training", run) < 40.0
    assert any("late_call: RolloutWorker" in text and text.endswith(".update_weights") for text in texts(run))


def test_a_step_is_told_before_its_checkpoint_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A resume goes on after that step: its line has to be there."""
    written: dict[int, list[int]] = {}
    begin = CheckpointWriter.begin

    async def notes(writer: CheckpointWriter, step: int, *rest: Any) -> None:
        written[step] = steps_told(tmp_path)
        await begin(writer, step, *rest)

    monkeypatch.setattr(CheckpointWriter, "begin", notes)
    assert World(slow_diagnostics(PLAIN), tmp_path).run().violation == ""
    assert 4 in written and written == {step: list(range(1, step + 1)) for step in written}


def steps_told(root: Path) -> list[int]:
    """Steps with a line of numbers on disk."""
    path = root / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def slow_diagnostics(schedule: FaultSchedule) -> FaultSchedule:
    """The service answers what it has found out about a step after ten seconds: its line comes long after its end."""
    return schedule.with_faults([Fault(0.0, "late_reply", i, 10.0, "observe") for i in range(4)])


@pytest.mark.parametrize("fails", [False, True], ids=["flushed", "flush fails"])
def test_the_last_steps_are_flushed_whatever_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool) -> None:
    """A failing flush stands in a warning, and doesn't hide what ended the run."""
    at_the_end: list[list[int]] = []

    next_batch = BatchSource.next

    async def until_step_3(*given: Any, step: int) -> PreparedBatch:
        if step == 2:
            at_the_end.append(steps_told(tmp_path))
            if fails:
                monkeypatch.setattr(Notes, "flush", refused)
            raise DataError("a batch that nobody can read")
        return await next_batch(*given, step=step)

    async def refused(_: Notes) -> None:
        raise RuntimeError("no connection")

    monkeypatch.setattr(BatchSource, "next", until_step_3)
    run = World(slow_diagnostics(replace(PLAIN, checkpoint_every=0)), tmp_path).run()
    assert "a batch that nobody can read" in run.violation
    assert at_the_end == [[]] and steps_told(tmp_path) == ([] if fails else [1, 2])
    assert ("warning: lines of the last steps: given up (no connection)" in texts_until_the_end(run)) == fails


def test_a_step_s_line_says_what_the_ways_of_its_groups_took(tmp_path: Path) -> None:
    """The service answers after 0.2 s of the learner's waiting, all of which is hand-over: the groups had come before."""
    groups: tuple[GroupFacts, ...] = tuple(facts(i, 5, 5, prompt_id=f"train/0/{i}") for i in range(2))
    batch = PreparedBatch(2, CorrectionConfig(preset="bypass"), None, 10, (), (), 0.0, 0.0, trained_tokens=(0, 0))

    class Service:
        async def pull(self, *_: Any) -> dict[int, str]:
            return {}

        async def correct(self, *_: Any) -> PreparedBatch:
            await asyncio.sleep(0.2)
            return batch

    class Pool:
        def last_progress(self) -> float:
            return 0.0

    class Numbers:
        def __init__(self) -> None:
            self.numbers: dict[str, float] = {}

        def note(self, numbers: dict[str, float]) -> None:
            self.numbers |= numbers

        def event(self, *_: Any) -> None: ...

        def waiting(self, *_: Any) -> None: ...

        def did(self, *_: Any) -> None: ...

    recorder: Any = Numbers()

    async def scenario() -> None:
        source = BatchSource(PLAIN.config, StartingPoint(Path("model")), Ledger(tmp_path / "ledger.jsonl"), recorder)
        source.service = FakeActor(Service())
        source.ledger.hand_out([one.prompt_id for one in groups])
        for ticket, one in zip(source.book.admit(prompts(0, 2), now=0.0), groups, strict=True):
            assert source.book.finish(StoredGroup(one, None), now=0.0) is not None and ticket.group_id == one.group_id
        pool: Any = Pool()
        found = await source.next(2, None, pool, step=2)  # type: ignore[arg-type]
        source.stop()
        assert found == replace(batch, groups=groups)
        counts, discarded = source.settle(3, found, version=3, published=3)
        assert (counts["trained"], discarded) == (2, [])

    asyncio.run(scenario())
    assert set(recorder.numbers) == {"wait/handover_s"} and recorder.numbers["wait/handover_s"] >= 0.2
