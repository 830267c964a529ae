"""Faults of every class, in simulated time: the real pool and the real queue over workers that die, freeze, lag and talk rubbish.

Each run has to finish what was admitted, or to say why it can't; and no worker is lost by what is not its fault.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

import actors.pool.workers
from actors.carriers import FAILED, LOST, ActorInfo, GroupFailure, Ticket, WorkerLoad
from actors.config import DeadlinesConfig
from actors.pool.dispatch import WaitingWork
from actors.pool.faults import GroupBook, LossBook
from actors.pool.pool import RolloutPool
from actors.queue.queue_actor import TrajectoryQueueActor
from correction.errors import DeadlineExceeded, EngineError, LateError, RequestError
from rollout.config import AnswerSampling
from rollout.trajectory import Group, GroupFacts
from tests.actors.cases import FakeActor, group, prompt
from tests.actors.pool.pool_cases import worker_settings
from tests.actors.processes.test_supervision import errors_of_ray
from tests.actors.simulated_time import simulate
from tests.failures.measured import PLAYED, Measured

GROUP_S = 10.0
START_S = 60.0
Outcome = GroupFacts | GroupFailure


class Mortal:
    """A worker that samples a group in GROUP_S, unless the test's `sample` says otherwise; killed, each of its calls ends."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world
        self.finished: list[int] = []
        self.dead = asyncio.Event()
        self.is_frozen = False
        self.loads = 0

    async def start(self, *_: Any) -> ActorInfo:
        await asyncio.sleep(START_S)
        return ActorInfo("rollout", self.name, 1, "127.0.0.1:1", node=self.world.node_of(self.name))

    async def load(self) -> WorkerLoad:
        self.loads += 1
        await self._living(self._answer())
        return WorkerLoad(1.0, 2.0, 3, 4)

    async def _answer(self) -> None:
        if self.is_frozen:
            await asyncio.sleep(1e6)

    async def generate_group(self, ticket: Ticket) -> tuple[Outcome, Group | None]:
        found: tuple[Outcome, Group | None] = await self._living(self._one(ticket))
        return found

    async def _one(self, ticket: Ticket) -> tuple[Outcome, Group | None]:
        await self._answer()
        outcome = await self.world.sample(self, ticket)
        if outcome is not None:
            return outcome, group(ticket) if isinstance(outcome, GroupFacts) else None
        await asyncio.sleep(GROUP_S)
        self.finished.append(ticket.group_id)
        return group(ticket).facts, group(ticket)

    async def answer(self, prompts: list[Any], how: AnswerSampling) -> list[str]:
        await self._living(self.world.sample(self, Ticket(-1, prompts[0], 0)))
        return [p.prompt_id for p in prompts]

    async def _living(self, work: Coroutine[Any, Any, Any]) -> Any:
        """As Ray would: whoever waits for a dead actor is told."""
        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self.dead.wait())
        try:
            await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
            if self.dead.is_set():
                raise ray.exceptions.ActorDiedError()
            return working.result()
        finally:
            for one in (working, dying):
                one.cancel()


class AtOnce:
    """Weight sync that takes no time; `heals` says whether a dirty engine is well again after it."""

    version = 0

    def __init__(self, world: World) -> None:
        self.world = world
        self.resynced: list[str] = []

    def join(self, target: Any) -> None:
        target.version = 0

    def leave(self, name: str) -> None: ...

    def resync(self, target: Any, reason: str) -> None:
        self.resynced.append(target.name)
        target.version = -1
        asyncio.get_running_loop().call_later(1.0, self._receipt, target)

    def _receipt(self, target: Any) -> None:
        target.version = 0
        self.world.pool.wake()


