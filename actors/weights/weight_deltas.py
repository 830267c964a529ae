"""Weight deltas: a node computes new weights from an older version that it holds and the difference, instead of fetching all weights.

The difference of two versions (delta) is computed on the learner's node, where both lie in the object store, by a Ray task during training.
Every other node whose engines hold an older version fetches the delta, and a task there rebuilds the buckets that the learner stored, once
for all engines of the node. The engines read them from their node's store like any others. A node that is several versions behind applies
several deltas. Nodes fetch a delta in waves, most of them from other nodes than the learner's (actors.weights.relay); each rebuilds as soon
as it has it.

The learner's store holds up to three versions: one is exported while the delta of the two before it is computed.

A node fetches all weights instead if it holds none yet, if the deltas together are not smaller, if computing or applying them fails or
misses its deadline, or if the checksum of a rebuilt bucket is wrong. A `WeightSync` belongs to one generation, and so does this: after a
return to a checkpoint nothing older is used.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.carriers import WeightSnapshot
from actors.processes.supervision import abandon, has_failed, wait_for
from actors.weights.relay import Relay, fetched
from correction.errors import EvenkeelError, SyncError

if TYPE_CHECKING:  # torch
    from actors.weights.bucket_delta import BucketDelta
    from correction.engines.weight_bucket import WeightBucket

log = logging.getLogger("evenkeel.sync")
_FAILURES = (EvenkeelError, ray.exceptions.RayError)
_FOR_WHO_COMES = 2
"""Number of latest deltas kept although no node needs them now: a node that joins may receive weights that are some versions old."""
_MAX_LARGE_DELTAS = 3
"""After so many deltas in a row that were no smaller than the weights, none are computed any more."""
_RELAYED = 2**20
"""Bytes of a delta from which it is fetched in waves: up to some seven nodes have a smaller one sooner if the learner's node sends it to
all. With 8 ms that a wave costs (benchmarks/delta_relay.py) that is so at 1 Gbit/s below 0.8 MB for 7 nodes, and below 8 MB at 10 Gbit/s.
Waves for too small a delta lose some tens of milliseconds; the other mistake loses seconds."""
_FIRST_PATIENCE_S, _LEAST_PATIENCE_S = 10.0, 1.0
"""Seconds for which others wait for a node that fetches: as long as no fetch has ended, and at least. Else twice the last ones' time."""
_THREADS = 4
"""Threads of a task that computes or applies deltas, while training and sampling go on."""


@dataclass(slots=True)
class _Step:
    """The delta from one published version to the next."""

    base: int
    version: int
    making: asyncio.Task[tuple[list[Any], int]]
    """Task that computes it. Returns references to a BucketDelta for each bucket, and their bytes together."""
    relay: Relay = field(default_factory=Relay)


@dataclass(slots=True)
class _Copy:
    """The weights that a node holds."""

    version: int
    buckets: list[Any]
    delta_bytes: int | None = None
    """Bytes of the deltas that they were made from; None: they were fetched whole."""
    following: asyncio.Task[None] | None = None
    """Task that brings them to the newest version."""


