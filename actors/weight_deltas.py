"""Deltas: a node makes the newest weights of those that it holds, and of what has changed since, instead of fetching all of them again.

What has changed is found on the learner's node, where both versions lie in the object store, in a process beside training. Every other
node whose engines hold some weights fetches that alone, and makes of it, once for all of its engines, buckets like those that the learner
has stored: the engines read them in their own node's store, and know of no difference. A node that is behind takes several steps in one.
Ray fetches an object from any node that has it, so that what many nodes fetch goes from one to the other, and not from the learner alone.

The learner's store holds a third version: the one that is exported while differences of the two before it are found.

A node takes the whole, which is always there, if it holds nothing yet, if the differences are no smaller together, if making them failed
or was too slow, and if what was made of them isn't to the bit what the learner stored. A new generation has no older weights: all of this
belongs to one `WeightSync`, and what it compares are objects in the store, of which nobody makes others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.carriers import WeightSnapshot
from actors.supervision import abandon, wait_for
from correction.errors import EvenkeelError, SyncError

if TYPE_CHECKING:  # torch
    from actors.bucket_delta import BucketDelta
    from correction.engines.weight_bucket import WeightBucket

log = logging.getLogger("evenkeel.sync")
_FAILURES = (EvenkeelError, ray.exceptions.RayError)
_FOR_WHO_COMES = 2
"""Steps that are kept though every node's copy is newer: of a node whose first weights come now, published some versions ago."""
_FRUITLESS = 3
"""Versions in a row whose differences were no smaller than the whole: from then on none are sought."""
_THREADS = 4
"""Of a process that finds differences, or makes weights of them, beside training or sampling."""


@dataclass(slots=True)
class _Step:
    """From one published version to the next."""

    base: int
    version: int
    making: asyncio.Task[tuple[list[Any], int]]
    """References to its WeightDeltas, and their bytes."""


@dataclass(slots=True)
class _Copy:
    """Weights that a node has."""

    version: int
    buckets: list[Any]
    delta_bytes: int | None = None
    """Of the differences that they were made of; None: they came whole."""
    following: asyncio.Task[None] | None = None
    """Makes newer ones."""


