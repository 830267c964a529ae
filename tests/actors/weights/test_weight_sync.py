"""Versions, receipts and faults of the weight sync. Engines and learner are fakes here, for faults and time; tests/e2e has real ones.

Behaviours locked here: an engine that fails is tried again, whole and with checksums; after three failures it is given up; a slow engine
skips to the newest version; a wait for receipts names those that are missing; a broadcast that fails goes through the object store.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
import torch

from actors.carriers import ExportPlan, WeightSnapshot
from actors.config import WeightSyncConfig
from actors.processes.supervision import counted
from actors.ranks.learner_group import LearnerGroup
from actors.ranks.learner_rank_actor import LearnerRankActor
from actors.weights.weight_sync import SyncTarget, WeightSync
from correction.engines.checksum import compare_checksums, tensor_checksum
from correction.engines.weight_bucket import WeightBucket
from correction.errors import ActorLost, ActorUnavailable, DeadlineExceeded, EngineDirty, EngineError, SyncError
from learner.config import LearnerConfig
from rollout.trajectory import SyncReceipt
from tests.actors.cases import FakeActor
from tests.actors.simulated_time import simulate

SUMS = {"a": "1", "b": "2"}


class Learner:
    """Weights whose version the test sets. `gate` holds up what it exports."""

    def __init__(self) -> None:
        self.version = 0
        self.exported: list[tuple[int, ExportPlan]] = []
        self.hashed: list[list[Any]] = []
        self.gate: asyncio.Event | None = None
        self.fails = ""
        self.step_s = 100.0
        self.group: list[tuple[int, int]] = []
        """(rank, members) that each was told, the learner first."""
        self.rank_zero = FakeActor(self)

    async def export(self, plan: ExportPlan, *, deadline_s: float | None = None) -> WeightSnapshot:
        version = self.version
        self.exported.append((version, plan))
        await (self.gate.wait() if self.gate else asyncio.sleep(0))
        buckets = [f"v{version}"] if plan.stores else []
        return WeightSnapshot(
            version, buckets, [["spec"]], [-1.0, -2.0], dict(SUMS) if plan.checksums else {}, 0.0, None, self.fails  # type: ignore[list-item]
        )

    async def checksums(self, buckets: Sequence[Any], *, deadline_s: float) -> dict[str, str]:
        self.hashed.append(list(buckets))
        await asyncio.sleep(0.01)
        return dict(SUMS)

    async def address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def open_broadcast(self, host: str, port: int, world_size: int, *_: Any) -> None:
        self.group.append((0, world_size))

    async def close_broadcast(self) -> None: ...


def receipt(version: int, checksums: dict[str, str] | None = None) -> SyncReceipt:
    return SyncReceipt(version, "retract", 1, 1, bytes=8, pause_s=0.1, worker="w", seconds=0.1, checksums=checksums or {})


class Engine:
    """Takes weights as the test's script says: None for well, an error to raise, or something (or seconds) to wait for first."""

    def __init__(self, *script: Exception | Awaitable[Any] | float | None, checksums: dict[str, str] | None = None) -> None:
        self.script = list(script)
        self.checksums = checksums or SUMS
        self.taken: list[tuple[int, bool]] = []
        """(version, with checksums) of each attempt."""
        self.received: list[int] = []
        """Versions that came by broadcast."""
        self.probes: list[Awaitable[Any]] = []
        """What the next answers to the probe wait for."""

    async def update_weights(self, version: int, buckets: list[Any], checksums: dict[str, str], generation: int = 0) -> SyncReceipt:
        assert buckets == [f"v{version}"], "the stored copy of this version"
        self.taken.append((version, bool(checksums)))
        await self._play()
        return receipt(version, self.checksums if checksums else {})

    async def probe(self, token_ids: list[int]) -> list[float]:
        if self.probes:
            await self.probes.pop(0)
        return [-1.0, -2.5]

    async def join_weight_group(self, *_: Any) -> None: ...

    async def leave_weight_group(self, *_: Any) -> None: ...

    async def receive_weights(self, version: int, *_: Any) -> SyncReceipt:
        await self._play()
        self.received.append(version)
        return receipt(version)

    async def _play(self) -> None:
        part = self.script.pop(0) if self.script else None
        if isinstance(part, Exception):
            raise part
        if isinstance(part, float):
            await asyncio.sleep(part)
        elif part is not None:
            await part


