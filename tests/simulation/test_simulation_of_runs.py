"""Seeds hold, the same seed is the same run, and planted bugs are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.simulation.planted import BUGS, Bug, title
from tests.simulation.report import failures, first_shown
from tests.simulation.schedule import Fault, Schedule, schedule_of
from tests.simulation.shrink import shrunk
from tests.simulation.world import play

ROOT = Path(__file__).parents[2]
SEEDS = 100
"""Of the fast suite."""


def test_runs_keep_their_books_whatever_befalls_them() -> None:
    found = [str(failure) for _, some in failures(range(SEEDS)) for failure in some]
    assert not found, "\n\n".join(found)


@pytest.mark.slow
def test_runs_of_ten_thousand_seeds_keep_their_books() -> None:
    found = [str(failure) for _, some in failures(range(10_000), processes=os.cpu_count() or 1) for failure in some]
    assert not found, "\n\n".join(found)


def test_seeds_differ_in_what_befalls_a_run() -> None:
    """Every kind of fault comes, and among those of the fast suite runs are resumed, and go through without a fault."""
    schedules = [schedule_of(seed) for seed in range(SEEDS)]
    kinds = {fault.kind for schedule in schedules for fault in schedule.faults}
    assert len(kinds) == 25, kinds
    assert sum(not schedule.faults for schedule in schedules) > 10
    assert sum(any(fault.kind == "crash_driver" for fault in schedule.faults) for schedule in schedules) > 10


def fingerprints(seeds: Sequence[int]) -> list[int]:
    return [play(schedule_of(seed)).fingerprint for seed in seeds]


def test_a_seed_is_one_run_in_any_process() -> None:
    """Twice here, and once where the hashes of texts are others. In the first one a checkpoint fails, whose folder has a random name."""
    seeds = [18, *range(1000, 1005)]
    here = fingerprints(seeds)
    assert here == fingerprints(seeds) and len(set(here)) == len(here)
    code = (
        "import json; from tests.simulation.test_simulation_of_runs import fingerprints; "
        f"print(json.dumps(fingerprints({seeds})))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    there = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(there.stdout) == here


def run_of_one_worker(*, steps: int, groups_per_step: int, faults: tuple[Fault, ...]) -> Schedule:
    """With a checkpoint after each step."""
    shape = {"workers": 1, "max_staleness": 1, "checkpoint_every": 1, "evaluate_every": 0, "unscored": 0.0}
    options = {"dynamic_sampling": False, "broadcasts": False, "forwards": False}
    return Schedule(seed=3, steps=steps, groups_per_step=groups_per_step, faults=faults, **shape, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["kill_learner", "kill_queue", "kill_service", "kill_worker"])
def test_a_process_may_die_at_any_moment_from_its_start_to_the_runs_end(kind: str) -> None:
    """In the start-up, in an evaluation before or after training, and while the run ends: one driver goes through."""
    undisturbed = play(run_of_one_worker(steps=3, groups_per_step=2, faults=()))
    phases = [line for line in undisturbed.trace if "evaluating" in line or line.endswith("info: training")]
    assert len(phases) == 3 and not undisturbed.violation
    returns = 0
    for at in range(int(undisturbed.virtual_s) + 1):
        outcome = play(run_of_one_worker(steps=3, groups_per_step=2, faults=(Fault(float(at), kind),)))
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 3), f"killed at {at} s"
        returns += any("The run goes back to" in line for line in outcome.trace)
    assert returns > 15 if kind != "kill_worker" else returns == 0


@pytest.mark.parametrize("method", ["draw", "next_batch", "advance", "snapshot", "monitor_state"])
def test_an_answer_that_is_lost_is_asked_for_again(method: str) -> None:
    """The call has run, and its caller is told that the connection was lost: nothing is done twice, and the run doesn't go back for it."""
    played = 0
    for at in range(0, 24, 3):
        outcome = play(run_of_one_worker(steps=3, groups_per_step=2, faults=(Fault(float(at), "lost_reply", what=method),)))
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 3), f"lost after {at} s"
        assert not any("The run goes back to" in line for line in outcome.trace)
        played += any("lost_reply: " in line for line in outcome.trace)
    assert played > 3


