"""Versions, receipts and faults of the weight sync. Engines and learner are fakes here, for faults and time; tests/e2e has real ones.

Behaviours locked here: an engine that fails is tried again, whole and with checksums; after three failures it is given up; a slow engine
skips to the newest version; a wait for receipts names those that are missing; a broadcast that fails goes through the object store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import ray.exceptions
import torch

from actors.carriers import WeightSnapshot
from actors.config import WeightSyncConfig
from actors.learner_group import LearnerRankActor
from actors.weight_sync import SyncTarget, WeightSync, compare_checksums
from correction.errors import DeadlineExceeded, EngineError, SyncError
from learner.config import LearnerConfig
from rollout.trajectory import SyncReceipt
from tests.actors.cases import FakeActor

SUMS = {"a": "1", "b": "2"}


class Learner:
    """Weights whose version the test sets."""

    def __init__(self) -> None:
        self.version = 0
        self.broadcasts = 0
        self.rank_zero = FakeActor(self)

    async def weights(self, bucket_bytes: int, *, probe_ids: Sequence[int] = (), with_checksums: bool = False) -> WeightSnapshot:
        version = self.version
        await asyncio.sleep(0)
        return WeightSnapshot(version, [], [-1.0, -2.0], dict(SUMS) if with_checksums else {}, 0.0)

    async def address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def open_broadcast(self, *_: Any) -> None: ...

    async def close_broadcast(self) -> None: ...

    async def weight_specs(self, bucket_bytes: int, *, deadline_s: float) -> list[Any]:
        return []

    async def broadcast(self, bucket_bytes: int, *, deadline_s: float) -> None:
        self.broadcasts += 1


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

    async def update_weights(self, version: int, buckets: list[Any], with_checksums: bool) -> SyncReceipt:
        self.taken.append((version, with_checksums))
        await self._play()
        return receipt(version, self.checksums if with_checksums else {})

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

    def __init__(self, sync_s: float = 5.0, transport: str = "object_store", **engines: Engine) -> None:
        self.learner = Learner()
        self.receipts: list[tuple[str, int]] = []
        self.differences: list[tuple[str, int, float]] = []
        self.dirty: list[tuple[str, str]] = []
        self.failures: list[tuple[str, str]] = []
        self.sync = WeightSync(
            WeightSyncConfig.model_validate({"transport": transport}),
            self.learner,  # type: ignore[arg-type]
            probe_ids=[1, 2, 3],
            sync_s=sync_s,
            on_receipt=lambda receipt: self.receipts.append((receipt.worker, receipt.version)),
            on_probe=lambda target, version, difference: self.differences.append((target.name, version, difference)),
            on_dirty=lambda target, reason: self.dirty.append((target.name, reason)),
            on_failure=lambda target, reason: self.failures.append((target.name, reason)),
        )
        self.targets = {name: SyncTarget(name, FakeActor(engine)) for name, engine in engines.items()}

    async def join(self) -> None:
        await self.sync.publish()
        for target in self.targets.values():
            self.sync.join(target)
        await self.sync.receipts(0, deadline_s=10.0)

    async def publish(self, version: int) -> None:
        self.learner.version = version
        await self.sync.publish()


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30.0))  # type: ignore[arg-type]


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
    engine = Engine(None, SyncError("bucket 2 of 3"), ray.exceptions.RayTaskError("f", "traceback", EngineError("no answer")))

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

    play(scenario)
    assert engine.taken == [(0, True), (1, False), (1, True), (1, True)]


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

    play(scenario)


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

    play(scenario)


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


def test_many_probes_in_a_row_that_find_no_place_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")  # an engine in this process has put it to errors

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


def test_an_engine_that_joins_late_gets_the_newest_weights_and_checksums() -> None:
    """The version at hand was published without checksums, so they are asked for."""
    late = Engine()

    async def scenario() -> None:
        scene = Scene(w=Engine())
        await scene.join()
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=5.0)
        scene.sync.join(SyncTarget("late", FakeActor(late)))
        await scene.sync.receipts(1, deadline_s=5.0)

    play(scenario)
    assert late.taken == [(1, True)]


def test_an_older_copy_never_replaces_a_newer_one() -> None:
    """A joining engine's copy of v1 arrives after v2 was published: the sync stays at v2, and so does the engine."""

    async def scenario() -> None:
        scene = Scene(w=Engine())
        await scene.join()
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=5.0)
        gate, quick = asyncio.Event(), scene.learner.weights

        async def slow(*args: Any, **named: Any) -> WeightSnapshot:
            snapshot = await quick(*args, **named)
            await gate.wait()
            return snapshot

        scene.learner.weights = slow  # type: ignore[method-assign]
        scene.sync.join(SyncTarget("late", FakeActor(Engine())))
        await asyncio.sleep(0.01)
        scene.learner.weights = quick  # type: ignore[method-assign]
        await scene.publish(2)
        gate.set()
        await scene.sync.receipts(2, deadline_s=5.0)
        assert scene.sync.version == 2

    play(scenario)


