"""Which differences the learner's store keeps, for how long, and what a node makes of them. The sizes are told here instead of found.

With real differences, on two nodes: test_weight_deltas.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.carriers import WeightSnapshot
from actors.weights import weight_deltas
from actors.weights.weight_deltas import WeightDeltas
from correction.errors import SyncError

WHOLE = 1000
HOME, FAR = "a" * 56, "b" * 56


class DeltaStepScene:
    """One node apart from the learner's. What a task finds is there at once; weights are when they may be."""

    def __init__(self, delta_bytes: int = 20) -> None:
        self.delta_bytes = delta_bytes
        self.deltas = WeightDeltas(HOME, 5.0)
        self.deltas._run = self._run  # type: ignore[method-assign]
        self.deltas._start = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
        self.may_rebuild = asyncio.Event()
        self.may_rebuild.set()
        self.version = -1

    async def _run(self, function: Callable[..., Any], what: str, node: str, newest: WeightSnapshot, *arguments: Any) -> Any:
        if function is weight_deltas.rebuilt:
            await self.may_rebuild.wait()
            return [f"made v{newest.version}"], ""
        return [f"difference to v{newest.version}"], self.delta_bytes

    async def publish(self) -> WeightSnapshot:
        self.version += 1
        spec: Any = SimpleNamespace(nbytes=WHOLE)
        snapshot = WeightSnapshot(self.version, [f"v{self.version}"], [[spec]], [], None, 0.0)
        self.deltas.published(snapshot, [HOME, FAR])
        await asyncio.sleep(0.01)
        return snapshot

    @property
    def kept(self) -> list[int]:
        """Versions to which differences are held."""
        return [step.version for step in self.deltas._steps]


def test_differences_that_every_node_is_past_go_from_the_store() -> None:
    """Twenty bytes each are less than the whole for fifty versions: without that the store would hold so many."""

    async def scenario() -> None:
        scene = DeltaStepScene()
        scene.deltas.taken(FAR, await scene.publish())
        for _ in range(10):
            snapshot = await scene.publish()
            assert await scene.deltas.of_node(FAR, snapshot) == ([f"made v{scene.version}"], 20)
        assert scene.kept == [8, 9, 10], "the newest, and two for a node whose first weights came late"
        scene.deltas._copies[FAR].version = 3
        await scene.publish()
        assert scene.kept[0] == 8, "what is gone doesn't come back"

    asyncio.run(scenario())


def test_a_node_that_is_behind_has_its_differences_kept() -> None:
    """As far as they are fewer bytes than the whole."""

    async def scenario() -> None:
        scene = DeltaStepScene(delta_bytes=300)
        scene.may_rebuild.clear()
        scene.deltas.taken(FAR, await scene.publish())
        for _ in range(3):
            await scene.publish()
        assert scene.kept == [1, 2, 3]
        for _ in range(3):
            await scene.publish()
        assert scene.kept == [3, 4, 5, 6], "three older ones have 900 bytes"
        scene.deltas.close()

    asyncio.run(scenario())


class Tasks:
    """Ray's, none of which ends by itself; the process for them is there at once unless a test says otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_process: bool = True) -> None:
        self.has_process = has_process
        self.starts: list[asyncio.Future[None]] = []
        self.begun: list[asyncio.Future[Any]] = []
        self.cancelled: list[Any] = []
        monkeypatch.setattr(weight_deltas.ray, "remote", lambda function: SimpleNamespace(options=self._options))
        monkeypatch.setattr(weight_deltas.ray, "cancel", lambda reference, *, force: self.cancelled.append(reference))

    def _options(self, *, num_returns: int = 0, **_: Any) -> Any:
        return SimpleNamespace(remote=lambda *_: [self._begin() for _ in range(num_returns)] or self._start())

    def _begin(self) -> asyncio.Future[Any]:
        self.begun.append(asyncio.get_running_loop().create_future())
        return self.begun[-1]

    def _start(self) -> asyncio.Future[None]:
        self.starts.append(asyncio.get_running_loop().create_future())
        if self.has_process:
            self.starts[-1].set_result(None)
        return self.starts[-1]


@pytest.mark.parametrize("limit_s", [0.05, 5.0], ids=["past its deadline", "newer weights are out"])
def test_a_task_that_nobody_waits_for_is_ended(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold two versions in the store, and a step later another one would run at the same time."""

    async def scenario() -> None:
        scene, tasks = DeltaStepScene(), Tasks(monkeypatch)
        scene.deltas = WeightDeltas(HOME, limit_s)
        for _ in range(2):
            await scene.publish()
        assert tasks.cancelled == []
        if limit_s < 1.0:
            await asyncio.wait({scene.deltas._steps[-1].making})
        else:
            await scene.publish()
            assert scene.kept == []
        assert tasks.cancelled == [tasks.begun[1]], "of the differences of one bucket, and their bytes"
        await scene.publish()
        await scene.publish()
        assert len(tasks.starts) == 2, "its process has ended with it"
        scene.deltas.close()

    asyncio.run(scenario())


