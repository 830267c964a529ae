"""Workers come, fail and are replaced; each group is sampled to its end once. Workers are fakes here, because they have to fail on cue."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import evenkeel.actors.pool.workers
import evenkeel.actors.processes.pacing
from evenkeel.actors.groups.book import MAX_ENGINE_LOSSES
from evenkeel.correction.errors import DeadlineExceeded, EngineDirty, EngineError, EngineReplaced
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.trajectory import WorkerLoad
from tests.actors.cases import CallResult, OpenBook, prompt, prompts
from tests.actors.pool.pool_scene import DEAD, PoolScene, hang, play, raised
from tests.actors.processes.iteration_counter import IterationCounter


@pytest.mark.parametrize("fault", [DEAD, raised(EngineError("the scheduler is gone"))], ids=["process dead", "engine dead"])
def test_groups_of_a_lost_worker_are_sampled_by_its_replacement(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    async def scenario() -> None:
        scene = PoolScene(monkeypatch, faults={"0": fault})
        await scene.begin()
        await scene.until_finished(8)
        assert sorted(scene.finished) == list(range(8)) and sorted(scene.workers["1"].sampled) == list(range(8))
        assert scene.books.book.counts()["finished"] == 8
        assert scene.joined == ["0", "1"] and scene.left == ["0"] and scene.sync.left == ["0"]
        await asyncio.sleep(0.05)
        assert scene.killed == ["0"], "an engine whose scheduler died still has a process"
        assert any("rollout worker 0 is gone" in event for event in scene.events)

    play(scenario)


@pytest.mark.parametrize("kind", ["group", "evaluation"])
def test_a_dirty_engine_is_synced_again_and_its_worker_stays(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Eight groups (four parts of an evaluation) fail with it at once: one sync, and no work before its receipt."""

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, faults={"0": raised(EngineDirty("the update to v1 failed"))}, places=8 if kind == "group" else 0)
        await scene.begin()
        asking = asyncio.create_task(scene.pool.answer([prompt(i) for i in range(128)], AnswerSampling())) if kind == "evaluation" else None
        while not scene.sync.dirty:
            await asyncio.sleep(0.01)
        del scene.faults["0"]
        await asyncio.sleep(0.1)
        worker = scene.workers["0"]
        assert (worker.sampled, worker.answered) == ([], 0) and scene.pool.counts() == (1, 0), "no work without a receipt"
        waiting = {"pool/waiting_groups": 8 * (kind == "group"), "pool/waiting_answers": 128 * (kind == "evaluation")}
        slots = scene.pool.occupancy()
        assert slots.items() >= (waiting | {"pool/used_slots": 0}).items() and slots["pool/slots"] > 0
        scene.sync.dirty[0].version = 0
        scene.pool.wake()
        if asking is not None:
            await asking
        else:
            await scene.until_finished(8)
        assert len(scene.sync.dirty) == 1 and scene.left == [] and list(scene.workers) == ["0"]
        assert sorted(worker.sampled) == list(range(8)) or worker.answered == 128

    play(scenario)


def test_a_group_that_ends_engines_is_discarded_though_others_take_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker stays, and would sample it until the run ends."""

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, faults={"0": raised(EngineReplaced("the scheduler is gone"))}, places=1)
        await scene.begin()
        for lost in range(1, MAX_ENGINE_LOSSES + 1):
            while len(scene.sync.dirty) < lost:
                await asyncio.sleep(0.01)
            if lost == MAX_ENGINE_LOSSES:
                del scene.faults["0"]
            scene.sync.dirty[-1].version = 0
            scene.pool.wake()
        await scene.until_finished(1)
        assert any("group 0 (" in event and "a third engine was lost while it was sampled" in event for event in scene.events)
        assert scene.left == [] and scene.workers["0"].sampled == [1]

    play(scenario)


def test_an_engine_that_stays_dirty_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = PoolScene(monkeypatch, faults={"0": raised(EngineDirty("the update to v1 failed"))}, places=1)
        await scene.begin()
        for resync in range(1, 4):
            while len(scene.sync.dirty) < resync:
                await asyncio.sleep(0.01)
            scene.sync.dirty[-1].version = 0  # the sync says that all is well
            scene.pool.wake()
        await scene.until_finished(1)
        assert len(scene.sync.dirty) == 3 and scene.left == ["0"] and scene.workers["1"].sampled == [0]
        assert any("dirty again after 3 full syncs" in event for event in scene.events)

    play(scenario)


def test_a_wait_for_the_published_weights_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight groups wait for one worker: that is said once each time, and at the deadline the error names groups, version and workers."""

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, behind={"0"}, worker_s=0.7)
        await scene.begin()
        missing = r"\(1 worker joined, 0 of them with these weights, 0 starting\)"
        what = r"8 groups \(the oldest is 0\) <- a rollout worker with weights v0: not done in 1 s " + missing
        with pytest.raises(DeadlineExceeded, match=what):
            await scene.pool.raise_on_failure()
        notices = [event for event in scene.events if event.startswith("waiting ")]
        assert 1 <= len(notices) <= 3 and "1 worker joined, 0 of them" in notices[0], "every 0.2 s in 0.7 s, if the machine keeps up"

    play(scenario)


