"""Versions, receipts and faults of the weight sync. Engines and learner are fakes here, for faults and time; tests/e2e has real ones.

Behaviours locked here: a join is served from what was published, verified once; a slow engine skips to the newest version; a probe holds up
nobody; a wait for receipts names those that are missing. What fails is in test_sync_failures.py, broadcasts in test_broadcast_sync.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import ray

from evenkeel.actors.carriers import WeightChecksums
from evenkeel.actors.processes.pacing import CALLS_PER_ITERATION
from evenkeel.actors.weights.weight_sync import SyncTarget
from evenkeel.correction.errors import DeadlineExceeded, SyncError
from evenkeel.engines.weights import compare_checksums, digest_of
from tests.actors.cases import FakeActor
from tests.actors.simulated_time import simulate
from tests.actors.weights.sync_scene import CHECKSUMS, SUMS, Engine, SyncScene


def test_receipts_are_awaited_of_those_who_are_there_or_of_one() -> None:
    """Of nodes that come one after another somebody has always just begun to take weights; and a start needs one engine."""

    async def scenario() -> None:
        never = asyncio.get_running_loop().create_future()
        scene = SyncScene(a=Engine(0.05), b=Engine(never), late=Engine(never))
        await scene.sync.publish()
        for name in "ab":
            scene.sync.join(scene.targets[name])
        await scene.sync.receipts(0, deadline_s=20.0, is_one_enough=True)
        assert scene.receipts == [0]
        with pytest.raises(DeadlineExceeded, match="workers b: no receipt"):
            await scene.sync.receipts(0, deadline_s=0.1)
        waiting = asyncio.create_task(scene.sync.receipts(0, deadline_s=20.0))
        await asyncio.sleep(0.01)
        scene.sync.join(scene.targets["late"])
        scene.sync.leave("b")
        await waiting
        await scene.sync.close()

    simulate(scenario)


def test_a_receipt_says_how_long_the_driver_waited_for_it() -> None:
    """The engine takes 2 s of simulated time, of which its own receipt says 0.1 s: the rest is the calls', and nobody works meanwhile."""

    async def scenario() -> None:
        scene = SyncScene(w=Engine(2.0))
        await scene.join()
        assert [one.seconds for one in scene.taken] == [pytest.approx(2.0)]

    simulate(scenario)


def test_checksums_are_compared_once_after_a_join() -> None:
    engine = Engine()

    async def scenario() -> None:
        scene = SyncScene(w=engine)
        await scene.join()
        for version in (1, 2):
            await scene.publish(version)
            await scene.sync.receipts(version, deadline_s=5.0)
            await asyncio.sleep(0.01)  # an unhurried engine answers the probe before the next update
        assert scene.receipts == [0, 1, 2]
        assert scene.differences == [("w", 0, 0.5), ("w", 1, 0.5), ("w", 2, 0.5)], "the probe's largest: |-2.0 - -2.5|"

    simulate(scenario)
    assert engine.taken == [(0, True), (1, False), (2, False)]


def test_a_slow_engine_skips_to_the_newest_version_and_holds_up_nobody() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        slow, quick = Engine(None, gate.wait()), Engine()
        scene = SyncScene(slow=slow, quick=quick)
        await scene.join()
        for version in (1, 2, 3):
            await scene.publish(version)
            await asyncio.sleep(0.05)
        assert scene.targets["quick"].version == 3 and scene.targets["slow"].version == 0
        gate.set()
        await scene.sync.receipts(3, deadline_s=5.0)
        assert [version for version, _ in slow.taken] == [0, 1, 3]
        assert [version for version, _ in quick.taken] == [0, 1, 2, 3]

    simulate(scenario)


def test_a_probe_that_waits_in_a_full_engine_holds_up_neither_receipt_nor_update() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.probes = [asyncio.Event().wait()]  # for ever
        scene = SyncScene(w=engine)
        await scene.join()
        assert scene.receipts == [0] and scene.differences == []
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=5.0)
        await asyncio.sleep(0.01)
        assert scene.receipts == [0, 1]
        assert scene.differences == [("w", 1, 0.5)], "that of version 0 is given up: its answer would be of newer weights"
        await scene.sync.close()

    simulate(scenario)


