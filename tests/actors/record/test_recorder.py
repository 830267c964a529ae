"""Warnings of the monitor on their way to everything that shows a run: run folder, terminal, metrics, TensorBoard, Prometheus."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from evenkeel.actors.carriers import (
    ActorInfo,
    DiscardedGroup,
    DiscardReason,
    Example,
    LaneReport,
    Observation,
    ScalingCause,
    ScalingDecision,
    Span,
)
from evenkeel.actors.driver.evaluation import evaluate
from evenkeel.actors.metrics.step_metrics import StepMetrics, by_worker
from evenkeel.actors.record import recorder as recorder_module
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.step_numbers import trajectories_text
from evenkeel.correction.early_warning.monitor import Event, State
from evenkeel.learner.results import SkipReason, StepResult
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.trajectory import FailureKind, SyncReceipt, Trajectory, WorkerLoad
from tests.actors.cases import facts, prompts, trajectory
from tests.actors.driver.test_evaluation import Answers
from tests.actors.metrics.test_metrics import scalars
from tests.actors.record.recorder_cases import (
    ALARM,
    BROKEN,
    COUNTS,
    OVER,
    WATCH,
    Seen,
    StandInReference,
    batch_of,
    diagnosed,
    end_step,
    observe,
    result_of,
    write,
)
from tests.actors.record.recorder_cases import seen as seen


def test_a_warning_reaches_every_view(seen: Seen) -> None:
    steps = [
        (1, diagnosed(state=State.OK)),
        (2, diagnosed(WATCH, state=State.WATCH)),
        (3, diagnosed(ALARM, BROKEN, state=State.ALARM)),
        (4, diagnosed(OVER, state=State.OK)),
    ]
    asyncio.run(write(seen.recorder, *steps))
    assert [seen.line(step)["monitor/level"] for step in (1, 2, 3, 4)] == [0, 1, 2, 0]
    assert [seen.line(step).get("monitor/alarms_total/k3_kl") for step in (2, 3, 4)] == [None, 1, 1]
    assert seen.line(4)["monitor/watches_total/k3_kl"] == 1 and seen.line(4)["time/diagnose_s"] == 0.01
    told = seen.folder.read_monitor_events()
    assert told[:2] == [WATCH, ALARM] and told[3] == OVER
    assert told[2].value == math.inf and math.isnan(told[2].growth)
    assert [(event.level, event.text) for event in seen.told()] == [
        ("watch", "step 2: k3_kl = 0.002, 2.0 times the level"),
        ("alarm", "step 3: k3_kl = 0.008, 8.0 times the level"),
        ("alarm", "step 3: broken_tokens = inf"),
        ("info", "step 4: k3_kl = 0.001 is back where it was"),
    ]
    assert "alarm: step 3: k3_kl = 0.008, 8.0 times the level" in seen.screen.getvalue()
    page = seen.page()
    assert "evenkeel_monitor_level 0.0" in page
    assert 'evenkeel_monitor_alarms_total{part="k3_kl"} 1.0' in page and 'evenkeel_monitor_alarms_total{part="broken_tokens"} 1.0' in page
    seen.recorder.close()
    assert scalars(seen.folder.tensorboard_path, "monitor/level") == [(1, 0), (2, 1), (3, 2), (4, 0)]


def test_a_step_without_diagnostics_has_what_the_learner_itself_knows_of_its_tokens(seen: Seen) -> None:
    """The write's own numbers are 0.75 and 2; where the correction service has told one of them, that is written."""
    told = Observation({"kept_share": 0.5, "broken_tokens": 0.0}, (), State.OK, 0.01)
    asyncio.run(write(seen.recorder, (1, None), (2, told), (3, diagnosed(state=State.OK))))
    names = ("correction/kept_share", "correction/broken_tokens")
    assert [[seen.line(step)[name] for name in names] for step in (1, 2, 3)] == [[0.75, 2.0], [0.5, 0.0], [0.75, 2.0]]


