"""How many rollout workers a run should have: a decision from what both sides waited for. No Ray, no clock, no I/O.

While the learner waits and the workers are busy, the pool grows; while workers wait and the learner does not, it shrinks. If both wait, it
is neither's number that holds the run up: admission, the longest answers or the hand-over do, and nothing changes.

Why it comes to rest at constant load: say that a worker makes r groups a second and the learner could take L. The pool grows to at most
ceil(L / r), which is n / (1 - learner's waiting share) with n workers, and shrinks to no fewer than ceil(1.1 L / r), which is 1.1 n times
the busy share. So growing and shrinking don't alternate at constant load. The thresholds keep noise from deciding. After each
change the window begins anew, and again with each worker that comes or goes; the pool grows no further while one that was asked for has not
come, but it may shrink.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from evenkeel.actors.carriers import ScalingCause, ScalingDecision
from evenkeel.correction.errors import counted
from evenkeel.rollout.config import RolloutConfig

LEARNER_WAITS = 0.15
"""The learner waits for data if it does so for more than this share of its time; a part of that is hand-over, which workers can't mend."""
WORKERS_WAIT = 0.25
"""Workers wait for work if they do so for more than this share of their time."""
# A pool shrinks to so many times what the learner takes.
_HEADROOM = 1.1
# Steps that a decision looks at; none is made before so many have passed since the last change.
_WINDOW = 4
# Steps left out after a change: engines fill, or what those that left had made is trained.
_SETTLING = 1


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Smallest and largest size of an elastic pool."""

    lowest: int
    highest: int
    fed: int
    """Workers that admission can give enough work to, see `fed_by_admission`."""

    @property
    def most(self) -> int:
        return max(self.lowest, min(self.highest, self.fed))


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What both sides did during one step."""

    seconds: float
    learner_waits: float
    """Share of the time in which the learner had no batch."""
    workers_wait: float
    """Share of their time in which engines had no request."""
    workers: int
    """Workers whose engines are up."""


def fed_by_admission(places: int, samples_per_group: int, requests_per_worker: int) -> int:
    """Workers whose engines are full when all that admission allows is under way; one more would only take work from them.

    Args:
        places: groups that may be outstanding, (max_staleness + 1) * groups_per_step.
        requests_per_worker: answers that a worker samples at a time.
    """
    return math.ceil(places * samples_per_group / requests_per_worker)


def scaling_decision(load: StepLoad, target: int, limits: PoolLimits) -> ScalingDecision | None:
    """A new target, or None if the present one stays.

    Args:
        load: of a window; `workers` may be fewer than the target, while some are on their way.
    """
    present = load.workers
    said = (
        f"in {load.seconds:.0f} s the learner waited for {load.learner_waits:.0%} of its time, {counted(present, 'worker')} for "
        f"{load.workers_wait:.0%} of theirs"
    )
    if load.learner_waits > LEARNER_WAITS:
        wanted = math.ceil(present / max(1e-9, 1.0 - load.learner_waits) - 1e-9)
        wanted = min(wanted, max(2 * present, present + 2), limits.most)
        if load.workers_wait < WORKERS_WAIT and wanted > target and present >= target:  # what is on its way may be enough
            return ScalingDecision(wanted, ScalingCause.LEARNER_WAITS, said)
        return None
    needed = present
    if load.workers_wait > WORKERS_WAIT:
        needed = math.ceil(_HEADROOM * present * (1.0 - load.workers_wait) - 1e-9)
    needed = max(limits.lowest, min(needed, limits.most))
    if needed < present:
        return ScalingDecision(needed, ScalingCause.WORKERS_WAIT, said)
    if needed < target:
        return ScalingDecision(needed, ScalingCause.NO_LONGER_NEEDED, f"{said}, and {target - needed} on the way")
    return None


class ScalingRule:
    """Decides once a step, by the steps since the last change."""

    def __init__(self, limits: PoolLimits, target: int) -> None:
        self.limits = limits
        self.target = target
        self._window: deque[StepLoad] = deque(maxlen=_WINDOW)
        self._left_out = _SETTLING  # the first step waits for the first groups, however many workers there are
        self._present = 0

    def after(self, step: StepLoad) -> ScalingDecision | None:
        """What a step says; a decision becomes the target."""
        if step.workers != self._present:
            self._begin_anew(step.workers)
        if self._left_out or not step.workers or step.seconds <= 0:
            self._left_out = max(0, self._left_out - 1)
            return None
        self._window.append(step)
        if len(self._window) < _WINDOW:
            return None
        decision = scaling_decision(_together(self._window), self.target, self.limits)
        if decision is not None:
            self.target = decision.target
            self._begin_anew(step.workers)
        return decision

    def _begin_anew(self, present: int) -> None:
        self._present, self._left_out = present, _SETTLING
        self._window.clear()


def _together(steps: deque[StepLoad]) -> StepLoad:
    """Weighted by time."""
    seconds = sum(step.seconds for step in steps)
    return StepLoad(
        seconds,
        sum(step.learner_waits * step.seconds for step in steps) / seconds,
        sum(step.workers_wait * step.seconds for step in steps) / seconds,
        steps[-1].workers,
    )


# The sizes that a run's settings allow.


def limits_of(config: RolloutConfig, places: int) -> PoolLimits:
    """Args: places: groups that admission allows outstanding."""
    samples = config.sampling.samples_per_group
    at_a_time = min(config.engine.max_running_requests, config.slots_per_worker * samples)
    return PoolLimits(config.fewest_workers, config.most_workers, fed_by_admission(places, samples, at_a_time))


def first_workers(config: RolloutConfig, places: int) -> int:
    """Workers that a run begins with; of a pool that follows the load, no more than admission feeds. Args: places: as limits_of."""
    limits = limits_of(config, places)
    return min(config.workers, limits.most) if config.is_elastic else config.workers


def unreached_limit(limits: PoolLimits) -> str | None:
    """A sentence about a rollout.max_workers that is never reached; None if it can be."""
    if limits.most >= limits.highest:
        return None
    return (
        f"rollout.max_workers = {limits.highest}: admission feeds {limits.fed} ((max_staleness + 1) x groups_per_step x samples_per_group "
        f"requests, over those that an engine samples at a time), so the pool grows to {limits.most} at most"
    )
