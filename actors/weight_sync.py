"""Weight sync: the learner's weights, by version, to every engine, with a receipt from each.

`publish` hands a version over and returns; receipts come later. An engine that is still busy with an older version skips to the newest.
No work goes to an engine without a receipt for the published version (actors.pool looks at `SyncTarget.version`). The first sync of an
engine, and the first after a failure, compares checksums of every tensor, taken in the engine's own process, and for true on-policy also
what the two processes compute with. After each sync the logprobs of a fixed prompt (the probe) are compared while the engine works on: a
full engine may take long to answer. If newer weights come first, that comparison is left out.

Transports: Ray's object store, for any pool; or a torch.distributed broadcast for a fixed pool. A broadcast group belongs to one set of
workers: when that changes, or a collective fails, the group is closed, the version goes out through the object store, and a new group is
built for the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from actors.carriers import WeightSnapshot
from actors.config import WeightSyncConfig
from actors.learner_group import LearnerGroup
from actors.supervision import wait_for
from correction.errors import DeadlineExceeded, EngineError, EvenkeelError, SyncError
from rollout.trajectory import SyncReceipt

log = logging.getLogger("evenkeel.sync")
_ATTEMPTS = 3
_UNPROBED = 10
"""A warning comes after so many versions in a row whose probe was not answered before the next version."""


@dataclass(slots=True)
class SyncTarget:
    """One engine, as the sync sees it."""

    name: str
    actor: Any
    version: int = -1
    """Of the last receipt; -1: none yet, or dirty."""
    is_verified: bool = False
    """Checksums have been compared since it joined or failed."""
    task: asyncio.Task[None] | None = None
    """Brings it up to date."""
    probe: asyncio.Task[None] | None = None
    """Compares the logprobs of the fixed prompt."""
    unprobed: int = 0
    """Versions since the last comparison that came to an end."""


class WeightSync:
    """Publishes versions and collects receipts. One event loop uses it."""

    def __init__(
        self,
        config: WeightSyncConfig,
        learner: LearnerGroup,
        *,
        probe_ids: Sequence[int],
        sync_s: float,
        on_receipt: Callable[[SyncReceipt], None],
        on_probe: Callable[[SyncTarget, int, float], None],
        on_dirty: Callable[[SyncTarget, str], None],
        on_failure: Callable[[SyncTarget, str], None],
    ) -> None:
        """
        Args:
            probe_ids: token ids of the prompt whose logprobs both sides compute.
            on_receipt: told of each receipt; the engine gets work from then on.
            on_probe: told of each comparison: engine, version, largest difference in nats.
            on_dirty: told of each attempt that failed, with the reason; the engine gets no work until a full sync has succeeded.
            on_failure: told of an engine that took no weights in several attempts, with the reason.
        """
        self._config, self._learner, self._sync_s = config, learner, sync_s
        self._probe_ids = list(probe_ids) if len(probe_ids) > 1 else []  # the first token has no logprob
        self._on_receipt, self._on_probe, self._on_dirty, self._on_failure = on_receipt, on_probe, on_dirty, on_failure
        self._targets: dict[str, SyncTarget] = {}
        self._snapshot: WeightSnapshot | None = None
        self._broadcast = _BroadcastGroup(learner, config.bucket_bytes, sync_s) if config.transport == "broadcast" else None

    @property
    def version(self) -> int:
        """Version of the newest published weights; -1 before the first."""
        return self._snapshot.version if self._snapshot else -1

    async def publish(self) -> WeightSnapshot:
        """Copy the learner's present weights and start sending them to every engine."""
        checks = any(not target.is_verified for target in self._targets.values()) or self._snapshot is None
        self._snapshot = await self._learner.weights(self._config.bucket_bytes, probe_ids=self._probe_ids, with_checksums=checks)
        if self._broadcast is not None:
            await self._publish_by_broadcast(self._snapshot)
        for target in self._targets.values():
            self._ensure_syncing(target)
        return self._snapshot

    def join(self, target: SyncTarget) -> None:
        """A new engine: it gets the newest weights, verified."""
        self._targets[target.name] = target
        self._ensure_syncing(target)

    def leave(self, name: str) -> None:
        """An engine is gone."""
        target = self._targets.pop(name, None)
        if target is not None:
            self._end_probe(target)
            if target.task is not None:
                target.task.cancel()

    def resync(self, target: SyncTarget, reason: str) -> None:
        """An engine says that its weights are of no version: it is sent all of the newest, verified; it gets no work before its receipt."""
        self._mark_dirty(target, reason)
        self._ensure_syncing(target)

    async def receipts(self, version: int, *, deadline_s: float) -> None:
        """Wait until every engine in the pool holds `version`. Raises: DeadlineExceeded naming those that don't."""
        until = asyncio.get_running_loop().time() + deadline_s
        while missing := [t.name for t in self._targets.values() if t.version < version]:
            if asyncio.get_running_loop().time() > until:
                raise DeadlineExceeded(f"weight sync v{version} -> workers {', '.join(missing)}: no receipt in {deadline_s:.0f} s")
            tasks = [t.task for t in self._targets.values() if t.task is not None and not t.task.done()]
            await (asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED) if tasks else asyncio.sleep(0.05))

    async def close(self) -> None:
        for name in list(self._targets):
            self.leave(name)
        if self._broadcast is not None:
            await self._broadcast.close()

    # -- one engine --------------------------------------------------------------------------------------------------

    def _ensure_syncing(self, target: SyncTarget) -> None:
        if self._snapshot is not None and (target.task is None or target.task.done()):
            target.task = asyncio.create_task(self._bring_up_to_date(target), name=f"sync {target.name}")

    async def _bring_up_to_date(self, target: SyncTarget) -> None:
        failures = 0
        while self._snapshot is not None and target.version < self._snapshot.version:
            snapshot = self._snapshot
            if not target.is_verified and not snapshot.checksums:
                snapshot = await self._learner.weights(self._config.bucket_bytes, probe_ids=self._probe_ids, with_checksums=True)
                if snapshot.version < self.version:  # a newer one was published meanwhile
                    continue
                self._snapshot = snapshot
            self._end_probe(target)
            try:
                receipt = await wait_for(
                    target.actor.update_weights.remote(snapshot.version, snapshot.buckets, not target.is_verified),
                    f"weight sync v{snapshot.version} -> rollout worker {target.name}",
                    deadline_s=self._sync_s,
                )
                self._accept(target, receipt, snapshot)
                failures = 0
            except (SyncError, EngineError, DeadlineExceeded, ray.exceptions.RayError) as error:
                failures += 1
                self._mark_dirty(target, f"weight sync v{snapshot.version}, attempt {failures} of {_ATTEMPTS}: {error}")
                if failures >= _ATTEMPTS:
                    self._on_failure(target, f"took no weights in {_ATTEMPTS} attempts: {error}")
                    return
                await asyncio.sleep(failures)

    def _mark_dirty(self, target: SyncTarget, reason: str) -> None:
        target.version, target.is_verified = -1, False
        self._on_dirty(target, reason)

    def _accept(self, target: SyncTarget, receipt: SyncReceipt, snapshot: WeightSnapshot) -> None:
        if receipt.checksums:
            compare_checksums(target.name, snapshot.checksums, receipt.checksums, version=receipt.version)
            if receipt.processor is not None and snapshot.processor is not None:
                receipt.processor.require_same(snapshot.processor, this=f"rollout worker {target.name}", that="the learner")
            target.is_verified = True
        if not target.is_verified:  # marked dirty while this was under way: only a verified sync counts now
            return
        target.version = receipt.version
        self._on_receipt(receipt)
        if snapshot.probe_logprobs:
            probe = self._compare_probe(target, snapshot.version, snapshot.probe_logprobs)
            target.probe = asyncio.create_task(probe, name=f"probe {target.name}")

    async def _compare_probe(self, target: SyncTarget, version: int, expected: Sequence[float]) -> None:
        what = f"probe of weights v{version} <- rollout worker {target.name}"
        try:
            logprobs = await wait_for(target.actor.probe.remote(self._probe_ids), what, deadline_s=self._sync_s)
        except (EvenkeelError, ray.exceptions.RayError) as error:
            log.warning("%s: %s", what, error)  # an engine that is broken shows it in its work, or at the next sync
            return
        target.unprobed = 0
        self._on_probe(target, version, max(abs(a - b) for a, b in zip(logprobs, expected, strict=True)))

    def _end_probe(self, target: SyncTarget) -> None:
        """Cancel it before newer weights arrive: its answer would be of those, or of both."""
        if target.probe is None:
            return
        if not target.probe.done():
            target.probe.cancel()
            target.unprobed += 1
            if target.unprobed % _UNPROBED == 0:
                log.warning(
                    "rollout worker %s: %d weight versions in a row came before their probe was answered: whether the engine agrees with "
                    "the learner was not compared (it has more requests than places; rollout.engine.max_running_requests)",
                    target.name,
                    target.unprobed,
                )
        target.probe = None

    # -- broadcast ---------------------------------------------------------------------------------------------------

    async def _publish_by_broadcast(self, snapshot: WeightSnapshot) -> None:
        """Send by broadcast to the engines that are verified; those left behind get the version through the object store."""
        assert self._broadcast is not None
        targets = [t for t in self._targets.values() if t.is_verified]
        if not targets:
            return
        for target in targets:  # an update through the object store must not overlap the broadcast
            if target.task is not None and not target.task.done():
                await asyncio.wait({target.task}, timeout=self._sync_s)
        targets = [t for t in targets if t.is_verified and (t.task is None or t.task.done())]
        if not targets:
            return
        for target in targets:
            self._end_probe(target)
        try:
            receipts = await self._broadcast.send(snapshot, targets)
        except (SyncError, EngineError, DeadlineExceeded, ray.exceptions.RayError) as error:
            await self._broadcast.close()
            for target in targets:
                self._mark_dirty(target, f"broadcast of v{snapshot.version} failed, it goes through the object store: {error}")
            return
        for target, receipt in zip(targets, receipts, strict=True):
            self._accept(target, receipt, snapshot)


