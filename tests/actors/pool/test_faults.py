"""Faults of every class, in simulated time: the real pool and the real book over workers that die, freeze, lag and talk rubbish.

Each run has to finish what was admitted, or to say why it can't; and no worker is lost by what is not its fault.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from evenkeel.actors.carriers import DiscardReason, GroupFailure, Ticket
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.pool.dispatch import WaitingWork
from evenkeel.actors.processes.supervision import HALF_OVER, LongWait
from evenkeel.correction.errors import DeadlineExceeded, RequestError, counted
from tests.actors.pool.mortal_workers import GROUP_S, START_S, Mortal, Outcome, World, play
from tests.failures.measured import PLAYED, Measured


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
        assert sorted(world.finished) == list(range(160)) and not world.pool.has_failed
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
        HALF_OVER.set(lambda wait: stacks.append((wait, world.now - began)))
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

    stacks: list[tuple[LongWait, float]] = []
    play(scenario)
    for_weights = [wait for wait, _ in stacks if wait.what.endswith(" <- a rollout worker with weights v0") and not wait.has_deadline]
    assert len(for_weights) == 1, "and two for a node"
    assert [at for _, at in stacks] == pytest.approx([600.0] * 3, abs=1.0)


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
        assert dict(world.books.book.discarded_by_reason) == {DiscardReason.FAILED: 1}
        assert [event for event in world.events if "is discarded" in event] == [
            f"group 3 (train/0/3) is discarded, {DiscardReason.FAILED}: one logprob is not finite"
        ]
        follows = "it is discarded with the reason, after two workers have tried; no worker is lost by it"
        Measured("a prompt of which no engine gives a usable answer", follows, None, "that group, once", PLAYED).write()

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
        assert dict(world.books.book.discarded_by_reason) == {DiscardReason.FAILED: 1} and world.lost == []

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
        assert dict(world.books.book.discarded_by_reason) == {DiscardReason.LOST: 1}
        assert {*range(16)} - {*world.finished} == {5} and len(world.lost) == 3
        follows = "it is discarded with the reason, after the third; before, it never comes with another suspect"
        Measured(f"a prompt that ends each engine, with {counted(workers, 'worker')}", follows, None, world.sampled_again, PLAYED).write()

    play(scenario)


@pytest.mark.parametrize("heals", [True, False])
def test_an_engine_that_talks_rubbish_gets_its_weights_anew(monkeypatch: pytest.MonkeyPatch, heals: bool) -> None:
    """Four of its requests fail in a row, of different groups: it has a NaN in its weights. If they don't help it, it is replaced
    after the third time."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=2, places=128)

        async def rubbish(mortal: Mortal, ticket: Ticket) -> Outcome | None:
            if mortal.name == "0" and not (heals and world.sync.resynced):
                await asyncio.sleep(1.0)
                return GroupFailure(ticket.group_id, "one logprob is not finite", is_final=False)
            return None

        world.sample = rubbish
        await world.begin()
        await world.all_done(128)
        assert sorted(world.finished) == list(range(128)), "each on the other worker"
        if heals:
            assert world.sync.resynced == ["0"] and world.lost == [] and world.mortals["0"].finished
        else:
            assert set(world.sync.resynced) == {"0"} and len(world.lost) == 1 and "dirty again after 3 full syncs" in world.lost[0]

    play(scenario)


@pytest.mark.parametrize(("there_after_s", "taker"), [(None, "0"), (30.0, "1")], ids=["for good", "for a while"])
def test_a_group_that_failed_waits_for_a_worker_that_is_behind_as_long_as_weights_may_take(
    monkeypatch: pytest.MonkeyPatch, there_after_s: float | None, taker: str
) -> None:
    """Worker 1 holds an older version, as its weights are late. The group failed on 0, which is well, and alone with it from then on."""

    async def scenario() -> None:
        world, tried = World(monkeypatch, workers=2, places=1), list[tuple[str, float]]()

        async def fails_once(mortal: Mortal, ticket: Ticket) -> Outcome | None:
            tried.append((mortal.name, world.now))
            return GroupFailure(ticket.group_id, "no answer in 600 s", is_final=False) if len(tried) == 1 else None

        world.sample = fails_once
        await world.begin()
        world.sync.version = 1
        first, behind = world.pool.joined()
        first.sync.version = 1
        if there_after_s is not None:
            await asyncio.sleep(there_after_s)
            behind.sync.version = 1
            world.pool.wake()
        await world.all_done(1)
        (began, failed_at), (again, tried_at) = tried
        assert (began, again, world.finished) == ("0", taker, [0])
        waits_s = DeadlinesConfig().sync_s if there_after_s is None else there_after_s
        assert tried_at - failed_at == pytest.approx(waits_s, abs=0.5)

    play(scenario)


def test_rubbish_from_everybody_ends_the_run_before_the_prompts_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, workers=4, places=64)

        async def rubbish(mortal: Mortal, ticket: Ticket) -> Outcome | None:
            await asyncio.sleep(1.0)
            return GroupFailure(ticket.group_id, "one logprob is not finite", is_final=False)

        world.sample = rubbish
        await world.begin()
        said = r"16 of the last 16 groups got no usable answer .* The last reason: one logprob is not finite"
        with pytest.raises(RequestError, match=said):
            await world.all_done(10**6)
        follows = "the run ends in a sentence, with the last reason, before its prompts are used up"
        Measured("16 groups or more, and over half of the latest 64, without a usable answer", follows, None, "-", PLAYED).write()

    play(scenario)


def test_hundreds_of_workers_are_looked_through_for_many_changes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receipts come each millisecond while groups wait: the pool looks each 4 ms, not with each receipt; and all groups find a worker."""

    async def scenario() -> None:
        world = World(monkeypatch, workers=200, places=400)
        await world.begin()
        looks: list[float] = []
        take = WaitingWork.take
        monkeypatch.setattr(WaitingWork, "take", lambda self, *of: looks.append(world.now) or take(self, *of))
        for worker in world.pool.joined():
            worker.sync.version = -1  # a version is out, and nobody has it yet
        await asyncio.sleep(GROUP_S / 2)
        looks.clear()
        for worker in world.pool.joined():
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
