"""Weight sync: the learner's weights, by version, to every engine, with a receipt from each.

`publish` hands a version over and returns; receipts come later. An engine that is still busy with an older version skips to the newest.
No work goes to an engine without a receipt for the published version (actors.pool.pool looks at `SyncTarget.version`). The first sync of an
engine, and the first after a failure, compares checksums of every tensor, taken in the engine's own process, and for true on-policy also
what the two processes compute with. After a sync the logprobs of a fixed prompt (the probe) are compared while the engine works on: a
full engine may take long to answer. If newer weights come first, that comparison is left out. Of many engines _PROBED are compared at each
version, in turn, and each one after its first sync.

What was published stays in the object store until the next version is: whoever joins or is to be mended reads it there, and the learner
has nothing to do with it (PublishedVersions).

An engine is given up when it is lost, or when three updates in a row have failed in it or had no answer. That the weights themselves are
late on their way to its node (LateError) is not counted: it goes on waiting for them, with growing pauses.

Transports: Ray's object store, or a torch.distributed broadcast, without a copy in that store. A broadcast group belongs to one
set of workers: when that changes, or a collective fails, a new one is built during training, and versions go through the object store until
it is whole. An engine that joins gets its first version in this way, outside the others' group, until it is verified. An engine that needs
a version that was broadcast only waits for the next one, which is stored as well, so that it makes no work for the learner. If no other
engine has that version, or the next one is overdue, the learner copies it to the store, once for all who need it.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import ray
import ray.exceptions

from evenkeel.actors.carriers import ExportPlan, WeightChecksums, WeightSnapshot
from evenkeel.actors.config import SYNC_ATTEMPTS, WeightSyncConfig
from evenkeel.actors.processes.pacing import CallThrottle
from evenkeel.actors.processes.supervision import abandon, call_with_retries, wait_for
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.settings.deadlines import newer_weights_s
from evenkeel.actors.weights.broadcast_group import BroadcastGroup
from evenkeel.correction.errors import ActorLost, DeadlineExceeded, EngineError, EvenkeelError, LateError, SyncError, counted
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.trajectory import SyncReceipt, WorkerLoad

log = logging.getLogger("evenkeel.sync")
_LATE = 3  # attempts in a row, without anybody who has a version, after which its copy in the object store counts as lost
_FINAL = (EngineError, ActorLost)  # of an engine that is gone, or its worker; what derives from them (dirty, not reached now) may pass
_PROBED = 16
# Number of an engine's probes in a row that weren't answered before the next version, after which there is a warning.
_UNPROBED = 10
_SHOWN = 3  # engines whose trouble a message shows where several are missing
_ENDS = 150  # characters of either end of a long error


@dataclass(slots=True)
class SyncTarget:
    """One engine, as the sync sees it."""

    name: str
    actor: Any
    version: int = -1
    """Version of the last receipt; -1: none yet, or dirty."""
    is_verified: bool = False
    """Whether checksums have been compared since it joined or failed."""
    task: asyncio.Task[None] | None = None
    """Task that brings the engine up to date."""
    probe: asyncio.Task[None] | None = None
    """Task that compares the logprobs of the fixed prompt."""
    probed_version: int = -1
    """Version whose probe it was last asked for; -1: none yet."""
    unprobed: int = 0
    """Number of probes that it was asked for in vain since the last finished comparison."""
    answered_at: float = -math.inf
    """Event-loop time (s) of its last receipt, or answer to a probe."""
    load: WorkerLoad | None = None
    """Load of its worker, from the last receipt."""
    node: str = ""
    """Id of its node; empty: not known."""
    trouble: str = ""
    """Why it has no newer weights: what its last attempt failed of, or why its engine is dirty; empty: nothing since its last receipt."""


@dataclass(frozen=True, slots=True)
class SyncCallbacks:
    """Functions that a weight sync calls with its results."""

    receipt: Callable[[SyncReceipt], None]
    """Called with each receipt; the engine gets work from then on."""
    probe: Callable[[SyncTarget, int, list[float]], None]
    """Called with each comparison: engine, version, each token's difference in nats."""
    dirty: Callable[[SyncTarget, str], None]
    """Called with each failed attempt and the reason; the engine gets no work until a full sync has succeeded."""
    failure: Callable[[SyncTarget, str], None]
    """Called with an engine that took no weights in several attempts, and the reason."""
    loss: Callable[[ActorLost], None]
    """Called when a rank of the learner, or a collective call, is lost while weights are copied."""


