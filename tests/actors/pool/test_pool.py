"""Workers come, fail and are replaced; each group is sampled to its end once. Workers are fakes here, because they have to fail on cue."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

import actors.pool.workers
from actors.carriers import ActorInfo, StoredGroup, Ticket, WorkerLoad
from actors.config import DeadlinesConfig
from actors.pool.pool import RolloutPool
from actors.queue.outstanding import Outstanding
from actors.queue.queue_actor import TrajectoryQueueActor
from correction.errors import ActorLost, ConfigError, DeadlineExceeded, EngineDirty, EngineError, EvenkeelError
from rollout.config import AnswerSampling
from rollout.trajectory import Group, GroupFacts
from tests.actors.cases import CallResult, FakeActor, group, prompt
from tests.actors.pool.pool_cases import worker_settings

DEAD = ray.exceptions.ActorDiedError()
Fault = Exception | Callable[[], Awaitable[object]]


def raised(error: Exception) -> ray.exceptions.RayTaskError:
    """As Ray hands on what a worker raised."""
    return ray.exceptions.RayTaskError("f", f"a long traceback, {error!r}", error)


class Worker:
    """Samples at once, unless its turn in `faults` says what to raise or to wait for."""

    def __init__(self, name: str, scene: Scene) -> None:
        self.name, self.scene = name, scene
        self.sampled: list[int] = []
        self.answered = 0

    async def start(self, *_: Any) -> ActorInfo:
        fault = self.scene.start_faults.get(self.name)
        if fault is not None:
            raise fault
        return ActorInfo("rollout", self.name, 1, "127.0.0.1:1")

    async def generate_group(self, ticket: Ticket) -> tuple[GroupFacts, Group]:
        await self._play()
        self.sampled.append(ticket.group_id)
        return group(ticket).facts, group(ticket)

    async def answer(self, prompts: list[Any], how: AnswerSampling) -> list[str]:
        await asyncio.sleep(0)
        await self._play()
        self.answered += len(prompts) * how.samples
        return [p.prompt_id for p in prompts]

    async def load(self) -> WorkerLoad:
        await self._play()
        return WorkerLoad(1.0, 2.0, 3, 4)

    async def _play(self) -> None:
        fault: Fault | None = self.scene.faults.get(self.name)
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            await fault()


class Sync:
    """Every engine that joins holds the published version at once, but for those in `behind`; a dirty one does when the test says so."""

    version = 0

    def __init__(self, behind: set[str]) -> None:
        self.behind = behind
        self.left: list[str] = []
        self.dirty: list[Any] = []
        """Targets, as often as they were marked."""

    def resync(self, target: Any, reason: str) -> None:
        self.dirty.append(target)
        target.version = -1

    def join(self, target: Any) -> None:
        target.version = -1 if target.name in self.behind else 0

    def leave(self, name: str) -> None:
        self.left.append(name)


class Scene:
    """A pool with its queue, and what it reported."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        workers: int = 1,
        faults: dict[str, Fault] | None = None,
        start_faults: dict[str, Exception] | None = None,
        behind: set[str] | None = None,
        places: int = 8,
        worker_s: float = 10.0,
    ) -> None:
        self.faults: dict[str, Fault] = faults or {}
        self.start_faults = start_faults or {}
        self.workers: dict[str, Worker] = {}
        self.killed: list[str] = []
        self.finished: list[int] = []
        self.events: list[str] = []
        self.joined: list[str] = []
        self.left: list[str] = []
        self.sync = Sync(behind or set())
        self.queue = TrajectoryQueueActor(groups_per_step=places, max_staleness=0)
        fake_ray = SimpleNamespace(
            remote=lambda cls: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._make)),
            kill=lambda actor: self.killed.append(actor.instance.name),
            wait=lambda *_, **__: None,
            exceptions=ray.exceptions,
        )
        monkeypatch.setattr(actors.pool.workers, "ray", fake_ray)
        monkeypatch.setattr("ray.kill", fake_ray.kill)
        settings = worker_settings(workers)
        deadlines = DeadlinesConfig(start_s=worker_s / 2, sync_s=worker_s / 6, notice_s=0.2, no_workers_s=worker_s)
        observer = SimpleNamespace(
            joined=lambda info: self.joined.append(info.name),
            left=lambda key: self.left.append(key.removeprefix("rollout-")),
            group_finished=lambda summary: self.finished.append(summary.group_id),
            lost=lambda _: None,
            event=lambda _, text: self.events.append(text),
        )
        self.pool = RolloutPool(settings, deadlines, FakeActor(self.queue), observer)

    def _make(self, name: str, *_: Any, **__: Any) -> FakeActor:
        self.workers[name] = Worker(name, self)
        return FakeActor(self.workers[name])

    async def begin(self) -> asyncio.Task[None]:
        """Start, join, and feed; returns the feeding task."""
        self.pool.start()
        await self.pool.first_worker()
        self.pool.follow(self.sync)  # type: ignore[arg-type]
        return asyncio.create_task(self.pool.feed((prompt(i) for i in itertools.count()), [], lambda _: None))

    async def until_finished(self, count: int) -> None:
        """And with the queue."""
        while len(self.finished) < count or self.queue._queue.counts()["finished"] < count:
            await asyncio.sleep(0.01)


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20.0))  # type: ignore[arg-type]


