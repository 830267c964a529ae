"""What counts as a loss of a worker, what does not, and how many losses end a run; in simulated time."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import ray.exceptions

from evenkeel.actors.carriers import PoolFailure, Ticket
from evenkeel.actors.pool.faults import WorkerLosses
from evenkeel.actors.processes.supervision import HALF_OVER, LongWait
from evenkeel.correction.errors import EngineError
from evenkeel.rollout.config import AnswerSampling
from tests.actors.cases import group, prompt
from tests.actors.pool.mortal_workers import GROUP_S, START_S, Mortal, Outcome, World, play
from tests.actors.processes.test_supervision import errors_of_ray
from tests.failures.measured import PLAYED, Measured


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


def test_a_worker_whose_engine_has_a_successor_is_sent_weights_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeat says so: nothing of its own may fail meanwhile, as its agents wait."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=1, places=50)

        async def waits(mortal: Mortal, ticket: Ticket) -> None:
            if ticket.group_id == 7:
                mortal.lost_of = "the scheduler is gone"
                while mortal.lost_of:
                    await asyncio.sleep(1.0)
                    if world.sync.resynced:
                        mortal.lost_of = ""

        world.sample = waits  # type: ignore[assignment]
        await world.begin()
        await world.all_done(50)
        assert world.lost == [] and world.sync.resynced == ["0"] and world.failures == [PoolFailure.ENGINE_LOST]
        assert sorted(world.finished) == list(range(50))

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


def test_workers_that_die_one_after_the_other_end_the_run_after_longer_and_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers: the budget of ten losses without a finished group; pauses of 2 to 256 s from the third on."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=1)

        async def dies(mortal: Mortal, ticket: Ticket) -> None:
            mortal.dead.set()
            await asyncio.sleep(1.0)

        world.sample = dies  # type: ignore[assignment]
        monkeypatch.setattr("evenkeel.actors.pool.pool.MAX_ENGINE_LOSSES", 100)  # otherwise the group is found guilty first
        await world.begin()
        with pytest.raises(EngineError, match=r"^11 rollout workers were lost one after the other, all within 60 minutes, and not one"):
            await world.all_done(1)
        pauses = [event for event in world.events if "the next replacement starts in" in event]
        assert [event.rpartition(" in ")[2] for event in pauses] == [f"{2**i} s" for i in range(1, 9)]
        fault = "11 workers of a pool of two (3 x the pool, if that is above 10) lost in an hour, and not one group finished"
        Measured(fault, "replacements start after longer and longer pauses, and then the run ends in a sentence", None, "-", PLAYED).write()

    play(scenario)


def test_an_engine_that_dies_after_each_start_comes_back_later_and_later_while_the_other_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the only node there is. At once it would start 45 times in this hour, and as often in the next; the run goes on all the same."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=20_000)
        world.node_of = lambda name: "the only one"
        born: list[float] = []

        async def dies_soon(mortal: Mortal) -> None:
            born.append(world.now)
            if mortal.name != "1":
                asyncio.get_running_loop().call_later(START_S + 20.0, mortal.dead.set)

        async def takes_longer(mortal: Mortal, ticket: Ticket) -> None:
            if mortal.name == "1":
                await asyncio.sleep(60.0)  # or its groups of two hours would be more than ten thousand

        world.starts, world.sample = dies_soon, takes_longer
        await world.begin()
        await asyncio.sleep(3600.0)
        between = [later - earlier - START_S - 20.0 for earlier, later in itertools.pairwise(born[1:])]
        assert between == pytest.approx([0.0] * 10 + [2.0**i for i in range(1, 6)] + [60.0] * (len(between) - 15), abs=0.1)
        assert 30 < len(born) < 36
        assert "11 losses of rollout workers within 60 minutes: the next replacement starts in 2 s" in world.events
        in_an_hour = len(born)
        await asyncio.sleep(5000.0)
        assert len(born) - in_an_hour < 40 and not world.pool.has_failed
        assert len(world.mortals["1"].finished) > 800

    play(scenario)


def test_a_frozen_worker_is_condemned_by_its_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute after it froze, though its answers would have had many minutes; before, the stacks of all processes are asked for."""
    stacks: list[float] = []

    async def scenario() -> None:
        HALF_OVER.set(lambda wait: stacks.append(world.now - froze) if wait.what == "heartbeat <- rollout worker 0" else None)
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
        assert len(stacks) == 1 and 15.0 <= stacks[0] <= 27.0
        await world.all_done(8)
        assert sorted(world.finished) == list(range(8))

    play(scenario)