class World:
    """A pool over mortal workers, with a queue that has places for `places` groups, and what it told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, workers: int, places: int, no_workers_s: float | None = None) -> None:
        self.mortals: dict[str, Mortal] = {}
        self.events: list[str] = []
        self.finished: list[int] = []
        self.options: list[dict[str, Any]] = []
        self.nodes: asyncio.Event = asyncio.Event()
        self.nodes.set()
        self.node_of: Callable[[str], str] = lambda name: f"node-{name}"
        self.sample: Callable[[Mortal, Ticket], Coroutine[Any, Any, Outcome | None]] = nothing_special
        self.queue = TrajectoryQueueActor(groups_per_step=places, max_staleness=0)
        self.sync = AtOnce(self)
        fake_ray = SimpleNamespace(
            remote=lambda cls: SimpleNamespace(options=self._with_options),
            kill=lambda actor: actor.instance.dead.set(),
            exceptions=ray.exceptions,
        )
        monkeypatch.setattr(actors.pool.workers, "ray", fake_ray)
        monkeypatch.setattr("ray.kill", fake_ray.kill)
        settings = worker_settings(workers)
        observer = SimpleNamespace(
            joined=lambda _: None,
            left=lambda _: None,
            group_finished=lambda summary: self.finished.append(summary.group_id),
            lost=lambda _: None,
            event=lambda _, text: self.events.append(text),
        )
        self.pool = RolloutPool(settings, DeadlinesConfig(no_workers_s=no_workers_s), FakeActor(self.queue), observer)

    def _with_options(self, **options: Any) -> Any:
        self.options.append(options)
        return SimpleNamespace(remote=self._make)

    def _make(self, name: str, *_: Any, **__: Any) -> FakeActor:
        self.mortals[name] = Mortal(name, self)
        actor = FakeActor(self.mortals[name])
        actor.__ray_ready__ = SimpleNamespace(remote=lambda: asyncio.ensure_future(self.nodes.wait()))  # type: ignore[misc]
        return actor

    async def begin(self) -> None:
        self.pool.start()
        await self.pool.first_worker()
        await asyncio.sleep(0.001)
        self.pool.follow(self.sync)  # type: ignore[arg-type]
        self.feeding = asyncio.create_task(self.pool.feed((prompt(i) for i in itertools.count()), [], lambda _: None))

    async def all_done(self, count: int) -> None:
        """Until so many groups are finished or discarded. Raises: what ends the run."""
        while True:
            counts = self.queue._queue.counts()
            if len(self.finished) + counts["discarded"] >= count:
                return
            if self.pool._failure.done():
                self.pool._failure.result()
            await asyncio.sleep(1.0)

    @property
    def lost(self) -> list[str]:
        return [event for event in self.events if " is gone: " in event]

    @property
    def sampled_again(self) -> str:
        """By what is said of the lost workers."""
        return f"{sum(int(event.partition('others take its ')[2].split()[0]) for event in self.lost)} groups"

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()


async def nothing_special(mortal: Mortal, ticket: Ticket) -> None: ...


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    simulate(scenario)


def test_eleven_of_forty_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of a spot pool go. The others take the groups over, the replacements start without a pause."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=40, places=160)
        await world.begin()
        await asyncio.sleep(GROUP_S / 2)
        for name in range(11):
            world.mortals[str(name)].dead.set()
        await asyncio.sleep(1.0)
        assert len(world.lost) == 11 and len(world.mortals) == 51
        await world.all_done(160)
        assert sorted(world.finished) == list(range(160)) and not world.pool._failure.done()
        assert world.now < START_S + 6 * GROUP_S
        follows = "the others go on; 11 come in their place"
        Measured("11 of 40 rollout workers lost at once", follows, None, world.sampled_again, PLAYED).write()

    play(scenario)


def test_all_workers_lost_at_once_are_no_groups_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group goes to one dead worker after the other before the pool knows; it is not taken for what killed them."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=6, places=24)
        await world.begin()
        await asyncio.sleep(GROUP_S / 2)
        for mortal in list(world.mortals.values()):
            mortal.dead.set()
        await world.all_done(24)
        assert sorted(world.finished) == list(range(24)) and len(world.lost) == 6

    play(scenario)


def test_fifteen_minutes_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run says what it waits for, nobody's deadline counts meanwhile, and it goes on when a node comes."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=8)
        await world.begin()
        await asyncio.sleep(GROUP_S / 2)
        world.nodes.clear()
        for mortal in list(world.mortals.values()):
            mortal.dead.set()
        began = world.now
        await asyncio.sleep(900.0)
        assert world.pool.last_progress() == world.now, "a batch is not late while nobody could sample it"
        waiting = [event for event in world.events if event.startswith("waiting ")]
        assert len(waiting) == pytest.approx(900.0 / 30.0, abs=1)
        assert "<- a rollout worker with weights v0 (0 workers joined, 0 of them with these weights, 2 starting)" in waiting[0]
        assert len(world.mortals) == 4, "it asks for two, not for two every ten minutes"
        world.nodes.set()
        await world.all_done(8)
        assert world.now - began == pytest.approx(900.0 + START_S + GROUP_S, abs=5.0)
        follows = "the run waits, says for what, and goes on when nodes come: from then on an engine's start and a group"
        Measured("all workers lost, and no node for 15 minutes", follows, world.now - began - 900.0, world.sampled_again, PLAYED).write()

    play(scenario)


def test_without_workers_a_run_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=8, no_workers_s=600.0)
        await world.begin()
        world.nodes.clear()
        for mortal in list(world.mortals.values()):
            mortal.dead.set()
        began = world.now
        with pytest.raises(DeadlineExceeded, match=r"groups .* <- a rollout worker with weights v0: not done in 600 s"):
            await world.all_done(8)
        assert world.now - began == pytest.approx(600.0, abs=10.0)

    play(scenario)


def test_a_prompt_that_no_engine_can_sample_is_discarded_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, on two workers; no worker is lost by it."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=8)
        tried: list[str] = []

        async def poisoned(mortal: Mortal, ticket: Ticket) -> Outcome | None:
            if ticket.group_id != 3:
                return None
            tried.append(mortal.name)
            return GroupFailure(3, "one logprob is not finite", is_final=False)

        world.sample = poisoned
        await world.begin()
        await world.all_done(8)
        assert sorted(tried) == ["0", "1"] and world.lost == []
        assert dict(world.queue._queue.discarded_by_reason) == {FAILED: 1}
        assert [event for event in world.events if "is discarded" in event] == [
            f"group 3 (train/0/3) is discarded, {FAILED}: one logprob is not finite"
        ]

    play(scenario)


def test_a_prompt_that_nobody_could_ever_sample_is_discarded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=8)

        async def too_long(mortal: Mortal, ticket: Ticket) -> Outcome | None:
            return GroupFailure(3, "9000 prompt tokens", is_final=True) if ticket.group_id == 3 else None

        world.sample = too_long
        await world.begin()
        await world.all_done(8)
        assert not any("is sampled again" in event for event in world.events)
        assert dict(world.queue._queue.discarded_by_reason) == {FAILED: 1} and world.lost == []

    play(scenario)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_prompt_that_kills_engines_is_found(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """After two losses with it, it never comes with another suspect; the third loss is its end. All others are sampled."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=workers, places=16)

        async def deadly(mortal: Mortal, ticket: Ticket) -> None:
            if ticket.group_id == 5:
                await asyncio.sleep(1.0)
                mortal.dead.set()
                await asyncio.sleep(1.0)

        world.sample = deadly  # type: ignore[assignment]
        await world.begin()
        await world.all_done(17)  # the place of the one that is discarded is taken
        assert dict(world.queue._queue.discarded_by_reason) == {LOST: 1}
        assert {*range(16)} - {*world.finished} == {5} and len(world.lost) == 3

    play(scenario)


