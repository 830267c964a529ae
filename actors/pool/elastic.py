"""A pool that follows the load: compares what both sides waited for in each step, has scaling.py decide, and changes the pool's size."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from evenkeel.actors.pool.scaling import PoolLimits, ScalingDecision, ScalingRule, StepLoad, fed_by_admission, workers_wait
from evenkeel.actors.processes.stopwatch import Phase
from evenkeel.rollout.config import RolloutConfig
from evenkeel.rollout.trajectory import WorkerLoad


class Resizable(Protocol):
    """The part of the pool's interface that this module uses."""

    async def loads(self, version: int | None) -> dict[str, WorkerLoad]: ...

    def resize(self, target: int, why: str) -> None: ...


class Elastic:
    """Follows one run's load. One event loop uses it."""

    def __init__(self, pool: Resizable, config: RolloutConfig, places: int, on_decision: Callable[[ScalingDecision], None]) -> None:
        """Args: places: groups that admission allows outstanding."""
        self._pool, self._on_decision = pool, on_decision
        limits = limits_of(config, places)
        self.first = first_workers(config, places)
        """Workers to begin with."""
        self._rule = ScalingRule(limits, self.first) if config.is_elastic else None
        self.note = _unfed(limits) if self._rule is not None else None
        """A sentence about limits that can't be reached; None: there is nothing to say."""
        self._wait: Phase | None = None
        """The learner's last one for a batch."""
        self._before: dict[str, WorkerLoad] = {}

    def learner_waits(self, version: int, wait: Phase, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """To be called when the learner begins to wait for a batch, once a step: a step is measured from one such wait to the next.

        Args:
            version: made by the step before. Workers that hold it sent their loads with its receipts, and aren't asked again.
            wait: measured by the driver; it is read when the next one begins.
        """
        before, self._wait = self._wait, wait
        if self._rule is not None and before is not None:
            spawn(self._follow(self._rule, version, wait.began - before.began, before.seconds))

    async def _follow(self, rule: ScalingRule, version: int, seconds: float, waited_s: float) -> None:
        loads = await self._pool.loads(version)
        since = [load.since(self._before.get(name)) for name, load in loads.items()]
        self._before = loads
        if sum(part.up_s for part in since) <= 0 or seconds <= 0:
            return
        decision = rule.after(StepLoad(seconds, min(1.0, waited_s / seconds), workers_wait(since), len(loads)))
        if decision is not None:
            self._on_decision(decision)
            self._pool.resize(decision.target, decision.reason)


def limits_of(config: RolloutConfig, places: int) -> PoolLimits:
    """Args: places: groups that admission allows outstanding."""
    samples = config.sampling.samples_per_group
    at_a_time = min(config.engine.max_running_requests, config.slots_per_worker * samples)
    return PoolLimits(config.fewest_workers, config.most_workers, fed_by_admission(places, samples, at_a_time))


def first_workers(config: RolloutConfig, places: int) -> int:
    """Workers that a run begins with; of a pool that follows the load, no more than admission feeds. Args: places: as limits_of."""
    limits = limits_of(config, places)
    return min(config.workers, limits.most) if config.is_elastic else config.workers


def _unfed(limits: PoolLimits) -> str | None:
    """A sentence about a rollout.max_workers that is never reached; None if it can be."""
    if limits.most >= limits.highest:
        return None
    return (
        f"rollout.max_workers = {limits.highest}: admission feeds {limits.fed} ((max_staleness + 1) x groups_per_step x samples_per_group "
        f"requests, over those that an engine samples at a time), so the pool grows to {limits.most} at most"
    )


