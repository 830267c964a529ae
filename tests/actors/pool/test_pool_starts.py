"""What fails the pool, what a run that goes back does with it, and workers that do not start. Workers are fakes, which fail on cue."""

from __future__ import annotations

import asyncio

import pytest
import ray.exceptions

from evenkeel.actors.pool.faults import WorkerLosses
from evenkeel.correction.errors import ActorLost, ConfigError, DeadlineExceeded, EngineError, EvenkeelError
from tests.actors.pool.pool_scene import DEAD, PoolScene, Sync, Worker, play, raised


def test_a_mistake_in_our_own_code_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling again would fail again: what is neither a dead process nor an engine's failure is raised."""

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, faults={"0": raised(KeyError("text"))})
        await scene.begin()
        with pytest.raises(ray.exceptions.RayTaskError, match="KeyError"):
            await asyncio.wait_for(scene.pool.raise_on_failure(), 5.0)

    play(scenario)


def test_what_a_run_has_gone_back_for_does_not_fail_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = PoolScene(monkeypatch, faults={"0": raised(ray.exceptions.OutOfDiskError("full"))})
        await scene.begin()
        with pytest.raises(ray.exceptions.RayTaskError):
            await asyncio.wait_for(scene.pool.raise_on_failure(), 5.0)
        await scene.pool.withdraw()
        for worker in scene.workers.values():
            monkeypatch.setattr(worker, "follow", lambda generation: asyncio.sleep(0), raising=False)
        scene.pool.serve(scene.books.book, scene.books.changes, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scene.pool.raise_on_failure(), 0.1)

    play(scenario)


def test_a_copy_of_weights_that_are_withdrawn_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are ended while it is under way: that is no loss of its own, and must not take the run back a second time."""

    async def scenario() -> None:
        scene = PoolScene(monkeypatch)
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
        scene = PoolScene(monkeypatch, start_faults=dict.fromkeys("0123", raised(late)))
        with pytest.raises(EvenkeelError, match="not done in 150 s"):
            await scene.begin()
        assert not scene.pool.workers
        await scene.pool.withdraw()
        monkeypatch.setattr(Worker, "follow", lambda *_: asyncio.sleep(0), raising=False)
        scene.pool.serve(scene.books.book, scene.books.changes, 1)
        assert len(scene.pool.workers) == scene.pool.target

    play(scenario)


def test_a_first_worker_that_cannot_start_ends_the_run_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = PoolScene(monkeypatch, start_faults={"0": raised(ConfigError("rollout.reward (x:y): it raised"))})
        with pytest.raises(EvenkeelError, match=r"rollout.reward \(x:y\): it raised"):
            await scene.begin()

    play(scenario)


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (DEAD, EngineError, r"^rollout worker 2 did not start: start of rollout worker 2: the actor"),
        (raised(DeadlineExceeded("the engine's start: not done in 150 s")), DeadlineExceeded, r"^the engine's start: not done in 150 s"),
    ],
    ids=["killed", "late"],
)
def test_a_first_worker_that_is_killed_or_late_while_it_starts_is_replaced_twice(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, kind: type[Exception], said: str
) -> None:
    """That may have been chance, or a busy machine; the third time it is the end of the run, by a sentence that is no part's death."""

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, start_faults={"0": fault})
        (await scene.begin()).cancel()
        assert scene.joined == ["1"] and scene.killed == ["0"]
        scene = PoolScene(monkeypatch, start_faults=dict.fromkeys("0123", fault))
        with pytest.raises(kind, match=said) as end:
            await scene.begin()
        assert not isinstance(end.value, ActorLost) and list(scene.workers) == ["0", "1", "2"]

    play(scenario)


def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    real = WorkerLosses.pause_s
    monkeypatch.setattr(WorkerLosses, "pause_s", lambda book, *counts, **named: real(book, *counts, **named) / 100.0)


@pytest.mark.parametrize("last_s", [0.0, 0.2], ids=["together", "one after the others"])
def test_each_of_four_workers_has_three_attempts_at_its_start(monkeypatch: pytest.MonkeyPatch, last_s: float) -> None:
    """Whether all are late at one moment or one is later still: twelve starts, and then the end of the run in the words of the last."""
    quick_pauses(monkeypatch)

    async def scenario() -> None:
        scene = PoolScene(monkeypatch, workers=4)

        async def late(worker: Worker, *_: object) -> None:
            await asyncio.sleep(last_s if worker.name == "3" else 0.0)
            raise raised(DeadlineExceeded(f"start of rollout worker {worker.name}: not done in 150 s"))

        monkeypatch.setattr(Worker, "start", late)
        with pytest.raises(DeadlineExceeded, match=r"^start of rollout worker \d+: not done in 150 s"):
            await scene.begin()
        assert sorted(map(int, scene.workers)) == list(range(12)) and not scene.joined

    play(scenario)


def test_workers_given_up_before_a_first_one_is_up_are_asked_for_again_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two the first start raises, which is no chance, while the other is on its way; and one on its third attempt brings the run up."""
    quick_pauses(monkeypatch)

    async def scenario() -> None:
        late = raised(DeadlineExceeded("the engine's start: not done in 150 s"))
        scene = PoolScene(monkeypatch, workers=2, start_faults={"0": raised(ConfigError("no such model")), "1": late, "2": late})
        (await scene.begin()).cancel()
        await asyncio.sleep(0.1)
        assert scene.joined == ["3", "4"] and not scene.pool.has_failed

    play(scenario)
