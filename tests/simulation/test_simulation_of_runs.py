"""Seeds hold, the same seed is the same run, and planted bugs are found."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenkeel.actors.service.correction_service import CorrectionService
from evenkeel.rollout.trajectory import Prompt
from tests.simulation.engine import SimulatedSampler
from tests.simulation.planted import BUGS, Bug, title
from tests.simulation.report import failures, first_shown
from tests.simulation.schedule import Fault, FaultSchedule, schedule_of
from tests.simulation.shrink import shrunk
from tests.simulation.world import play

ROOT = Path(__file__).parents[2]
SEEDS = 100
"""Of the fast suite."""
FAILURES = ("OutOfMemoryError", "AcceleratorError", "DistBackendError", "RuntimeError")
SAID = ("out of memory", "its device or a collective has failed")


def test_runs_keep_their_books_whatever_befalls_them() -> None:
    found = [str(failure) for _, some in failures(range(SEEDS)) for failure in some]
    assert not found, "\n\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_runs_of_ten_thousand_seeds_keep_their_books() -> None:
    found = [str(failure) for _, some in failures(range(10_000), processes=os.cpu_count() or 1) for failure in some]
    assert not found, "\n\n".join(found)


def test_seeds_differ_in_what_befalls_a_run() -> None:
    """Else the runs above could pass for want of faults. Every kind comes in two hundred; in the fast suite runs are resumed, and go
    through without a fault."""
    schedules = [schedule_of(seed) for seed in range(SEEDS)]
    kinds = {fault.kind for seed in range(2 * SEEDS) for fault in schedule_of(seed).faults}
    assert len(kinds) == 32, kinds
    assert sum(not schedule.faults for schedule in schedules) > 10
    assert sum(any(fault.kind == "crash_driver" for fault in schedule.faults) for schedule in schedules) > 10


def fingerprints(seeds: Sequence[int]) -> list[int]:
    return [play(schedule_of(seed)).fingerprint for seed in seeds]


def test_a_seed_is_one_run_in_any_process() -> None:
    """Twice here, and once where the hashes of texts are others. In the first one a checkpoint fails, whose folder has a random name."""
    seeds = [138, *range(1000, 1003)]
    here = fingerprints(seeds)
    assert here == fingerprints(seeds) and len(set(here)) == len(here)
    code = f"import json; from tests.simulation.test_simulation_of_runs import fingerprints; print(json.dumps(fingerprints({seeds})))"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    there = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(there.stdout) == here


def run_of_one_worker(*, steps: int, groups_per_step: int, faults: tuple[Fault, ...]) -> FaultSchedule:
    """With a checkpoint after each step."""
    shape = {"workers": 1, "max_staleness": 1, "checkpoint_every": 1, "evaluate_every": 0, "unscored": 0.0}
    options = {"dynamic_sampling": False, "broadcasts": False, "forwards": False}
    return FaultSchedule(seed=3, steps=steps, groups_per_step=groups_per_step, faults=faults, **shape, **options)  # type: ignore[arg-type]


def test_a_run_without_a_gradient_ends_for_want_of_a_batch_or_goes_on_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the filter after 300 groups in a row (rule of three: fewer than 1 in 100 has a gradient) and those under way; it went on for
    ever. Without it, from the beginning or from then on, to its last step, with one warning; also when it goes back."""
    monkeypatch.setattr(SimulatedSampler, "_scored", lambda _, answer, *__: replace(answer, reward=1.0, text="an answer"))
    schedule = run_of_one_worker(steps=30, groups_per_step=4, faults=())
    filtered, plain = play(replace(schedule, dynamic_sampling=True)), play(schedule)
    (told,) = (line for line in filtered.trace if "no batch comes together" in line)
    discarded = re.search(r"discarded (\d+) groups since the last step, and kept 0", told)
    assert discarded is not None and 300 < int(discarded[1]) <= 300 + 2 * schedule.groups_per_step and filtered.steps == 0
    assert "the reward is 1 for each of the last" in told and told.count(", answer 'an answer'") == 2
    goes_on = replace(schedule, dynamic_sampling=True, changes="dynamic_sampling_on_shortage=train")
    unfiltered = play(goes_on)
    (said,) = (line for line in unfiltered.trace if "From here on the run trains on all groups" in line)
    back = play(replace(goes_on, faults=(Fault(float(said.split()[0]) + 20.0, "kill_learner"),)))
    assert unfiltered.steps == back.steps == 30
    assert sum("From here on" in line for line in back.trace) == sum("The run goes back to" in line for line in back.trace) == 1
    assert plain.steps == 30 and sum("the reward is 1 for each of the last" in line for line in plain.trace) == 1


