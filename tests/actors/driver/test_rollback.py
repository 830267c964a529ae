"""Who stays, how often a run goes back, what of a withdrawn generation is refused. A whole run: tests/failures/test_parts_killed.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.carriers import StoredGroup
from evenkeel.actors.driver.batches import BatchAhead
from evenkeel.actors.driver.parts import StartingPoint, start_learner
from evenkeel.actors.driver.recovery import MOST_ROLLBACKS, Lost, Rollbacks, end_parts, lost_among
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.groups.tokens import LATE
from evenkeel.actors.pool.rollout_worker import RolloutWorker
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.ranks.learner_rank_actor import LearnerRankActor
from evenkeel.correction.errors import ActorLost, DataError, EngineError, LateError
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.kept_weights import KeptWeights
from evenkeel.rollout.trajectory import Group
from tests.actors.cases import OpenBook, at_hand, group, prompts
from tests.actors.driver.test_lost_parts import ALIVE, GONE, UNREACHABLE, Part
from tests.actors.simulated_time import simulate
from tests.simulation.test_simulation_of_runs import run_of_one_worker


@pytest.mark.parametrize(
    ("ranks", "lost", "stays"),
    [
        ([Part(ALIVE), Part(ALIVE)], Lost(("service",)), True),
        ([Part(ALIVE), Part(ALIVE)], Lost(("learner rank 1",)), False),
        ([Part(ALIVE), Part(GONE)], Lost(("service",)), False),
        ([Part(ALIVE), Part("silent")], Lost(("service",)), False),
        ([Part(ALIVE), Part(UNREACHABLE)], Lost(("service",)), False),
        ([Part(ALIVE), Part(ALIVE)], Lost(answer="step"), False),
    ],
    ids=["idle", "one is lost", "one dies just now", "one is in a call that doesn't end", "one can't be reached", "of whom isn't known"],
)
def test_a_learner_stays_if_all_of_it_lives_and_rests(monkeypatch: pytest.MonkeyPatch, ranks: list[Any], lost: Lost, stays: bool) -> None:
    """Whatever else there is, ends; and of a learner all ranks or none."""
    killed: list[Any] = []
    monkeypatch.setattr("evenkeel.actors.processes.supervision.ray.kill", killed.append)
    monkeypatch.setattr("evenkeel.actors.driver.recovery._IDLE_S", 0.3)
    learner = LearnerGroup(ranks, version=3, step_s=1.0)
    service = Part(ALIVE)
    parts = {"service": service, **learner.ranks}
    kept, left = asyncio.run(end_parts(parts, learner, lost))
    assert (kept, left) == ((learner, learner.ranks) if stays else (None, {}))
    assert set(killed) == ({service} if stays else {service, *ranks})


@pytest.mark.parametrize(("start_took_s", "stays"), [(0.1, False), (5.0, True)])
def test_a_busy_learner_is_waited_for_as_long_as_its_start_took(monkeypatch: pytest.MonkeyPatch, start_took_s: float, stays: bool) -> None:
    """A step of minutes is cheaper than to load the model once more; and a start of seconds is cheaper than the step."""
    monkeypatch.setattr("evenkeel.actors.processes.supervision.ray.kill", lambda _: None)
    monkeypatch.setattr("evenkeel.actors.driver.recovery._IDLE_S", 0.1)
    learner = LearnerGroup([Part("busy")], version=3, step_s=1.0)
    learner.start_took_s = start_took_s
    kept, _ = asyncio.run(end_parts(dict(learner.ranks), learner, Lost(("service",))))
    assert (kept is learner) == stays


def test_the_wait_for_a_busy_learner_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as its start took: minutes, with a large model."""
    monkeypatch.setattr("evenkeel.actors.processes.supervision.ray.kill", lambda _: None)
    told: list[str] = []

    async def scenario() -> None:
        learner = LearnerGroup([Part("silent")], version=3, step_s=1.0)
        learner.start_took_s = 400.0
        learner.ranks["learner rank 0"].__ray_ready__.remote = lambda: asyncio.sleep(100.0)  # in a step
        kept, _ = await end_parts(dict(learner.ranks), learner, Lost(("service",)), lambda notice: told.append(str(notice)))
        assert kept is learner

    simulate(scenario)
    assert told == [f"waiting {seconds} s for calls under way <- learner ranks, which may stay" for seconds in (30, 60, 90)]