def test_loads_are_asked_for_at_once_and_a_worker_that_hangs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(evenkeel.actors.pool.workers, "_LOAD_S", 0.3)
        together = asyncio.Barrier(3)
        scene = PoolScene(monkeypatch, workers=4, faults={"2": hang} | dict.fromkeys("013", together.wait))
        scene.pool.start()
        while len(scene.joined) < 4:
            await asyncio.sleep(0.01)
        assert await scene.pool.loads() == {name: WorkerLoad(1.0, 2.0, 3, 4) for name in ("0", "1", "3")}

    play(scenario)


def test_after_a_step_the_loads_come_with_the_receipts_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 has the version, 1 gets it now, 2 holds an older one and takes long: it alone is asked. Of a step whose version was not
    published what the receipts said is old: all are asked."""

    async def scenario() -> None:
        monkeypatch.setattr(evenkeel.actors.pool.workers, "_RECEIPT_S", 0.5)
        asked: list[str] = []

        def asks(name: str) -> Callable[[], Awaitable[None]]:
            return lambda: asyncio.sleep(0, asked.append(name))

        scene = PoolScene(monkeypatch, workers=3, places=0, faults={name: asks(name) for name in "012"})
        await scene.begin()
        while len(scene.joined) < 3:
            await asyncio.sleep(0.01)
        targets = {name: worker.sync for name, worker in scene.pool.workers.items()}

        async def takes(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            targets[name].version, targets[name].load = 1, WorkerLoad(10.0 + int(name), 20.0, 30, 40)

        scene.sync.version = 1
        for name, seconds in {"0": 0.0, "1": 0.1, "2": 60.0}.items():
            targets[name].task = asyncio.create_task(takes(name, seconds))
        targets["2"].load = WorkerLoad(12.0, 20.0, 30, 40)
        receipts = {name: WorkerLoad(10.0 + int(name), 20.0, 30, 40) for name in "01"}
        assert await scene.pool.loads(1) == receipts | {"2": WorkerLoad(1.0, 2.0, 3, 4)} and asked == ["2"]
        asked.clear()
        assert await scene.pool.loads(2) == dict.fromkeys("012", WorkerLoad(1.0, 2.0, 3, 4)) and sorted(asked) == ["0", "1", "2"]

    play(scenario)


def test_calls_that_begin_together_are_made_a_few_in_each_iteration_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step hands out all of its groups together, and asks all workers for their loads."""

    monkeypatch.setattr(evenkeel.actors.processes.pacing, "CALLS_PER_ITERATION", 2)

    async def scenario() -> None:
        made: list[int] = []

        async def note() -> None:
            made.append(counter.iteration)

        scene = PoolScene(monkeypatch, workers=8, places=24, faults=dict.fromkeys(map(str, range(8)), note))
        scene.pool.start()
        while len(scene.joined) < 8:
            await asyncio.sleep(0.01)
        scene.pool.follow(scene.sync)  # type: ignore[arg-type]
        counter = IterationCounter()
        feeding = asyncio.create_task(scene.pool.feed((prompt(i) for i in itertools.count()), [], lambda _: None, lambda _: None))
        await scene.until_finished(24)
        assert len(made) == 24 and max(Counter(made).values()) == 2
        made.clear()
        assert len(await scene.pool.loads()) == 8 and max(Counter(made).values()) == 2
        feeding.cancel()

    play(scenario)


@pytest.mark.parametrize("fault", ["killed", "dirty"])
def test_groups_that_wait_for_their_turn_are_not_sent_to_a_worker_that_failed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Nor does its loss count against them: they never were on it."""

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, places=4)
        (await scene.begin()).cancel()
        worker, calls = scene.pool.workers["0"], list[int]()

        async def note() -> None:
            calls.append(1)
            raise DEAD

        scene.faults["0"] = note
        for ticket in scene.books.admit(prompts(0, 4)):
            scene.pool.tasks.spawn(scene.pool._sample(worker, ticket))
        if fault == "killed":
            scene.pool.lost(worker, "killed")
        else:
            scene.pool.sync.resync(worker.sync, "dirty")  # type: ignore[union-attr]
        await asyncio.sleep(0.05)
        assert not calls and not any(scene.books.book.attempts(one).engines_lost for one in range(4))
        if fault == "killed":
            while len(scene.finished) < 4:
                await asyncio.sleep(0.01)
            assert sorted(scene.workers["1"].sampled) == [0, 1, 2, 3] and not scene.sync.dirty

    play(scenario)


def test_a_group_that_was_finished_before_the_worker_died_is_in_the_book(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has it, with or without the worker: others sample what was under way, and that alone."""

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, places=3)

        async def finish_one_and_die() -> None:
            if scene.workers["0"].sampled:
                raise DEAD

        scene.faults["0"] = finish_one_and_die
        await scene.begin()
        await scene.until_finished(3)
        assert scene.workers["0"].sampled == [0] and sorted(scene.workers["1"].sampled) == [1, 2]
        assert sorted(scene.finished) == [0, 1, 2], "each once"
        counts = scene.books.book.counts()
        assert (counts["admitted"], counts["finished"], counts["in_flight"]) == (3, 3, 0)

    play(scenario)