@pytest.mark.parametrize("kind", ["kill_learner", "kill_service", "kill_worker"])
def test_a_process_may_die_at_any_moment_from_its_start_to_the_runs_end(kind: str) -> None:
    """In the start-up, in an evaluation before or after training, and while the run ends: one driver goes through. It goes back for a part
    that dies in the start-up, and for the learner; once training has begun the service is replaced."""
    undisturbed = play(run_of_one_worker(steps=3, groups_per_step=2, faults=()))
    phases = [line for line in undisturbed.trace if "evaluating" in line or line.endswith("info: training")]
    assert len(phases) == 3 and not undisturbed.violation
    returns, replaced = list[int](), list[int]()
    for at in range(int(undisturbed.virtual_s) + 1):
        outcome = play(run_of_one_worker(steps=3, groups_per_step=2, faults=(Fault(float(at), kind),)))
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 3), f"killed at {at} s"
        told = "\n".join(outcome.trace)
        assert told.count("The run goes back to") + told.count("A new one goes on after") <= 1
        returns += [at] * ("The run goes back to" in told)
        replaced += [at] * ("A new one goes on after" in told)
    if kind == "kill_worker":
        assert not returns and not replaced
    elif kind == "kill_learner":
        assert len(returns) > 15 and not replaced
    else:
        assert returns and len(replaced) > 5 and max(returns) < min(replaced)


@pytest.mark.parametrize("method", ["step", "proximal", "begin_save", "export"])
@pytest.mark.parametrize("at", [5.0, 14.0])
def test_the_run_goes_back_for_a_call_that_never_begins(method: str, at: float) -> None:
    """What it is to work on is gone, and Ray looks for it without end; all parts answer."""
    schedule = run_of_one_worker(steps=3, groups_per_step=2, faults=(Fault(at, "stuck_call", what=method),))
    outcome = play(replace(schedule, forwards=method == "proximal"))
    told = "\n".join(outcome.trace)
    assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 3)
    assert told.count("not begun by rank 0") == told.count("The run goes back to") == 1