class WeightDeltas:
    """The versions that nodes hold, and the deltas that bring them to the newest. To be used from one event loop."""

    def __init__(self, learner_node: str, limit_s: float) -> None:
        """
        Args:
            learner_node: id of the node whose store has the learner's weights; engines there need no deltas.
            limit_s: longest time to compute the deltas of a version, for them to come to a node, its wait for its turn included, and to
                apply them there, each, seconds.
        """
        self._home, self._limit_s = learner_node, limit_s
        self._newest: WeightSnapshot | None = None
        self._steps: list[_Step] = []
        """Consecutive versions, up to the newest."""
        self._large_deltas = 0
        """Latest deltas in a row that were no smaller than the weights."""
        self._starting: asyncio.Task[None] | None = None
        """Task that starts the process in which deltas are computed. An abandoned delta doesn't end it: where a start takes longer than a
        step, each version would begin another one, and none would ever end."""
        self._copies: dict[str, _Copy] = {}
        """By node id the weights that the node holds."""
        self._patience_s = _FIRST_PATIENCE_S

    def published(self, snapshot: WeightSnapshot, nodes: Collection[str]) -> None:
        """A newer version is published: start computing its delta, and applying it. Args: nodes: ids of the nodes of all engines."""
        older, self._newest = self._newest, snapshot
        for node in self._copies.keys() - set(nodes):
            self._drop(node, self._copies[node])
        if older is None or not any(self._is_far(node) for node in nodes) or self._large_deltas >= _MAX_LARGE_DELTAS:
            self._steps.clear()
        elif self._steps and not self._steps[-1].making.done():  # one at a time: each keeps two versions in the store
            log.warning("weights v%d are sent whole: the changes to v%d are still being computed", snapshot.version, older.version)
            abandon(self._steps[-1].making)
            self._steps.clear()
        else:
            making = asyncio.create_task(self._make(older, snapshot), name=f"differences to v{snapshot.version}")
            making.add_done_callback(has_failed)  # _make has logged it
            self._steps = [*self._needed(sum(_sizes(snapshot))), _Step(older.version, snapshot.version, making)]
        for node in list(self._copies):
            self._ensure_following(node)

    def taken(self, node: str, snapshot: WeightSnapshot) -> None:
        """An engine of this node has taken these weights, so they are in the node's object store."""
        if self._is_far(node) and node not in self._copies:
            self._copies[node] = _Copy(snapshot.version, snapshot.buckets)
            self._ensure_following(node)

    async def of_node(self, node: str, snapshot: WeightSnapshot) -> tuple[list[Any], int | None]:
        """References to a version's buckets for an engine of a node, and bytes of the deltas they were made from (None: fetched whole)."""
        copy = self._copies.get(node)
        while copy is not None and copy.version < snapshot.version and copy.following is not None and self._copies.get(node) is copy:
            await asyncio.wait({copy.following})
        if copy is None or copy.version != snapshot.version:
            return snapshot.buckets, None
        return copy.buckets, copy.delta_bytes

    def close(self) -> None:
        for node, copy in list(self._copies.items()):
            self._drop(node, copy)
        for making in (*(step.making for step in self._steps), self._starting):
            if making is not None:
                abandon(making)

    def _is_far(self, node: str) -> bool:
        return node not in ("", self._home)

    def _needed(self, limit: int) -> list[_Step]:
        """The latest deltas that some node may still need, as long as all together have fewer bytes than `limit`, the weights' size."""
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
            raise SyncError(f"weights v{newer.version} are divided into other buckets than v{older.version}")
        if self._starting is None or (self._starting.done() and (self._starting.cancelled() or has_failed(self._starting))):
            self._starting = asyncio.create_task(self._start(), name="process for differences")
        starting = self._starting
        try:
            await asyncio.shield(starting)
            deltas, delta_bytes = await self._run(differences, "differences", self._home, newer, *older.buckets, *newer.buckets)
        except BaseException as error:
            if starting.done() and self._starting is starting:  # its process has ended with the task, or could not be started
                self._starting = None
            if isinstance(error, _FAILURES):
                log.warning("weights v%d are sent whole, because their delta could not be computed: %s", newer.version, error)
            raise
        self._large_deltas = self._large_deltas + 1 if delta_bytes >= sum(_sizes(newer)) else 0
        if self._large_deltas == _MAX_LARGE_DELTAS:
            message = "weights are sent whole from now on: the deltas of %d versions in a row were no smaller (weight_sync.deltas)"
            log.warning(message, _MAX_LARGE_DELTAS)
        return deltas, delta_bytes

    async def _start(self) -> None:
        """Start the process that computes deltas. Ray runs the next tasks of this node in it, if it keeps it: on a node without a CPU to
        spare it ends an idle process after a second, and then each delta begins with another start."""
        await self._result(task_on(imports, self._home).remote(), "process for differences", self._home)

    async def _run(self, function: Any, what: str, node: str, newest: WeightSnapshot, *arguments: Any) -> tuple[list[Any], Any]:
        """Run a generator as a Ray task on a node. Returns: references to what it yields for each bucket, and its last value."""
        count = len(newest.buckets)
        *found, summary = task_on(function, node, num_returns=count + 1).remote(count, *arguments)
        return found, await self._result(summary, f"{what}, v{newest.version}", node)

    async def _result(self, reference: Any, what: str, node: str) -> Any:
        """The result of a Ray task on this node. The task is cancelled if it is late, or if this call is cancelled."""
        try:
            return await wait_for(reference, f"{what} <- node {node[:8]}", deadline_s=self._limit_s)
        except BaseException:  # the task would go on, and keep its versions in the store
            ray.cancel(reference, force=True)
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
        """Bring the node's copy to the newest version; if that fails, the node's engines fetch all weights."""
        steps = [step for step in self._steps if copy.version <= step.base and step.version <= newest.version]
        try:
            if not steps or steps[0].base != copy.version or steps[-1].version != newest.version:
                raise SyncError(f"there is no delta from v{copy.version}")
            made = [await asyncio.shield(step.making) for step in steps]
            delta_bytes, whole = sum(size for _, size in made), sum(_sizes(newest))
            if delta_bytes >= whole:
                of_deltas = f"the deltas from v{copy.version} ({delta_bytes:,} bytes)"
                raise SyncError(f"{of_deltas} are not smaller than the weights ({whole:,} bytes)")
            fetching = self._fetch_in_turn(node, [(step, *of_step) for step, of_step in zip(steps, made, strict=True)])
            what = f"deltas in turn, v{newest.version} <- node {node[:8]}"
            await wait_for(fetching, what, deadline_s=self._limit_s, usual_s=self._limit_s)
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

    async def _fetch_in_turn(self, node: str, deltas: Sequence[tuple[_Step, list[Any], int]]) -> None:
        """Have the node's store fetch deltas, each when it is its turn. Args: deltas: with references and bytes. Raises: as _fetch."""
        for step, references, size in deltas:
            if size >= _RELAYED:
                took_s = await step.relay.in_turn(partial(self._fetch, references, node, step.version), self._patience_s)
                self._patience_s = max(_LEAST_PATIENCE_S, 2 * took_s, self._patience_s / 2)  # the slowest of the last few

    async def _fetch(self, references: list[Any], node: str, version: int) -> None:
        """Have the node's store fetch the delta to a version."""
        await self._result(task_on(fetched, node).remote(references), f"delta, v{version}", node)

    def _drop(self, node: str, copy: _Copy) -> None:
        if self._copies.get(node) is copy:
            del self._copies[node]
        if copy.following is not None and copy.following is not asyncio.current_task():
            abandon(copy.following)