def test_a_queue_that_is_silent_for_ninety_seconds_costs_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=8)
        await world.begin()
        silent_until = world.now + 90.0
        for name in ("put", "wait_for_places", "admit"):
            method: Callable[..., Awaitable[Any]] = getattr(world.queue, name)

            async def late(*arguments: Any, method: Callable[..., Awaitable[Any]] = method) -> Any:
                await asyncio.sleep(max(0.0, silent_until - world.now))
                return await method(*arguments)

            monkeypatch.setattr(world.queue, name, late)
        await world.all_done(8)
        assert world.lost == [] and sorted(world.finished) == list(range(8))
        assert world.now >= silent_until
        assert any("trajectory queue: late, no answer in" in event for event in world.events)
        assert world.queue._queue.counts()["admitted"] == 8, "asked again, it admits nothing twice"

    play(scenario)


def test_a_worker_that_waits_for_a_lost_queue_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=8)
        failed: list[int] = []

        async def once(mortal: Mortal, ticket: Ticket) -> None:
            if ticket.group_id == 3 and not failed:
                failed.append(3)
                raise ray.exceptions.RayTaskError("f", "a long traceback", LateError("put <- trajectory queue: its process is gone"))

        world.sample = once  # type: ignore[assignment]
        await world.begin()
        await world.all_done(8)
        assert world.lost == [] and sorted(world.finished) == list(range(8))

    play(scenario)


def test_an_engine_ten_times_as_slow_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, workers=4, places=400)

        async def slow(mortal: Mortal, ticket: Ticket) -> None:
            if mortal.name == "0":
                await asyncio.sleep(9 * GROUP_S)

        world.sample = slow  # type: ignore[assignment]
        await world.begin()
        await world.all_done(400)
        assert world.lost == [] and sorted(world.finished) == list(range(400))
        assert [event for event in world.events if "sampled its first group" not in event] == []
        assert len(world.mortals["0"].finished) < 0.5 * len(world.mortals["1"].finished)

    play(scenario)