def test_a_line_has_what_belongs_to_its_step_however_late_it_is_told(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 1 is told when step 2 has been noted, received and counted already."""
    monkeypatch.setattr(recorder_module, "MOST_PARTS", 1)
    named = facts(1, 5)
    parts = replace(named.trajectories[0], reward_components={"a": 1.0, "b": 1.0})
    batch = batch_of(replace(named, trajectories=(parts,)), facts(2, 9))
    gone = DiscardedGroup("train/0/1", DiscardReason.UNIFORM)

    async def scenario() -> None:
        recorder = seen.recorder
        waits = [asyncio.get_running_loop().create_future() for _ in (1, 2)]
        for step, wait in enumerate(waits, start=1):
            recorder.note({"true_on_policy/tokens": step})
            recorder.receipt(SyncReceipt(step, bytes=100 * step, pause_s=0.0, seconds=0.1 * step))
            recorder.group_finished(facts(step, 7 * step), "0")
            counts = {"admitted": 10 * step, "trained": step, "discarded": step, "finished": 0, "in_flight": 0, "drawn": 0}
            end_step(recorder, step, wait, batch=batch, counts=counts, discarded=[gone])
        for wait in waits:
            wait.set_result(None)
        await recorder.flush()

    asyncio.run(scenario())
    names = ("true_on_policy/tokens", "sync/bytes", "length/sampled_tokens", "groups/trained_total", "groups/refilled_total")
    assert [seen.line(1)[name] for name in names] == [1, 100, 7, 1, 1]
    assert [seen.line(2)[name] for name in names] == [2, 200, 14, 2, 2]
    assert all("reward/component/a" in seen.line(step) and "reward/component/b" not in seen.line(step) for step in (1, 2))
    assert sum("named more than 1 parts" in event.text for event in seen.told()) == 1
    assert seen.folder.read_answer_lengths(first_step=1) == [5, 9, 5, 9], "one answer of each trained group"
    assert seen.folder.read_answer_lengths(first_step=2) == [5, 9]
    assert (seen.folder.rewind(1), seen.folder.read_answer_lengths(first_step=1)) == (2, [5, 9]), "a step's metrics and its lengths go"


def test_the_number_of_reward_parts_with_a_metric_is_bounded(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward function may name a new part in each answer: metrics, curves and endpoint would grow to the end of the run."""
    monkeypatch.setattr(recorder_module, "MOST_PARTS", 3)

    async def scenario() -> None:
        for step, names in enumerate([["a", "b"], ["a", "c", "d", "e"], [str(n) for n in range(1000)]], start=1):
            named = facts(1, 5)
            answer = replace(named.trajectories[0], reward_components=dict.fromkeys(names, 1.0))
            end_step(seen.recorder, step, batch=batch_of(replace(named, trajectories=(answer,))))
        await seen.recorder.flush()

    asyncio.run(scenario())
    kept = [[name for name in seen.line(step) if name.startswith("reward/component/")] for step in (1, 2, 3)]
    assert kept == [["reward/component/a", "reward/component/b"], ["reward/component/a", "reward/component/c"], []]
    (told,) = seen.told()
    named = "the reward function has named more than 3 parts: 'd' and other new ones train as before, but have no metric"
    assert (told.level, told.text) == ("warning", named)


def test_a_steps_numbers_are_asked_for_a_moment_after_it_or_when_the_next_one_ends(seen: Seen) -> None:
    """The next batch goes first to the learner. The service holds a batch until the next one is trained."""
    asked = list[int]()

    async def ask(step: int, version: int, result: StepResult) -> None:
        asked.append(step)

    async def scenario() -> None:
        for step in (1, 2):
            seen.recorder.end_step(step, step, batch_of(), result_of(step), {}, COUNTS, [], asyncio.sleep(0, {}), ask)
            assert asked == []
        await asyncio.sleep(0.05)
        assert asked == [1]
        await asyncio.sleep(0.3)
        assert asked == [1, 2] and [line.step for line in seen.folder.read_metrics()] == [1, 2], "nobody has asked for a flush"

    asyncio.run(scenario())


def test_held_out_answers_without_a_score_are_told_everywhere(seen: Seen) -> None:
    result = asyncio.run(evaluate(Answers([1.0, None, 0.0, None]), prompts(0, 4), AnswerSampling(), step=4, correct_at={"": 1.0}))
    seen.recorder.evaluated(result, prompts(0, 4))
    seen.settle()
    (line,) = seen.folder.read_evaluations()
    assert (line["held_out/accuracy"], line["held_out/unscored"]) == (0.5, 2)
    told = "2 of 4 held-out answers could not be scored, and are left out of the accuracy; the first: train/0/1: the reward raised"
    assert any(event.level == "warning" and told in event.text for event in seen.told())
    assert "held-out accuracy 0.500" in seen.screen.getvalue() and "on 4 problems, 2 of them not scored" in seen.screen.getvalue()
    assert told in seen.screen.getvalue()


def test_a_reward_that_fails_by_the_hundred_is_one_line_a_step(seen: Seen) -> None:
    """The first at once, with what it says; then one line a step and kind with the number, and counters of all."""

    async def step(number: int) -> None:
        for group in range(100):
            late = ((FailureKind.REWARD_TIMEOUT, "the reward took more than 10 s"),) if group % 10 == 0 else ()
            raised = FailureKind.REWARD, f"the reward raised ValueError: {number}-{group} misses the deadline of a page that it asks"
            errors = (raised, *late)
            seen.recorder.group_finished(facts(group, *[1] * 8, failures=errors), "0")
        end_step(seen.recorder, number)
        await seen.recorder.flush()

    for number in (1, 2):
        asyncio.run(step(number))
    seen.recorder.group_finished(facts(7, *[1] * 8, failures=[(FailureKind.ENGINE, "the engine aborted the request")]), "0")
    seen.recorder.close()
    warnings = [event.text for event in seen.told() if event.level == "warning"]
    assert len(warnings) == 2 + 2 + 2 + 1
    assert warnings[0] == (
        "group 0: a trajectory failed: the reward raised ValueError: 1-0 misses the deadline of a page that it asks "
        "(further trajectories without a reward are counted, and reported once a step)"
    )
    assert warnings[2].startswith("step 1: trajectories without a reward: 99 more, the first: group 1: ")
    assert warnings[3].startswith("step 1: trajectories whose reward took too long: 9 more, the first: group 10: ")
    assert warnings[4].startswith("step 2: trajectories without a reward: 100 more, the first: group 0: ")
    assert "ValueError: 1-1" in warnings[2] and "ValueError: 2-0" in warnings[4], "one example"
    assert warnings[6].startswith("after the last step: trajectories without a reward: 1 more, the first: group 7: ")
    assert (seen.line(2)["reward/exceptions_total"], seen.line(2)["reward/timeouts_total"]) == (200, 20)


def test_an_overflow_in_float16_is_said_and_counted_apart(seen: Seen) -> None:
    """It is part of finding the loss scale: no batch is kept for study, and no alert rests on its counter."""
    skipped = (SkipReason.OVERFLOW, SkipReason.NO_GRADIENT, SkipReason.OVERFLOW)

    async def scenario() -> None:
        end_step(seen.recorder, 1, result=result_of(1, skipped=skipped, loss_scale=32768.0))
        await seen.recorder.flush()

    asyncio.run(scenario())
    (line,) = seen.folder.read_metrics()
    assert (line["steps/skipped_total"], line["steps/overflowed_total"]) == (1, 2)
    (event,) = seen.told()
    assert event.text == "step 1: 2 updates left out: the gradient overflowed in float16; the loss scale is 32,768 now"
    assert not (seen.folder.path / "skipped_batches").exists()


def test_what_the_learner_gives_as_the_reason_is_what_is_told(seen: Seen) -> None:
    """Nothing is read off the loss and the norms again."""

    async def scenario() -> None:
        for number, reason in enumerate((SkipReason.NO_GRADIENT, SkipReason.NOT_FINITE), start=1):
            batch = batch_of(corrected=StandInReference(MemoryError("no room for it")))
            end_step(seen.recorder, number, batch=batch, result=result_of(number, skipped=(reason,), optimizer_steps=0))
        await seen.recorder.flush()

    asyncio.run(scenario())
    (event,) = seen.told()
    assert event.text.startswith("step 2: 1 of 1 updates left out; loss or gradient was not finite (loss 1; ")


def test_changes_of_the_pools_size_are_told_and_counted_by_cause(seen: Seen) -> None:
    recorder = seen.recorder
    recorder.scaled(ScalingDecision(3, ScalingCause.LEARNER_WAITS, "the learner waited for 62%"))
    recorder.scaled(ScalingDecision(1, ScalingCause.WORKERS_WAIT, "3 workers waited for 80%"))
    recorder.scaled(ScalingDecision(2, ScalingCause.LEARNER_WAITS, "the learner waited for 30%"))
    recorder.handed_back(4, 120)
    recorder.handed_back(1, 5)
    totals = recorder.totals()
    assert totals == {
        "pool/scaled_total/learner_waits": 2, "pool/scaled_total/workers_wait": 1,
        "pool/handed_back_total": 5, "pool/handed_back_tokens_total": 125,
    }  # fmt: skip
    assert dict(StepMetrics(1, totals)) == totals | {"step": 1}, "the catalogue knows them"
    seen.settle()
    told = [event.text for event in seen.told()]
    assert told[0] == "the pool goes to 3 rollout workers (learner_waits): the learner waited for 62%"
    assert told[1].startswith("the pool goes to 1 rollout worker (workers_wait)")


def test_workers_are_counted_before_a_steps_weights_go_out(seen: Seen) -> None:
    """Two of three held the newest by then; right after it none does. Prometheus forgets who left, now and when the step is told."""

    async def scenario() -> None:
        recorder = seen.recorder
        for name in ("0", "1", "2"):
            recorder.joined(ActorInfo("rollout", name, 1, "127.0.0.1:1"))
        for name, tokens in (("0", 10), ("1", 20), ("0", 5), ("2", 40)):
            recorder.group_finished(facts(1, tokens), name)
        recorder.trained({"0": 4, "1": 4, "2": 3}, 3, 2, 3)
        end_step(recorder, 1)
        recorder.left("2")
        await recorder.flush()

    asyncio.run(scenario())
    line = seen.line(1)
    assert (line["pool/workers"], line["pool/current_workers"], line["pool/target_workers"]) == (3, 2, 3)
    assert by_worker(line, "tokens") == {"0": 15, "1": 20, "2": 40} and sum(by_worker(line, "tokens").values()) == 75
    assert by_worker(line, "groups") == {"0": 2, "1": 1, "2": 1} and by_worker(line, "weight_version") == {"0": 4, "1": 4, "2": 3}
    assert "    workers  0: 15 tokens, v4  1: 20 tokens, v4  2: 40 tokens, v3" in seen.screen.getvalue().splitlines()
    page = seen.page()
    assert 'evenkeel_worker_tokens{worker="1"} 20.0' in page and 'worker="2"' not in page
    seen.recorder.left("1")
    page = seen.page()
    assert 'evenkeel_worker_tokens{worker="0"} 15.0' in page and 'worker="1"' not in page
    seen.recorder.close()
    assert scalars(seen.folder.tensorboard_path, "worker/tokens/1") == [(1, 20)]


def test_the_load_of_a_worker_that_has_left_is_not_kept(seen: Seen) -> None:
    """Two answer as step 1 ends, and leave, one before its line and one after. New workers of their names count from their own start."""
    worker = partial(ActorInfo, "rollout", pid=1, target="127.0.0.1:1")

    async def scenario() -> None:
        recorder, wait = seen.recorder, asyncio.get_running_loop().create_future()
        for name in ("0", "1"):
            recorder.joined(worker(name))
        end_step(recorder, 1, wait, loads=asyncio.sleep(0, {name: WorkerLoad(1.0, 2.0, 3, 4) for name in ("0", "1")}))
        flushing = asyncio.create_task(recorder.flush())
        await asyncio.sleep(0)
        recorder.left("1")
        wait.set_result(None)
        await flushing
        recorder.left("0")
        for name in ("0", "1"):
            recorder.joined(worker(name))
        end_step(recorder, 2, loads=asyncio.sleep(0, {name: WorkerLoad(0.75, 1.0, 3, 1) for name in ("0", "1")}))
        await recorder.flush()

    asyncio.run(scenario())
    assert seen.line(1)["rollout/requests_in_flight"] == 8.0, "both had some as the step ended"
    assert by_worker(seen.line(2), "wait_share") == {"0": 0.25, "1": 0.25}


def test_lines_are_written_though_the_wait_for_them_is_cancelled(seen: Seen) -> None:
    """As when the pool fails while a checkpoint waits for them: the run's end waits again."""

    async def scenario() -> None:
        writing = asyncio.create_task(write(seen.recorder, (1, None)))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(seen.recorder.flush())
        await asyncio.sleep(0)
        waiting.cancel()
        await writing

    asyncio.run(scenario())
    assert seen.line(1)["step"] == 1


def test_a_steps_clipped_tokens_are_a_line_of_their_own(seen: Seen) -> None:
    """Not metrics: there is one for each token id."""
    observed = replace(diagnosed(state=State.OK), clipped={"positive": [(7, 3)], "negative": []})
    asyncio.run(write(seen.recorder, (1, observed), (2, diagnosed(state=State.OK))))
    lines = (seen.folder.path / "clipped_tokens.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "positive": [[7, 3]], "negative": []}]


def test_a_step_without_diagnostics_has_no_level(seen: Seen) -> None:
    asyncio.run(write(seen.recorder, (1, None)))
    assert "monitor/level" not in seen.line(1)


def test_a_run_that_may_have_seconds_left_waits_for_no_diagnostics(seen: Seen) -> None:
    """After SIGTERM: a checkpoint needs the step's line, not what the service and the workers are still to say of it."""

    async def scenario() -> None:
        never = asyncio.get_running_loop().create_future
        end_step(seen.recorder, 1, never(), loads=never())
        flushing = asyncio.create_task(seen.recorder.flush())
        await asyncio.sleep(0.05)
        assert not flushing.done()
        seen.recorder.stop_waiting()
        await asyncio.wait_for(flushing, 20.0)

    asyncio.run(scenario())
    assert seen.line(1)["reward/mean"] == 1.0 and "monitor/level" not in seen.line(1)
    assert seen.line(1)["monitor/left_out_total"] == 1


def test_counts_of_events_go_on_after_a_resume(seen: Seen, tmp_path: Path) -> None:
    """They come back from the checkpoint's totals with the others, and a step's line has them whatever the step was."""
    asyncio.run(write(seen.recorder, (3, diagnosed(ALARM, state=State.ALARM))))
    totals = seen.recorder.totals()
    assert totals["monitor/alarms_total/k3_kl"] == 1
    with RunFolder.create(tmp_path / "resumed", "x") as folder:
        resumed = observe(folder, totals)
        assert 'evenkeel_monitor_alarms_total{part="k3_kl"} 1.0' in (page := resumed.page()), "also before its first step"
        assert "evenkeel_sync_failures_total 0.0" in page and 'evenkeel_pool_failures_total{kind="engine_lost"} 0.0' in page
        again = Event(**{**{name: getattr(ALARM, name) for name in ("name", "state", "value", "growth", "message")}, "step": 9})
        asyncio.run(write(resumed.recorder, (8, diagnosed(state=State.ALARM)), (9, diagnosed(again, state=State.ALARM))))
        assert [resumed.line(step)["monitor/alarms_total/k3_kl"] for step in (8, 9)] == [1, 2]
        assert resumed.recorder.totals()["monitor/alarms_total/k3_kl"] == 2
        resumed.recorder.close()


def test_prometheus_finds_the_service_where_its_last_observation_said(seen: Seen) -> None:
    """One that was replaced has another port."""
    told = [replace(diagnosed(state=State.OK), info=ActorInfo("correction", "0", 7, f"127.0.0.1:{port}")) for port in (1, 2)]
    asyncio.run(write(seen.recorder, *enumerate(told, 1)))
    assert [one["targets"] for one in seen.discovered() if one["labels"]["role"] == "correction"] == [["127.0.0.1:2"]]


def test_a_resume_takes_back_warnings_of_later_steps(seen: Seen) -> None:
    for event in (WATCH, ALARM, BROKEN):
        seen.folder.append_monitor_event(event)
    assert seen.folder.rewind(2) == 2
    assert seen.folder.read_monitor_events() == [WATCH]
    moved = [json.loads(line) for line in (seen.folder.path / "rewound.jsonl").read_text().splitlines()]
    assert [(line["step"], line["name"], line["value"]) for line in moved] == [(3, "k3_kl", 0.008), (3, "broken_tokens", "inf")]


@pytest.mark.parametrize("lane", ["rank-0", "service"])
def test_a_part_that_comes_after_another_may_have_another_clock(seen: Seen, lane: str) -> None:
    """The node of the first one was 300 s ahead: by its clock the spans of the second would be drawn 300 s too early."""
    now = time.time()
    seen.recorder.did(LaneReport(lane, now + 300.0, ()))
    if lane == "service":
        seen.recorder.replaced_service()
    else:
        seen.recorder.roll_back({}, 0)
    seen.recorder.did(LaneReport(lane, time.time(), (Span("step", now, now + 1.0),)))
    seen.recorder.close()
    (span,) = seen.folder.read_timeline()
    assert now <= span.begin < now + 100.0


def test_half_a_surrogate_pair_ends_nothing(seen: Seen) -> None:
    """In what a scorer has said of a held-out answer, and in a question; the second file is written as well."""
    (prompt,) = prompts(0, 1)
    said = "the reward raised KeyError: \ud83d"

    class Unscored(Answers):
        async def answer(self, *_: object) -> list[tuple[Trajectory, ...]]:
            return [(replace(trajectory(prompt, reward=None), error=said),)]

    how = AnswerSampling(samples=1, temperature=0.7)
    seen.recorder.evaluated(asyncio.run(evaluate(Unscored([None]), [prompt], how, step=7, correct_at={"": 1.0})), [prompt])
    text = trajectories_text([facts(1, 5)], [Example(replace(prompt, text="spell \udfff"), "a")], step=8)
    seen.recorder.disk.file(seen.folder.write_trajectories, 8, text)
    seen.settle()
    assert r"KeyError: \ud83d)" in seen.folder.trajectory_files("held_out")[0].read_text()
    assert r"question: spell \udfff" in seen.folder.trajectory_files()[0].read_text()
    assert r"KeyError: \ud83d" in seen.folder.read_events()[-1].text


def test_a_torn_line_is_overlooked(seen: Seen) -> None:
    seen.folder.append_monitor_event(WATCH)
    with seen.folder.monitor_path.open("a") as file:
        file.write('{"step": 3, "na')
    assert seen.folder.read_monitor_events() == [WATCH]
    seen.folder.close()
    with RunFolder.open(seen.folder.path) as again:
        again.append_monitor_event(ALARM)
        assert again.read_monitor_events() == [WATCH, ALARM]
