"""How many workers a run comes to: the rule by itself, over a learner and workers of constant speed, whose ideal number is known."""

from __future__ import annotations

import math
import random

import pytest

from evenkeel.actors.carriers import ScalingCause
from evenkeel.actors.pool.scaling import (
    LEARNER_WAITS,
    WORKERS_WAIT,
    PoolLimits,
    ScalingRule,
    StepLoad,
    fed_by_admission,
    first_workers,
    limits_of,
    scaling_decision,
)
from evenkeel.rollout.config import RolloutConfig

WIDE = PoolLimits(lowest=1, highest=64, fed=64)


def load(workers: int, *, learner_waits: float = 0.0, workers_wait: float = 0.0) -> StepLoad:
    return StepLoad(10.0, learner_waits, workers_wait, workers)


class ConstantLoad:
    """The learner could take `ratio` times what one worker makes; the slower side makes the other wait."""

    def __init__(
        self, ratio: float, rule: ScalingRule, *, noise: float = 0.0, overhead: float = 0.0, delay: int = 0, seed: int = 0
    ) -> None:
        """Args: overhead: share of a step in which the learner waits whatever the workers do. delay: steps until a change has arrived."""
        self.ratio, self.rule, self.noise, self.overhead, self.delay = ratio, rule, noise, overhead, delay
        self.random = random.Random(seed)
        self.present = rule.target
        self.arriving = 0
        self.targets = [rule.target]

    def step(self) -> None:
        if self.present != self.rule.target:
            self.arriving += 1
            if self.arriving > self.delay:
                self.present, self.arriving = self.rule.target, 0
        waits = max(self.overhead, 1.0 - self.present / self.ratio), max(0.0, 1.0 - self.ratio * (1.0 - self.overhead) / self.present)
        learner, workers = (min(1.0, max(0.0, share + self.random.uniform(-self.noise, self.noise))) for share in waits)
        decision = self.rule.after(StepLoad(self.random.uniform(5.0, 15.0), learner, workers, self.present))
        if decision is not None:
            self.targets.append(decision.target)


@pytest.mark.parametrize("seed", range(60))
def test_a_constant_load_brings_the_pool_to_rest(seed: int) -> None:
    """Whatever the ratio, where it begins, how noisy shares are, and how long nodes take. It ends with no fewer than the workers that leave
    the learner busy but for the threshold, and no more than those that would wait beyond theirs; it goes in one direction only."""
    draw = random.Random(seed)
    ratio, start = draw.uniform(0.2, 40.0), draw.randint(1, 60)
    overhead = draw.choice([0.0, 0.05, 0.1])
    case = ConstantLoad(ratio, ScalingRule(WIDE, start), noise=0.03, overhead=overhead, delay=draw.randint(0, 6), seed=seed)
    for _ in range(120):
        case.step()
    at_rest = len(case.targets)
    for _ in range(400):
        case.step()
    assert len(case.targets) == at_rest, "no change any more"
    assert case.targets in (sorted(case.targets), sorted(case.targets, reverse=True)), "never there and back"
    end = case.targets[-1]
    assert end >= math.floor(ratio * (1 - LEARNER_WAITS - 0.03)) and (end == 1 or end - 1 <= 1.1 * ratio / (1 - WORKERS_WAIT - 0.03))


def test_a_learner_that_becomes_slower_and_faster_again_is_followed() -> None:
    """Up by two or to twice as many at a time; it may take several changes, since the window still holds steps of before."""
    case = ConstantLoad(3.0, ScalingRule(WIDE, 1))
    for ratio, expected in ((3.0, 3), (0.8, 1), (6.0, 6), (2.5, 3)):
        case.ratio, before = ratio, case.rule.target
        case.targets = [before]
        for _ in range(60):
            case.step()
        assert case.targets[-1] == expected and case.targets == sorted(case.targets, reverse=expected < before)
        assert all(b <= max(2 * a, a + 2) for a, b in zip(case.targets, case.targets[1:], strict=False))