class WeightSync:
    """Publishes versions and collects receipts. One event loop uses it."""

    def __init__(
        self,
        config: WeightSyncConfig,
        engine: EngineConfig,
        learner: LearnerGroup,
        callbacks: SyncCallbacks,
        *,
        probe_ids: Sequence[int],
        sync_s: float,
        bucket_s: float | None = None,
        generation: int = 0,
    ) -> None:
        """
        Args:
            engine: settings of all workers' engines: the type of their weights, and their ranks, all of them members of a broadcast group.
            probe_ids: token ids of the prompt whose logprobs both sides compute.
            sync_s: deadline of one update, seconds.
            bucket_s: longest time for one bucket of a broadcast, seconds; None: sync_s.
            generation: of the run; only receipts of its versions count.
        """
        self._config, self._learner, self._sync_s, self._callbacks = config, learner, sync_s, callbacks
        self._plan = ExportPlan(config.bucket_bytes, float8=engine.has_float8)
        self._probe_ids = list(probe_ids) if len(probe_ids) > 1 else []  # the first token has no logprob
        self._targets: dict[str, SyncTarget] = {}
        # Names of the engines whose turn it is to be probed at the newest version.
        self._to_probe: set[str] = set()
        self._versions = PublishedVersions(learner, self._plan, sync_s, callbacks.loss)
        self._throttle, self._generation = CallThrottle(), generation
        self._broadcast: BroadcastGroup | None = None
        if config.transport == "broadcast":
            self._broadcast = BroadcastGroup(learner, sync_s, generation, engine.tensor_parallel, self._wanted, bucket_s=bucket_s)

    @property
    def version(self) -> int:
        """Version of the newest published weights; -1 before the first."""
        return self._versions.version

    async def publish(self) -> WeightSnapshot:
        """Export the learner's present weights and start sending them to every engine. They are handed out from here on, not before."""
        if self._broadcast is None:
            return await self._publish([])
        async with self._broadcast.in_use:
            snapshot = await self._publish(await self._members())
        self._broadcast.rebuild()  # if the last try failed
        return snapshot

    async def _publish(self, members: Sequence[SyncTarget]) -> WeightSnapshot:
        others = len(self._targets) - len(members)
        plan = replace(
            self._plan,
            # With every_steps > 1 the learner goes on to versions that aren't published: an engine that joins then needs a stored one.
            stores=not members or others > 0 or self._config.every_steps > 1,
            broadcasts=bool(members),
            checksums=self._versions.newest is None,  # all engines wait for the first; for who joins later a task makes them
            probe_ids=tuple(self._probe_ids),
        )
        snapshot, receipts = await self._export_to(members, plan) if members else (await self._learner.export(plan), [])
        self._versions.add(snapshot)
        verified = (target for target in self._targets.values() if target.is_verified)  # others are probed after their first sync anyway
        in_turn = heapq.nsmallest(_PROBED, verified, key=lambda target: target.probed_version)
        self._to_probe = {target.name for target in in_turn}
        for target, receipt in receipts:
            self._accept(target, receipt, snapshot)
        for target in self._targets.values():
            self._ensure_syncing(target)
        return snapshot

    def join(self, target: SyncTarget) -> None:
        """Add an engine: it gets the newest weights, verified."""
        self._targets[target.name] = target
        self._ensure_syncing(target)

    def leave(self, name: str) -> None:
        """Called when an engine is gone."""
        self._drop(name)
        if self._broadcast is not None:
            self._broadcast.rebuild()

    def _drop(self, name: str) -> None:
        if (target := self._targets.pop(name, None)) is not None:
            self._end_probe(target)
            if target.task is not None:
                target.task.cancel()

    def resync(self, target: SyncTarget, reason: str) -> None:
        """Called when an engine is dirty: send it all of the newest weights, verified. It gets no work before its receipt."""
        self._mark_dirty(target, reason)
        self._ensure_syncing(target)

    async def receipts(self, version: int, *, deadline_s: float, is_one_enough: bool = False) -> None:
        """Wait until the engines that are in the pool now hold `version`, or one does.

        Raises: DeadlineExceeded naming those that don't, and what their last attempts failed of.
        """
        names, until = list(self._targets), asyncio.get_running_loop().time() + deadline_s  # with nodes that come, somebody always lacks it
        if self._versions.newest is not None and not is_one_enough:
            self._versions.newest.is_awaited.set()
        while missing := [name for name in names if name in self._targets and self._targets[name].version < version]:
            if is_one_enough and any(t.version >= version for t in self._targets.values()):
                return
            if asyncio.get_running_loop().time() > until:
                what = f"weight sync v{version} -> workers {', '.join(missing)}"
                troubles = [f"; {name}: {_brief(trouble)}" for name in missing if (trouble := self._targets[name].trouble)]
                why = "".join(troubles[:_SHOWN]) + (f"; and {len(troubles) - _SHOWN} more" if len(troubles) > _SHOWN else "")
                raise DeadlineExceeded(f"{what}: no receipt in {deadline_s:.0f} s{why}", what=what, seconds=deadline_s)
            tasks = [t.task for t in self._targets.values() if t.task is not None and not t.task.done()]
            await (asyncio.wait(tasks, timeout=1.0) if tasks else asyncio.sleep(0.05))

    async def close(self) -> None:
        for name in list(self._targets):
            self._drop(name)
        self._versions.close()
        if self._broadcast is not None:
            await self._broadcast.close()

    # -- one engine --------------------------------------------------------------------------------------------------

    def _ensure_syncing(self, target: SyncTarget) -> None:
        if self._versions.newest is not None and (target.task is None or target.task.done()):
            target.task = asyncio.create_task(self._bring_up_to_date(target), name=f"sync {target.name}")
            target.task.add_done_callback(lambda task: self._note_end(target, task))

    def _note_end(self, target: SyncTarget, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            target.trouble = f"its weight sync failed: {error!r}"
            self._callbacks.failure(target, target.trouble)

    async def _bring_up_to_date(self, target: SyncTarget) -> None:
        failures = late = 0
        while self._versions.newest is not None and target.version < self.version:
            version, is_asked = self.version, False
            try:
                is_held = partial(self._is_held, target)
                if (at_hand := await self._versions.at_hand(target.name, is_verified=target.is_verified, is_held=is_held)) is None:
                    return
                (published, checksums), began = at_hand, asyncio.get_running_loop().time()
                buckets = published.snapshot.buckets
                await self._throttle.wait()
                # Outdated ones are for an unverified engine alone, which may need longer than a step for any.
                if published is not self._versions.newest and not checksums:
                    continue
                version, is_asked = published.version, True
                self._end_probe(target)
                receipt = await call_with_retries(
                    partial(target.actor.update_weights.remote, version, buckets, checksums, self._generation),
                    f"weight sync v{version} -> rollout worker {target.name}",
                    deadline_s=self._sync_s,
                )
                seconds = asyncio.get_running_loop().time() - began  # the worker's own don't hold the calls, there and back
                self._accept(target, replace(receipt, seconds=seconds), published.snapshot)
                failures = late = 0
            except LateError as error:  # its engine was not touched, and is none the worse for a network or a store
                late += 1
                target.trouble = str(error)
                level = logging.WARNING if late % 10 == 1 else logging.DEBUG  # all workers of a slow network say so
                log.log(level, "weights v%d did not come to rollout worker %s, tried %dx: %s", version, target.name, late, error)
                if is_asked and late % _LATE == 0 and all(other.version < version for other in self._targets.values()):
                    self._versions.make_anew(published, buckets)
                await asyncio.sleep(pause_s(late))
            except SYNC_FAILURES as error:
                failures += 1
                self._mark_dirty(target, f"weight sync v{version}, attempt {failures} of {SYNC_ATTEMPTS}: {error}")
                if failures >= SYNC_ATTEMPTS or (is_asked and type(error) in _FINAL):
                    self._callbacks.failure(target, f"took no weights in {counted(failures, 'attempt')}: {error}")
                    return
                await asyncio.sleep(failures)

    def _is_held(self, target: SyncTarget, version: int) -> bool:
        """Whether another engine than this one has the version."""
        return any(other is not target and other.version >= version for other in self._targets.values())

    def _mark_dirty(self, target: SyncTarget, reason: str) -> None:
        target.version, target.is_verified, target.trouble = -1, False, reason
        self._callbacks.dirty(target, reason)

    def _accept(self, target: SyncTarget, receipt: SyncReceipt, snapshot: WeightSnapshot) -> None:
        if receipt.generation != self._generation:
            raise SyncError(
                f"rollout worker {target.name}: a receipt for v{receipt.version} of generation {receipt.generation}, not "
                f"{self._generation}: those weights were withdrawn"
            )
        if receipt.digest:
            if snapshot.checksums is None or receipt.digest != snapshot.checksums.digest:
                raise SyncError(
                    f"weight sync v{receipt.version} -> rollout worker {target.name}: it has compared its weights with others "
                    "than this version's; the engine gets no work until a full sync succeeds"
                )
            if receipt.processor is not None and snapshot.processor is not None:
                receipt.processor.require_same(snapshot.processor, this=f"rollout worker {target.name}", that="the learner")
            target.is_verified = True
            if self._broadcast is not None:
                self._broadcast.rebuild()
        if not target.is_verified:  # marked dirty while this was under way: only a verified sync counts now
            return
        target.version, target.trouble = receipt.version, ""
        target.answered_at, target.load = asyncio.get_running_loop().time(), receipt.load
        self._callbacks.receipt(receipt)
        if snapshot.probe_logprobs and (receipt.digest or target.name in self._to_probe):
            target.probed_version = snapshot.version
            probe = self._compare_probe(target, snapshot.version, snapshot.probe_logprobs)
            target.probe = asyncio.create_task(probe, name=f"probe {target.name}")

    async def _compare_probe(self, target: SyncTarget, version: int, expected: Sequence[float]) -> None:
        what = f"probe of weights v{version} <- rollout worker {target.name}"
        try:
            logprobs = await wait_for(target.actor.probe.remote(self._probe_ids), what, deadline_s=self._sync_s)
        except (EvenkeelError, ray.exceptions.RayError) as error:
            log.warning("%s: %s", what, error)  # an engine that is broken shows it in its work, or at the next sync
            return
        target.unprobed, target.answered_at = 0, asyncio.get_running_loop().time()
        self._callbacks.probe(target, version, [abs(a - b) for a, b in zip(logprobs, expected, strict=True)])

    def _end_probe(self, target: SyncTarget) -> None:
        """Cancel it before newer weights arrive: its answer would be of those, or of both."""
        if target.probe is None:
            return
        if not target.probe.done():
            target.probe.cancel()
            target.unprobed += 1
            if target.unprobed % _UNPROBED == 0:
                log.warning(
                    "rollout worker %s: %d times in a row newer weights came before the probe was answered: engine and learner were "
                    "not compared. The engine is full, and the probe waited too long. Raise rollout.engine.max_running_requests",
                    target.name,
                    target.unprobed,
                )
        target.probe = None

    # -- broadcast ---------------------------------------------------------------------------------------------------

    def _wanted(self) -> list[SyncTarget]:
        """The engines of the next group: all of them; none as long as one is about to join or to be repaired."""
        targets = list(self._targets.values())
        return targets if all(target.is_verified for target in targets) else []

    async def _members(self) -> list[SyncTarget]:
        """The engines that the next version is broadcast to: those of the group if it is whole, and they have nothing under way."""
        assert self._broadcast is not None
        if self._versions.newest is None:
            return []
        members = [t for one in self._broadcast.members if (t := self._targets.get(one.name)) is one and t.is_verified]
        if len(members) < len(self._broadcast.members):  # one is gone, or is to be mended
            return []
        # An update through the object store must not overlap the broadcast.
        if busy := [t.task for t in members if t.task is not None and not t.task.done()]:
            await asyncio.wait(busy, timeout=self._sync_s)
        ready = [t for t in members if self._targets.get(t.name) is t and t.is_verified and (t.task is None or t.task.done())]
        return ready if ready == members else []

    async def _export_to(
        self, targets: Sequence[SyncTarget], plan: ExportPlan
    ) -> tuple[WeightSnapshot, list[tuple[SyncTarget, SyncReceipt]]]:
        """Broadcast to these engines, in one pass over the weights, and their receipts; if that fails they are dirty, and all is stored."""
        assert self._broadcast is not None and self._versions.newest is not None
        version = self._learner.version
        for target in targets:
            self._end_probe(target)
        waits: list[asyncio.Task[Any]] = []
        try:
            receiving = self._broadcast.receiving(version, self._versions.newest.snapshot.specs)
            waits = [asyncio.create_task(wait) for wait in (self._learner.export(plan, deadline_s=self._sync_s), *receiving)]
            snapshot, *receipts = await asyncio.gather(*waits)
            if snapshot.broadcast_error:
                raise SyncError(snapshot.broadcast_error)
            return snapshot, list(zip(targets, receipts, strict=True))
        except SYNC_FAILURES as error:
            for wait in waits:
                abandon(wait)
            for target in targets:  # before anything is waited for: none may get work at weights that it holds in part
                self._mark_dirty(target, f"broadcast of v{version} failed, it goes through the object store: {error}")
            await self._broadcast.dissolve()
            return await self._learner.export(replace(plan, broadcasts=False, stores=True, checksums=True)), []


def _brief(error: str) -> str:
    """An error's text in one line, with its middle left out if it is long: there an error of another process has its traceback."""
    line = " ".join(error.split())
    return line if len(line) <= 2 * _ENDS else f"{line[:_ENDS]} ... {line[-_ENDS:]}"


# The newest published weights, and what all who need them share: their copy in the object store, and their checksums.
#
# Both are made once, in the learner's export or for the first who needs them; checksums for who comes later by a task beside the learner.
# What was broadcast only is copied for an engine if no other one works with it, or if the run stands: else this engine waits for the next
# version, which is stored as well, so that it makes no work for the learner. What fails here is the learner's or the object store's, and no
# engine's fault.

SYNC_FAILURES = (SyncError, EngineError, DeadlineExceeded, ray.exceptions.RayError)
_LONGEST_PAUSE_S = 30.0
# Number of latest publications whose median distance is the usual one.
_USUAL_OF = 9
# Usual distances between two publications after which the next one counts as overdue.
_STANDS_AFTER = 2.0
# Seconds after which an engine that waits for the next version looks again whether another one works.
_LOOK_S = 1.0


def pause_s(failures: int) -> float:
    """Seconds until the next attempt after failures that are not an engine's fault."""
    return min(failures, _LONGEST_PAUSE_S)


@dataclass(slots=True)
class Publication:
    """A published version."""

    snapshot: WeightSnapshot
    overdue_at: float = -math.inf
    """Event-loop time (s) from which the next version is overdue."""
    copying: asyncio.Task[None] | None = None
    """Task that copies it into the object store."""
    hashing: asyncio.Task[None] | None = None
    """Task that computes its checksums."""
    replaced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a newer version is published."""
    is_awaited: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run waits for the engines that lack this version, so that no newer one comes."""

    @property
    def version(self) -> int:
        return self.snapshot.version


class PublishedVersions:
    """Holds the newest published version. One event loop uses it."""

    def __init__(self, learner: LearnerGroup, plan: ExportPlan, sync_s: float, on_loss: Callable[[ActorLost], None]) -> None:
        """Args: plan: for a copy into the object store. on_loss: called when a rank is lost during a copy, or nobody has the newest
        weights."""
        self._learner, self._plan, self._sync_s, self._on_loss = learner, plan, sync_s, on_loss
        self.newest: Publication | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # Event-loop times (s) of the latest publications.
        self._published_at: deque[float] = deque(maxlen=_USUAL_OF + 1)

    @property
    def version(self) -> int:
        """The newest published version; -1 before the first."""
        return self.newest.version if self.newest else -1

    def add(self, snapshot: WeightSnapshot) -> None:
        """Note that a newer version is published."""
        self._published_at.append(now := asyncio.get_running_loop().time())
        distances = [after - before for before, after in pairwise(self._published_at)]
        overdue_at = now + _STANDS_AFTER * median(distances) if distances else -math.inf
        older, self.newest = self.newest, Publication(snapshot, overdue_at)
        if older is not None:
            older.replaced.set()

    async def at_hand(
        self, worker: str, *, is_verified: bool, is_held: Callable[[int], bool]
    ) -> tuple[Publication, WeightChecksums | None] | None:
        """The newest version in the object store, with the checksums that this engine has to show; None once the learner is lost.

        Tried again until it is there.
        Args:
            worker: its name.
            is_verified: its engine has to show none.
            is_held: whether another engine has a version, or a newer one.
        """
        failures = 0
        while self.newest is not None:
            version = self.version
            try:
                try:
                    published = await self._stored(self.newest, is_held)
                except ActorLost as error:
                    self._on_loss(error)
                    return None
                return published, await self._checksums(published) if not is_verified else None
            except SYNC_FAILURES as error:
                failures += 1
                log.warning("weights v%d are not at hand for rollout worker %s, tried %dx: %s", version, worker, failures, error)
                await asyncio.sleep(pause_s(failures))
        return None

    async def _stored(self, published: Publication, is_held: Callable[[int], bool]) -> Publication:
        """The copy of this version, or of a newer one, as it lies in the object store."""
        while not published.snapshot.buckets:
            newer = f"weights newer than v{published.version}, which were broadcast only <- learner"
            if self._learner.version != published.version:
                longest_s = newer_weights_s(self._learner.step_s, self._sync_s)
                await wait_for(published.replaced.wait(), newer, deadline_s=longest_s)
            elif _is_near(published) and is_held(published.version):
                await _until_due(published, is_held)
            else:
                if published.copying is None or published.copying.done():
                    published.copying = self._begin(self._copy(published))
                await asyncio.shield(published.copying)
            published = self.newest or published
        return published

    def make_anew(self, published: Publication, buckets: Sequence[Any]) -> None:
        """Called when nobody can read the copy with these buckets: the learner makes another one when an engine next asks.

        If the learner has newer weights by then it can't, and `on_loss` is called.
        """
        if published is not self.newest or published.snapshot.buckets is not buckets:
            return
        if self._learner.version == published.version:
            published.snapshot = replace(published.snapshot, buckets=[])
        else:
            self._on_loss(ActorLost(f"weights v{published.version}: no rollout worker can read them, and the learner has newer ones"))

    async def _copy(self, published: Publication) -> None:
        copy = await self._learner.export(replace(self._plan, checksums=True))
        published.snapshot = replace(published.snapshot, buckets=copy.buckets, checksums=copy.checksums)

    async def _checksums(self, published: Publication) -> WeightChecksums:
        while (found := published.snapshot.checksums) is None:
            if published.hashing is None or published.hashing.done():
                published.hashing = self._begin(self._hash(published))
            await asyncio.shield(published.hashing)
        return found

    async def _hash(self, published: Publication) -> None:
        checksums = await self._learner.checksums(published.snapshot.buckets, deadline_s=self._sync_s)
        published.snapshot = replace(published.snapshot, checksums=checksums)

    def close(self) -> None:
        """Cancel the tasks that copy weights or compute checksums; those of an older version may go on for who joins."""
        for task in list(self._tasks):
            abandon(task)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_near(published: Publication) -> bool:
    """Whether a newer version may be expected soon."""
    is_left = published.replaced.is_set() or published.is_awaited.is_set()
    return not is_left and asyncio.get_running_loop().time() < published.overdue_at


async def _until_due(published: Publication, is_held: Callable[[int], bool]) -> None:
    """Returns when there is a newer version, it is overdue, or no other engine has this one any more."""
    while _is_near(published) and is_held(published.version):
        left_s = published.overdue_at - asyncio.get_running_loop().time()
        with suppress(TimeoutError):
            await asyncio.wait_for(published.replaced.wait(), min(left_s, _LOOK_S))