# -- broadcast -------------------------------------------------------------------------------------------------------


def test_broadcast_serves_verified_engines() -> None:
    engines = {"a": Engine(), "b": Engine()}

    async def scenario() -> None:
        scene = Scene(transport="broadcast", **engines)
        await scene.join()
        for version in (1, 2):
            await scene.publish(version)
        assert scene.learner.broadcasts == 2
        assert [t.version for t in scene.targets.values()] == [2, 2]

    play(scenario)
    assert all(e.taken == [(0, True)] and e.received == [1, 2] for e in engines.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gathers_to_the_end_of_a_broadcast(rank: int) -> None:
    """Rank 0 alone sends; when that fails in the middle, it goes on gathering, or the other ranks would wait for it."""
    gathered, sent = [], []

    class Rank:
        def weights(self, bucket_bytes: int) -> Iterator[int]:
            for i in range(3):
                gathered.append(i)
                yield i

    class Broadcaster:
        def send(self, tensors: int) -> None:
            sent.append(tensors)
            if tensors == 1:
                raise SyncError("an engine is gone")

    actor = LearnerRankActor(LearnerConfig(), rank, bind="")
    actor._learner = Rank()  # type: ignore[assignment]
    if rank == 0:
        with pytest.raises(SyncError, match="no weight group"):
            actor.broadcast(1)
        actor._broadcaster = Broadcaster()  # type: ignore[assignment]
        with pytest.raises(SyncError, match="gone"):
            actor.broadcast(1)
    else:
        actor.broadcast(1)
    assert gathered == [0, 1, 2] and sent == ([0, 1] if rank == 0 else [])


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gathers_the_weights_and_rank_zero_alone_copies_them(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered, stored = [], []

    class Rank:
        def weights(self, bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
            for i in range(3):
                gathered.append(i)
                yield {f"w{i}": torch.full((2,), float(i))}

    monkeypatch.setattr(ray, "put", stored.append)
    actor = LearnerRankActor(LearnerConfig(), rank, bind="")
    actor._learner = Rank()  # type: ignore[assignment]
    snapshot = actor.weights(1, [], with_checksums=False)
    assert gathered == [0, 1, 2] and (snapshot is None) == (rank == 1)
    assert [list(bucket.tensors()) for bucket in stored] == ([["w0"], ["w1"], ["w2"]] if rank == 0 else [])


def test_a_broadcast_that_fails_goes_through_the_object_store_and_the_next_one_works() -> None:
    good, bad = Engine(), Engine(None, ray.exceptions.RayTaskError("f", "traceback", SyncError("member gone")))

    async def scenario() -> None:
        scene = Scene(transport="broadcast", good=good, bad=bad)
        await scene.join()
        await scene.publish(1)
        await scene.sync.receipts(1, deadline_s=5.0)
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