def test_a_learner_of_a_start_that_failed_is_not_taken_for_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has the one before in its hand, whose ranks have been ended."""
    killed: list[Any] = []
    monkeypatch.setattr("evenkeel.actors.processes.supervision.ray.kill", killed.append)
    before, new = LearnerGroup([Part(ALIVE)], version=0, step_s=1.0), Part(ALIVE)
    assert asyncio.run(end_parts({"service": Part(ALIVE), "learner rank 0": new}, before, Lost(("service",)))) == (None, {})
    assert new in killed


def test_a_learner_that_stays_reads_the_checkpoint_and_ends_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only new ranks have the weights and the empty averages of a run's beginning."""
    told: list[Any] = []

    class Kept:
        async def restore(self, folder: Path, version: int, *, deadline_s: float) -> None:
            told.append((folder, version))

        def kill(self) -> None:
            told.append("ended")

    async def started(*_: Any, **__: Any) -> tuple[str, list[str]]:
        return "new ranks", ["rank 0"]

    monkeypatch.setattr(LearnerGroup, "start", started)
    monkeypatch.setattr("evenkeel.actors.driver.parts.fetch_where_ranks_are", started)
    config: Any = SimpleNamespace(
        deadlines=SimpleNamespace(checkpoint_s=1.0, start_s=1.0, step_s=1.0), needs_reference=False, metrics=SimpleNamespace(bind="")
    )
    kept: Any = Kept()
    saved: Any = SimpleNamespace(state=tmp_path, hf=tmp_path)
    point = StartingPoint(tmp_path, saved, SimpleNamespace(weight_version=7))  # type: ignore[arg-type]
    assert asyncio.run(start_learner(config, point, None, {}, kept)) == (kept, [])  # type: ignore[arg-type]
    assert asyncio.run(start_learner(config, StartingPoint(tmp_path), None, {}, kept)) == ("new ranks", ["rank 0"])  # type: ignore[arg-type]
    assert told == [(tmp_path / "learner", 7), "ended"]


def test_a_rank_that_goes_back_counts_its_calls_from_there() -> None:
    """Of those before some may never have come: what they were to work on was lost with who had made it. Copies of weights that will have
    the same version again are dropped."""
    rank, done = LearnerRankActor(LearnerConfig(), 0, bind=""), list[str]()

    def is_saved(*, wait: bool) -> bool:
        done.append("save is over" if wait else "")
        raise DataError("the disk is full")

    restore = lambda _: done.append("restored")  # noqa: E731
    rank._learner = SimpleNamespace(restore=restore, weights_copy=list, is_saved=is_saved)  # type: ignore[assignment]
    rank._kept = KeptWeights(rank._learner)
    rank.restore(4, Path("a"), 2)
    assert done == ["save is over", "restored"], "the same step will be saved again; how this one ends is nobody's business any more"
    rank.keep_weights(5, 2, 0)
    rank.restore(9, Path("a"), 1)
    assert rank._kept.versions == () and rank._version == 1
    rank.keep_weights(10, 1, 0)
    with pytest.raises(EngineError, match="came as collective call 12, but 11 is the next"):
        rank.keep_weights(12, 1, 0)
    rank.forget_weights(11, 1)
    assert rank._kept.versions == (1,)
    rank.forget_weights(12, 2)
    assert rank._kept.versions == ()


def test_a_group_that_can_never_be_read_takes_the_run_back_and_ends_it_the_fourth_time() -> None:
    """All parts live, so that another service may be able to read it; at the fourth return the run ends with the drawing's own remedy."""
    rollbacks, parts = Rollbacks(None, None), {"learner rank 0": Part(ALIVE), "correction service": Part(ALIVE)}  # type: ignore[arg-type]

    async def lost_three_times() -> ActorLost:
        books, config = OpenBook(groups_per_step=1, max_staleness=0), run_of_one_worker(steps=1, groups_per_step=1, faults=()).config

        async def pulls(_: str, version: int, number: int, groups: list[StoredGroup], lost: list[int], **__: Any) -> dict[int, str]:
            return {one.group_id: LATE for one in groups}

        (ticket,) = books.admit(prompts(0, 1))
        ahead = BatchAhead(0, config.correction, config, books.book, books.changes, pulls, gather_s=0.0)
        for _ in range(3):
            books.put(at_hand(group(ticket)))
            await asyncio.sleep(0.1)
        with pytest.raises(ActorLost) as found:
            await ahead.completed(None, step=0, in_time=lambda work: work)  # type: ignore[arg-type]
        return found.value

    for _ in range(MOST_ROLLBACKS):
        error = asyncio.run(lost_three_times())
        lost = asyncio.run(lost_among(parts, error))
        assert lost.parts == () and not lost.is_replaceable, "the run goes back; a new service alone doesn't do"
        rollbacks.allow(lost, error, saved=3, step=5)
    with pytest.raises(ActorLost, match=r"the 4th death after step 3, .*: group 0 was sampled 3 times.*lower deadlines.bytes_per_s$"):
        rollbacks.allow(lost, error, saved=3, step=5)


def test_a_run_goes_back_to_one_checkpoint_so_many_times_only() -> None:
    rollbacks = Rollbacks(None, None)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="a bit differs"):
        rollbacks.allow(Lost(), EngineError("a bit differs"), saved=3, step=5)
    for _ in range(MOST_ROLLBACKS):
        rollbacks.allow(Lost(("rank",)), EngineError("step 5"), saved=3, step=4)
    for _ in range(MOST_ROLLBACKS):  # a new checkpoint is progress
        rollbacks.allow(Lost(("rank",)), EngineError("step 8"), saved=6, step=7)
    with pytest.raises(ActorLost, match=r"^rank: the 4th death after step 6, before there was another checkpoint: step 9$"):
        rollbacks.allow(Lost(("rank",)), EngineError("step 9"), saved=6, step=8)


