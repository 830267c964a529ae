"""What befalls rollout workers, the prompts that they sample, and their starts; and what must be true of the run at its end."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

import pytest

from evenkeel.rollout.prompt_place import task_of
from evenkeel.rollout.trajectory import Group, Prompt, Trajectory, UnfinishedGroup
from tests.simulation.engine import SimulatedSampler
from tests.simulation.parts import SimulatedTask
from tests.simulation.scenarios import PLAIN, Scenario, check
from tests.simulation.schedule import TWO_TASKS, Fault
from tests.simulation.world import play

MANY = range(1, 10_000)
GOOD_FOR = {"steps": 40}
"""A run that is still there a while after what befalls it."""
ELASTIC = "rollout.min_workers=1 rollout.max_workers=4"


def each(kind: str, at: float, count: int, *, apart: float = 0.0, lasts: float = 0.0, what: str = "") -> tuple[Fault, ...]:
    return tuple(Fault(round(at + i * apart, 1), kind, i, lasts, what) for i in range(count))


LOSSES = {
    "eleven of forty at once are replaced without a pause, and the others go on": Scenario(
        each("kill_worker", 14.0, 11),
        {"workers": 40, "groups_per_step": 80},
        lost=11,
        told={r"RolloutWorker 50 is up": 1, "the next replacement starts in": 0},
    ),
    "all at once are no group's fault": Scenario(each("kill_worker", 12.0, 6), {"workers": 6, "groups_per_step": 12}, lost=6),
    "all, and no node for half an hour: the run says what it waits for, and no batch is late": Scenario(
        (Fault(12.0, "no_node", lasts=2000.0), *each("kill_worker", 12.0, 2)),
        lost=2,
        told={
            r"waiting .* groups \(the oldest is \d+\) <- a rollout worker with weights v\d+ \(0 workers joined, 0 of them with these "
            r"weights, 2 starting\)": range(30, 36),
            "driver -> RolloutWorker [23].node_id": 2,
            "driver -> RolloutWorker 4": 0,
            "not done in": 0,
        },
        between=(("fault: .* no_node", "rollout worker [23] sampled its first group", 2000.0, 2030.0),),
    ),
    "all, and no node within deadlines.no_workers_s, end the run": Scenario(
        (Fault(12.0, "no_node", lasts=3000.0), *each("kill_worker", 12.0, 2)),
        {"changes": "deadlines.no_workers_s=600"},
        lost=2,
        ends=r"groups .* <- a rollout worker with weights v\d+: not done in 600 s",
    ),
    "one after the other without a finished group end the run, after longer and longer pauses": Scenario(
        (Fault(0.0, "spoilt_prompt", what="kills"),),
        {"groups_per_step": 8},
        lost=MANY,
        discarded=MANY,
        ends=r"11 rollout workers were lost one after the other, all within 60 minutes, and not one group was finished in between",
        told={f"the next replacement starts in {2**i} s": MANY for i in range(1, 9)},
    ),
    "more than ten in an hour, with groups finished in between, only slow their replacements down": Scenario(
        each("kill_worker", 20.0, 13, apart=20.0),
        {"steps": 120},
        lost=13,
        told={"11 losses of rollout workers within 60 minutes: the next replacement starts in 2 s": 1, "starts in 8 s": 1},
    ),
    "one that stands still is condemned by its heartbeat": Scenario(
        (Fault(14.0, "freeze_worker", lasts=600.0),),
        GOOD_FOR,
        lost=1,
        told={"missed its heartbeat": 1},
        between=(("fault: .* freeze_worker", "is gone: ", 30.0, 37.0),),
    ),
    "one eight times as slow is left alone": Scenario((Fault(14.0, "slow_worker", lasts=300.0),), GOOD_FOR),
    "a moment without a connection is none": Scenario((Fault(14.0, "unreachable_worker", lasts=7.0),), GOOD_FOR),
    "half a minute without a connection is none": Scenario((Fault(14.0, "unreachable_worker", lasts=25.0),), GOOD_FOR),
    "one that can't be reached for as long as a heartbeat": Scenario(
        (Fault(14.0, "unreachable_worker", lasts=60.0),),
        GOOD_FOR,
        lost=1,
        between=(("fault: .* unreachable_worker", "is gone: ", 30.0, 37.0),),
    ),
    "one that dies while it can't be reached: its groups go on as soon as that is known": Scenario(
        (Fault(14.0, "unreachable_worker", lasts=60.0), Fault(15.0, "kill_worker")),
        {"groups_per_step": 16},
        lost=1,
        between=(("is gone: ", "under way again", 0.0, 1.0),),
    ),
    "an engine that talks rubbish four times in a row gets its weights anew": Scenario(
        (Fault(8.0, "nan_weights"),),
        {"groups_per_step": 8, "max_staleness": 0},
        told={"is sampled again: ": 4, r"Worker 0.update_weights$": 6, r"Worker 1.update_weights$": 5},
    ),
    "one that does so again and again, and works in between, stays": Scenario(
        each("nan_weights", 12.0, 5, apart=20.0), {"groups_per_step": 32, "steps": 20}, told={"is sampled again: ": MANY}
    ),
    "one that talks rubbish with new weights, too, is replaced after the third time": Scenario(
        (Fault(12.0, "nan_weights", lasts=100.0),),
        {"groups_per_step": 32, "steps": 8},
        lost=1,
        told={"dirty again after 3 full syncs": 1},
    ),
    "rubbish from everybody ends the run before the prompts are used up": Scenario(
        (Fault(12.0, "spoilt_prompt", what="garbled"),),
        {"groups_per_step": 8},
        lost=range(3),
        discarded=range(16, 200),
        ends=r"of the last \d+ groups got no usable answer on any worker. The last reason: one logprob is not finite",
    ),
}
"""Of workers."""

PROMPTS = {
    "no engine gives a usable answer to: discarded after two attempts": Scenario(
        (Fault(0.0, "spoilt_prompt", what="garbled train/0/5"),),
        discarded=1,
        told={
            "group 5 is sampled again: one logprob is not finite": 1,
            r"group 5 \(train/0/5\) is discarded, no usable answer: one logprob is not finite": 1,
        },
    ),
    "nobody could ever sample: discarded at once": Scenario(
        (Fault(0.0, "spoilt_prompt", what="too_long train/0/5"),), discarded=1, told={"is sampled again": 0, "9000 prompt tokens": 1}
    ),
    "the only engine dies of: found": Scenario(
        (Fault(0.0, "spoilt_prompt", what="kills train/0/5"),),
        {"workers": 1},
        lost=3,
        discarded=1,
        told={r"\(train/0/5\) is discarded, lost with several engines": 1},
    ),
    "four engines die of: found": Scenario(
        (Fault(0.0, "spoilt_prompt", what="kills train/0/5"),),
        {"workers": 4, "groups_per_step": 8},
        lost=3,
        discarded=1,
        told={r"\(train/0/5\) is discarded, lost with several engines": 1},
    ),
    "three calls for which are swallowed": Scenario((Fault(0.0, "spoilt_prompt", lasts=3, what="unreached train/0/5"),)),
    "no call for ever reaches a worker: discarded in the end": Scenario(
        (Fault(0.0, "spoilt_prompt", what="unreached train/0/5"),),
        discarded=1,
        told={r"\(train/0/5\) is discarded, no usable answer": 1, "group 5 is sampled again": 4},
    ),
    "a call for which can't be delivered, and then the engine dies of: found all the same": Scenario(
        (Fault(0.0, "spoilt_prompt", lasts=1, what="unreached train/0/5"), Fault(0.0, "spoilt_prompt", what="kills train/0/5")),
        lost=3,
        discarded=1,
    ),
    "a call hangs for, in a worker that lives: aborted, and discarded the second time": Scenario(
        (Fault(0.0, "spoilt_prompt", what="hangs train/0/5"),), discarded=1, told={r"RolloutWorker \d.abort$": 2, "sampled again": 1}
    ),
    "a call for doesn't end when it is aborted: its worker is replaced": Scenario(
        (Fault(0.0, "spoilt_prompt", lasts=1, what="clings train/0/5"),), lost=1, told={"doesn't end in": MANY}
    ),
    "of an evaluation kills engines: the evaluation ends": Scenario(
        (Fault(0.0, "spoilt_prompt", what="kills held_out/0/1"),),
        {"workers": 4, "evaluate_every": 100, "steps": 8},
        lost=6,
        told={"left out: evaluation answers <- rollout worker": 2},
    ),
    "of an evaluation meets a bug: that is the evaluation's": Scenario(
        (Fault(0.0, "spoilt_prompt", what="bug held_out/0/1"),), {"evaluate_every": 2}, told={"an evaluation during training failed": MANY}
    ),
}
"""A prompt that ..."""

STARTS = {
    "that is killed twice is tried a third time": Scenario((Fault(0.0, "bad_start", lasts=2, what="kills"),), {"workers": 1}, lost=2),
    "that is late twice is tried a third time": Scenario((Fault(0.0, "bad_start", lasts=2, what="hangs"),), {"workers": 1}, lost=2),
    "that is killed each time ends the run": Scenario(
        (Fault(0.0, "bad_start", lasts=3, what="kills"),),
        {"workers": 1},
        lost=3,
        ends="EngineError: rollout worker 2 did not start: start of rollout worker 2: the actor",
    ),
    "of each of four workers is tried three times": Scenario(
        (Fault(0.0, "bad_start", lasts=100, what="hangs"),),
        {"workers": 4},
        lost=range(12, 13),
        ends=r"DeadlineExceeded: start of rollout worker \d+: not done in 150 s",
        told={"RolloutWorker 11 is up": 1, "RolloutWorker 12": 0},
    ),
    "that can't succeed ends the run in its own words": Scenario(
        (Fault(0.0, "bad_start", lasts=1, what="no_model"),), {"workers": 1}, lost=1, ends="ConfigError: model: there is no such model"
    ),
    "whose reward has never given a score ends a new run": Scenario(
        (Fault(0.0, "bad_start", lasts=1, what="no_score"),), {"workers": 1}, lost=1, ends=r"rollout.reward \(exact_match\): it raised"
    ),
    "that was given up before another one is up is asked for again then": Scenario(
        (Fault(0.0, "bad_start", lasts=1, what="no_model"), Fault(0.0, "bad_start", lasts=2, what="kills")),
        lost=3,
        told={r"RolloutWorker 4 is up": 1},
    ),
    "that fails again and again in a run that works comes later each time, and ends nothing": Scenario(
        (Fault(13.0, "bad_start", lasts=6, what="no_device"), Fault(14.0, "kill_worker")),
        {"steps": 60},
        lost=7,
        told={f"{2 + i} starts in a row failed: the next replacement starts in {2 ** (i + 1)} s": 1 for i in range(5)},
    ),
    "that waits for its turn keeps its place when the pool grows": Scenario(
        (Fault(13.0, "bad_start", lasts=5, what="no_device"), Fault(14.0, "kill_worker"), Fault(40.0, "resize_pool", lasts=3)),
        {"steps": 60},
        lost=6,
        told={r"RolloutWorker 8 is up": 1, "RolloutWorker 9": 0},
    ),
    "that waits for its turn is not needed any more when the pool has shrunk": Scenario(
        (Fault(13.0, "bad_start", lasts=5, what="no_device"), Fault(14.0, "kill_worker"), Fault(25.0, "resize_pool", lasts=1)),
        {"steps": 60},
        lost=range(2, 6),
        told={r"RolloutWorker [7-9]": 0, r"RolloutWorker [1-6] is up": range(2, 6), "RolloutWorker 6": 0},
    ),
    "of the last of several that fail, with the learner dead: the run goes back, and asks for workers anew": Scenario(
        (Fault(0.0, "bad_start", lasts=3, what="kills"), Fault(1.5, "kill_learner")), {"workers": 1}, lost=3, returns=1
    ),
    "that no reward scores for half an hour while no other worker is up ends the run": Scenario(
        (Fault(20.0, "dead_judge", lasts=6000.0), Fault(20.1, "kill_worker")),
        {"workers": 1},
        lost=MANY,
        ends="For 30 minutes no rollout worker could start because of it. Repair it and resume the run",
        told={f"gives no score: the next replacement starts in {seconds} s": MANY for seconds in (2, 4, 8, 16, 32, 60)},
    ),
}
"""A start ..."""

LEAVING = {
    "as the pool shrinks gets nothing new, and nobody takes its place": Scenario(
        (Fault(14.0, "resize_pool", lasts=1),), {"workers": 3, **GOOD_FOR}, told={"has left": 2, "RolloutWorker 3": 0}
    ),
    "whose process is told to end is replaced": Scenario(
        (Fault(14.0, "end_worker", lasts=100.0),), GOOD_FOR, told={r"leaves, .*\(SIGTERM\)": 1, "has left": 1, "RolloutWorker 2 is up": 1}
    ),
    "that is killed before it has left loses no group, three times with one group": Scenario(
        (Fault(0.0, "spoilt_prompt", lasts=3, what="leaves train/0/5"),), told={r"\(SIGTERM\)": 3}
    ),
    "whose node is drained works for half of what is left, and others come at once": Scenario(
        (Fault(14.0, "drain_node", lasts=8.0),),
        {"changes": "deadlines.drain_s=20", "workers": 4, **GOOD_FOR},
        told={r"under way and [34] s for them: Ray drains its node": 2, "RolloutWorker 5 is up": 1},
    ),
    "whose node is drained without a hurry works as long as it may": Scenario(
        (Fault(14.0, "drain_node", lasts=100.0),), {"changes": "deadlines.drain_s=20", **GOOD_FOR}, told={"and 20 s for them": 2}
    ),
    "whose node is drained while its engine starts never joins": Scenario(
        (Fault(12.0, "bad_start", lasts=1, what="drained"), Fault(12.1, "kill_worker")),
        {"workers": 3, **GOOD_FOR},
        lost=1,
        told={
            "rollout worker 3 leaves, .*: Ray drains its node": 1,
            "driver -> RolloutWorker 3.generate_group": 0,
            "RolloutWorker 4 is up": 1,
        },
    ),
    "as a pool that follows its load has more than the learner can use": Scenario(
        (Fault(0.0, "slow_learner", lasts=10_000.0),),
        {"changes": ELASTIC, "workers": 4, "groups_per_step": 8, **GOOD_FOR},
        told={r"rollout worker \d leaves, .*: in \d+ s the learner waited for \d+% of its time, 4 workers for \d+% of theirs": range(1, 4)},
    ),
}
"""A worker ..."""
LATE = {
    "an hour for its first worker": Scenario(
        (Fault(0.0, "no_node", lasts=3600.0),), told={"driver -> RolloutWorker [01].node_id": 2, "RolloutWorker 2": 0}
    ),
    "longer than a start may take for its third worker, and goes on meanwhile": Scenario(
        (Fault(14.0, "no_node", lasts=200.0), Fault(14.1, "resize_pool", lasts=3)),
        {"steps": 70},
        told={"RolloutWorker 2 is up": 1, "RolloutWorker 3": 0},
    ),
    "while its learner waits and its pool may follow that": Scenario(
        (), {"changes": ELASTIC, "workers": 1, "groups_per_step": 8, "steps": 20}, told={"RolloutWorker [123] is up": 3}
    ),
}
"""A run waits, or grows, ..."""


@pytest.mark.parametrize("name", LOSSES)
def test_workers(name: str) -> None:
    check(LOSSES[name])


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str) -> None:
    check(PROMPTS[name])


@pytest.mark.parametrize("name", STARTS)
def test_starts(name: str) -> None:
    check(STARTS[name])


@pytest.mark.parametrize("name", LEAVING)
def test_leaving(name: str) -> None:
    check(LEAVING[name])


@pytest.mark.parametrize("name", LATE)
def test_nodes(name: str) -> None:
    check(LATE[name])


def test_prompts_are_made_while_the_engines_are_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as were admitted last, so that the next places don't wait for them; and no more, since the source may be long to read."""
    made, train_prompt = list[float](), SimulatedTask.train_prompt

    def noted(task: SimulatedTask, position: int) -> Prompt:
        made.append(asyncio.get_running_loop().time())
        return train_prompt(task, position)

    monkeypatch.setattr(SimulatedTask, "train_prompt", noted)
    play(PLAIN.with_faults([Fault(0.0, "spoilt_prompt", what="hangs")]))
    places = (PLAIN.max_staleness + 1) * PLAIN.groups_per_step
    assert sum(at < 500.0 for at in made) == 2 * places