def test_both_waiting_means_that_workers_are_not_what_is_missing() -> None:
    """A synchronous run, or one whose longest answers hold everything up: more workers would wait as well."""
    assert scaling_decision(load(4, learner_waits=0.5, workers_wait=0.5), 4, WIDE) is None


def test_the_pool_does_not_grow_beyond_what_admission_feeds() -> None:
    """(max_staleness 1 + 1) x 16 groups x 8 samples are 256 requests; engines of 64 places: 4 workers."""
    assert fed_by_admission(32, 8, 64) == 4 and fed_by_admission(33, 8, 64) == 5
    decision = scaling_decision(load(3, learner_waits=0.9), 3, PoolLimits(1, 64, 4))
    assert decision is not None and (decision.target, decision.cause) == (4, ScalingCause.LEARNER_WAITS)
    assert scaling_decision(load(4, learner_waits=0.9), 4, PoolLimits(1, 64, 4)) is None
    assert PoolLimits(6, 64, 4).most == 6, "what the recipe asks for at least, it gets"


def test_limits_come_from_places_and_slots() -> None:
    common = {"task": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "reward": {"kind": "exact_match"}}
    settings = {"engine": {"device": "cpu", "max_running_requests": 64}, "sampling": {"samples_per_group": 8}}
    config = RolloutConfig.model_validate(common | settings | {"min_workers": 2, "max_workers": 9})
    assert limits_of(config, 32) == PoolLimits(2, 9, 4)
    assert limits_of(config.model_copy(update={"slots": 4}), 32) == PoolLimits(2, 9, 8), "32 requests at a time, if it has 4 slots"
    assert [first_workers(config.model_copy(update={"workers": asked}), 32) for asked in (2, 3, 9)] == [2, 3, 4]


def test_a_node_on_its_way_that_is_not_needed_any_more_is_given_up() -> None:
    decision = scaling_decision(load(2, learner_waits=0.05, workers_wait=0.1), 4, WIDE)
    assert decision is not None and (decision.target, decision.cause) == (2, ScalingCause.NO_LONGER_NEEDED)
    assert "2 on the way" in decision.reason
    assert scaling_decision(load(2, learner_waits=0.6), 4, WIDE) is None, "wanted: 5, but at most 4 at a time; they are on their way"


def test_the_pool_grows_no_further_while_a_worker_is_on_its_way() -> None:
    """Three of four are there: they would ask for two more. Once the fourth is there, four ask for two; and a node that never comes keeps
    no pool from shrinking."""
    assert scaling_decision(load(3, learner_waits=0.4), 4, WIDE) is None
    grown = scaling_decision(load(4, learner_waits=0.3), 4, WIDE)
    assert grown is not None and grown.target == 6
    shrunk = scaling_decision(load(3, workers_wait=0.5), 4, WIDE)
    assert shrunk is not None and (shrunk.target, shrunk.cause) == (2, ScalingCause.WORKERS_WAIT)


def test_a_decision_says_what_it_was_made_of() -> None:
    decision = scaling_decision(load(2, learner_waits=0.5, workers_wait=0.04), 2, WIDE)
    assert decision is not None and decision.target == 4
    assert decision.reason == "in 10 s the learner waited for 50% of its time, 2 workers for 4% of theirs"


def test_a_change_is_followed_by_a_pause() -> None:
    """One step settles, four are looked at; a worker that joins or goes begins that anew."""
    rule = ScalingRule(WIDE, 1)
    made = [rule.after(load(1, learner_waits=0.9)) is not None for _ in range(5)]
    assert made == [False] * 4 + [True] and rule.target == 3
    made = [rule.after(load(n, learner_waits=0.9)) is not None for n in (1, 2, 2, 2, 3, 3, 3, 3, 3)]
    assert made == [False] * 8 + [True] and rule.target == 6