@pytest.mark.parametrize("method", ["step", "proximal", "fetch", "begin_save", "is_saved", "export"])
def test_a_rank_that_raises_is_ended_and_the_run_goes_back(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process lives, and its device or a collective has failed: out of memory, a CUDA error, a connection that broke."""
    if method == "fetch":
        monkeypatch.setattr(CorrectionService, "_fetch_s", lambda *_: 60.0)  # as of batches with wide fields
    for kind, at in zip(range(4), itertools.cycle((5.0, 14.0)), strict=False):  # which error it is changes only what is said
        schedule = run_of_one_worker(steps=3, groups_per_step=2, faults=(Fault(at, "fail_rank", kind, what=method),))
        outcome = play(replace(schedule, forwards=method == "proximal"))
        told = "\n".join(outcome.trace)
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 3)
        assert told.count(f"lost: learner rank 0 (learner rank 0: {SAID[kind > 0]} in {method} ({FAILURES[kind]}: ") == 1
        assert told.count("The run goes back to") == 1 and "LearnerRankActor 0 is dead" in told and "LearnerRankActor 1 is up" in told


def test_a_rank_that_raises_while_it_goes_back_is_ended_as_well() -> None:
    faults = Fault(40.0, "kill_learner"), Fault(40.1, "fail_rank", what="restore")
    outcome = play(run_of_one_worker(steps=20, groups_per_step=2, faults=faults))
    assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 20)
    told = "\n".join(outcome.trace)
    assert "lost: learner rank 0 (learner rank 0: out of memory in restore " in told and "LearnerRankActor 2 is up" in told


def test_a_rank_that_raises_again_and_again_ends_the_run_in_a_sentence() -> None:
    """The fourth time before another checkpoint; a resume goes on from the last one. The first may come while one is being written."""
    faults = tuple(Fault(14.0 + i / 10, "fail_rank", what="step") for i in range(5))
    outcome = play(run_of_one_worker(steps=3, groups_per_step=2, faults=faults))
    assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 2, 3)
    (ended,) = [line for line in outcome.trace if "driver 0 has ended: " in line]
    assert "ActorLost: learner rank 0: the 4th death after step " in ended and "; lower learner.tokens_per_microbatch, " in ended


def test_a_slow_disk_holds_no_run_up_and_loses_no_line() -> None:
    """Each write takes seconds; the driver is killed, and what its last checkpoint says is there (books.py)."""
    for at in (12.0, 20.0, 28.0):
        faults = (Fault(5.0, "slow_disk", lasts=60.0), Fault(at, "crash_driver"))
        outcome = play(run_of_one_worker(steps=4, groups_per_step=2, faults=faults))
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 2, 4)


@pytest.mark.parametrize("kind", ["lost_call", "lost_reply"])
def test_a_restore_that_a_bad_network_swallows_is_asked_for_again(kind: str) -> None:
    """After the death of a rank: a new one reads the checkpoint, once."""
    for times in (1, 3):
        faults = (Fault(40.0, "kill_learner"), *(Fault(40.0, kind, target=i, what="restore") for i in range(times)))
        outcome = play(run_of_one_worker(steps=20, groups_per_step=2, faults=faults))
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 20)
        told = "\n".join(outcome.trace)
        assert told.count("The run goes back to") == 1 and f"{kind}: LearnerRankActor 1.restore" in told


def test_a_worker_that_never_hears_of_a_return_gives_up_what_it_has() -> None:
    """It is slow, so that groups outlast the return; those of withdrawn weights reach no batch (books.py)."""
    for at in range(17, 21):
        slow, unheard = Fault(at - 8.0, "slow_worker", lasts=20.0), Fault(float(at), "lost_call", what="follow")
        schedule = run_of_one_worker(steps=6, groups_per_step=2, faults=(slow, unheard, Fault(float(at), "kill_learner")))
        outcome = play(replace(schedule, checkpoint_every=3, max_staleness=3))
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 6), f"gone back after {at} s"
        told = "\n".join(outcome.trace)
        assert told.count("The run goes back to") == 1 and "lost_call: RolloutWorker 0.follow" in told


@pytest.mark.parametrize("at", [14.0, 18.0, 22.0])
def test_a_service_that_stands_still_is_replaced_and_the_learner_stays(at: float) -> None:
    """Whoever misses it first, a call or its heartbeat."""
    schedule = run_of_one_worker(steps=6, groups_per_step=2, faults=(Fault(at, "freeze_service", lasts=300.0),))
    outcome = play(replace(schedule, workers=3, max_staleness=2, checkpoint_every=2))
    told = "\n".join(outcome.trace)
    assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 6)
    assert told.count("A new one goes on after") == 1 and "The run goes back to" not in told and "LearnerRankActor 1 is up" not in told


@pytest.mark.parametrize("lasts", [64.0, 130.0])
def test_a_service_that_is_late_ends_no_run(lasts: float) -> None:
    """sync_s is 60 s here. One that answers again just after it is asked again; of one that doesn't, the run goes back for another."""
    for at in (11.0, 15.0, 18.0):
        outcome = play(run_of_one_worker(steps=4, groups_per_step=2, faults=(Fault(at, "freeze_service", lasts=lasts),)))
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 4), f"stopped after {at} s"
        if lasts < 70.0:
            assert not any("The run goes back to" in line for line in outcome.trace)


@pytest.mark.parametrize(("seconds", "ends"), [(600.0, False), (4000.0, True)], ids=["ten minutes", "for good"])
def test_a_run_outlives_a_judge_that_is_down_for_a_while(seconds: float, ends: bool) -> None:
    """Some tens of groups go, in place of hundreds; one that stays down ends the run, and its resume, in a sentence."""
    outcome = play(run_of_one_worker(steps=4, groups_per_step=2, faults=(Fault(15.0, "dead_judge", lasts=seconds),)))
    sampled = sum("-> RolloutWorker 0.generate_group" in line for line in outcome.trace)
    if ends:
        assert "RequestError: reward exact_match: " in outcome.violation and "The last error: the reward took longer" in outcome.violation
    else:
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 4)
    assert 30 < sampled < 80 and not any("is gone: " in line for line in outcome.trace)