@pytest.mark.parametrize("workers", [2, 65])
def test_stacks_are_asked_for_once_each_time_an_engine_is_silent(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Its worker answers, and says for how long the engine has not: half of its time is 15 s. A large pool asks each 15 s; but as often as
    a small one while an engine is silent, or it would miss the end of a silence."""
    stacks: list[LongWait] = []

    async def scenario() -> None:
        HALF_OVER.set(stacks.append)
        world = World(monkeypatch, workers=workers, places=0)
        await world.begin()
        for seconds in (10.0, 20.0, 30.0, 0.0, 20.0):
            world.mortals["1"].engine_silent_s = seconds
            await asyncio.sleep(11.0)
        assert world.lost == []

    play(scenario)
    assert stacks == [LongWait("heartbeat <- rollout worker 1")] * 2


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


@pytest.mark.parametrize(("workers", "times", "pause_s"), [(64, 30, 5.0), (65, 10, 15.0)])
def test_a_large_pool_asks_a_third_as_often(monkeypatch: pytest.MonkeyPatch, workers: int, times: int, pause_s: float) -> None:
    """Within 150 s, with heartbeat_s at 30 s; a hang is noticed that much later than the pause. An answered probe of the weights is a sign
    of life, too: it was a call to the same process."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=workers, places=0)
        await world.begin()
        await asyncio.sleep(1.0)
        asked = world.mortals["0"].loads
        await asyncio.sleep(150.0)
        assert world.mortals["0"].loads == asked + times
        world.mortals["0"].is_frozen, froze = True, world.now
        while not world.lost:
            await asyncio.sleep(0.5)
        assert 30.0 <= world.now - froze <= 30.5 + pause_s
        worker, asked = world.pool.workers["1"], world.mortals["1"].loads
        for _ in range(6):
            worker.sync.answered_at = world.now
            await asyncio.sleep(pause_s - 1.0)
        assert world.mortals["1"].loads <= asked + 1

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
        assert len(world.lost) == 3 and not world.pool.has_failed

    play(scenario)


def test_losses_are_counted_in_time_and_forgotten_with_work() -> None:
    book = WorkerLosses()
    for second in range(5):
        book.lost(float(second), "a" if second < 2 else "b")
    assert [book.pause_s(size) for size in (1, 4, 5, 40)] == [16.0, 2.0, 0.0, 0.0]
    assert [book.pause_s(*counts) for counts in ((40, 1), (40, 2), (40, 5), (1, 2), (40, 99))] == [0.0, 2.0, 16.0, 16.0, 300.0]
    assert book.avoided(10.0) == ["a", "b"] and book.avoided(3601.5) == ["b"] and book.avoided(4000.0) == []
    book.worked()
    assert book.pause_s(1) == 0.0
    book.lost(4000.0, "c", is_in_vain=False)
    book.lost(4000.0, "c", is_in_vain=False)
    assert (book.in_vain, book.avoided(4000.0)) == (0, ["c"])
    for _ in range(121):
        book.lost(5000.0)
    with pytest.raises(EngineError):
        book.check(40, "it died")
    book.check(41, "it died")


def test_a_node_s_engines_that_are_lost_with_it_are_one_loss() -> None:
    book = WorkerLosses()
    for at in range(0, 3000, 300):  # ten nodes of eight engines
        for engine in range(8):
            book.lost(at + engine, f"node {at}")
            book.worked()
    assert book.pause_s(2) == 0.0
    book.lost(3000.0, "another")
    book.worked()
    assert book.pause_s(2) == 2.0


def test_a_large_pool_that_loses_its_usual_share_is_not_slowed() -> None:
    """180 of 64 workers in an hour, as on a bad spot market. Starts that fail have a pause of their own, and don't count."""
    book = WorkerLosses()
    for number in range(400):
        book.lost(20.0 * number, "a")
        book.lost(20.0 * number, "a", was_up=False)
        book.worked()
        assert (book.pause_s(64), book.pause_s(64, 3)) == (0.0, 4.0)
    for _ in range(12):  # to 193 within an hour, both of its ends counted
        book.lost(20.0 * 399)
        book.worked()
    assert (book.pause_s(64), book.pause_s(65), book.pause_s(64, 3)) == (2.0, 0.0, 4.0)
    assert book.pause_s(64, is_alone=True) == 0.0, "the whole run would wait"
    assert book.why_pause(64, 2, is_alone=True) == "2 starts in a row failed"
    window = "193 losses of rollout workers within 60 minutes"
    assert [book.why_pause(64, failed) for failed in (1, 3)] == [window, "3 starts in a row failed"]


def test_losses_without_work_that_are_far_apart_end_no_run() -> None:
    """Groups of hours on a spot market: ten are lost before one is finished, and it goes on. Within an hour the eleventh is the end."""
    book = WorkerLosses()
    for number in range(100):
        book.lost(400.0 * number)
        book.check(1, "its node was taken away")
    assert book.in_vain == 10 and book.pause_s(20) == 0.0
    for second in range(1, 12):
        book.lost(39_600.0 + second)
    with pytest.raises(EngineError, match="all within 60 minutes"):
        book.check(1, "it died")