class _BroadcastGroup:
    """The torch.distributed group of the learner (rank 0) and one fixed set of engines."""

    def __init__(self, learner: LearnerGroup, bucket_bytes: int, sync_s: float) -> None:
        self._learner, self._bucket_bytes, self._sync_s = learner, bucket_bytes, sync_s
        self._members: tuple[str, ...] = ()
        self._actors: list[Any] = []
        self._generation = 0

    async def send(self, snapshot: WeightSnapshot, targets: Sequence[SyncTarget]) -> list[SyncReceipt]:
        """Broadcast the learner's weights to the targets; builds the group anew when they are others than last time."""
        await self._ensure_group(targets)
        buckets = await self._learner.weight_specs(self._bucket_bytes, deadline_s=self._sync_s)
        receiving = [t.actor.receive_weights.remote(snapshot.version, buckets, self._name) for t in targets]
        what = f"broadcast of v{snapshot.version}"
        waits = [
            wait_for(r, f"{what} -> rollout worker {t.name}", deadline_s=self._sync_s) for r, t in zip(receiving, targets, strict=True)
        ]
        _, *receipts = await asyncio.gather(self._learner.broadcast(self._bucket_bytes, deadline_s=self._sync_s), *waits)
        return receipts

    @property
    def _name(self) -> str:
        return f"weights-{self._generation}"

    async def _ensure_group(self, targets: Sequence[SyncTarget]) -> None:
        members = tuple(t.name for t in targets)
        if members == self._members:
            return
        await self.close()
        self._generation += 1
        rank_zero, world_size = self._learner.rank_zero, 1 + len(targets)
        host, port = await wait_for(rank_zero.address.remote(), "address <- learner", deadline_s=self._sync_s)
        joins = [rank_zero.open_broadcast.remote(host, port, world_size, self._name, self._sync_s)]
        joins += [t.actor.join_weight_group.remote(host, port, i + 1, world_size, self._name) for i, t in enumerate(targets)]
        # Before they have joined, so that `close` undoes a half-built group.
        self._members, self._actors = members, [t.actor for t in targets]
        await asyncio.gather(*(wait_for(j, f"weight group {self._name}", deadline_s=self._sync_s) for j in joins))

    async def close(self) -> None:
        """Leave the group everywhere; members that are gone don't matter."""
        if not self._members:
            return
        name = self._name
        leaving = [self._learner.rank_zero.close_broadcast.remote()] + [a.leave_weight_group.remote(name) for a in self._actors]
        self._members, self._actors = (), []
        for call in leaving:
            try:
                await wait_for(call, f"leaving weight group {name}", deadline_s=10.0)
            except Exception as error:  # a dead member can't leave; the group is given up anyway
                log.info("leaving weight group: %s", type(error).__name__)


def compare_checksums(worker: str, learner: dict[str, str], engine: dict[str, str], *, version: int) -> None:
    """Raises: SyncError naming the first tensors that differ, or that one side lacks."""
    if learner == engine:
        return
    missing = sorted(learner.keys() ^ engine.keys())
    different = sorted(name for name in learner.keys() & engine.keys() if learner[name] != engine[name])
    raise SyncError(
        f"weight sync v{version} -> rollout worker {worker}: "
        + (f"{len(different)} tensors differ, first {different[0]}; " if different else "")
        + (f"{len(missing)} tensors stand on one side only, first {missing[0]}; " if missing else "")
        + "the engine gets no work until a full sync succeeds"
    )