class Scene:
    """A sync with a learner and named engines, and what it reported."""

    def __init__(
        self,
        sync_s: float = 5.0,
        transport: str = "object_store",
        every_steps: int = 1,
        float8: bool = False,
        ranks: int = 1,
        **engines: Engine,
    ) -> None:
        self.learner = Learner()
        self.receipts: list[tuple[str, int]] = []
        self.differences: list[tuple[str, int, float]] = []
        self.dirty: list[tuple[str, str]] = []
        self.failures: list[tuple[str, str]] = []
        self.losses: list[str] = []
        self.sync = WeightSync(
            WeightSyncConfig.model_validate({"transport": transport, "every_steps": every_steps}),
            self.learner,  # type: ignore[arg-type]
            probe_ids=[1, 2, 3],
            sync_s=sync_s,
            on_receipt=lambda receipt: self.receipts.append((receipt.worker, receipt.version)),
            on_probe=lambda target, version, differences: self.differences.append((target.name, version, max(differences))),
            on_dirty=lambda target, reason: self.dirty.append((target.name, reason)),
            on_failure=lambda target, reason: self.failures.append((target.name, reason)),
            on_loss=lambda error: self.losses.append(str(error)),
            float8=float8,
            ranks_of_engine=ranks,
        )
        self.targets = {name: SyncTarget(name, FakeActor(engine)) for name, engine in engines.items()}

    async def join(self) -> None:
        await self.sync.publish()
        for target in self.targets.values():
            self.sync.join(target)
        await self.sync.receipts(0, deadline_s=10.0)
        await self.grouped()

    async def grouped(self) -> None:
        """Until there is a broadcast group, and it is of all engines."""
        group = self.sync._broadcast
        while group is not None and group.members != list(self.sync._targets.values()):
            await asyncio.sleep(0.01)

    async def publish(self, version: int) -> None:
        self.learner.version = version
        await self.sync.publish()


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30.0))  # type: ignore[arg-type]


def test_receipts_are_awaited_of_those_who_are_there_or_of_one() -> None:
    """Of nodes that come one after another somebody has always just begun to take weights; and a start needs one engine."""

    async def scenario() -> None:
        never = asyncio.get_running_loop().create_future()
        scene = Scene(a=Engine(0.05), b=Engine(never), late=Engine(never))
        await scene.sync.publish()
        for name in "ab":
            scene.sync.join(scene.targets[name])
        await scene.sync.receipts(0, deadline_s=20.0, is_one_enough=True)
        assert scene.receipts == [("w", 0)]
        with pytest.raises(DeadlineExceeded, match="workers b: no receipt"):
            await scene.sync.receipts(0, deadline_s=0.1)
        waiting = asyncio.create_task(scene.sync.receipts(0, deadline_s=20.0))
        await asyncio.sleep(0.01)
        scene.sync.join(scene.targets["late"])
        scene.sync.leave("b")
        await waiting
        await scene.sync.close()

    play(scenario)


def test_checksums_are_compared_once_after_a_join() -> None:
    engine = Engine()

    async def scenario() -> None:
        scene = Scene(w=engine)
        await scene.join()
        for version in (1, 2):
            await scene.publish(version)
            await scene.sync.receipts(version, deadline_s=5.0)
            await asyncio.sleep(0.01)  # an unhurried engine answers the probe before the next update
        assert scene.receipts == [("w", 0), ("w", 1), ("w", 2)]
        assert scene.differences == [("w", 0, 0.5), ("w", 1, 0.5), ("w", 2, 0.5)], "the probe's largest: |-2.0 - -2.5|"

    play(scenario)
    assert engine.taken == [(0, True), (1, False), (2, False)]


def test_an_engine_that_fails_twice_is_tried_again_with_checksums() -> None:
    engine = Engine(None, SyncError("bucket 2 of 3"), ray.exceptions.RayTaskError("f", "traceback", EngineDirty("no answer")))

    async def scenario() -> None:
        scene = Scene(w=engine)
        await scene.join()
        await scene.publish(1)
        with pytest.raises(DeadlineExceeded):
            await scene.sync.receipts(1, deadline_s=0.1)
        assert scene.targets["w"].version == -1, "dirty: it must not be given work"
        await scene.sync.receipts(1, deadline_s=10.0)
        assert scene.failures == []
        assert scene.dirty == [
            ("w", "weight sync v1, attempt 1 of 3: bucket 2 of 3"),
            ("w", "weight sync v1, attempt 2 of 3: no answer"),
        ]

    simulate(scenario)  # the pauses between attempts are seconds
    assert engine.taken == [(0, True), (1, False), (1, True), (1, True)]