def test_of_many_engines_sixteen_are_probed_at_each_version_in_turn() -> None:
    """Of 40, each at one of three versions. The first version of whoever joins or was dirty is probed besides."""

    async def scenario() -> None:
        scene = SyncScene(**{str(number): Engine() for number in range(40)})
        await scene.join()
        await asyncio.sleep(0.05)

        async def probed(version: int) -> list[str]:
            del scene.differences[:]
            await scene.publish(version)
            await scene.sync.receipts(version, deadline_s=5.0)
            await asyncio.sleep(0.05)
            return [name for name, _, _ in scene.differences]

        assert len(scene.differences) == 40, "all of them have just joined"
        rounds = [await probed(version) for version in range(1, 6)]
        assert [len(names) for names in rounds] == [16] * 5
        for first in range(3):
            assert len({name for names in rounds[first : first + 3] for name in names}) == 40, "each in any three versions"
        due = await probed(6)
        scene.sync.resync(scene.targets[due[0]], "it failed")
        scene.targets["new"] = SyncTarget("new", FakeActor(Engine()))
        scene.sync.join(scene.targets["new"])
        await scene.sync.receipts(6, deadline_s=5.0)
        await asyncio.sleep(0.05)
        assert sorted(name for name, _, _ in scene.differences) == sorted([*due, due[0], "new"])
        await scene.sync.close()

    simulate(scenario)


def test_many_probes_in_a_row_that_find_no_place_are_told(caplog: pytest.LogCaptureFixture) -> None:

    async def scenario() -> None:
        engine = Engine()
        engine.probes = [asyncio.Event().wait() for _ in range(11)]
        scene = SyncScene(w=engine)
        await scene.join()
        for version in range(1, 11):
            await scene.publish(version)
            await scene.sync.receipts(version, deadline_s=5.0)
        assert scene.differences == []
        await scene.sync.close()

    simulate(scenario)
    assert "rollout worker w: 10 times in a row newer weights came before the probe was answered" in caplog.text


def test_those_who_join_or_are_dirty_read_what_was_published_and_the_learner_does_nothing() -> None:
    """Eight engines at once, five new and three dirty: no export, and one computation of checksums, which the version at hand lacks."""
    late = [Engine() for _ in range(5)]
    old = [Engine() for _ in range(3)]

    async def scenario() -> None:
        scene = SyncScene(**{f"old{i}": engine for i, engine in enumerate(old)})
        await scene.join()
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=5.0)
        assert [(version, plan.checksums) for version, plan in scene.learner.exported] == [(0, True), (1, False)]
        assert scene.learner.hashed == []
        scene.learner.version = 2  # trained, but not published
        for target in scene.targets.values():
            scene.sync.resync(target, "the update to v1 failed")
        for i, engine in enumerate(late):
            scene.sync.join(SyncTarget(f"late{i}", FakeActor(engine)))
        await scene.sync.receipts(1, deadline_s=5.0)
        assert len(scene.learner.exported) == 2, "a join never makes the learner work"
        assert scene.learner.hashed == [["v1"]], "once a version, kept with it"
        scene.sync.join(SyncTarget("last", FakeActor(Engine())))
        await scene.sync.receipts(1, deadline_s=5.0)
        assert len(scene.learner.hashed) == 1 and scene.sync.version == 1

    simulate(scenario)
    assert all(engine.taken == [(1, True)] for engine in late)
    assert all(engine.taken == [(0, True), (1, False), (1, True)] for engine in old)


def test_a_version_is_handed_out_only_when_it_is_published() -> None:
    """The export of v1 is under way, for a publish that may yet be given up: who joins meanwhile gets v0, then v1."""
    late = Engine()

    async def scenario() -> None:
        scene = SyncScene(w=Engine())
        await scene.join()
        scene.learner.gate = asyncio.Event()
        publishing = asyncio.create_task(scene.publish(1))
        await asyncio.sleep(0.01)
        target = SyncTarget("late", FakeActor(late))
        scene.sync.join(target)
        await asyncio.sleep(0.05)
        assert scene.sync.version == target.version == 0
        scene.learner.gate.set()
        await publishing
        await scene.sync.receipts(1, deadline_s=5.0)

    simulate(scenario)
    assert late.taken == [(0, True), (1, False)]


