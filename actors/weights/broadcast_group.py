"""The torch.distributed group through which weights are broadcast: the learner's rank 0 and the engines of the pool.

A group has a fixed set of engines. When the set changes, a new group is built during training: rank 0 joins in a thread of its own, the
engines between two steps of theirs. Nothing is broadcast until all have joined. If a member doesn't join, all leave the group, and nobody
waits for it any more; it is tried again when the set changes, or at the next call of `rebuild`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import ray

from evenkeel.actors.processes.supervision import wait_for
from evenkeel.actors.ranks.collective_calls import all_of
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.correction.errors import EvenkeelError
from evenkeel.rollout.trajectory import SyncReceipt

if TYPE_CHECKING:  # torch
    from evenkeel.engines.weights import WeightSpec

log = logging.getLogger("evenkeel.sync")


class Member(Protocol):
    """A rollout worker whose engine receives broadcasts."""

    name: str
    actor: Any


class BroadcastGroup:
    """The learner's rank 0 (rank 0 of the group) and one set of engines."""

    def __init__(
        self,
        learner: LearnerGroup,
        sync_s: float,
        generation: int,
        ranks: int,
        wanted: Callable[[], Sequence[Member]] = tuple,
        *,
        bucket_s: float | None = None,
    ) -> None:
        """
        Args:
            sync_s: deadline of each step, seconds.
            generation: of the run; part of the group's name.
            ranks: of an engine; each is a member.
            wanted: returns the engines that `rebuild` takes; none while they are not known yet.
            bucket_s: longest time for one bucket of a broadcast, seconds; None: sync_s. The learner waits so long for a dead member.
        """
        self._learner, self._sync_s, self._generation, self._ranks, self._wanted = learner, sync_s, generation, ranks, wanted
        self._bucket_s = sync_s if bucket_s is None else bucket_s
        # Engines that were asked to join the present group.
        self._asked: list[Member] = []
        self._is_whole, self._built = False, 0
        self._building: asyncio.Task[None] | None = None
        self.in_use = asyncio.Lock()
        """Held during a broadcast, so that `rebuild` doesn't dissolve the group meanwhile."""

    @property
    def members(self) -> list[Member]:
        """Engines of the group; none until all have joined."""
        return self._asked if self._is_whole else []

    def rebuild(self) -> None:
        """Start building a group of the wanted engines in the background."""
        if self._building is None or self._building.done():
            self._building = asyncio.create_task(self._follow(), name="weight group")

    async def _follow(self) -> None:
        while True:
            async with self.in_use:
                targets = list(self._wanted())
            if not targets or targets == self.members:
                return
            try:
                await self.build(targets)
            except (EvenkeelError, ray.exceptions.RayError) as error:
                log.warning("%s; weights go through the object store until there is one", error)
                if targets == list(self._wanted()):
                    return

    async def build(self, targets: Sequence[Member]) -> None:
        """Dissolve the present group and build one with these engines. Raises: the first error of a member; all have left it then."""
        await self.dissolve()
        self._built += 1
        rank_zero, world_size = self._learner.rank_zero, 1 + len(targets) * self._ranks
        # If rank 0's thread is still in the group before, this call fails, before any engine waits for rank 0.
        serving = rank_zero.serve_broadcast.remote(world_size, self._name, self._sync_s)
        host, port = await wait_for(serving, f"store of weight group {self._name} <- learner", deadline_s=self._sync_s)
        self._asked = list(targets)
        joins = [rank_zero.open_broadcast.remote(host, port, world_size, self._name, self._sync_s, self._bucket_s)]
        joins += [t.actor.join_weight_group.remote(host, port, 1 + i * self._ranks, world_size, self._name) for i, t in enumerate(targets)]
        try:
            await all_of(wait_for(j, f"weight group {self._name}", deadline_s=self._sync_s) for j in joins)
        except (EvenkeelError, ray.exceptions.RayError):
            await self.dissolve()
            raise
        self._is_whole = True
        log.info("weight group %s is whole: %s", self._name, ", ".join(t.name for t in targets))

    def receiving(self, version: int, specs: list[list[WeightSpec]]) -> list[Coroutine[Any, Any, SyncReceipt]]:
        """Have the members receive a version that rank 0 will broadcast.

        Args: specs: of the tensors, bucket by bucket, in the order of the broadcast.
        Returns: for each member a coroutine that waits for its receipt.
        """
        calls = [t.actor.receive_weights.remote(version, specs, self._name, self._generation) for t in self.members]
        what = f"broadcast of v{version} -> rollout worker"
        return [wait_for(call, f"{what} {t.name}", deadline_s=self._sync_s) for call, t in zip(calls, self.members, strict=True)]

    @property
    def _name(self) -> str:
        return f"weights-{self._generation}-{self._built}"

    async def dissolve(self) -> None:
        """Have all members leave the group; errors of members are ignored."""
        asked, self._asked, self._is_whole = self._asked, [], False
        if not asked:
            return
        name = self._name
        leaving = [self._learner.rank_zero.close_broadcast.remote(name)] + [t.actor.leave_weight_group.remote(name) for t in asked]
        waits = (wait_for(call, f"leaving weight group {name}", deadline_s=10.0) for call in leaving)
        for error in await asyncio.gather(*waits, return_exceptions=True):
            if error is not None:  # a dead member can't leave; the group is given up anyway
                log.info("leaving weight group: %s", type(error).__name__)

    async def close(self) -> None:
        """Build no further group, and have all members leave the present one."""
        if self._building is not None:
            self._building.cancel()
            await asyncio.wait([self._building])
        await self.dissolve()