@pytest.mark.parametrize(
    ("error", "attempts", "calls"),
    [
        (ray.exceptions.RayTaskError("f", "traceback", EngineError("its scheduler ended")), 1, 1),
        (ray.exceptions.ActorDiedError(), 1, 1),
        (ray.exceptions.ActorUnavailableError("for now", None), 3, 18),
        (ray.exceptions.RayTaskError("f", "traceback", EngineDirty("half an update")), 3, 3),
    ],
    ids=["engine gone", "worker gone", "not reached just now", "dirty"],
)
def test_an_engine_that_is_gone_is_given_up_at_once(error: Exception, attempts: int, calls: int) -> None:
    """Each attempt more would be seconds in which nobody starts the next one. Of one that can't be reached each lasts half a minute: by
    then its heartbeat has said whether it is lost."""
    engine = Engine(*[error] * calls)

    async def scenario() -> None:
        scene = Scene(w=engine)
        await scene.sync.publish()
        scene.sync.join(scene.targets["w"])
        while not scene.failures:
            await asyncio.sleep(0.05)
        assert f"took no weights in {counted(attempts, 'attempt')}: " in scene.failures[0][1]

    simulate(scenario)
    assert len(engine.taken) == calls


def test_an_engine_that_can_not_be_reached_for_a_moment_takes_its_weights_then() -> None:
    """Three calls in vain would have been its end, after three seconds."""
    engine = Engine(*[ray.exceptions.ActorUnavailableError("for now", None)] * 4)

    async def scenario() -> None:
        scene = Scene(w=engine)
        await scene.sync.publish()
        scene.sync.join(scene.targets["w"])
        await scene.sync.receipts(0, deadline_s=60.0)
        assert scene.failures == scene.dirty == [] and len(scene.receipts) == 1 and len(engine.taken) == 5

    simulate(scenario)


def test_a_learner_that_fails_is_no_engines_fault() -> None:
    """Who joins needs checksums of what is published; the learner's error is no reason to replace the engine."""

    async def scenario() -> None:
        scene = Scene(w=Engine())
        await scene.sync.publish()
        assert scene.sync._published is not None
        scene.sync._published.snapshot.checksums.clear()
        asked: list[int] = []

        async def checksums(*_: Any, **__: Any) -> dict[str, str]:
            asked.append(1)
            if len(asked) < 3:
                raise EngineError("learner rank 0: no memory")
            return dict(SUMS)

        scene.learner.checksums = checksums  # type: ignore[method-assign]
        scene.sync.join(scene.targets["w"])
        await scene.sync.receipts(0, deadline_s=60.0)
        assert scene.failures == [] and len(asked) == 3

    simulate(scenario)


@pytest.mark.parametrize("error", [ActorLost("rank 1: its process is gone"), ActorUnavailable("rank 1: it may have missed the call")])
def test_a_learner_that_is_lost_in_a_copy_takes_the_run_back_and_costs_no_engine(error: ActorLost) -> None:
    """One who joins needs a version that was broadcast only; a rank that has missed a call is called no more before a restore."""

    async def scenario() -> None:
        scene = Scene(transport="broadcast", a=Engine(), b=Engine())
        await scene.join()
        await scene.publish(1)
        asked: list[ExportPlan] = []

        async def export(plan: ExportPlan, **_: Any) -> WeightSnapshot:
            asked.append(plan)
            raise error

        scene.learner.export = export  # type: ignore[method-assign]
        scene.sync.join(SyncTarget("late", FakeActor(Engine())))
        await asyncio.sleep(60.0)
        assert scene.losses == [str(error)] and len(asked) == 1
        assert scene.failures == scene.dirty == []

    simulate(scenario)


def test_a_copy_that_fails_costs_no_engine_however_often(caplog: pytest.LogCaptureFixture) -> None:
    """The learner is slow, or the object store full: the engine that waits is not the one to replace."""

    async def scenario() -> None:
        scene = Scene(transport="broadcast", a=Engine(), b=Engine())
        await scene.join()
        await scene.publish(1)
        whole, asked = scene.learner.export, list[float]()

        async def export(plan: ExportPlan, **_: Any) -> WeightSnapshot:
            asked.append(asyncio.get_running_loop().time())
            if len(asked) <= 5:
                raise DeadlineExceeded("weights v1 <- learner: nothing in 60 s")
            return await whole(plan)

        scene.learner.export = export  # type: ignore[method-assign]
        late = SyncTarget("late", FakeActor(Engine()))
        scene.sync.join(late)
        await asyncio.sleep(60.0)
        assert late.version == 1 and scene.failures == scene.losses == scene.dirty == []
        assert [record.getMessage() for record in caplog.records if "late" in record.getMessage()] == [
            f"weights v1 are not at hand for rollout worker late, tried {n}x: weights v1 <- learner: nothing in 60 s" for n in range(1, 6)
        ]
        assert [round(b - a) for a, b in pairwise(asked)] == [1, 2, 3, 4, 5], "seconds between them"

    simulate(scenario)