FOR_GOOD = [error for error in errors_of_ray() if not isinstance(error, ray.exceptions.ActorUnavailableError)]


@pytest.mark.parametrize("error", FOR_GOOD, ids=lambda error: type(error).__name__)
def test_whatever_ray_says_of_a_worker_it_is_replaced(monkeypatch: pytest.MonkeyPatch, error: ray.exceptions.RayError) -> None:
    """Unless it says that it can't be reached just now: test_hiccups.py."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=8)

        async def fails(mortal: Mortal, ticket: Ticket) -> None:
            if mortal.name == "0":
                raise error

        world.sample = fails  # type: ignore[assignment]
        await world.begin()
        await world.all_done(8)
        assert len(world.lost) == 1 and world.lost[0].startswith("rollout worker 0 is gone") and type(error).__name__ in world.lost[0]
        assert sorted(world.finished) == list(range(8))

    play(scenario)


@pytest.mark.parametrize("heals", [True, False])
def test_an_engine_that_talks_rubbish_gets_its_weights_anew(monkeypatch: pytest.MonkeyPatch, heals: bool) -> None:
    """Four of its requests fail in a row, of different groups: it has a NaN in its weights. If they don't help it, it is replaced."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=64)

        async def rubbish(mortal: Mortal, ticket: Ticket) -> Outcome | None:
            if mortal.name == "0" and not (heals and world.sync.resynced):
                await asyncio.sleep(1.0)
                return GroupFailure(ticket.group_id, "one logprob is not finite", is_final=False)
            return None

        world.sample = rubbish
        await world.begin()
        await world.all_done(64)
        assert sorted(world.finished) == list(range(64)), "each on the other worker"
        if heals:
            assert world.sync.resynced == ["0"] and world.lost == [] and world.mortals["0"].finished
        else:
            assert set(world.sync.resynced) == {"0"} and len(world.lost) <= 1

    play(scenario)


def test_rubbish_from_everybody_ends_the_run_before_the_prompts_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, workers=4, places=64)

        async def rubbish(mortal: Mortal, ticket: Ticket) -> Outcome | None:
            await asyncio.sleep(1.0)
            return GroupFailure(ticket.group_id, "one logprob is not finite", is_final=False)

        world.sample = rubbish
        await world.begin()
        with pytest.raises(RequestError, match=r"16 of the last 16 groups got no usable answer .* The last: one logprob is not finite"):
            await world.all_done(10**6)

    play(scenario)


def test_workers_that_die_one_after_the_other_end_the_run_after_longer_and_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers: the budget of ten losses without a finished group; pauses of 2 to 256 s from the third on."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=1)

        async def dies(mortal: Mortal, ticket: Ticket) -> None:
            mortal.dead.set()
            await asyncio.sleep(1.0)

        world.sample = dies  # type: ignore[assignment]
        monkeypatch.setattr("actors.pool.faults.STRIKES", 100)  # otherwise the group is found guilty first
        await world.begin()
        with pytest.raises(EngineError, match=r"^11 rollout workers were lost one after the other, all within 60 minutes, and not one"):
            await world.all_done(1)
        pauses = [event for event in world.events if "the next replacement starts in" in event]
        assert [event.rpartition(" in ")[2] for event in pauses] == [f"{2**i} s" for i in range(1, 9)]

    play(scenario)


def test_a_frozen_worker_is_condemned_by_its_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute after it froze, though its answers would have had many minutes."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=8)
        await world.begin()
        await asyncio.sleep(1.0)
        world.mortals["0"].is_frozen = True

        async def waits(mortal: Mortal, ticket: Ticket) -> None:
            if mortal.name == "0":
                await asyncio.sleep(1e6)

        world.sample = waits  # type: ignore[assignment]
        froze = world.now
        while not world.lost:
            await asyncio.sleep(1.0)
        assert 30.0 <= world.now - froze <= 37.0 and "missed its heartbeat" in world.lost[0]
        await world.all_done(8)
        assert sorted(world.finished) == list(range(8))

    play(scenario)


