"""The turns in which nodes fetch a delta, in simulated time: who fetches when, and what a node costs the others that is slow or gone.

That a node then fetches from another one than the learner's: tests/actors/on_two_nodes/test_delta_relay.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from actors.carriers import WeightSnapshot
from actors.weights import weight_deltas
from actors.weights.weight_deltas import WeightDeltas
from correction.errors import ActorLost
from tests.actors.simulated_time import simulate

HOME = "home"
FETCH_S, REBUILD_S = 1.0, 100.0
WHOLE, DELTA = 100 << 20, 5 << 20


class RelayScene:
    """Nodes that hold version 0 when version 1 is published. A fetch takes 1 s of simulated time, a rebuild 100 s."""

    def __init__(self, nodes: int, delta_bytes: int = DELTA, limit_s: float = 1000.0, **fetch_s: float) -> None:
        """
        Args:
            limit_s: for all of a node's deltas to come.
            fetch_s: by node, where it is another one; infinite: it never ends, negative: it fails after so long.
        """
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.fetch_s = fetch_s
        self.delta_bytes = delta_bytes
        self.deltas = WeightDeltas(HOME, limit_s)
        self.deltas._run = self._run  # type: ignore[method-assign]
        self.deltas._fetch = self._fetch  # type: ignore[method-assign]
        self.deltas._start = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
        self.began: dict[str, float] = {}
        """By node the second in which its fetch began, since the publication."""
        self.rebuilt: dict[str, float] = {}
        self.under_way, self.holders = 0, 1
        self.never = asyncio.Event()

    async def _run(self, function: Callable[..., Any], what: str, node: str, newest: WeightSnapshot, *arguments: Any) -> Any:
        if function is weight_deltas.rebuilt:
            self.rebuilt[node] = self.now
            await asyncio.sleep(REBUILD_S)
            return ["made"], ""
        return ["delta"], self.delta_bytes

    async def _fetch(self, references: list[Any], node: str, version: int) -> None:
        assert references == ["delta"] and version == self.version
        self.began[node], took_s = self.now, self.fetch_s.get(node, FETCH_S)
        self.under_way += 1
        try:
            if took_s == float("inf"):
                await self.never.wait()
            await asyncio.sleep(abs(took_s))
            if took_s < 0:
                raise ActorLost(f"node {node} is gone")
            self.holders += 1
        finally:
            self.under_way -= 1

    @property
    def now(self) -> float:
        return round(asyncio.get_running_loop().time() - self.published_at, 3)

    async def publish(self, version: int) -> None:
        spec: Any = SimpleNamespace(nbytes=WHOLE)
        snapshot = WeightSnapshot(version, [f"v{version}"], [[spec]], [], None, 0.0)
        self.version, self.published_at = version, asyncio.get_running_loop().time()
        self.began.clear()
        self.deltas.published(snapshot, [HOME, *self.nodes])
        if version == 0:
            for node in self.nodes:
                self.deltas.taken(node, snapshot)
        await asyncio.sleep(0)

    async def both(self) -> None:
        await self.publish(0)
        await self.publish(1)


def test_nodes_fetch_in_waves_and_rebuild_as_soon_as_they_have_it() -> None:
    """Fifteen in four waves, no more at a time than have it; a rebuild, however long, holds up no fetch."""

    async def scenario() -> None:
        scene = RelayScene(15)
        await scene.both()
        for _ in range(50):
            await asyncio.sleep(0.1)
            assert scene.under_way <= scene.holders
        assert Counter(scene.began.values()) == {0.0: 1, 1.0: 2, 2.0: 4, 3.0: 8}
        assert {node: at_s - scene.began[node] for node, at_s in scene.rebuilt.items()} == dict.fromkeys(scene.nodes, FETCH_S)
        scene.deltas.close()

    simulate(scenario)


def test_a_small_delta_is_not_fetched_in_waves() -> None:
    async def scenario() -> None:
        scene = RelayScene(15, delta_bytes=1000)
        await scene.both()
        await asyncio.sleep(0.1)
        assert scene.began == {} and scene.rebuilt == dict.fromkeys(scene.nodes, 0.0), "the learner's node sends it to all at once"
        scene.deltas.close()

    simulate(scenario)


def test_a_node_that_is_lost_as_it_fetches_passes_its_turn_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        scene = RelayScene(4, n0=-0.5)
        await scene.both()
        await asyncio.sleep(5.0)
        assert scene.began == {"n0": 0.0, "n1": 0.5, "n2": 1.5, "n3": 1.5}
        assert set(scene.rebuilt) == {"n1", "n2", "n3"} and set(scene.deltas._copies) == {"n1", "n2", "n3"}
        scene.deltas.close()

    simulate(scenario)
    assert "node n0 fetches the whole of weights v1: node n0 is gone" in caplog.text


def test_others_wait_for_a_silent_node_no_longer_than_twice_a_usual_fetch() -> None:
    """A machine without power says nothing. The first delta of all is waited for longer: nobody knows the network yet."""

    async def scenario() -> None:
        scene = RelayScene(2, n0=float("inf"))
        await scene.both()
        await asyncio.sleep(20.0)
        assert scene.began == {"n0": 0.0, "n1": weight_deltas._FIRST_PATIENCE_S}
        scene.deltas.close()
        scene = RelayScene(2)
        await scene.both()
        await asyncio.sleep(REBUILD_S + 20.0)
        for version in range(2, 5):  # the patience of the beginning is forgotten
            await scene.publish(version)
            await asyncio.sleep(REBUILD_S + 20.0)
        scene.fetch_s = {"n0": float("inf")}
        await scene.publish(5)
        await asyncio.sleep(20.0)
        assert scene.began == {"n0": 0.0, "n1": 2 * FETCH_S}
        scene.deltas.close()

    simulate(scenario)


def test_the_turns_of_all_nodes_together_have_one_limit(caplog: pytest.LogCaptureFixture) -> None:
    """Each fetch takes 1 s of the 2.5 s. Those of the third wave would end after 3 s: who isn't done by then takes all weights, and the
    fourth wave never begins."""

    async def scenario() -> None:
        scene = RelayScene(15, limit_s=2.5)
        await scene.both()
        snapshot = scene.deltas._newest
        assert snapshot is not None
        answers = {node: asyncio.ensure_future(scene.deltas.of_node(node, snapshot)) for node in scene.nodes}
        await asyncio.sleep(2.6)
        assert Counter(scene.began.values()) == {0.0: 1, 1.0: 2, 2.0: 4} and scene.under_way == 0
        whole = [node for node, answer in answers.items() if answer.done()]
        assert whole == scene.nodes[3:] and all(answers[node].result() == (["v1"], None) for node in whole)
        await asyncio.sleep(REBUILD_S)
        assert [answers[node].result() for node in scene.nodes[:3]] == [(["made"], DELTA)] * 3
        scene.deltas.close()

    simulate(scenario)
    assert "node n14 fetches the whole of weights v1: deltas in turn, v1 <- node n14: not done in 2 s" in caplog.text


def test_a_node_that_is_dropped_as_it_waits_or_fetches_takes_no_turn_with_it() -> None:
    async def scenario() -> None:
        scene = RelayScene(4)
        await scene.both()
        await asyncio.sleep(0.5)
        for node in ("n0", "n1"):  # n0 fetches, n1 is the next
            scene.deltas._drop(node, scene.deltas._copies[node])
        await asyncio.sleep(5.0)
        assert scene.began == {"n0": 0.0, "n2": 0.5, "n3": 1.5}
        scene.deltas.close()

    simulate(scenario)
