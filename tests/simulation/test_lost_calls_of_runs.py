"""Simulated runs in which a bad network swallows a call or its answer: each of a method's calls in turn, or some of many."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tests.simulation.schedule import Fault, FaultSchedule
from tests.simulation.test_simulation_of_runs import run_of_one_worker
from tests.simulation.world import PlayedRun, play


@functools.cache
def undisturbed(schedule: FaultSchedule) -> PlayedRun:
    return play(schedule)


def calls_of(method: str, schedule: FaultSchedule, *, most: int = 6) -> list[float]:
    """Just before the run calls it, seconds of virtual time, as long as nothing befalls it; of many calls some, from the first on."""
    lines = (line.split() for line in undisturbed(schedule).trace if " -> " in line and line.endswith(f".{method}"))
    found = list(dict.fromkeys(round(float(line[0]) - 0.05, 1) for line in lines))
    return found[:: -(-len(found) // most)]


@pytest.mark.parametrize("method", ["pull", "pack", "correct"])
def test_an_answer_that_is_lost_is_asked_for_again(method: str) -> None:
    """The call has run, and its caller is told that the connection was lost: nothing is done twice, and the run doesn't go back for it."""
    plain = replace(run_of_one_worker(steps=3, groups_per_step=2, faults=()), forwards=method == "pack")
    moments = calls_of(method, plain, most=8)
    assert len(moments) > 1
    for at in moments:
        outcome = play(plain.with_faults([Fault(at, "lost_reply", what=method)]))
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 3), f"lost after {at} s"
        assert not any("The run goes back to" in line for line in outcome.trace)
        assert any("lost_reply: " in line for line in outcome.trace)


@pytest.mark.parametrize("kind", ["lost_call", "lost_reply"])
@pytest.mark.parametrize("method", ["step", "proximal", "export", "begin_save", "is_saved", "checkpoint_bytes"])
def test_a_learners_call_that_a_bad_network_swallows_costs_no_step(kind: str, method: str) -> None:
    """It is asked for again under its number: what has run doesn't run twice (books.py), and the run doesn't go back."""
    plain = replace(run_of_one_worker(steps=3, groups_per_step=2, faults=()), forwards=method == "proximal")
    moments = calls_of(method, plain)
    assert moments
    for at in moments:
        outcome = play(plain.with_faults([Fault(at, kind, target=i, what=method) for i in range(3)]))  # one after the other
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 3), f"lost after {at} s"
        assert not any("The run goes back to" in line for line in outcome.trace)
        assert any(f"{kind}: " in line for line in outcome.trace)


@pytest.mark.parametrize("kind", ["lost_call", "lost_reply"])
@pytest.mark.parametrize("method", ["generate_group", "update_weights", "load", "answer"])
def test_a_call_that_a_bad_network_swallows_costs_no_worker(kind: str, method: str) -> None:
    """Neither does the run go back for it, nor is a prompt discarded."""
    plain = run_of_one_worker(steps=3, groups_per_step=2, faults=())
    moments = calls_of(method, plain)
    assert moments
    for at in moments:
        outcome = play(plain.with_faults([Fault(at, kind, target=i, what=method) for i in range(3)]))  # one after the other
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 3), f"lost after {at} s"
        assert not any(text in line for line in outcome.trace for text in ("The run goes back to", " is gone: ", "is discarded"))
        assert any(f"{kind}: " in line for line in outcome.trace)


@pytest.mark.parametrize("method", ["step", "proximal"])
def test_a_batch_that_is_gone_with_the_service_before_the_learner_has_it_is_packed_again(method: str) -> None:
    """The learner's call fails for want of its argument: neither a step nor the learner is lost, and no group is trained twice."""
    plain = replace(run_of_one_worker(steps=3, groups_per_step=2, faults=()), forwards=method == "proximal")
    lines = [line for line in undisturbed(plain).trace if line.endswith(f"LearnerRankActor 0.{method}")]
    for line in lines:
        outcome = play(plain.with_faults([Fault(float(line.split()[0]) + 0.0004, "kill_service")]))  # while the call is on its way
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 3), line
        told = "\n".join(outcome.trace)
        assert "The run goes back to" not in told and told.count("A new one goes on after") == 1
    assert len(lines) > 2