def test_a_service_that_dies_again_and_again_is_replaced_after_pauses() -> None:
    """In other steps each time. It ends no run, and the twelfth death waits for four seconds."""
    deaths = tuple(Fault(20.0 + 15.0 * i, "kill_service") for i in range(12))
    outcome = play(run_of_one_worker(steps=70, groups_per_step=2, faults=deaths))
    assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 70)
    told = [line.partition("warning: ")[2] for line in outcome.trace if "the service was lost" in line]
    assert [text.rpartition(": ")[2] for text in told] == ["a new one in 2 s", "a new one in 4 s"]


def test_a_preemption_of_everything_waits_for_no_node_that_is_gone() -> None:
    """The store of a node of workers answers no more, and SIGTERM comes some time later: its groups are saved as prompts."""
    said, took_s = 0, list[float]()
    for at in range(12, 30):
        faults = (Fault(at - 1.0, "lose_node", 0, 1.0, "hangs"), Fault(float(at), "stop_driver"))
        schedule = run_of_one_worker(steps=6, groups_per_step=2, faults=faults)
        outcome = play(replace(schedule, workers=2, max_staleness=2, checkpoint_every=0))
        assert (outcome.violation, outcome.steps) == ("", 6), f"stopped after {at} s"
        asked = [float(line.split()[0]) for line in outcome.trace if "interrupted (SIGTERM): ending with a checkpoint" in line]
        saved = [float(line.split()[0]) for line in outcome.trace if "is told to be complete" in line]
        took_s += [next(one for one in saved if one >= asked[0]) - asked[0]] * len(asked[:1])
        said += any("can't be read: the checkpoint has their prompts" in line for line in outcome.trace)
    assert said > 2 and len(took_s) > 5 and max(took_s) < 20.0


@pytest.mark.parametrize("what", ["", "service", "hangs"])
def test_groups_that_were_lost_with_their_node_are_sampled_again(what: str) -> None:
    """Whoever reads them first: no prompt is discarded for it, and the run doesn't go back, also if the service dies meanwhile."""
    lost_groups = 0
    for at in range(11, 27, 2):  # later no group is finished or read
        for target in (0, 1):  # when it is read, and later
            fault = Fault(float(at), "lose_node", target, lasts=0.5 + at % 5, what=what)
            outcome = play(run_of_one_worker(steps=4, groups_per_step=2, faults=(fault,)))
            assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 4), f"lost after {at} s"
            told = "\n".join(outcome.trace)
            assert "The run goes back to" not in told and "is discarded" not in told
            lost_groups += "groups are lost: " in told
    assert lost_groups > 3


@pytest.mark.parametrize("kind", ["end_worker", "drain_node"])
def test_what_a_leaving_worker_has_begun_goes_on_elsewhere(kind: str) -> None:
    """From its tokens, which keep their versions (books.py): the run doesn't go back, and no prompt is discarded."""
    went_on = 0
    for at in range(8, 24, 2):
        outcome = play(run_of_one_worker(steps=4, groups_per_step=2, faults=(Fault(float(at), kind, lasts=60.0),)))
        assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 4), f"told after {at} s"
        told = "\n".join(outcome.trace)
        assert "The run goes back to" not in told and "is discarded" not in told
        went_on += " go on elsewhere from " in told or " goes on elsewhere from " in told
    assert went_on > 1