def test_checksums_that_are_lost_are_made_again() -> None:
    """By a task of Ray's: its loss is not the learner's."""

    async def scenario() -> None:
        scene = Scene(w=Engine())
        whole, asked = scene.learner.checksums, list[int]()

        async def checksums(buckets: Sequence[Any], *, deadline_s: float) -> dict[str, str]:
            asked.append(len(buckets))
            if len(asked) <= 2:
                raise ActorLost("checksums of the weights: its process is gone")
            return await whole(buckets, deadline_s=deadline_s)

        await scene.join()
        await scene.publish(1)
        scene.learner.checksums = checksums  # type: ignore[method-assign]
        scene.sync.join(late := SyncTarget("late", FakeActor(Engine())))
        await asyncio.sleep(30.0)
        assert late.version == 1 and len(asked) == 3 and scene.losses == scene.failures == []

    simulate(scenario)


def test_a_receipt_of_withdrawn_weights_does_not_count() -> None:
    """An update of the generation before, v0 as well, is the one that the engine confirms."""

    class Late(Engine):
        async def update_weights(self, version: int, buckets: list[Any], checksums: dict[str, str], generation: int = 0) -> SyncReceipt:
            generations.append(generation)
            return replace(await super().update_weights(version, buckets, checksums), generation=generation - (len(generations) == 1))

    generations: list[int] = []

    async def scenario() -> None:
        scene = Scene(w=Late())
        scene.sync._generation = 2
        await scene.join()
        assert scene.dirty == [
            ("w", "weight sync v0, attempt 1 of 3: rollout worker w: a receipt for v0 of generation 1, not 2: those weights were withdrawn")
        ]
        assert scene.receipts == [("w", 0)]

    play(scenario)
    assert generations == [2, 2]


def test_an_engine_that_fails_three_times_is_given_up() -> None:
    async def scenario() -> None:
        scene = Scene(w=Engine(*[SyncError("the disk of the engine is full")] * 3))
        await scene.sync.publish()
        scene.sync.join(scene.targets["w"])
        while not scene.failures:
            await asyncio.sleep(0.05)
        ((name, reason),) = scene.failures
        assert name == "w" and "took no weights in 3 attempts" in reason and "the disk of the engine is full" in reason
        assert scene.targets["w"].version == -1 and scene.receipts == []

    simulate(scenario)  # the pauses between attempts are seconds


def test_an_engine_that_says_it_is_dirty_gets_everything_again_with_checksums() -> None:
    engine = Engine()

    async def scenario() -> None:
        scene = Scene(w=engine)
        await scene.join()
        target = scene.targets["w"]
        scene.sync.resync(target, "the update to v0 failed")
        assert target.version == -1
        await scene.sync.receipts(0, deadline_s=5.0)
        assert target.is_verified

    play(scenario)
    assert engine.taken == [(0, True), (0, True)]


def test_an_engine_marked_dirty_during_an_update_is_clean_only_after_the_next() -> None:
    """The update under way is without checksums: what it leaves is not known to be right."""
    gate = asyncio.Event()
    engine = Engine(None, gate.wait())

    async def scenario() -> None:
        scene = Scene(w=engine)
        await scene.join()
        await scene.publish(1)
        await asyncio.sleep(0.01)
        scene.sync.resync(scene.targets["w"], "the update to v1 failed")
        gate.set()
        await scene.sync.receipts(1, deadline_s=5.0)
        assert scene.targets["w"].is_verified and [version for _, version in scene.receipts] == [0, 1]

    play(scenario)
    assert engine.taken == [(0, True), (1, False), (1, True)]


def test_wrong_tensors_count_as_a_failure() -> None:
    async def scenario() -> None:
        scene = Scene(w=Engine(checksums={"a": "1", "b": "3"}))
        await scene.sync.publish()
        scene.sync.join(scene.targets["w"])
        while not scene.failures:
            await asyncio.sleep(0.05)
        assert "1 tensors differ, first b" in scene.failures[0][1]

    simulate(scenario)  # the pauses between attempts are seconds


def test_a_slow_engine_skips_to_the_newest_version_and_holds_up_nobody() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        slow, quick = Engine(None, gate.wait()), Engine()
        scene = Scene(slow=slow, quick=quick)
        await scene.join()
        for version in (1, 2, 3):
            await scene.publish(version)
            await asyncio.sleep(0.05)
        assert scene.targets["quick"].version == 3 and scene.targets["slow"].version == 0
        gate.set()
        await scene.sync.receipts(3, deadline_s=5.0)
        assert [version for version, _ in slow.taken] == [0, 1, 3]
        assert [version for version, _ in quick.taken] == [0, 1, 2, 3]

    play(scenario)