async def hang() -> None:
    await asyncio.sleep(60.0)


@pytest.mark.parametrize("fault", [DEAD, raised(EngineError("the scheduler is gone"))], ids=["process dead", "engine dead"])
def test_groups_of_a_lost_worker_are_sampled_by_its_replacement(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch, faults={"0": fault})
        await scene.begin()
        await scene.until_finished(8)
        assert sorted(scene.finished) == list(range(8)) and sorted(scene.workers["1"].sampled) == list(range(8))
        assert scene.queue._queue.counts()["finished"] == 8
        assert scene.joined == ["0", "1"] and scene.left == ["0"] and scene.sync.left == ["0"]
        await asyncio.sleep(0.05)
        assert scene.killed == ["0"], "an engine whose scheduler died still has a process"
        assert any("rollout worker 0 is gone" in event for event in scene.events)

    play(scenario)


@pytest.mark.parametrize("kind", ["group", "evaluation"])
def test_a_dirty_engine_is_synced_again_and_its_worker_stays(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Eight groups (four parts of an evaluation) fail with it at once: one sync, and no work before its receipt."""

    async def scenario() -> None:
        scene = Scene(monkeypatch, faults={"0": raised(EngineDirty("the update to v1 failed"))}, places=8 if kind == "group" else 0)
        await scene.begin()
        asking = asyncio.create_task(scene.pool.answer([prompt(i) for i in range(128)], AnswerSampling())) if kind == "evaluation" else None
        while not scene.sync.dirty:
            await asyncio.sleep(0.01)
        del scene.faults["0"]
        await asyncio.sleep(0.1)
        worker = scene.workers["0"]
        assert (worker.sampled, worker.answered) == ([], 0) and scene.pool.counts() == (1, 0), "no work without a receipt"
        scene.sync.dirty[0].version = 0
        scene.pool.wake()
        if asking is not None:
            await asking
        else:
            await scene.until_finished(8)
        assert len(scene.sync.dirty) == 1 and scene.left == [] and list(scene.workers) == ["0"]
        assert sorted(worker.sampled) == list(range(8)) or worker.answered == 128

    play(scenario)


def test_an_engine_that_stays_dirty_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch, faults={"0": raised(EngineDirty("the update to v1 failed"))}, places=1)
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
        scene = Scene(monkeypatch, behind={"0"}, worker_s=0.7)
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
        monkeypatch.setattr(actors.pool.workers, "_LOAD_S", 0.3)
        together = asyncio.Barrier(3)
        scene = Scene(monkeypatch, workers=4, faults={"2": hang} | dict.fromkeys("013", together.wait))
        scene.pool.start()
        while len(scene.joined) < 4:
            await asyncio.sleep(0.01)
        assert await scene.pool.loads() == {name: WorkerLoad(1.0, 2.0, 3, 4) for name in ("0", "1", "3")}

    play(scenario)


def test_a_group_that_was_finished_before_the_worker_died_goes_to_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has it and delivers it, with or without the worker: others sample what was under way, and that alone."""

    async def scenario() -> None:
        scene = Scene(monkeypatch, places=3)
        at_its_end: list[int] = []

        async def finish_one_and_die() -> None:
            if scene.workers["0"].sampled:
                at_its_end.append(scene.queue._queue.counts()["finished"])
                raise DEAD

        scene.faults["0"] = finish_one_and_die
        await scene.begin()
        await scene.until_finished(3)
        assert at_its_end[0] == 0, "it died before the group was delivered"
        assert scene.workers["0"].sampled == [0] and sorted(scene.workers["1"].sampled) == [1, 2]
        assert sorted(scene.finished) == [0, 1, 2], "each once"
        counts = scene.queue._queue.counts()
        assert (counts["admitted"], counts["finished"], counts["in_flight"]) == (3, 3, 0)

    play(scenario)


def test_groups_of_a_call_to_the_queue_that_failed_are_handed_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All eight were on board; the queue lives, as the next call shows, and has each of them once."""

    async def scenario() -> None:
        scene, failed = Scene(monkeypatch), list[list[int]]()
        put = scene.queue.put

        async def fails_once(groups: list[StoredGroup]) -> None:
            if not failed:
                failed.append([one.group_id for one in groups])
                raise DEAD
            await put(groups)

        monkeypatch.setattr(scene.queue, "put", fails_once)
        await scene.begin()
        await scene.until_finished(8)
        assert failed == [list(range(8))] and sorted(scene.workers["0"].sampled) == [*range(8)]
        assert sum("wait: " in event for event in scene.events) == 1

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
        scene = Scene(monkeypatch, faults={"0": raised(EngineError("the scheduler is gone"))}, places=1)
        await scene.begin()
        await scene.until_finished(1)
        assert scene.workers["1"].sampled == [0] and sorted(looked_at) == [0, 0, 0, 1, 1]

    play(scenario)


def test_an_answer_that_comes_after_the_work_was_withdrawn_reaches_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group ids come again with the same prompts: an answer by withdrawn weights must not be taken for the new one."""

    async def scenario() -> None:
        go_on, looked_at = asyncio.Event(), numbers_looked_at(monkeypatch)
        scene = Scene(monkeypatch, faults={"0": go_on.wait}, places=1)
        await scene.begin()
        while not scene.pool._workers["0"].groups:
            await asyncio.sleep(0.01)
        old, new = scene.queue, TrajectoryQueueActor(groups_per_step=1, max_staleness=0)
        (ticket,) = await new.admit([prompt(0)])
        await scene.pool.withdraw()
        scene.workers["0"].follow = lambda generation: asyncio.sleep(0)  # type: ignore[attr-defined]
        scene.pool.serve(FakeActor(new), 1, Outstanding())
        go_on.set()
        await asyncio.sleep(0.3)
        assert scene.workers["0"].sampled == [0] and scene.finished == []
        assert set(looked_at) == {0}, "the group itself is dropped where it lies, and not fetched for that"
        assert [queue._queue.expects(ticket.group_id) for queue in (old, new)] == [True, True]

    play(scenario)


def test_other_workers_take_over_without_waiting_for_the_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch, workers=2, faults={"0": DEAD}, behind={"2"})
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
        scene = Scene(monkeypatch, workers=2, behind={"0"})
        await scene.begin()
        while len(scene.joined) < 2:
            await asyncio.sleep(0.01)
        await scene.until_finished(8)
        assert scene.workers["0"].sampled == []
        assert scene.pool.counts() == (2, 1)

    play(scenario)


