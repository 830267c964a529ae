"""Simulated runs in which something starts while what it needs is away."""

from __future__ import annotations

import pytest

from tests.simulation.schedule import Fault
from tests.simulation.test_simulation_of_runs import run_of_one_worker
from tests.simulation.world import play


@pytest.mark.parametrize("kind", ["kill_worker", "crash_driver", "kill_learner"])
def test_a_judge_that_is_down_while_something_starts_again_ends_no_run(kind: str) -> None:
    """The only worker's replacement, a resumed run's workers: none of their starts that the reward fails is a lost worker. Engines that
    stay up when the run goes back have nothing to start."""
    for at in (31.0, 35.0, 39.0):
        faults = (Fault(30.0, "dead_judge", lasts=900.0), Fault(at, kind))
        outcome = play(run_of_one_worker(steps=9, groups_per_step=2, faults=faults))
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1 + (kind == "crash_driver"), 9), f"{kind} after {at} s"
        waited = sum("the reward of a worker that starts gives no score" in line for line in outcome.trace)
        assert waited == 0 if kind == "kill_learner" else waited > 11
