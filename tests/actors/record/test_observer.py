"""Warnings of the monitor on their way to everything that shows a run: run folder, terminal, metrics, TensorBoard, Prometheus."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenkeel.actors.carriers import ActorInfo, DiscardedGroup, DiscardReason, Example, Observation, ScalingCause
from evenkeel.actors.driver.evaluation import evaluate
from evenkeel.actors.metrics.step_metrics import StepMetrics, by_worker
from evenkeel.actors.pool.scaling import ScalingDecision
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.step_sources import trajectories_text
from evenkeel.correction.early_warning.monitor import Event, State
from evenkeel.learner.results import SkipReason
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.trajectory import FailureKind, SyncReceipt, Trajectory, WorkerLoad
from tests.actors.cases import facts, prompts, trajectory
from tests.actors.driver.test_evaluation import Answers
from tests.actors.metrics.test_metrics import scalars
from tests.actors.record.observer_cases import ALARM, BROKEN, OVER, WATCH, Seen, StandInReference, diagnosed, observe, write
from tests.actors.record.observer_cases import seen as seen


def test_a_warning_reaches_every_view(seen: Seen) -> None:
    steps = [(1, diagnosed(state=State.OK)), (2, diagnosed(WATCH, state=State.WATCH)), (3, diagnosed(ALARM, BROKEN, state=State.ALARM)),
             (4, diagnosed(OVER, state=State.OK))]
    asyncio.run(write(seen.observer, *steps))
    assert [seen.line(step)["monitor/level"] for step in (1, 2, 3, 4)] == [0, 1, 2, 0]
    assert [seen.line(step).get("monitor/alarms_total/k3_kl") for step in (2, 3, 4)] == [None, 1, 1]
    assert seen.line(4)["monitor/watches_total/k3_kl"] == 1 and seen.line(4)["time/diagnose_s"] == 0.01
    told = seen.folder.read_monitor_events()
    assert told[:2] == [WATCH, ALARM] and told[3] == OVER
    assert told[2].value == math.inf and math.isnan(told[2].growth)
    assert [(event.level, event.text) for event in seen.folder.read_events()] == [
        ("watch", "step 2: k3_kl = 0.002, 2.0 times the level"),
        ("alarm", "step 3: k3_kl = 0.008, 8.0 times the level"),
        ("alarm", "step 3: broken_tokens = inf"),
        ("info", "step 4: k3_kl = 0.001 is back where it was"),
    ]
    assert "alarm: step 3: k3_kl = 0.008, 8.0 times the level" in seen.screen.getvalue()
    with urllib.request.urlopen(f"http://{seen.observer._endpoint._own.target}/metrics") as answer:
        page = answer.read().decode()
    assert "evenkeel_monitor_level 0.0" in page
    assert 'evenkeel_monitor_alarms_total{part="k3_kl"} 1.0' in page and 'evenkeel_monitor_alarms_total{part="broken_tokens"} 1.0' in page
    seen.observer.close()
    assert scalars(seen.folder.tensorboard_path, "monitor/level") == [(1, 0), (2, 1), (3, 2), (4, 0)]


def test_a_step_without_diagnostics_has_what_the_learner_itself_knows_of_its_tokens(seen: Seen) -> None:
    """The write's own numbers are 0.75 and 2; where the correction service has told one of them, that is written."""
    told = Observation({"kept_share": 0.5, "broken_tokens": 0.0}, (), State.OK, 0.01)
    asyncio.run(write(seen.observer, (1, None), (2, told), (3, diagnosed(state=State.OK))))
    names = ("correction/kept_share", "correction/broken_tokens")
    assert [[seen.line(step)[name] for name in names] for step in (1, 2, 3)] == [[0.75, 2.0], [0.5, 0.0], [0.75, 2.0]]