def numbers_looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Results of calls to workers that are awaited from now on: 0 is what became of a group, 1 the group itself."""
    numbers: list[int] = []
    awaited = CallResult.__await__

    def noted(part: CallResult) -> Any:
        numbers.append(part.number)
        return awaited(part)

    monkeypatch.setattr(CallResult, "__await__", noted)
    return numbers


def test_what_a_failed_call_would_have_returned_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reports each error that nobody has looked at, and the second result of a failed call is one; of a finished one it is a
    small group, which goes on itself."""

    async def scenario() -> None:
        looked_at = numbers_looked_at(monkeypatch)
        scene = PoolScene(monkeypatch, faults={"0": raised(EngineError("the scheduler is gone"))}, places=1)
        await scene.begin()
        await scene.until_finished(1)
        assert scene.workers["1"].sampled == [0] and sorted(looked_at) == [0, 0, 0, 1, 1]

    play(scenario)


def test_an_answer_that_comes_after_the_work_was_withdrawn_reaches_no_book(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group ids come again with the same prompts: an answer by withdrawn weights must not be taken for the new one."""

    async def scenario() -> None:
        go_on, looked_at = asyncio.Event(), numbers_looked_at(monkeypatch)
        scene = PoolScene(monkeypatch, faults={"0": go_on.wait}, places=1)
        await scene.begin()
        while not scene.pool.workers["0"].groups:
            await asyncio.sleep(0.01)
        old, new = scene.books, OpenBook(groups_per_step=1, max_staleness=0)
        new.admit([prompt(0)])
        await scene.pool.withdraw()
        scene.workers["0"].follow = lambda generation: asyncio.sleep(0)  # type: ignore[attr-defined]
        scene.pool.serve(new.book, new.changes, 1)
        go_on.set()
        await asyncio.sleep(0.3)
        assert scene.workers["0"].sampled == [0] and scene.finished == []
        assert set(looked_at) == {0}, "the group itself is dropped where it lies, and not fetched for that"
        assert [books.book.counts()["in_flight"] for books in (old, new)] == [1, 1]

    play(scenario)


def test_what_a_call_takes_besides_sampling_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's groups say that they were sampled and scored in no time; its calls take 0.3 s."""

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, faults={"0": lambda: asyncio.sleep(0.3)}, places=2)
        await scene.begin()
        await scene.until_finished(2)
        assert scene.books.book.delays.read()["time/call_s"] >= 0.3

    play(scenario)


def test_other_workers_take_over_without_waiting_for_the_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = PoolScene(monkeypatch, workers=2, faults={"0": DEAD}, behind={"2"})
        await scene.begin()
        await scene.until_finished(8)
        assert sorted(scene.workers["1"].sampled) == list(range(8))
        (told,) = [event for event in scene.events if "under way again" in event]
        assert told.startswith("all groups of rollout worker 0 are under way again, ")
        (first,) = [event for event in scene.events if event.startswith("rollout worker 1 sampled its first group")]
        assert [part.split()[0] for part in first.split(": ")[1].split(", ")] == ["node", "engine", "weights"]

    play(scenario)


def test_work_goes_only_to_engines_that_hold_the_published_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = PoolScene(monkeypatch, workers=2, behind={"0"})
        await scene.begin()
        while len(scene.joined) < 2:
            await asyncio.sleep(0.01)
        await scene.until_finished(8)
        assert scene.workers["0"].sampled == []
        assert scene.pool.counts() == (2, 1)

    play(scenario)


def test_work_is_spread_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = PoolScene(monkeypatch, workers=2, faults={"0": hang, "1": hang})
        scene.pool.start()
        while len(scene.joined) < 2:
            await asyncio.sleep(0.01)
        scene.pool.follow(scene.sync)  # type: ignore[arg-type]
        feeding = asyncio.create_task(scene.pool.feed((prompt(i) for i in itertools.count()), [], lambda _: None, lambda _: None))
        await asyncio.sleep(0.2)
        assert [len(worker.groups) for worker in scene.pool.workers.values()] == [4, 4]
        feeding.cancel()

    play(scenario)


def test_the_next_prompts_are_made_while_the_engines_are_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as were admitted last, so that the next places don't wait for them; and no more, since the source may be long to read."""

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, faults={"0": hang})
        scene.pool.start()
        while not scene.joined:
            await asyncio.sleep(0.01)
        scene.pool.follow(scene.sync)  # type: ignore[arg-type]
        positions = itertools.count()
        feeding = asyncio.create_task(scene.pool.feed((prompt(i) for i in positions), [], lambda _: None, lambda _: None))
        await asyncio.sleep(0.2)
        admitted = sum(len(worker.groups) for worker in scene.pool.workers.values())
        assert admitted == 8 and next(positions) == 2 * admitted
        feeding.cancel()

    play(scenario)