def test_work_is_spread_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch, workers=2, faults={"0": hang, "1": hang})
        scene.pool.start()
        while len(scene.joined) < 2:
            await asyncio.sleep(0.01)
        scene.pool.follow(scene.sync)  # type: ignore[arg-type]
        feeding = asyncio.create_task(scene.pool.feed((prompt(i) for i in itertools.count()), [], lambda _: None))
        await asyncio.sleep(0.2)
        assert [len(worker.groups) for worker in scene.pool._workers.values()] == [4, 4]
        feeding.cancel()

    play(scenario)


def test_the_next_prompts_are_made_while_the_engines_are_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as were admitted last, so that the next places don't wait for them; and no more, since the source may be long to read."""

    async def scenario() -> None:
        scene = Scene(monkeypatch, faults={"0": hang})
        scene.pool.start()
        while not scene.joined:
            await asyncio.sleep(0.01)
        scene.pool.follow(scene.sync)  # type: ignore[arg-type]
        positions = itertools.count()
        feeding = asyncio.create_task(scene.pool.feed((prompt(i) for i in positions), [], lambda _: None))
        await asyncio.sleep(0.2)
        admitted = sum(len(worker.groups) for worker in scene.pool._workers.values())
        assert admitted == 8 and next(positions) == 2 * admitted
        feeding.cancel()

    play(scenario)


def test_a_mistake_in_our_own_code_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling again would fail again: what is neither a dead process nor an engine's failure is raised."""

    async def scenario() -> None:
        scene = Scene(monkeypatch, faults={"0": raised(KeyError("text"))})
        await scene.begin()
        with pytest.raises(ray.exceptions.RayTaskError, match="KeyError"):
            await asyncio.wait_for(scene.pool.raise_on_failure(), 5.0)

    play(scenario)