def test_checksums_that_take_longer_than_a_step_keep_no_engine_out() -> None:
    """It takes the version for which they were made, although newer ones are out, and then the newest: one computation for two who come."""
    late = [Engine(), Engine()]

    async def scenario() -> None:
        scene = SyncScene(w=Engine())
        await scene.join()
        await scene.publish(1)

        async def slow(buckets: Sequence[Any], **_: Any) -> WeightChecksums:
            scene.learner.hashed.append(list(buckets))
            await asyncio.sleep(2.5)
            return CHECKSUMS

        scene.learner.checksums = slow  # type: ignore[method-assign]
        targets = [SyncTarget(f"late{number}", FakeActor(engine)) for number, engine in enumerate(late)]
        for target in targets:
            scene.sync.join(target)
        for version in range(2, 7):
            await asyncio.sleep(1.0)
            await scene.publish(version)
        await scene.sync.receipts(6, deadline_s=5.0)
        assert scene.learner.hashed == [["v1"]] and all(target.is_verified for target in targets)
        assert [plan.checksums for _, plan in scene.learner.exported] == [True] + [False] * 6, "a join never makes the learner work"

    simulate(scenario)
    assert [engine.taken[:2] for engine in late] == [[(1, True), (3, False)]] * 2


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"checksums": {"a": "1", "b": "3"}}, "1 tensors differ, first b"),
        ({"shows": digest_of({"a": "1", "b": "3"})}, "it has compared its weights with others than this version's"),
    ],
    ids=["wrong tensors", "compared with another version's"],
)
def test_an_engine_that_shows_other_checksums_is_not_verified(engine: dict[str, Any], why: str) -> None:
    """Also where what it holds is what it was sent, but that was not what this version is."""

    async def scenario() -> None:
        scene = SyncScene(w=Engine(**engine))
        await scene.sync.publish()
        scene.sync.join(scene.targets["w"])
        while not scene.failures:
            await asyncio.sleep(0.05)
        assert why in scene.failures[0][1]
        assert not scene.targets["w"].is_verified and scene.receipts == []

    simulate(scenario)


def test_comparison_names_what_differs() -> None:
    compare_checksums("0", SUMS, dict(SUMS), version=1)
    with pytest.raises(SyncError, match=r"v1 -> rollout worker 0: 1 tensors differ, first a; 2 tensors are on one side only, first b"):
        compare_checksums("0", {"a": "1", "b": "2"}, {"a": "9", "c": "2"}, version=1)


def test_hundreds_of_engines_leave_the_loop_to_others() -> None:
    """A few are asked in each iteration of the event loop, in their order: a call costs half a millisecond."""
    scene, iteration, asked = SyncScene(**{f"e{i}": Engine() for i in range(200)}), 0, []

    class Noting(FakeActor):
        def __getattr__(self, name: str) -> Any:
            if name == "update_weights":
                asked.append(iteration)
            return super().__getattr__(name)

    async def scenario() -> None:
        async def count() -> None:
            nonlocal iteration
            while True:
                iteration += 1
                await asyncio.sleep(0)

        await scene.join()
        for target in scene.targets.values():
            target.actor = Noting(target.actor.instance)
        counting = asyncio.create_task(count())
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=10.0)
        counting.cancel()
        assert asked == sorted(asked) and len(asked) == 200 and max(Counter(asked).values()) == CALLS_PER_ITERATION
        assert [name for name, target in scene.targets.items() if target.version == 1] == list(scene.targets)

    simulate(scenario)


def test_the_trouble_of_many_engines_is_a_sentence() -> None:
    """Of three, each in one line: 500 tracebacks say less."""
    traceback = "\n".join(["AttributeError", *("  File somewhere, line 1" for _ in range(1000)), "no _generation"])

    async def scenario() -> None:
        fails = [ray.exceptions.RayTaskError("f", traceback, AttributeError())] * 9
        scene = SyncScene(**{f"w{number}": Engine(*fails) for number in range(5)})
        await scene.sync.publish()
        for target in scene.targets.values():
            scene.sync.join(target)
        with pytest.raises(DeadlineExceeded) as told:
            await scene.sync.receipts(0, deadline_s=30.0)
        said = str(told.value)
        assert said.count("no _generation") == 3 and said.endswith("; and 2 more") and "\n" not in said and len(said) < 1500
        await scene.sync.close()

    simulate(scenario)
