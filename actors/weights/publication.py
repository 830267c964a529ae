"""The newest published weights, and what all who need them share: their copy in the object store, and their checksums.

Both are made once, in the learner's export or for the first who needs them; checksums for who comes later by a task beside the learner.
What was broadcast only is copied for an engine if no other one works with it, or if the run stands: else this engine waits for the next
version, which is stored as well, so that it makes no work for the learner. What fails here is the learner's or the object store's, and no
engine's fault.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

import ray.exceptions

from actors.carriers import ExportPlan, WeightChecksums, WeightSnapshot
from actors.processes.supervision import abandon, wait_for
from actors.ranks.learner_group import LearnerGroup
from actors.settings.deadlines import newer_weights_s
from correction.errors import ActorLost, DeadlineExceeded, EngineError, SyncError

log = logging.getLogger("evenkeel.sync")
SYNC_FAILURES = (SyncError, EngineError, DeadlineExceeded, ray.exceptions.RayError)
_LONGEST_PAUSE_S = 30.0
_USUAL_OF = 9
"""Number of latest publications whose median distance is the usual one."""
_STANDS_AFTER = 2.0
"""Usual distances between two publications after which the next one counts as overdue."""
_LOOK_S = 1.0
"""Seconds after which an engine that waits for the next version looks again whether another one works."""


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
        self._published_at: deque[float] = deque(maxlen=_USUAL_OF + 1)
        """Event-loop times (s) of the latest publications."""

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
        """This version, or a newer one, as it lies in the object store."""
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