def test_a_worker_that_has_just_finished_something_is_not_asked_whether_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hundreds of workers the questions would be a large part of what the driver does. Idle again it is asked every 5 s."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=1, places=8)

        async def one_after_the_other(mortal: Mortal, ticket: Ticket) -> Outcome:
            await asyncio.sleep(4.0 * (ticket.group_id + 1))
            return group(ticket).facts

        world.sample = one_after_the_other
        await world.begin()
        await world.all_done(1)
        asked = world.mortals["0"].loads
        await world.all_done(8)
        assert world.mortals["0"].loads == asked
        await asyncio.sleep(62.0)
        assert 11 <= world.mortals["0"].loads - asked <= 12

    play(scenario)


def test_hundreds_of_workers_are_looked_through_for_many_changes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receipts come each millisecond while groups wait: the pool looks each 4 ms, not with each receipt; and all groups find a worker."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=200, places=400)
        await world.begin()
        looks: list[float] = []
        take = WaitingWork.take
        monkeypatch.setattr(WaitingWork, "take", lambda self, *workers: looks.append(world.now) or take(self, *workers))
        for worker in world.pool._joined():
            worker.sync.version = -1  # a version is out, and nobody has it yet
        await asyncio.sleep(GROUP_S / 2)
        looks.clear()
        for worker in world.pool._joined():
            worker.sync.version = 0
            world.pool.wake()
            await asyncio.sleep(0.001)
        assert len(looks) > 3 and all(later - earlier > 0.0039 for earlier, later in itertools.pairwise(looks))
        await world.all_done(400)
        assert sorted(world.finished) == list(range(400))

    play(scenario)


def test_what_goes_wrong_while_work_is_handed_out_ends_the_run_with_hundreds_of_workers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, workers=100, places=200)

        def wrong(*_: Any) -> Any:
            raise RuntimeError("a fault of the dispatch")

        await world.begin()
        monkeypatch.setattr(WaitingWork, "take", wrong)
        with pytest.raises(RuntimeError, match="a fault of the dispatch"):
            await world.all_done(400)

    play(scenario)


def test_a_node_that_lost_two_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, workers=3, places=30)
        world.node_of = lambda name: "bad" if name in "01" else "good"
        await world.begin()
        assert [options["scheduling_strategy"] for options in world.options] == [None] * 3
        for name in "01":
            world.mortals[name].dead.set()
            await asyncio.sleep(1.0)
        await world.all_done(30)
        assert world.options[3]["scheduling_strategy"] is None, "one loss is chance"
        (expression,) = world.options[4]["scheduling_strategy"].soft
        assert (expression.key, expression.operator.values) == ("ray.io/node-id", ["bad"])

    play(scenario)


def test_an_evaluation_ends_rather_than_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=0)

        async def deadly(mortal: Mortal, ticket: Ticket) -> None:
            mortal.dead.set()
            await asyncio.sleep(1.0)

        world.sample = deadly  # type: ignore[assignment]
        await world.begin()
        with pytest.raises(EngineError):
            await world.pool.answer([prompt(0)], AnswerSampling())
        assert len(world.lost) == 3 and not world.pool._failure.done()

    play(scenario)


def test_losses_are_counted_in_time_and_forgotten_with_work() -> None:
    book = LossBook()
    for second in range(5):
        book.lost(float(second), "a" if second < 2 else "b")
    assert [book.pause_s(size) for size in (1, 4, 5, 40)] == [16.0, 2.0, 0.0, 0.0]
    assert book.avoided(10.0) == ["a", "b"] and book.avoided(3601.5) == ["b"] and book.avoided(4000.0) == []
    book.worked()
    assert book.pause_s(1) == 0.0
    for _ in range(121):
        book.lost(5000.0)
    with pytest.raises(EngineError):
        book.check(40, "it died")
    book.check(41, "it died")


def test_losses_without_work_that_are_far_apart_end_no_run() -> None:
    """Groups of hours on a spot market: ten are lost before one is finished, and it goes on. Within an hour the eleventh is the end."""
    book = LossBook()
    for number in range(100):
        book.lost(400.0 * number)
        book.check(1, "its node was taken away")
    assert book.in_vain == 10 and book.pause_s(20) == 0.0
    for second in range(1, 12):
        book.lost(39_600.0 + second)
    with pytest.raises(EngineError, match="all within 60 minutes"):
        book.check(1, "it died")


def test_a_group_that_is_finished_has_a_clean_slate() -> None:
    book = GroupBook()
    assert book.lost([1, 2], "0") == [] and not book.is_suspect(1)
    book.finished(1, "1")
    assert book.lost([1, 2], "1") == [] and book.is_suspect(2) and not book.is_suspect(1)
    assert book.lost([1, 2], "1") == [2]
    assert [book.failed(9, worker) for worker in "01"] == [True, False]