def test_a_process_that_starts_for_longer_than_a_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ended with the delta that was late, each time anew: a run of short steps had no delta in a minute."""

    async def scenario() -> None:
        scene, tasks = DeltaStepScene(), Tasks(monkeypatch, has_process=False)
        scene.deltas = WeightDeltas(HOME, 5.0)
        for _ in range(6):
            await scene.publish()
        assert len(tasks.starts) == 1 and tasks.begun == tasks.cancelled == []
        tasks.starts[0].set_result(None)
        await asyncio.sleep(0.01)
        assert len(tasks.begun) == 2, "the differences of one bucket to the newest version, and their bytes"
        for _ in range(2):
            tasks.begun[-1].set_result(20)
            await asyncio.sleep(0.01)
            await scene.publish()
        assert len(tasks.starts) == 1 and tasks.cancelled == [] and scene.kept == [5, 6, 7]
        scene.deltas.close()

    asyncio.run(scenario())


def test_a_process_that_does_not_start_is_tried_again_with_the_next_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        scene, tasks = DeltaStepScene(), Tasks(monkeypatch, has_process=False)
        scene.deltas = WeightDeltas(HOME, 0.05)
        for _ in range(2):
            await scene.publish()
        await asyncio.wait({scene.deltas._steps[-1].making})
        assert tasks.cancelled == tasks.starts and len(tasks.starts) == 1
        tasks.has_process = True
        await scene.publish()
        assert len(tasks.starts) == 2 and len(tasks.begun) == 2
        scene.deltas.close()

    asyncio.run(scenario())
    assert "weights v1 are sent whole, because their delta could not be computed: process for differences <- node aaaaaaaa" in caplog.text


def test_a_start_that_failed_while_nobody_waited_is_no_later_version_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene, tasks = DeltaStepScene(), Tasks(monkeypatch, has_process=False)
        scene.deltas = WeightDeltas(HOME, 5.0)
        for _ in range(3):
            await scene.publish()
        assert scene.kept == [], "the one that waited has been given up"
        tasks.starts[0].set_exception(SyncError("its node is gone"))
        await asyncio.sleep(0.01)
        tasks.has_process = True
        await scene.publish()
        assert len(tasks.starts) == 2 and len(tasks.begun) == 2
        scene.deltas.close()

    asyncio.run(scenario())


def test_what_leads_to_an_older_version_is_not_taken_for_the_newest() -> None:
    """An engine would sample at version 1 under the name of version 2."""

    async def scenario() -> None:
        scene = DeltaStepScene()
        scene.may_rebuild.clear()
        scene.deltas.taken(FAR, await scene.publish())
        await scene.publish()
        scene.deltas._copies.clear()
        newest = await scene.publish()
        scene.deltas.taken(FAR, replace(newest, version=0))
        scene.deltas._steps.pop()
        scene.may_rebuild.set()
        assert await scene.deltas.of_node(FAR, newest) == (newest.buckets, None)

    asyncio.run(scenario())


def test_differences_that_do_not_pay_are_not_sought_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """As with high learning rates in float32; one version in between that pays begins the count anew."""

    async def scenario() -> None:
        scene = DeltaStepScene(delta_bytes=WHOLE)
        for size in (WHOLE, WHOLE, WHOLE, 20, WHOLE, WHOLE, WHOLE):
            scene.delta_bytes = size
            await scene.publish()
        assert scene.kept != [], "two, none, and three in a row"
        for _ in range(3):
            await scene.publish()
            assert scene.kept == []

    asyncio.run(scenario())
    assert [one.getMessage() for one in caplog.records if "from now on" in one.getMessage()] == [
        "weights are sent whole from now on: the deltas of 3 versions in a row were no smaller (weight_sync.deltas)"
    ]