@pytest.mark.parametrize(("steps", "ends"), [([5, 6, 7, 8, 9, 10], False), ([5, 5, 5, 5], True)], ids=["chance", "the same step"])
def test_deaths_that_are_hours_apart_end_no_run_unless_they_come_at_the_same_step(
    monkeypatch: pytest.MonkeyPatch, steps: list[int], ends: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr("evenkeel.actors.driver.recovery.time", SimpleNamespace(monotonic=lambda: now[0]))
    rollbacks = Rollbacks(None, None)  # type: ignore[arg-type]
    for step in steps[:3]:
        rollbacks.allow(Lost(("rank",)), EngineError("killed"), saved=3, step=step)
        now[0] += 4000.0
    if ends:
        with pytest.raises(ActorLost, match="the 4th death after step 3"):
            rollbacks.allow(Lost(("rank",)), EngineError("killed"), saved=3, step=steps[3])
    else:
        for step in steps[3:]:
            rollbacks.allow(Lost(("rank",)), EngineError("killed"), saved=3, step=step)
            now[0] += 4000.0


def test_a_service_that_dies_every_few_steps_is_replaced_after_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """At other steps, and after new checkpoints, too: that never ends the run, and takes no more than its share of it. An hour later the
    first of them no longer count."""
    now, told = [0.0], list[str]()
    monkeypatch.setattr("evenkeel.actors.driver.recovery.time", SimpleNamespace(monotonic=lambda: now[0]))
    rollbacks = Rollbacks(None, None)  # type: ignore[arg-type]

    async def dies(step: int) -> float:
        rollbacks.allow(Lost(("correction service",)), EngineError("killed"), saved=step - step % 3, step=step, is_replaced=True)
        before = asyncio.get_running_loop().time()
        await rollbacks.pause(lambda level, text: told.append(f"{level}: {text}"))
        now[0] += 20.0
        return asyncio.get_running_loop().time() - before

    async def scenario() -> None:
        assert [round(await dies(step)) for step in range(18)] == [0] * 10 + [2, 4, 8, 16, 32, 60, 60, 60]
        now[0] += 3600.0
        assert await dies(18) == 0.0

    simulate(scenario)
    assert told[0] == "warning: the service was lost 11 times in 60 minutes: a new one in 2 s" and len(told) == 8


def test_replaced_services_are_no_returns_of_a_learner_that_dies_later() -> None:
    """Three services died at other steps. Before, the first death of a rank after that counted as the fourth return, and ended the run."""
    rollbacks = Rollbacks(None, None)  # type: ignore[arg-type]
    for step in (4, 5, 6):
        rollbacks.allow(Lost(("correction service",)), EngineError("killed"), saved=3, step=step, is_replaced=True)
    for step in (7, 8, 9):
        rollbacks.allow(Lost(("learner rank 0",)), EngineError("killed"), saved=3, step=step)
    with pytest.raises(ActorLost, match="the 4th death after step 3"):
        rollbacks.allow(Lost(("learner rank 0",)), EngineError("killed"), saved=3, step=10)


class StubbornSampler:
    """Takes until `finish` is set; may swallow its cancellation, as a library's code could."""

    def __init__(self, *, is_stubborn: bool = False) -> None:
        self.finish, self.aborted, self._is_stubborn = asyncio.Event(), 0, is_stubborn
        self.engine, self.lost_of = SimpleNamespace(requests_in_flight=0, metrics=None), ""

    async def group(self, prompt: Any, *, group_id: int, admitted_version: int, **_: Any) -> Group:
        try:
            await self.finish.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            if not self._is_stubborn:
                raise
            await self.finish.wait()
        return group(SimpleNamespace(group_id=group_id, prompt=prompt, admitted_version=admitted_version))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_stubborn", [False, True], ids=["aborted", "finishes all the same"])
def test_a_worker_gives_up_what_it_has_under_way_when_it_follows_another_generation(is_stubborn: bool) -> None:
    async def scenario() -> None:
        worker = RolloutWorker("0", SimpleNamespace(topk=0, has_wide_fields=False))  # type: ignore[arg-type]
        sampler = StubbornSampler(is_stubborn=is_stubborn)
        worker._sampler = sampler  # type: ignore[assignment]
        worker._endpoint = SimpleNamespace(add=lambda *_: None, set=lambda *_: None)  # type: ignore[assignment]
        tickets = GroupBook(groups_per_step=2, max_staleness=0).admit(prompts(0, 2), now=0.0)
        first = asyncio.ensure_future(worker.generate_group(tickets[0]))
        await asyncio.sleep(0.01)
        await worker.follow(1)
        await asyncio.sleep(0.01)
        assert sampler.aborted == 1
        second = [asyncio.ensure_future(worker.generate_group(ticket, 1)) for ticket in tickets]
        await asyncio.sleep(0.01)
        sampler.finish.set()
        assert [facts.group_id for facts, _ in await asyncio.gather(*second)] == [0, 1]
        with pytest.raises(LateError, match="withdrawn"):
            await first

    asyncio.run(scenario())