SLOTS = f"{TWO_TASKS} rollout.slots=2"


def test_groups_of_one_task_take_slots_though_another_one_is_played_in_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers with two slots each, and admission for 32 groups of which every other is played, 20 s each: those are all under way at
    once, 8 at a worker, and of the others never more than 2 at a worker. One worker is killed in the middle."""
    under_way, most, group = Counter[tuple[int, str]](), Counter[str](), SimulatedSampler.group

    async def counted(sampler: SimulatedSampler, prompt: Prompt, **how: Any) -> Any:
        task = task_of(prompt.prompt_id)
        under_way[id(sampler), task] += 1
        most[task] = max(most[task], under_way[id(sampler), task])
        try:
            await asyncio.sleep(20.0 if task == "played" else 0.0)
            return await group(sampler, prompt, **how)
        finally:
            under_way[id(sampler), task] -= 1

    monkeypatch.setattr(SimulatedSampler, "group", counted)
    check(Scenario((Fault(60.0, "kill_worker"),), {"groups_per_step": 16, "changes": SLOTS, **GOOD_FOR}, lost=1))
    assert most["asked"] == 2 and most["played"] >= 8


GOES_ON = r"group \d+ goes on from \d+ tokens: rollout worker \d+ was lost in the middle of its rollouts"


def test_rollouts_with_turns_of_a_worker_that_dies_go_on_from_there() -> None:
    """Also where the weights were taken back meanwhile: by the books of the world, no token is of other weights than it says."""
    faults = (*each("kill_worker", 60.0, 3, apart=40.0), Fault(200.0, "kill_learner"), Fault(230.0, "kill_worker"))
    run = check(Scenario(faults, {"groups_per_step": 16, "changes": SLOTS, "steps": 60}, lost=4, returns=1))
    assert sum(bool(re.search(GOES_ON, line)) for line in run.trace) >= 4


def test_turns_of_weights_that_were_taken_back_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner dies, and a worker that has groups of the same numbers again, but has said nothing of them."""
    turned = SimulatedSampler.turned

    async def silent_in_the_end(sampler: SimulatedSampler) -> None:
        await (asyncio.sleep(3600.0) if asyncio.get_running_loop().time() > 98.0 else turned(sampler))

    monkeypatch.setattr(SimulatedSampler, "turned", silent_in_the_end)
    shape = {"groups_per_step": 16, "changes": SLOTS, "steps": 40}
    check(Scenario((Fault(100.0, "kill_learner"), Fault(104.6, "kill_worker")), shape, lost=1, returns=1, told={GOES_ON: 0}))