def test_a_probe_that_waits_in_a_full_engine_holds_up_neither_receipt_nor_update() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.probes = [asyncio.Event().wait()]  # for ever
        scene = Scene(w=engine)
        await scene.join()
        assert scene.receipts == [("w", 0)] and scene.differences == []
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=5.0)
        await asyncio.sleep(0.01)
        assert scene.receipts == [("w", 0), ("w", 1)]
        assert scene.differences == [("w", 1, 0.5)], "that of version 0 is given up: its answer would be of newer weights"
        await scene.sync.close()

    play(scenario)


def test_a_probe_is_not_answered_by_newer_weights_while_a_broadcast_reaches_another_engine() -> None:
    """The quick engine would answer the probe of version 1 at version 2 while the slow one still receives that."""

    async def scenario() -> None:
        quick, slow = Engine(), Engine()
        scene = Scene(transport="broadcast", quick=quick, slow=slow)
        await scene.join()
        await asyncio.sleep(0.01)
        waits = asyncio.Event()
        quick.probes = [waits.wait()]
        await scene.publish(1)
        slow.script = [0.2]
        publishing = asyncio.create_task(scene.publish(2))
        await asyncio.sleep(0.1)
        waits.set()
        await publishing
        await asyncio.sleep(0.01)
        assert [version for name, version, _ in scene.differences if name == "quick"] == [0, 2]
        await scene.sync.close()

    play(scenario)


@pytest.mark.parametrize(("ranks", "told"), [(1, [(0, 3), (1, 3), (2, 3)]), (4, [(0, 9), (1, 9), (5, 9)])])
def test_all_ranks_of_the_engines_are_counted_in_a_broadcast_group(ranks: int, told: list[tuple[int, int]]) -> None:
    """An engine is told its first rank; SGLang adds each one's own number."""

    class Member(Engine):
        async def join_weight_group(self, host: str, port: int, rank: int, world_size: int, name: str) -> None:
            scene.learner.group.append((rank, world_size))

    scene: Scene

    async def scenario() -> None:
        nonlocal scene
        scene = Scene(transport="broadcast", ranks=ranks, one=Member(), other=Member())
        await scene.join()
        await scene.publish(1)
        assert scene.learner.group == told
        await scene.sync.close()

    play(scenario)


def test_many_probes_in_a_row_that_find_no_place_are_told(caplog: pytest.LogCaptureFixture) -> None:

    async def scenario() -> None:
        engine = Engine()
        engine.probes = [asyncio.Event().wait() for _ in range(11)]
        scene = Scene(w=engine)
        await scene.join()
        for version in range(1, 11):
            await scene.publish(version)
            await scene.sync.receipts(version, deadline_s=5.0)
        assert scene.differences == []
        await scene.sync.close()

    play(scenario)
    assert "rollout worker w: 10 weight versions in a row came before their probe was answered" in caplog.text


def test_a_wait_for_receipts_names_the_missing() -> None:
    async def scenario() -> None:
        scene = Scene(quick=Engine(), slow=Engine(None, 60.0))
        await scene.join()
        await scene.publish(1)
        with pytest.raises(DeadlineExceeded, match=r"^weight sync v1 -> workers slow: no receipt in 0 s$"):
            await scene.sync.receipts(1, deadline_s=0.2)
        await scene.sync.close()

    play(scenario)


def test_an_engine_that_hangs_is_tried_again_at_the_deadline() -> None:
    engine = Engine(None, 60.0)

    async def scenario() -> None:
        scene = Scene(sync_s=0.2, w=engine)
        await scene.join()
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=5.0)

    play(scenario)
    assert [version for version, _ in engine.taken] == [0, 1, 1]


def test_an_engine_that_left_is_waited_for_no_longer() -> None:
    async def scenario() -> None:
        scene = Scene(a=Engine(), b=Engine(None, 60.0))
        await scene.join()
        await scene.publish(1)
        scene.sync.leave("b")
        await scene.sync.receipts(1, deadline_s=2.0)
        scene.sync.leave("b")  # twice does no harm

    play(scenario)


def test_those_who_join_or_are_dirty_read_what_was_published_and_the_learner_does_nothing() -> None:
    """Eight engines at once, five new and three dirty: no export, and one computation of checksums, which the version at hand lacks."""
    late = [Engine() for _ in range(5)]
    old = [Engine() for _ in range(3)]

    async def scenario() -> None:
        scene = Scene(**{f"old{i}": engine for i, engine in enumerate(old)})
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

    play(scenario)
    assert all(engine.taken == [(1, True)] for engine in late)
    assert all(engine.taken == [(0, True), (1, False), (1, True)] for engine in old)


