"""Workers that leave: because the pool shrinks, their node is drained, or their process gets a SIGTERM.

One that leaves gets no new work. It ends what it has under way within a time, hands back the rest with the tokens sampled so far, and is
ended, which frees its resource. If it doesn't do so in order, its groups are sampled anew.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from ray.exceptions import RayError

from evenkeel.actors.pool.pool_tasks import PoolTasks
from evenkeel.actors.pool.workers import STOP_S, PoolObserver, WorkerHandle, WorkerState
from evenkeel.actors.processes.supervision import kill, unwrapped, wait_for
from evenkeel.correction.errors import DeadlineExceeded, EvenkeelError, counted

log = logging.getLogger("evenkeel.pool")
_LEAST_HAND_BACK_S = 10.0
"""Long answers with routed experts take seconds a group to read and to send."""


class WorkerDrainer:
    """Drains the workers that leave one pool. One event loop uses it."""

    def __init__(self, tasks: PoolTasks, forget: Callable[[WorkerHandle], bool], observer: PoolObserver, drain_s: float) -> None:
        """
        Args:
            forget: removes a worker that is gone. Returns: False if it had been removed already.
            drain_s: longest time for which a worker that leaves goes on with its groups.
        """
        self._tasks, self._forget, self._observer, self._drain_s = tasks, forget, observer, drain_s

    def begin(self, worker: WorkerHandle, why: str, left_s: float | None = None) -> None:
        """Have a worker leave.

        Args:
            left_s: seconds until it is taken away. It goes on with its groups for half of them; the rest is for handing back and for its
            end.
        """
        within_s = self._drain_s if left_s is None else min(self._drain_s, left_s / 2)
        hand_back_s = max(_LEAST_HAND_BACK_S, self._drain_s if left_s is None else min(self._drain_s, left_s - within_s))
        worker.state, worker.leaves = WorkerState.LEAVING, True
        under_way = f"with {counted(len(worker.groups), 'group')} under way and {within_s:.0f} s for them"
        self._observer.event("info", f"rollout worker {worker.name} leaves, {under_way}: {why}")
        self._tasks.spawn(self._leave(worker, within_s, hand_back_s))

    async def wait_for_end_notice(self, worker: WorkerHandle, on_notice: Callable[[WorkerHandle], None]) -> None:
        """Wait until a worker's process gets a SIGTERM."""
        with suppress(EvenkeelError, RayError):  # the heartbeat deals with a worker that dies
            what = f"end notice <- rollout worker {worker.name}"
            await wait_for(worker.actor.end_notice.remote(), what, deadline_s=math.inf, notice=log.debug, usual_s=math.inf)
            on_notice(worker)

    async def _leave(self, worker: WorkerHandle, within_s: float, hand_back_s: float) -> None:
        try:
            if worker.info is not None:
                await self._finish(worker, within_s, hand_back_s)
        except (EvenkeelError, RayError) as error:
            log.warning("rollout worker %s did not leave in order, its groups are sampled anew: %s", worker.name, unwrapped(error))
        finally:
            kill(worker.actor)
        if self._forget(worker):
            groups, tokens = len(worker.handed_back), sum(group.tokens for group in worker.handed_back)
            self._observer.handed_back(groups, tokens)
            rest = f"; {counted(groups, 'group')} go on elsewhere from {tokens} tokens" if groups else ""
            self._observer.event("info", f"rollout worker {worker.name} has left{rest}")

    async def _finish(self, worker: WorkerHandle, within_s: float, hand_back_s: float) -> None:
        def is_idle() -> bool:
            return not worker.groups and not worker.questions

        name = f"rollout worker {worker.name}, which leaves"
        with suppress(DeadlineExceeded):
            await wait_for(self._tasks.until(is_idle), f"groups of {name}", deadline_s=within_s, notice=log.debug)
        if not is_idle():
            await wait_for(worker.actor.hand_back.remote(), f"groups handed back <- {name}", deadline_s=hand_back_s)
            await wait_for(self._tasks.until(is_idle), f"groups handed back <- {name}", deadline_s=hand_back_s, notice=log.debug)
        await wait_for(worker.actor.stop.remote(), f"end of {name}", deadline_s=STOP_S)


def first_to_leave(workers: Iterable[WorkerHandle]) -> list[WorkerHandle]:
    """In the order in which a pool that shrinks does without them: those that wait for a node, those that start, then those whose node has
    the fewest others, so that whole nodes become free; of these the ones with the least under way."""
    staying = list(workers)
    on_node = Counter(worker.info.node for worker in staying if worker.info is not None)

    def loss(worker: WorkerHandle) -> tuple[int, ...]:
        if worker.info is None:
            return int(worker.has_node), 0, 0, -int(worker.name)
        return 2, on_node[worker.info.node], len(worker.groups), -int(worker.name)

    return sorted(staying, key=loss)