FROM_THE_CHECKPOINT = r"info: \d+ groups? under way go on from [1-9]\d* tokens of the checkpoint"


def test_rollouts_with_turns_go_on_from_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill of the driver, another one, and a return in the same process. What the engine that takes a group up was given is the
    beginning of what it answers; that this is trained, with the weights that sampled each token, and with what was read in between, whole
    and once, the world's books say."""
    gone_on, group = list[tuple[UnfinishedGroup, Group]](), SimulatedSampler.group

    async def noted(sampler: SimulatedSampler, prompt: Prompt, *, begun: UnfinishedGroup | None = None, **how: Any) -> Any:
        found = await group(sampler, prompt, begun=begun, **how)
        if begun is not None and isinstance(found, Group):
            gone_on.append((begun, found))
        return found

    def versions(one: Trajectory) -> list[int]:
        return [span.version for span in one.version_spans for _ in range(span.start, span.end)]

    monkeypatch.setattr(SimulatedSampler, "group", noted)
    faults = Fault(60.0, "crash_driver"), Fault(100.0, "crash_driver"), Fault(140.0, "kill_learner")
    shape = {"groups_per_step": 8, "max_staleness": 3, "changes": SLOTS, "steps": 40}
    check(Scenario(faults, shape, drivers=3, returns=1, told={FROM_THE_CHECKPOINT: 3, GOES_ON: 0}))
    assert len(gone_on) >= 3 and any(one.later for begun, _ in gone_on for one in begun.answers)
    for begun, found in gone_on:
        for one, whole in zip(begun.answers, found.trajectories, strict=True):
            tokens = len(one.response_ids)
            assert whole.response_ids[:tokens] == one.response_ids and whole.behavior_logprobs[:tokens] == one.behavior_logprobs
            assert versions(whole)[:tokens] == versions(one) and whole.later[: len(one.later)] == one.later