def test_a_line_has_what_belongs_to_its_step_however_late_it_is_told(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 1 is told when step 2 has been noted, received and counted already."""
    for part in ("batch_metrics", "learner_metrics", "undiagnosed"):
        monkeypatch.setattr(f"evenkeel.actors.record.step_writer.{part}", lambda *_, **__: {})
    parts = {f"reward/component/{name}": 1.0 for name in "ab"}
    monkeypatch.setattr("evenkeel.actors.record.step_writer.batch_metrics", lambda *_, **__: parts)
    monkeypatch.setattr("evenkeel.actors.record.reward_parts.MOST", 1)
    batch = SimpleNamespace(groups=[facts(1, 5), facts(2, 9)], tokens=10, examples=())
    result = SimpleNamespace(skipped=(), skipped_steps=0, overflowed_steps=0, loss_scale=None)

    gone = DiscardedGroup("train/0/1", DiscardReason.UNIFORM)

    async def scenario() -> None:
        observer = seen.observer
        observer.follow(SimpleNamespace(loads=lambda _: asyncio.sleep(0, {})))  # type: ignore[arg-type]
        ended = []
        for step in (1, 2):
            observer.note({"true_on_policy/tokens": step})
            observer.receipt(SyncReceipt(step, bytes=100 * step, pause_s=0.0, seconds=0.1 * step))
            observer.group_finished(facts(step, 7 * step), "0")
            counts = {"admitted": 10 * step, "trained": step, "discarded": step, "finished": 0, "in_flight": 0, "drawn": 0}
            ended.append(observer.end_step(step, step, batch, result, {"train": 1.0}, counts, [gone]))  # type: ignore[arg-type]
        for step in ended:
            observer.steps.report(step, asyncio.sleep(0, None))  # type: ignore[arg-type]
        await observer.steps.flush()

    asyncio.run(scenario())
    names = ("true_on_policy/tokens", "sync/bytes", "length/sampled_tokens", "groups/trained_total", "groups/refilled_total")
    assert [seen.line(1)[name] for name in names] == [1, 100, 7, 1, 1]
    assert [seen.line(2)[name] for name in names] == [2, 200, 14, 2, 2]
    assert all("reward/component/a" in seen.line(step) and "reward/component/b" not in seen.line(step) for step in (1, 2))
    assert sum("named more than 1 parts" in event.text for event in seen.folder.read_events()) == 1
    assert seen.folder.read_answer_lengths(first_step=1) == [5, 9, 5, 9], "one answer of each trained group"
    assert seen.folder.read_answer_lengths(first_step=2) == [5, 9]
    assert (seen.folder.rewind(1), seen.folder.read_answer_lengths(first_step=1)) == (2, [5, 9]), "a step's metrics and its lengths go"


def test_held_out_answers_without_a_score_are_told_everywhere(seen: Seen) -> None:
    result = asyncio.run(evaluate(Answers([1.0, None, 0.0, None]), prompts(0, 4), AnswerSampling(), step=4, correct_at=1.0))
    seen.observer.evaluated(result, prompts(0, 4))
    seen.settle()
    (line,) = seen.folder.read_evaluations()
    assert (line["held_out/accuracy"], line["held_out/unscored"]) == (0.5, 2)
    told = "2 of 4 held-out answers could not be scored, and are left out of the accuracy; the first: train/0/1: the reward raised"
    assert any(event.level == "warning" and told in event.text for event in seen.folder.read_events())
    assert "held-out accuracy 0.500" in seen.screen.getvalue() and "on 4 problems, 2 of them not scored" in seen.screen.getvalue()
    assert told in seen.screen.getvalue()


def test_a_reward_that_fails_by_the_hundred_is_one_line_a_step(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first at once, with what it says; then one line a step and kind with the number, and counters of all."""
    seen.observer.follow(SimpleNamespace(loads=lambda _: asyncio.sleep(0, {}), counts=lambda: (1, 1), versions=dict))  # type: ignore[arg-type]
    batch, result = SimpleNamespace(groups=[]), SimpleNamespace(skipped_steps=0, overflowed_steps=0, loss_scale=None)
    counts = {"admitted": 0, "trained": 0, "discarded": 0, "finished": 0, "in_flight": 0, "drawn": 0}

    async def step(number: int) -> dict[str, float]:
        for group in range(100):
            late = ((FailureKind.REWARD_TIMEOUT, "the reward took more than 10 s"),) if group % 10 == 0 else ()
            raised = FailureKind.REWARD, f"the reward raised ValueError: {number}-{group} misses the deadline of a page that it asks"
            errors = (raised, *late)
            seen.observer.group_finished(facts(group, *[1] * 8, failures=errors), "0")
        return seen.observer.end_step(number, number, batch, result, {}, counts, []).noted  # type: ignore[arg-type]

    totals = [asyncio.run(step(number)) for number in (1, 2)][-1]
    seen.observer.group_finished(facts(7, *[1] * 8, failures=[(FailureKind.ENGINE, "the engine aborted the request")]), "0")
    seen.observer.close()
    warnings = [event.text for event in seen.folder.read_events() if event.level == "warning"]
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
    assert (totals["reward/exceptions_total"], totals["reward/timeouts_total"]) == (200, 20)


def test_an_overflow_in_float16_is_said_and_counted_apart(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of finding the loss scale: no batch is kept for study, and no alert rests on its counter."""
    for part in ("batch_metrics", "learner_metrics", "undiagnosed"):
        monkeypatch.setattr(f"evenkeel.actors.record.step_writer.{part}", lambda *_, **__: {})
    seen.observer.follow(SimpleNamespace(loads=lambda _: asyncio.sleep(0, {}), counts=lambda: (1, 1), versions=dict))  # type: ignore[arg-type]
    batch = SimpleNamespace(groups=[], tokens=10, examples=())
    skipped = (SkipReason.OVERFLOW, SkipReason.NO_GRADIENT, SkipReason.OVERFLOW)
    result = SimpleNamespace(skipped=skipped, skipped_steps=3, overflowed_steps=2, loss_scale=32768.0)
    counts = {"admitted": 0, "trained": 0, "discarded": 0, "finished": 0, "in_flight": 0, "drawn": 0}

    async def scenario() -> None:
        step = seen.observer.end_step(1, 1, batch, result, {"train": 1.0}, counts, [])  # type: ignore[arg-type]
        seen.observer.steps.report(step, asyncio.sleep(0, None))  # type: ignore[arg-type]
        await seen.observer.steps.flush()

    asyncio.run(scenario())
    (line,) = seen.folder.read_metrics()
    assert (line["steps/skipped_total"], line["steps/overflowed_total"]) == (1, 2)
    (event,) = seen.folder.read_events()
    assert event.text == "step 1: 2 updates left out: the gradient overflowed in float16; the loss scale is 32,768 now"
    assert not (seen.folder.path / "skipped_batches").exists()


def test_what_the_learner_gives_as_the_reason_is_what_is_told(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read off the loss and the norms again."""
    for part in ("batch_metrics", "learner_metrics", "undiagnosed"):
        monkeypatch.setattr(f"evenkeel.actors.record.step_writer.{part}", lambda *_, **__: {})
    seen.observer.follow(SimpleNamespace(loads=lambda _: asyncio.sleep(0, {})))  # type: ignore[arg-type]
    batch = SimpleNamespace(groups=[], tokens=10, examples=(), version=0, corrected=StandInReference(MemoryError("no room for it")))
    counts = dict.fromkeys(("admitted", "trained", "discarded", "finished", "in_flight", "drawn"), 0)

    async def scenario() -> None:
        for number, reason in enumerate((SkipReason.NO_GRADIENT, SkipReason.NOT_FINITE), start=1):
            result = SimpleNamespace(skipped=(reason,), skipped_steps=1, overflowed_steps=0, loss_scale=None, optimizer_steps=0)
            result.loss, result.group_norms = 1.0, {}
            ended = seen.observer.end_step(number, number, batch, result, {}, counts, [])  # type: ignore[arg-type]
            seen.observer.steps.report(ended, asyncio.sleep(0, None))  # type: ignore[arg-type]
        await seen.observer.steps.flush()

    asyncio.run(scenario())
    (event,) = seen.folder.read_events()
    assert event.text.startswith("step 2: 1 of 1 updates left out; loss or gradient was not finite (loss 1; ")


def test_changes_of_the_pools_size_are_told_and_counted_by_cause(seen: Seen) -> None:
    observer = seen.observer
    observer.scaled(ScalingDecision(3, ScalingCause.LEARNER_WAITS, "the learner waited for 62%"))
    observer.scaled(ScalingDecision(1, ScalingCause.WORKERS_WAIT, "3 workers waited for 80%"))
    observer.scaled(ScalingDecision(2, ScalingCause.LEARNER_WAITS, "the learner waited for 30%"))
    observer.handed_back(4, 120)
    observer.handed_back(1, 5)
    totals = observer.totals()
    assert totals == {
        "pool/scaled_total/learner_waits": 2, "pool/scaled_total/workers_wait": 1,
        "pool/handed_back_total": 5, "pool/handed_back_tokens_total": 125,
    }  # fmt: skip
    assert dict(StepMetrics(1, totals)) == totals | {"step": 1}, "the catalogue knows them"
    seen.settle()
    told = [event.text for event in seen.folder.read_events()]
    assert told[0] == "the pool goes to 3 rollout workers (learner_waits): the learner waited for 62%"
    assert told[1].startswith("the pool goes to 1 rollout worker (workers_wait)")


def test_workers_are_counted_before_a_steps_weights_go_out(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three held the newest by then; right after it none does. Prometheus forgets who left, now and when the step is told."""
    for part in ("batch_metrics", "learner_metrics", "undiagnosed"):
        monkeypatch.setattr(f"evenkeel.actors.record.step_writer.{part}", lambda *_, **__: {})
    batch = SimpleNamespace(groups=[], tokens=10, examples=())
    result = SimpleNamespace(skipped=(), skipped_steps=0, overflowed_steps=0, loss_scale=None)
    held = {"0": 4, "1": 4, "2": 3}

    def current() -> tuple[int, int]:
        return len(held), sum(version == 4 for version in held.values())

    async def scenario() -> None:
        observer, registry = seen.observer, SimpleNamespace(register=lambda *_: None, deregister=lambda _: None, close=lambda: None)
        observer._endpoint._discovery = registry  # type: ignore[assignment]
        pool = SimpleNamespace(loads=lambda _: asyncio.sleep(0, {}), versions=lambda: dict(held), counts=current, target=3)
        observer.follow(pool)  # type: ignore[arg-type]
        for name in held:
            observer.joined(ActorInfo("rollout", name, 1, "127.0.0.1:1"))
        for name, tokens in (("0", 10), ("1", 20), ("0", 5), ("2", 40)):
            observer.group_finished(facts(1, tokens), name)
        observer.trained()
        held.update(dict.fromkeys(held, -1))
        counts = {"admitted": 4, "trained": 4, "discarded": 0, "finished": 0, "in_flight": 0, "drawn": 0}
        ended = observer.end_step(1, 5, batch, result, {"train": 1.0}, counts, [])  # type: ignore[arg-type]
        observer.left("2")
        observer.steps.report(ended, asyncio.sleep(0, None))  # type: ignore[arg-type]
        await observer.steps.flush()

    asyncio.run(scenario())
    line = seen.line(1)
    assert (line["pool/workers"], line["pool/current_workers"]) == (3, 2)
    assert by_worker(line, "tokens") == {"0": 15, "1": 20, "2": 40} and sum(by_worker(line, "tokens").values()) == 75
    assert by_worker(line, "groups") == {"0": 2, "1": 1, "2": 1} and by_worker(line, "weight_version") == {"0": 4, "1": 4, "2": 3}
    assert "    workers  0: 15 tokens, v4  1: 20 tokens, v4  2: 40 tokens, v3" in seen.screen.getvalue().splitlines()
    with urllib.request.urlopen(f"http://{seen.observer._endpoint._own.target}/metrics") as answer:
        page = answer.read().decode()
    assert 'evenkeel_worker_tokens{worker="1"} 20.0' in page and 'worker="2"' not in page
    seen.observer.left("1")
    with urllib.request.urlopen(f"http://{seen.observer._endpoint._own.target}/metrics") as answer:
        page = answer.read().decode()
    assert 'evenkeel_worker_tokens{worker="0"} 15.0' in page and 'worker="1"' not in page
    seen.observer.close()
    assert scalars(seen.folder.tensorboard_path, "worker/tokens/1") == [(1, 20)]


def test_the_load_of_a_worker_that_has_left_is_not_kept(seen: Seen) -> None:
    """It answered as the step ended, and left before the step's line, which waits for diagnostics of the step before."""

    async def scenario() -> None:
        observer = seen.observer
        observer._endpoint._discovery = SimpleNamespace(register=lambda *_: None, deregister=lambda _: None, close=lambda: None)  # type: ignore[assignment]
        for name in ("0", "1"):
            observer.joined(ActorInfo("rollout", name, 1, "127.0.0.1:1"))
        answered, load = asyncio.get_running_loop().create_future(), WorkerLoad(1.0, 2.0, 3, 4)
        answered.set_result({"0": load, "1": load})
        before = asyncio.create_task(asyncio.sleep(0.01))
        metrics, nothing = StepMetrics(1, {"time/step_s": 1.0}), asyncio.sleep(0, None)
        observer.steps._writing = asyncio.create_task(observer.steps._write_when_known(metrics, {}, {}, answered, nothing, before))
        await asyncio.sleep(0)
        observer.left("1")
        await observer.steps.flush()
        assert observer.steps._loads == {"0": load}
        observer.left("0")
        assert observer.steps._loads == {}

    asyncio.run(scenario())
    assert seen.line(1)["rollout/requests_in_flight"] == 8.0, "both had some as the step ended"


def test_lines_are_written_though_the_wait_for_them_is_cancelled(seen: Seen) -> None:
    """As when the pool fails while a checkpoint waits for them: the run's end waits again."""

    async def scenario() -> None:
        writing = asyncio.create_task(write(seen.observer, (1, None)))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(seen.observer.steps.flush())
        await asyncio.sleep(0)
        waiting.cancel()
        await writing

    asyncio.run(scenario())
    assert seen.line(1)["time/step_s"] == 1.0


def test_a_steps_clipped_tokens_are_a_line_of_their_own(seen: Seen) -> None:
    """Not metrics: there is one for each token id."""
    observed = replace(diagnosed(state=State.OK), clipped={"positive": [(7, 3)], "negative": []})
    asyncio.run(write(seen.observer, (1, observed), (2, diagnosed(state=State.OK))))
    lines = (seen.folder.path / "clipped_tokens.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "positive": [[7, 3]], "negative": []}]


def test_a_step_without_diagnostics_has_no_level(seen: Seen) -> None:
    asyncio.run(write(seen.observer, (1, None)))
    assert "monitor/level" not in seen.line(1)


def test_a_run_that_may_have_seconds_left_waits_for_no_diagnostics(seen: Seen) -> None:
    """After SIGTERM: a checkpoint needs the step's line, not what the service and the workers are still to say of it."""

    async def scenario() -> None:
        never, metrics = asyncio.get_running_loop().create_future, StepMetrics(1, {"time/step_s": 1.0, "reward/mean": 0.5})
        seen.observer.steps._writing = asyncio.create_task(seen.observer.steps._write_when_known(metrics, {}, {}, never(), never(), None))
        flushing = asyncio.create_task(seen.observer.steps.flush())
        await asyncio.sleep(0.05)
        assert not flushing.done()
        seen.observer.steps.stop_waiting()
        await asyncio.wait_for(flushing, 20.0)

    asyncio.run(scenario())
    assert seen.line(1)["reward/mean"] == 0.5 and "monitor/level" not in seen.line(1)
    assert seen.observer.totals() == {"monitor/left_out_total": 1}


def test_counts_of_events_go_on_after_a_resume(seen: Seen, tmp_path: Path) -> None:
    """They come back from the checkpoint's totals with the others, and a step's line has them whatever the step was."""
    asyncio.run(write(seen.observer, (3, diagnosed(ALARM, state=State.ALARM))))
    totals = seen.observer.totals()
    assert totals == {"monitor/alarms_total/k3_kl": 1}
    with RunFolder.create(tmp_path / "resumed", "x") as folder:
        resumed = observe(folder, {**totals, "groups/trained_total": 12.0})
        again = Event(**{**{name: getattr(ALARM, name) for name in ("name", "state", "value", "growth", "message")}, "step": 9})
        asyncio.run(write(resumed.observer, (8, diagnosed(state=State.ALARM)), (9, diagnosed(again, state=State.ALARM))))
        assert [resumed.line(step)["monitor/alarms_total/k3_kl"] for step in (8, 9)] == [1, 2]
        assert resumed.observer.totals() == {"monitor/alarms_total/k3_kl": 2, "groups/trained_total": 12.0}
        resumed.observer.close()


def test_a_resume_takes_back_warnings_of_later_steps(seen: Seen) -> None:
    for event in (WATCH, ALARM, BROKEN):
        seen.folder.append_monitor_event(event)
    assert seen.folder.rewind(2) == 2
    assert seen.folder.read_monitor_events() == [WATCH]
    moved = [json.loads(line) for line in (seen.folder.path / "rewound.jsonl").read_text().splitlines()]
    assert [(line["step"], line["name"], line["value"]) for line in moved] == [(3, "k3_kl", 0.008), (3, "broken_tokens", "inf")]


def test_half_a_surrogate_pair_ends_nothing(seen: Seen) -> None:
    """In what a scorer has said of a held-out answer, and in a question; the second file is written as well."""
    (prompt,) = prompts(0, 1)
    said = "the reward raised KeyError: \ud83d"

    class Unscored(Answers):
        async def answer(self, *_: object) -> list[tuple[Trajectory, ...]]:
            return [(replace(trajectory(prompt, reward=None), error=said),)]

    how = AnswerSampling(samples=1, temperature=0.7)
    seen.observer.evaluated(asyncio.run(evaluate(Unscored([None]), [prompt], how, step=7, correct_at=1.0)), [prompt])
    text = trajectories_text([facts(1, 5)], [Example(replace(prompt, text="spell \udfff"), "a")], step=8)
    seen.observer.disk.file(seen.folder.write_trajectories, 8, text)
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