def test_what_a_run_has_gone_back_for_does_not_fail_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch, faults={"0": raised(ray.exceptions.OutOfDiskError("full"))})
        await scene.begin()
        with pytest.raises(ray.exceptions.RayTaskError):
            await asyncio.wait_for(scene.pool.raise_on_failure(), 5.0)
        await scene.pool.withdraw()
        for worker in scene.workers.values():
            monkeypatch.setattr(worker, "follow", lambda generation: asyncio.sleep(0), raising=False)
        scene.pool.serve(FakeActor(scene.queue), 1, Outstanding())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scene.pool.raise_on_failure(), 0.1)

    play(scenario)


def test_a_copy_of_weights_that_are_withdrawn_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are ended while it is under way: that is no loss of its own, and must not take the run back a second time."""

    async def scenario() -> None:
        scene = Scene(monkeypatch)
        (await scene.begin()).cancel()
        await scene.pool.withdraw()
        scene.pool.weights_lost(ActorLost("copy of the weights v1 <- rank 0: the actor died"))
        assert not scene.pool.has_failed
        scene.pool.follow(Sync(set()))  # type: ignore[arg-type]
        scene.pool.weights_lost(ActorLost("copy of the weights v2 <- rank 0: the actor died"))
        with pytest.raises(ActorLost, match="weights v2"):
            await scene.pool.raise_on_failure()

    play(scenario)


def test_a_run_that_goes_back_asks_for_the_workers_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss that failed the pool has asked for nobody; if something else died with it, the run goes on, and would wait for ever."""

    async def scenario() -> None:
        late = DeadlineExceeded("start of a rollout worker: not done in 150 s")
        scene = Scene(monkeypatch, start_faults={"0": raised(late), "1": raised(late)})
        with pytest.raises(EvenkeelError, match="not done in 150 s"):
            await scene.begin()
        assert not scene.pool._workers
        await scene.pool.withdraw()
        monkeypatch.setattr(Worker, "follow", lambda *_: asyncio.sleep(0), raising=False)
        scene.pool.serve(FakeActor(scene.queue), 1, Outstanding())
        assert len(scene.pool._workers) == scene.pool.target

    play(scenario)


def test_a_first_worker_that_cannot_start_ends_the_run_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch, start_faults={"0": raised(ConfigError("rollout.reward (x:y): it raised"))})
        with pytest.raises(EvenkeelError, match=r"rollout.reward \(x:y\): it raised"):
            await scene.begin()

    play(scenario)


def test_a_first_worker_whose_process_is_killed_while_it_starts_is_replaced_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What killed it may have been chance; the third time it is the end of the run, by a sentence that is no part's death."""

    async def scenario() -> None:
        scene = Scene(monkeypatch, start_faults={"0": DEAD})
        (await scene.begin()).cancel()
        assert scene.joined == ["1"] and scene.killed == ["0"]
        scene = Scene(monkeypatch, start_faults=dict.fromkeys("0123", DEAD))
        with pytest.raises(EngineError, match=r"^rollout worker 2 did not start: start of rollout worker 2: the actor") as end:
            await scene.begin()
        assert not isinstance(end.value, ActorLost) and list(scene.workers) == ["0", "1", "2"]

    play(scenario)


@pytest.mark.parametrize("fault", [DEAD, raised(EngineError("the scheduler is gone"))], ids=["process dead", "engine dead"])
def test_an_evaluation_outlives_a_worker(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch, workers=2)
        feeding = await scene.begin()
        await scene.until_finished(8)
        feeding.cancel()
        scene.faults["0"] = fault
        prompts = [prompt(i) for i in range(100)]
        assert await scene.pool.answer(prompts, AnswerSampling()) == [p.prompt_id for p in prompts]  # type: ignore[comparison-overlap]

    play(scenario)


def test_an_evaluation_is_spread_over_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch, workers=2)
        feeding = await scene.begin()
        await scene.until_finished(8)
        feeding.cancel()
        await asyncio.wait({feeding})
        while len(scene.joined) < 2:
            await asyncio.sleep(0.01)
        await scene.pool.answer([prompt(i) for i in range(128)], AnswerSampling())
        assert [worker.answered for worker in scene.workers.values()] == [64, 64]

    play(scenario)


def test_a_mistake_in_an_evaluation_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked gets the error; the run, which can do without this evaluation, goes on, and nothing of it waits."""

    async def scenario() -> None:
        scene = Scene(monkeypatch, workers=2, places=0, faults=dict.fromkeys("01", raised(KeyError("text"))))
        await scene.begin()
        with pytest.raises(ray.exceptions.RayTaskError, match="KeyError"):
            await scene.pool.answer([prompt(i) for i in range(2000)], AnswerSampling())
        await asyncio.sleep(0.05)
        assert not scene.pool._failure.done() and not scene.pool._work and scene.left == []
        assert [worker.questions for worker in scene.pool._workers.values()] == [0, 0]

    play(scenario)