def test_a_version_is_handed_out_only_when_it_is_published() -> None:
    """The export of v1 is under way, for a publish that may yet be given up: who joins meanwhile gets v0, then v1."""
    late = Engine()

    async def scenario() -> None:
        scene = Scene(w=Engine())
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

    play(scenario)
    assert late.taken == [(0, True), (1, False)]


def test_a_newer_version_that_comes_while_checksums_are_made_is_the_one_that_is_sent() -> None:
    late = Engine()

    async def scenario() -> None:
        scene = Scene(w=Engine())
        await scene.join()
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=5.0)
        gate = asyncio.Event()

        async def slow(*_: Any, **__: Any) -> dict[str, str]:
            await gate.wait()
            return dict(SUMS)

        scene.learner.checksums = slow  # type: ignore[method-assign]
        scene.sync.join(SyncTarget("late", FakeActor(late)))
        await asyncio.sleep(0.01)
        await scene.publish(2)
        gate.set()
        await scene.sync.receipts(2, deadline_s=5.0)

    play(scenario)
    assert late.taken == [(2, True)]


def test_a_sync_that_breaks_is_told() -> None:
    """An error that is nobody's failure to take weights must not leave an engine without work and without a reason."""

    async def scenario() -> None:
        scene = Scene(w=Engine(KeyError("bug")))
        await scene.sync.publish()
        scene.sync.join(scene.targets["w"])
        while not scene.failures:
            await asyncio.sleep(0.01)
        assert scene.failures == [("w", "its weight sync failed: KeyError('bug')")]

    play(scenario)


# -- broadcast -------------------------------------------------------------------------------------------------------


def plans(scene: Scene) -> list[tuple[int, bool, bool]]:
    """(version, into the store, by broadcast) of each pass over the weights."""
    return [(version, plan.stores, plan.broadcasts) for version, plan in scene.learner.exported]


def test_a_broadcast_makes_one_pass_and_no_copy_in_the_store() -> None:
    engines = {"a": Engine(), "b": Engine()}

    async def scenario() -> None:
        scene = Scene(transport="broadcast", **engines)
        await scene.join()
        for version in (1, 2):
            await scene.publish(version)
        assert plans(scene) == [(0, True, False), (1, False, True), (2, False, True)]
        assert [t.version for t in scene.targets.values()] == [2, 2]

    play(scenario)
    assert all(e.taken == [(0, True)] and e.received == [1, 2] for e in engines.values())


def test_versions_that_have_to_last_are_stored_beside_the_broadcast() -> None:
    """An engine that joins while the learner stands at a version that isn't published gets the last one, at once."""

    async def scenario() -> None:
        scene = Scene(transport="broadcast", every_steps=2, a=Engine())
        await scene.join()
        await scene.publish(2)
        scene.learner.version = 3
        late = SyncTarget("late", FakeActor(engine := Engine()))
        scene.sync.join(late)
        await scene.sync.receipts(2, deadline_s=5.0)
        assert plans(scene) == [(0, True, False), (2, True, True)]
        assert engine.taken == [(2, True)] and late.version == 2

    play(scenario)


def test_an_engine_that_needs_what_was_broadcast_has_it_copied_once_for_all() -> None:
    late = [Engine() for _ in range(8)]

    async def scenario() -> None:
        scene = Scene(transport="broadcast", w=Engine())
        await scene.join()
        await scene.publish(1)
        for i, engine in enumerate(late):
            scene.sync.join(SyncTarget(f"late{i}", FakeActor(engine)))
        await scene.sync.receipts(1, deadline_s=5.0)
        assert plans(scene) == [(0, True, False), (1, False, True), (1, True, False)] and scene.learner.hashed == []

    play(scenario)
    assert all(engine.taken == [(1, True)] for engine in late)


def test_every_pass_over_the_weights_is_in_the_engines_numbers() -> None:
    """Also the copy for those who come late: an engine in float8 takes nothing else."""

    async def scenario() -> None:
        scene = Scene(transport="broadcast", float8=True, w=Engine())
        await scene.join()
        await scene.publish(1)
        scene.sync.join(SyncTarget("late", FakeActor(Engine())))
        await scene.sync.receipts(1, deadline_s=5.0)
        assert plans(scene) == [(0, True, False), (1, False, True), (1, True, False)]
        assert all(plan.float8 for _, plan in scene.learner.exported)

    play(scenario)