@pytest.mark.parametrize("kind", ["freeze_queue", "freeze_service"])
@pytest.mark.parametrize("lasts", [64.0, 130.0])
def test_a_part_that_is_late_ends_no_run(kind: str, lasts: float) -> None:
    """sync_s is 60 s here. One that answers again just after it is asked again; of one that doesn't, the run goes back for another."""
    for at in (11.0, 15.0, 18.0):
        outcome = play(run_of_one_worker(steps=4, groups_per_step=2, faults=(Fault(at, kind, lasts=lasts),)))
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 4), f"stopped after {at} s"
        if lasts < 70.0:
            assert not any("The run goes back to" in line for line in outcome.trace)


@pytest.mark.parametrize("kind", ["lost_call", "lost_reply"])
@pytest.mark.parametrize("method", ["generate_group", "update_weights", "load", "answer"])
def test_a_call_that_a_bad_network_swallows_costs_no_worker(kind: str, method: str) -> None:
    """Neither does the run go back for it, nor is a prompt discarded."""
    played = 0
    for at in range(0, 24, 4):
        faults = tuple(Fault(float(at), kind, what=method) for _ in range(3))  # one after the other
        outcome = play(run_of_one_worker(steps=3, groups_per_step=2, faults=faults))
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 3), f"lost after {at} s"
        assert not any(text in line for line in outcome.trace for text in ("The run goes back to", " is gone: ", "is discarded"))
        played += any(f"{kind}: " in line for line in outcome.trace)
    assert played > (3 if method in ("generate_group", "update_weights") else 0)


def test_a_crash_goes_on_at_the_checkpoint_and_a_damaged_one_is_passed_over() -> None:
    """Three drivers: killed, resumed, killed with its newest checkpoint damaged, resumed from the older one."""
    faults = (Fault(60.0, "crash_driver"), Fault(110.0, "crash_driver", what="truncated"))
    outcome = play(run_of_one_worker(steps=40, groups_per_step=2, faults=faults))
    assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 3, 40)
    told = "\n".join(outcome.trace)
    resumes = [line for line in outcome.trace if "LearnerRankActor 0.restore" in line]
    assert len(resumes) == 2 and "truncated" in told


def seed_of_the_page(bug: Bug) -> list[int]:
    """By the table in docs/reliability.md, which counts from seed 0 on; nothing if it doesn't have the bug yet."""
    lines = (ROOT / "docs" / "reliability.md").read_text().splitlines()
    return [int(line.split(" | ")[1]) - 1 for line in lines if line.startswith(f"| {title(bug)} | ")]


@pytest.mark.parametrize("bug", BUGS, ids=title)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    """By the seed that showed it when the page was written; if by now another run belongs to that, by one of the first hundreds."""
    seeds = [*seed_of_the_page(bug), *range(3 * SEEDS)]
    assert first_shown(bug, seeds) is not None, f"{title(bug)}: not found in {len(seeds)} seeds"


def test_a_failure_is_told_so_that_it_can_be_played_again() -> None:
    """With a bug that needs one fault, all other faults are left out, and the printed schedule fails in the same way."""
    lost_groups = next(bug for bug in BUGS if "lost_worker" in bug.__name__)  # type: ignore[attr-defined]
    noise = tuple(Fault(12.0 + 2 * i, "slow_learner", lasts=1.0) for i in range(3))
    with lost_groups():
        kills = (Fault(at, "kill_worker") for at in (11.0, 13.0, 19.0, 22.0, 23.0))  # some find the worker without a group
        schedules = (run_of_one_worker(steps=5, groups_per_step=4, faults=(*noise[:2], kill, *noise[2:])) for kill in kills)
        schedule = next(schedule for schedule in schedules if play(schedule).violation)
        smallest = shrunk(schedule.faults, lambda part: bool(play(schedule.with_faults(part)).violation))
        assert [fault.kind for fault in smallest] == ["kill_worker"]
        again = Schedule.of_text(schedule.with_faults(smallest).text())
        assert play(again).violation == play(schedule.with_faults(smallest)).violation != ""
    assert not play(again).violation


@pytest.mark.parametrize("needed", [{3}, {0, 9}, {2, 5, 6}, {1, 4, 7, 8}])
def test_a_schedule_shrinks_to_what_is_needed(needed: set[int]) -> None:
    tried: list[int] = []

    def fails(part: object) -> bool:
        tried.append(1)
        return needed <= set(part)  # type: ignore[call-overload]

    assert set(shrunk(range(10), fails)) == needed
    assert len(tried) < 100