def test_a_prompt_whose_tokens_no_tokenizer_decodes_is_discarded_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two attempts, and the run goes on; a resume would come to the same prompt."""
    group, asked = SimulatedSampler.group, list[str]()

    async def decoded(sampler: SimulatedSampler, prompt: Prompt, **named: Any) -> Any:
        asked.append(prompt.prompt_id)
        if prompt.prompt_id == "train/0/5":  # before the world's books count its tokens: nobody does who can't read them
            await asyncio.sleep(1.0)
            raise KeyError(151_936)
        return await group(sampler, prompt, **named)

    monkeypatch.setattr(SimulatedSampler, "group", decoded)
    outcome = play(run_of_one_worker(steps=4, groups_per_step=2, faults=()))
    assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 1, 4)
    (discarded,) = [line for line in outcome.trace if "is discarded" in line]
    assert discarded.endswith("(train/0/5) is discarded, no usable answer: KeyError: 151936") and asked.count("train/0/5") == 2
    assert not any("is gone: " in line for line in outcome.trace)


def test_a_crash_goes_on_at_the_checkpoint_and_a_damaged_one_is_passed_over() -> None:
    """Three drivers: killed, resumed, killed with its newest checkpoint damaged, resumed from the older one."""
    faults = (Fault(60.0, "crash_driver"), Fault(110.0, "crash_driver", what="truncated"))
    outcome = play(run_of_one_worker(steps=40, groups_per_step=2, faults=faults))
    assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 3, 40)
    told = "\n".join(outcome.trace)
    resumes = [line for line in outcome.trace if "LearnerRankActor 0.restore" in line]
    assert len(resumes) == 2 and "truncated" in told


def test_when_all_checkpoints_that_are_kept_are_damaged_the_run_begins_anew() -> None:
    """Two are kept; of those before, nothing is left that a resume could find. All that was told to be complete and is kept counts."""
    faults = (Fault(60.0, "crash_driver", what="truncated"), Fault(66.0, "crash_driver", what="no manifest"))
    outcome = play(run_of_one_worker(steps=20, groups_per_step=2, faults=faults))
    assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 3, 20)
    told = "\n".join(outcome.trace)
    assert "truncated" in told and "no manifest" in told and told.count("step_000001 is told to be complete") == 2


@pytest.mark.parametrize("crash_s", [38.0, 52.0])
def test_a_checkpoint_that_was_left_does_not_appear_after_the_return(crash_s: float) -> None:
    """The disk takes 45 s for its last syncs, and the learner dies meanwhile. The driver is killed in the steps that are done again: a
    resume goes on from what the run had gone back to, not from a checkpoint of the steps that were taken back."""
    faults = Fault(30.5, "slow_disk", lasts=0.3), Fault(30.8, "kill_learner"), Fault(30.8 + crash_s, "crash_driver")
    outcome = play(replace(run_of_one_worker(steps=9, groups_per_step=2, faults=faults), seed=13, checkpoint_every=6))
    told = "\n".join(outcome.trace)
    assert "checkpoint under way: given up (checkpoint under way: not done in 30 s" in told and "goes back to its beginning" in told
    assert (outcome.violation, outcome.drivers, outcome.steps) == ("", 2, 9)


def seed_of_the_page(bug: Bug) -> list[int]:
    """By the table in docs/reliability.md, which counts from seed 0 on; nothing if it doesn't have the bug yet."""
    lines = (ROOT / "docs" / "reliability.md").read_text().splitlines()
    return [int(line.split(" | ")[1]) - 1 for line in lines if line.startswith(f"| {title(bug)} | ")]


@pytest.mark.parametrize("bug", BUGS, ids=title)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seed that showed it when the page was written; if by now another run belongs to that, by one of the first hundreds. A run that
    the bug holds up isn't waited for to the driver's deadline, which it doesn't need without the bug."""
    monkeypatch.setattr("tests.simulation.world.FINISH_S", 400.0)
    seeds = [*seed_of_the_page(bug), *range(3 * SEEDS)]
    shown = first_shown(bug, seeds)
    assert shown is not None, f"{title(bug)}: not found in {len(seeds)} seeds"
    if shown[1].startswith("not through"):
        assert not play(schedule_of(shown[0])).violation


def test_a_failure_is_told_so_that_it_can_be_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bug that needs one fault, all other faults are left out, and the printed schedule fails in the same way."""
    monkeypatch.setattr("tests.simulation.world.FINISH_S", 200.0)  # a run with this bug waits to the end of it
    lost_groups = next(bug for bug in BUGS if "lost_worker" in bug.__name__)  # type: ignore[attr-defined]
    noise = tuple(Fault(12.0 + 2 * i, "slow_learner", lasts=1.0) for i in range(3))
    with lost_groups():
        kills = (Fault(at, "kill_worker") for at in (11.0, 13.0, 19.0, 22.0, 23.0))  # some find the worker without a group
        schedules = (run_of_one_worker(steps=5, groups_per_step=4, faults=(*noise[:2], kill, *noise[2:])) for kill in kills)
        schedule = next(schedule for schedule in schedules if play(schedule).violation)
        smallest = shrunk(schedule.faults, lambda part: bool(play(schedule.with_faults(part)).violation))
        assert [fault.kind for fault in smallest] == ["kill_worker"]
        again = FaultSchedule.of_text(schedule.with_faults(smallest).text())
        assert play(again).violation == play(schedule.with_faults(smallest)).violation != ""
    assert not play(again).violation