def test_when_the_learner_has_trained_on_the_next_version_is_stored_beside_its_broadcast() -> None:
    """What was broadcast is no more; the learner's weights of now are nobody's before they are published."""
    late = Engine()

    async def scenario() -> None:
        scene = Scene(transport="broadcast", w=Engine())
        await scene.join()
        await scene.publish(1)
        scene.learner.version = 2
        scene.sync.join(SyncTarget("late", FakeActor(late)))
        await asyncio.sleep(0.05)
        assert late.taken == []
        await scene.publish(2)
        await scene.sync.receipts(2, deadline_s=5.0)
        assert plans(scene) == [(0, True, False), (1, False, True), (2, True, True)]

    play(scenario)
    assert late.taken == [(2, True)]


def test_a_wait_for_weights_that_are_never_published_has_a_name_and_an_end(caplog: pytest.LogCaptureFixture) -> None:
    """Who joins while the learner trains on waits for what comes after that; the learner's own deadlines come long before this one."""

    async def scenario() -> None:
        scene = Scene(transport="broadcast", w=Engine())
        await scene.join()
        await scene.publish(1)
        scene.learner.version = 2
        scene.sync.join(SyncTarget("late", FakeActor(Engine())))
        began = asyncio.get_running_loop().time()
        while "weights newer than v1, which were broadcast only <- learner: not done in 220 s" not in caplog.text:
            await asyncio.sleep(1.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(2 * 100.0 + 4 * 5.0, abs=2.0), "two passes and four syncs"
        assert scene.failures == scene.dirty == []

    with caplog.at_level("INFO", logger="evenkeel"):
        simulate(scenario)
    assert "waiting 30 s for weights newer than v1" in caplog.text


class Pieces:
    """A rank whose weights are three tensors; `gathered` says how far a pass has come."""

    def __init__(self, *, is_contiguous: bool = True) -> None:
        self.gathered: list[int] = []
        self.tensors = [torch.full((2, 2), float(i))[:, 0] if not is_contiguous else torch.full((2,), float(i)) for i in range(3)]

    def weights(self, bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        for i, tensor in enumerate(self.tensors):
            self.gathered.append(i)
            yield {f"w{i}": tensor}


def rank_with(pieces: Pieces, rank: int = 0) -> LearnerRankActor:
    actor = LearnerRankActor(LearnerConfig(), rank, bind="")
    actor._learner = pieces  # type: ignore[assignment]
    return actor


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gathers_to_the_end_of_a_broadcast(rank: int) -> None:
    """Rank 0 alone sends; when that fails in the middle, it goes on gathering, or the other ranks would wait for it."""
    sent: list[str] = []

    class Broadcaster:
        def send(self, tensors: dict[str, torch.Tensor]) -> None:
            sent.extend(tensors)
            if "w1" in tensors:
                raise SyncError("an engine is gone")

    pieces = Pieces()
    actor, plan = rank_with(pieces, rank), ExportPlan(8, stores=False, broadcasts=True)
    lonely = actor.export(1, 0, plan)
    actor._broadcaster = Broadcaster() if rank == 0 else None  # type: ignore[assignment]
    snapshot = actor.export(2, 0, plan)
    assert pieces.gathered == [0, 1, 2] * 2 and sent == (["w0", "w1"] if rank == 0 else [])
    if rank == 0:
        assert lonely is not None and "no weight group" in lonely.broadcast_error
        assert snapshot is not None and snapshot.broadcast_error == "an engine is gone" and snapshot.buckets == []
    else:
        assert lonely is snapshot is None


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_every_rank_gathers_the_weights_and_rank_zero_alone_copies_them(
    rank: int, is_contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pass, with the checksums: from where they lie, or through memory that every bucket and version uses again."""
    stored: list[tuple[dict[str, list[float]], int]] = []

    def put(bucket: WeightBucket) -> None:
        (part,) = bucket.parts
        stored.append(({name: tensor.tolist() for name, tensor in bucket.tensors().items()}, part.ctypes.data))

    monkeypatch.setattr(ray, "put", put)
    pieces = Pieces(is_contiguous=is_contiguous)
    actor = rank_with(pieces, rank)
    snapshots = [actor.export(number, 0, ExportPlan(8, checksums=True)) for number in (1, 2)]
    assert pieces.gathered == [0, 1, 2] * 2
    if rank == 1:
        assert snapshots == [None, None] and stored == []
        return
    assert [tensors for tensors, _ in stored] == [{"w0": [0.0] * 2}, {"w1": [1.0] * 2}, {"w2": [2.0] * 2}] * 2
    addresses = [address for _, address in stored]
    own = [tensor.data_ptr() for tensor in pieces.tensors]
    assert addresses == own * 2 if is_contiguous else len({*addresses}) == 1 and not {*addresses} & {*own}
    assert snapshots[0] is not None and [[spec.name for spec in bucket] for bucket in snapshots[0].specs] == [["w0"], ["w1"], ["w2"]]
    assert snapshots[0].checksums == {f"w{i}": tensor_checksum(torch.full((2,), float(i))) for i in range(3)}


def test_a_broadcast_that_fails_goes_through_the_object_store_and_the_next_one_works() -> None:
    good, bad = Engine(), Engine(None, ray.exceptions.RayTaskError("f", "traceback", SyncError("member gone")))

    async def scenario() -> None:
        scene = Scene(transport="broadcast", good=good, bad=bad)
        await scene.join()
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=5.0)
        await scene.grouped()
        await scene.publish(2)
        assert [t.version for t in scene.targets.values()] == [2, 2]
        assert [name for name, _ in scene.dirty] == ["good", "bad"] and "broadcast of v1 failed" in scene.dirty[0][1]

    play(scenario)
    assert good.taken == bad.taken == [(0, True), (1, True)], "whole and verified after the failure"
    assert good.received == [1, 2] and bad.received == [2]


def test_comparison_names_what_differs() -> None:
    compare_checksums("0", SUMS, dict(SUMS), version=1)
    with pytest.raises(SyncError, match=r"v1 -> rollout worker 0: 1 tensors differ, first a; 2 tensors stand on one side only, first b"):
        compare_checksums("0", {"a": "1", "b": "2"}, {"a": "9", "c": "2"}, version=1)


# -- one caller ------------------------------------------------------------------------------------------------------


def test_a_rank_refuses_a_call_out_of_order_and_one_for_other_weights() -> None:
    """The ranks would wait for each other in different calls: better an error at once, in one sentence."""
    actor = rank_with(Pieces(), rank=1)
    actor.export(1, 0, ExportPlan(8))
    for number in (1, 3):  # again, and one left out
        with pytest.raises(EngineError, match=rf"^learner rank 1: proximal logprobs came as collective call {number}, but 2 is the next"):
            actor.proximal(number, None, 0)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="reference logprobs asked at version 7, but the weights are of 0"):
        actor.reference_logprobs(2, None, 7)  # type: ignore[arg-type]
    actor.export(3, 0, ExportPlan(8))


def test_the_group_numbers_its_calls_and_stays_in_its_process() -> None:
    """Each call is handed to every rank before the next, whoever of the process makes it; another process gets no handle."""
    calls: list[tuple[int, str, int]] = []

    class Method:
        def __init__(self, rank: int, name: str) -> None:
            self.rank, self.name = rank, name

        def options(self, *, num_returns: int) -> Method:
            self.results = num_returns
            return self

        def remote(self, number: int, *_: Any) -> Any:
            calls.append((self.rank, self.name, number))
            answers = [asyncio.ensure_future(asyncio.sleep(0.01, self.name)) for _ in range(self.results)]
            return answers[0] if self.results == 1 else answers

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __getattr__(self, name: str) -> Method:
            return Method(self.rank, name)

    group = LearnerGroup([Rank(0), Rank(1)], version=4, step_s=5.0)

    async def scenario() -> None:
        forwards = [group.proximal(None, version=4), group.reference_logprobs(None, version=4)]
        found, *_ = await asyncio.gather(*forwards, group.export(ExportPlan(8)))
        assert await found == "proximal", "a reference, for who has asked"
        await group.restore(Path("a"), 2, deadline_s=5.0)

    play(scenario)
    names = ["proximal", "reference_logprobs", "export", "restore"]
    assert calls == [(rank, name, number) for number, name in enumerate(names, 1) for rank in (0, 1)]
    assert group.version == 2
    with pytest.raises(TypeError, match="stays in its process"):
        pickle.dumps(group)


def test_hundreds_of_engines_leave_the_loop_to_others() -> None:
    """Each is asked in a turn of the event loop of its own, in their order: a call costs half a millisecond and more."""
    scene, turns, asked = Scene(**{f"e{i}": Engine() for i in range(200)}), 0, []

    class Noting(FakeActor):
        def __getattr__(self, name: str) -> Any:
            if name == "update_weights":
                asked.append(turns)
            return super().__getattr__(name)

    async def scenario() -> None:
        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        await scene.join()
        for target in scene.targets.values():
            target.actor = Noting(target.actor.instance)
        counting = asyncio.create_task(count())
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=10.0)
        counting.cancel()
        assert asked == sorted(set(asked)) and len(asked) == 200
        assert [name for name, target in scene.targets.items() if target.version == 1] == list(scene.targets)

    play(scenario)