def _sizes(snapshot: WeightSnapshot) -> list[int]:
    """Bytes of its buckets."""
    return [sum(spec.nbytes for spec in bucket) for bucket in snapshot.specs]


def task_on(function: Any, node: str, **options: Any) -> Any:
    """The function as a Ray task on this node; empty: on any."""
    place = NodeAffinitySchedulingStrategy(node, soft=False) if node else None
    # No retries: for one Ray would keep the arguments in the store; if a result is lost, the node fetches all weights.
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=place, **options)


def imports() -> None:
    """A Ray task: does nothing, in a process that has imported what `differences` needs (torch, too)."""
    from actors.weights import bucket_delta  # noqa: F401


def differences(count: int, *buckets: WeightBucket) -> Iterator[BucketDelta | int]:
    """A Ray task: yields the BucketDelta of each bucket, and at last their bytes. Args: buckets: `count` older, then as many new ones."""
    from actors.weights.bucket_delta import BucketDelta

    delta_bytes = 0
    with ThreadPoolExecutor(_THREADS) as pool:
        for base, new in zip(buckets[:count], buckets[count:], strict=True):
            delta = BucketDelta.between(base, new, pool.map)
            delta_bytes += delta.nbytes
            yield delta
    yield delta_bytes


def rebuilt(count: int, *parts: Any) -> Iterator[WeightBucket | str | None]:
    """A Ray task: yields the new buckets, and at last why one could not be made (empty: all are made).

    Args: parts: `count` older buckets, then for each version in order its `count` BucketDeltas.
    """
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