class WeightDeltas:
    """What the nodes hold, and how they get to the newest version. One event loop uses it."""

    def __init__(self, learner_node: str, limit_s: float) -> None:
        """
        Args:
            learner_node: its id, where weights are stored; nobody there needs differences.
            limit_s: for finding differences, and for making weights of them.
        """
        self._home, self._limit_s = learner_node, limit_s
        self._newest: WeightSnapshot | None = None
        self._steps: list[_Step] = []
        """Without a gap up to the newest version."""
        self._fruitless = 0
        self._copies: dict[str, _Copy] = {}
        """By node."""

    def published(self, snapshot: WeightSnapshot, nodes: Collection[str]) -> None:
        """A newer version is out. Args: nodes: those of all engines."""
        older, self._newest = self._newest, snapshot
        for node in self._copies.keys() - set(nodes):
            self._drop(node, self._copies[node])
        if older is None or not any(self._is_far(node) for node in nodes) or self._fruitless >= _FRUITLESS:
            self._steps.clear()
        elif self._steps and not self._steps[-1].making.done():  # each holds two versions
            log.warning("weights v%d go out whole: what had changed before is still being sought", snapshot.version)
            abandon(self._steps[-1].making)
            self._steps.clear()
        else:
            making = asyncio.create_task(self._make(older, snapshot), name=f"differences to v{snapshot.version}")
            making.add_done_callback(_look_at_its_error)
            self._steps = [*self._needed(sum(_sizes(snapshot))), _Step(older.version, snapshot.version, making)]
        for node in list(self._copies):
            self._ensure_following(node)

    def taken(self, node: str, snapshot: WeightSnapshot) -> None:
        """An engine of this node holds these weights, so that they lie in the node's object store."""
        if self._is_far(node) and node not in self._copies:
            self._copies[node] = _Copy(snapshot.version, snapshot.buckets)
            self._ensure_following(node)

    async def of_node(self, node: str, snapshot: WeightSnapshot) -> tuple[list[Any], int | None]:
        """References to a version's buckets for an engine of a node, and the bytes of the differences they were made of (None: whole)."""
        copy = self._copies.get(node)
        while copy is not None and copy.version < snapshot.version and copy.following is not None and self._copies.get(node) is copy:
            await asyncio.wait({copy.following})
        if copy is None or copy.version != snapshot.version:
            return snapshot.buckets, None
        return copy.buckets, copy.delta_bytes

    def close(self) -> None:
        for node, copy in list(self._copies.items()):
            self._drop(node, copy)
        for step in self._steps:
            abandon(step.making)

    def _is_far(self, node: str) -> bool:
        return node not in ("", self._home)

    def _needed(self, limit: int) -> list[_Step]:
        """The last steps, as far back as a node may be behind, and all together have fewer bytes: they lie in the store meanwhile."""
        found: list[_Step] = []
        oldest = min((copy.version for copy in self._copies.values()), default=math.inf)
        for step in reversed(self._steps):
            limit -= step.making.result()[1] if step.making.exception() is None else limit
            if limit <= 0 or (step.version <= oldest and len(found) >= _FOR_WHO_COMES):
                break
            found.insert(0, step)
        return found

    async def _make(self, older: WeightSnapshot, newer: WeightSnapshot) -> tuple[list[Any], int]:
        if _sizes(older) != _sizes(newer):
            raise SyncError(f"weights v{newer.version} lie in other buckets than v{older.version}")
        try:
            deltas, delta_bytes = await self._run(differences, "differences", self._home, newer, *older.buckets, *newer.buckets)
        except _FAILURES as error:
            log.warning("weights v%d go out whole: what has changed in them was not found: %s", newer.version, error)
            raise
        self._fruitless = self._fruitless + 1 if delta_bytes >= sum(_sizes(newer)) else 0
        if self._fruitless == _FRUITLESS:
            said = "weights go out whole from here on: what had changed in %d versions was no smaller than that (weight_sync.deltas)"
            log.warning(said, _FRUITLESS)
        return deltas, delta_bytes

    async def _run(self, function: Any, what: str, node: str, newest: WeightSnapshot, *arguments: Any) -> tuple[list[Any], Any]:
        """A generator as a Ray task on a node. Returns: references to what it yields for each bucket, and what it yields at last."""
        place = NodeAffinitySchedulingStrategy(node, soft=False) if node else None
        # No retries: Ray would keep what it needs to make a lost result again, and here the whole is what comes in its place.
        task = ray.remote(function).options(num_cpus=0, max_retries=0, num_returns=len(newest.buckets) + 1, scheduling_strategy=place)
        *found, told = task.remote(len(newest.buckets), *arguments)
        try:
            return found, await wait_for(told, f"{what}, v{newest.version} <- node {node[:8]}", deadline_s=self._limit_s)
        except BaseException:  # late, or nobody waits any more: it would go on, and hold its versions in the store
            ray.cancel(told, force=True)
            raise

    # -- one node ----------------------------------------------------------------------------------------------------

    def _ensure_following(self, node: str) -> None:
        copy = self._copies.get(node)
        if copy is None or self._newest is None or copy.version >= self._newest.version:
            return
        if copy.following is None or copy.following.done():
            copy.following = asyncio.create_task(self._follow(node, copy, self._newest), name=f"weights of node {node[:8]}")
            copy.following.add_done_callback(lambda _: self._ensure_following(node))

    async def _follow(self, node: str, copy: _Copy, newest: WeightSnapshot) -> None:
        """Make the newest version of the node's copy; if that fails, the node's engines take the whole."""
        steps = [step for step in self._steps if copy.version <= step.base and step.version <= newest.version]
        try:
            if not steps or steps[0].base != copy.version or steps[-1].version != newest.version:
                raise SyncError(f"nothing leads there from v{copy.version}")
            made = [await asyncio.shield(step.making) for step in steps]
            delta_bytes, whole = sum(size for _, size in made), sum(_sizes(newest))
            if delta_bytes >= whole:
                raise SyncError(f"the differences to v{copy.version} have {delta_bytes:,} bytes, the whole has {whole:,}")
            deltas = [reference for references, _ in made for reference in references]
            buckets, problem = await self._run(rebuilt, "weights of differences", node, newest, *copy.buckets, *deltas)
            if problem:
                raise SyncError(problem)
            copy.version, copy.buckets, copy.delta_bytes = newest.version, buckets, delta_bytes
        except _FAILURES as error:
            log.warning("node %s fetches the whole of weights v%d: %s", node[:8], newest.version, error)
        finally:
            if copy.version != newest.version:
                self._drop(node, copy)

    def _drop(self, node: str, copy: _Copy) -> None:
        if self._copies.get(node) is copy:
            del self._copies[node]
        if copy.following is not None and copy.following is not asyncio.current_task():
            abandon(copy.following)


def _look_at_its_error(making: asyncio.Task[Any]) -> None:
    """Who needs it will say so."""
    if not making.cancelled():
        making.exception()


def _sizes(snapshot: WeightSnapshot) -> list[int]:
    """Bytes of its buckets."""
    return [sum(spec.nbytes for spec in bucket) for bucket in snapshot.specs]


def differences(count: int, *buckets: WeightBucket) -> Iterator[BucketDelta | int]:
    """Of `count` older buckets to as many new ones; and at last their bytes."""
    from actors.bucket_delta import BucketDelta

    delta_bytes = 0
    with ThreadPoolExecutor(_THREADS) as pool:
        for base, new in zip(buckets[:count], buckets[count:], strict=True):
            delta = BucketDelta.between(base, new, pool.map)
            delta_bytes += delta.nbytes
            yield delta
    yield delta_bytes


def rebuilt(count: int, *parts: Any) -> Iterator[WeightBucket | str | None]:
    """Of `count` older buckets, and of each one's differences from version to version; and at last what went wrong, or nothing."""
    problem = ""
    with ThreadPoolExecutor(_THREADS) as pool:
        for bucket, *deltas in zip(*(parts[i : i + count] for i in range(0, len(parts), count)), strict=True):
            try:
                for delta in deltas if not problem else ():
                    bucket = delta.applied(bucket, pool.map)
            except SyncError as error:
                problem = str(error)
            yield None if problem else bucket
    yield problem
