"""The page of a run, frozen into one file: self-contained, true to the folder's numbers, and there for a run that has only begun."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel.actors.carriers import ScatterSample
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.recorder import Recorder
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.terminal import usual_mismatch_of
from evenkeel.actors.service.scatter import ScatterReservoir
from evenkeel.correction.early_warning.monitor import Event, State
from evenkeel.dashboard.charts import chart_of
from evenkeel.dashboard.columns import StepColumns, drawn_points, running_mean
from evenkeel.dashboard.curves import Curves
from evenkeel.dashboard.facts import clipped_rows, summary_rows, worker_rows
from evenkeel.dashboard.frozen import write_report
from evenkeel.rollout.trajectory import FailureKind
from tests.actors.cases import facts
from tests.actors.record.recorder_cases import end_step, observe
from tests.evenkeel.dashboard.made_runs import made as made_run
from tests.evenkeel.dashboard.made_runs import read_report, with_tokens


def overview(folder: RunFolder) -> dict[str, Any]:
    """What the first view of its report has."""
    found: dict[str, Any] = read_report(write_report(folder))["overview"]
    return found


def step_metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step,
        {
            "time/elapsed_s": 2.0 * step,
            "time/step_s": 2.0,
            "reward/mean": step / 40,
            "reward/component/format": 0.5,
            "mismatch/k3": 1e-12 * step,
            "mismatch_and_staleness/k3": 1e-4,
            "mismatch/max_abs_log_ratio": 1e-6 * step,
            "mismatch_and_staleness/log_ratio_std": 0.01,
            "learner/entropy": 1.0,
            "learner/grad_norm": float("inf") if step == 2 else 0.5,
            "staleness/tokens/0": 70.0,
            "staleness/tokens/1": 30.0,
            "staleness/max": 1,
            "throughput/rollout_tokens_per_s": 100.0,
            "wait/rollout_share": 0.1,
            "length/sampled_tokens": 8.0,
            "length/trained_tokens": 7.5,
            "groups/trained_total": 4 * step,
        },
    )


def made(parent: Path) -> RunFolder:
    folder = RunFolder.create(parent / "run", "nano")
    folder.write_text("config.yaml", "name: nano <sum>\nsteps: 40\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return made(tmp_path)


def fill(folder: RunFolder, steps: int) -> None:
    reservoir = ScatterReservoir(steps=4, tokens_per_step=50)
    for step in range(1, steps + 1):
        folder.append_metrics(step_metrics(step))
        logprobs = -torch.rand(100)
        reservoir.add(step, logprobs, logprobs + 1e-3, torch.ones(100), torch.arange(100) % 2 == 0)
    sample = reservoir.sample()
    assert sample is not None
    folder.write_file("scatter.npz", sample.save)
    for step, accuracy in ((0, 0.5), (steps, 0.9)):
        folder.append_evaluation(
            StepMetrics(
                step,
                {
                    "held_out/accuracy": accuracy,
                    "held_out/wilson_low": accuracy - 0.05,
                    "held_out/wilson_high": accuracy + 0.05,
                    "held_out/problems": 512,
                },
            )
        )
    folder.event("warning", "a reward raised <ValueError>")


@pytest.mark.parametrize(
    ("learner", "engine", "model", "usual"),
    [
        ("{dtype: float32}", "{device: cpu}", {"model_type": "llama"}, 3e-10),
        ("{dtype: bfloat16}", "{device: cpu}", {"model_type": "llama"}, 8e-3),
        ("{dtype: bfloat16}", "{device: cuda}", {"model_type": "llama"}, 1e-3),
        ("{dtype: bfloat16}", "{device: cuda}", {"model_type": "qwen3_moe", "num_experts": 8}, 1e-1),
        ("{dtype: bfloat16, routing_replay: rollout}", "{device: cuda}", {"model_type": "qwen3_moe", "num_experts": 8}, 1e-3),
        ("{dtype: float16}", "{device: cuda}", {"model_type": "llama"}, None),
    ],
)
def test_mismatch_stands_beside_what_is_usual_for_the_run(
    folder: RunFolder, learner: str, engine: str, model: dict[str, Any], usual: float | None
) -> None:
    """By what the run's folder says of types and devices, derived or given, and of the model's experts; published or measured levels."""
    folder.write_text("config.yaml", f"steps: 40\nlearner: {learner}\nrollout: {{engine: {engine}}}\n")
    folder.model_path.mkdir()
    (folder.model_path / "config.json").write_text(json.dumps(model))
    level = usual_mismatch_of(folder)
    assert (level and level.high) == usual
    rows = dict(summary_rows(StepColumns([step_metrics(1)]), [], folder.read_config(), level))
    assert ("usual: up to" in rows["mismatch k3 KL, largest"]) == (usual is not None)


def test_who_did_what_has_a_table_if_there_were_several(folder: RunFolder) -> None:
    """Worker 1 left after step 2 of 3 and 2 took its place: 10 + 20 + 30 of 120 tokens are worker 0's."""
    tokens = [{"0": 10, "1": 20}, {"0": 20, "1": 10}, {"0": 30, "2": 30}]
    for step, by in enumerate(tokens, start=1):
        numbers = {f"worker/tokens/{name}": count for name, count in by.items()} | {f"worker/groups/{name}": 2 for name in by}
        folder.append_metrics(StepMetrics(step, numbers | {"worker/wait_share/0": 0.1 * step}))
    assert worker_rows(StepColumns(folder.read_metrics())) == [
        ("0", "1 to 3", "6", "60 (50%)", "20%"),
        ("1", "1 to 2", "4", "30 (25%)", ""),
        ("2", "3 to 3", "2", "30 (25%)", ""),
    ]
    assert overview(folder)["workers"][0] == ["0", "1 to 3", "6", "60 (50%)", "20%"]
    assert worker_rows(StepColumns([StepMetrics(1, {"worker/tokens/0": 1, "worker/groups/0": 1})])) == []


def test_clipped_tokens_have_a_table_with_their_text(folder: RunFolder) -> None:
    """Counts of all steps that are still in the run, by side; a resume takes back what later steps wrote."""
    from tokenizers import Tokenizer, models

    (folder.path / "model").mkdir(exist_ok=True)
    Tokenizer(models.WordLevel({"wait": 3, "<so>": 4, "?": 5}, unk_token="?")).save(str(folder.path / "model" / "tokenizer.json"))
    folder.append_clipped_tokens(1, {"positive": [(3, 5), (4, 1)], "negative": []})
    folder.append_clipped_tokens(2, {"positive": [], "negative": []})  # nothing was clipped: no line
    folder.append_clipped_tokens(3, {"positive": [(4, 7)], "negative": [(5, 2)]})
    folder.append_clipped_tokens(4, {"positive": [(3, 100)], "negative": []})
    assert folder.rewind(3) == 1
    assert folder.read_clipped_tokens() == {"positive": {4: 8, 3: 5}, "negative": {5: 2}}
    assert overview(folder)["clipped"][0] == ["positive advantage", "'<so>' 8, 'wait' 5"]
    (folder.path / "model" / "tokenizer.json").unlink()
    assert clipped_rows(folder) == [("positive advantage", "4 8, 3 5"), ("negative advantage", "5 2")]


def test_a_finished_run(folder: RunFolder) -> None:
    fill(folder, 40)
    shown = overview(folder)
    assert shown["status"] == "Finished after 40 steps." and shown["headline"]["gain"] == "+0.400"
    text = json.dumps(shown["summary"])
    for one in ("0.500 [0.450, 0.550] on 512 problems", "0.900 [0.850, 0.950] on 512 problems", "1 min 20 s", "4e-11 nats", "4e-05 nats"):
        assert one in text, one
    assert {
        "Reward",
        "Parts of the reward",
        "k3 KL from behaviour to proximal policy",
        "Spread of the log-ratio",
        "Entropy",
        "Gradient norm",
        "Throughput",
        "Share of time that each side waits",
        "Length of sampled and of trained answers",
    } <= {chart["title"] for chart in shown["charts"]}
    assert all(chart["caption"] for chart in shown["charts"]) and shown["staleness"]["ages"] == ["0", "1"]
    assert shown["notable"][0]["text"] == "a reward raised <ValueError>"


def test_several_answers_to_a_question_have_pass_at_k_on_the_page(folder: RunFolder) -> None:
    """The largest k, in the table and as a second curve; an evaluation without it, as of an older run, goes with the others."""
    for step, shares in ((0, {}), (20, {2: 0.6, 8: 0.7}), (40, {2: 0.8, 8: 0.9})):
        numbers = {"held_out/accuracy": 0.5, "held_out/wilson_low": 0.45, "held_out/wilson_high": 0.55, "held_out/problems": 512}
        numbers |= {"held_out/samples": 8} if shares else {}
        for k, p in shares.items():
            numbers |= {f"held_out/pass_at/{k}": p, f"held_out/pass_at_low/{k}": p - 0.04, f"held_out/pass_at_high/{k}": p + 0.04}
        folder.append_evaluation(StepMetrics(step, numbers))
    rows = dict(summary_rows(StepColumns([]), folder.read_evaluations(), {}))
    assert rows["held-out pass@8 after"] == "0.900 [0.860, 0.940]" and "held-out pass@8 before" not in rows
    assert rows["held-out accuracy after"].startswith("0.500 [0.450, 0.550] on 512 problems x 8 answers")
    shown = overview(folder)["accuracy"]
    assert shown["k"] == 8 and [row[:2] for row in shown["pass"]] == [[20, 0.7], [40, 0.9]]
    assert [row[2:] for row in shown["pass"]] == [pytest.approx([0.66, 0.74]), pytest.approx([0.86, 0.94])]
    assert [row[0] for row in shown["accuracy"]] == [0, 20, 40]


def test_the_page_says_how_many_answers_could_not_be_scored(folder: RunFolder) -> None:
    for step, unscored in ((0, 0), (40, 170)):
        numbers = {"held_out/accuracy": 0.5, "held_out/wilson_low": 0.45, "held_out/wilson_high": 0.55, "held_out/problems": 512}
        folder.append_evaluation(StepMetrics(step, numbers | {"held_out/unscored": unscored}))
    told = overview(folder)["headline"]
    assert "170 of them not scored" in told["after_on"] and "not scored" not in told["before_on"]


def test_warnings_of_the_monitor(folder: RunFolder) -> None:
    """A list of their own, which errors don't repeat, and marks on the axis at watches and alarms; the recovery has none."""
    fill(folder, 40)
    assert overview(folder)["warnings"] == []
    for step, state in ((12, State.WATCH), (20, State.ALARM), (31, State.OK)):
        folder.append_monitor_event(Event(step, "k3_kl", state, 0.01, 8.0, f"k3_kl <grows> {state}"))
        folder.event({State.OK: "info"}.get(state, state.value), f"step {step}: k3_kl <grows> {state}")  # type: ignore[arg-type]
    shown = overview(folder)
    assert [(one["state"], one["step"]) for one in shown["warnings"]] == [("watch", 12), ("alarm", 20), ("ok", 31)]
    assert not any("grows" in one["text"] for one in shown["notable"])
    assert [(one["kind"], one["step"]) for one in shown["marks"] if "grows" in one["text"]] == [("watch", 12), ("alarm", 20)]


def test_its_policy_allows_its_own_scripts_alone(folder: RunFolder) -> None:
    fill(folder, 3)
    page = write_report(folder).read_text()
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy and "http" not in policy
    assert not re.search(r"<(link rel=.stylesheet|img|iframe)\b|src=", page.split("<script type")[0])
    held = page.split('id="frozen">')[1].split("</script>")[0]
    assert "<" not in held and "\\u003cValueError" in held


def test_a_report_has_each_kept_step_once_and_none_that_a_resume_took_back(tmp_path: Path) -> None:
    """Steps 3, 7 and 11 of training and 11 of an evaluation; the newest is what a view of no step shows. Tokens are most of a report."""
    with made_run(tmp_path, steps=11) as folder:
        with_tokens(folder, 3, 7, 9, 11)
        page = write_report(folder)
        assert page.read_text().count('"offsets"') == 4
        found = read_report(page)
        assert found["tokens"]["step"] == found["correction"]["step"] == found["tokens?kind=held_out"]["step"] == 11
        folder.rewind(10)
        found = read_report(write_report(folder))
        assert found["tokens"]["kept"] == {"step": [3, 7, 9], "held_out": []} and found["tokens"]["step"] == 9
        assert found["correction"]["kept"] == [3, 7, 9]


def test_a_view_whose_files_are_damaged_says_so_and_the_others_are_there(tmp_path: Path) -> None:
    with made_run(tmp_path) as folder:
        with_tokens(folder, 40)
        folder.tokens_path(40).write_bytes(b"PK")
        found = read_report(write_report(folder))
        assert "step_000040.npz can't be read" in found["tokens"]["refused"] and found["overview"]["status"] == "Finished after 40 steps."


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_only_begun(folder: RunFolder, steps: int) -> None:
    if steps:
        folder.append_metrics(step_metrics(1))
    assert overview(folder)["status"] == ("No step is finished yet." if steps == 0 else "Stands at step 1 of 40.")


def test_summary_takes_maxima_as_maxima() -> None:
    steps = StepColumns([StepMetrics(1, {"mismatch/k3": 3e-12}), StepMetrics(2, {"mismatch/k3": 1e-12})])
    rows = dict(summary_rows(steps, [], {"steps": 2}))
    assert rows["mismatch k3 KL, largest"] == "3e-12 nats" and rows["steps"] == "2 of 2"
    assert not any("accuracy" in row for row in rows)


def test_the_number_in_a_legend_is_the_newest_even_where_its_axis_has_no_place_for_it() -> None:
    steps = StepColumns([StepMetrics(step, {"mismatch/k3": k3}) for step, k3 in ((1, 3e-12), (2, 1e-12), (3, 0.0))])
    chart = chart_of(Curves("k3", ("mismatch/k3",), "", "", is_logarithmic=True), steps, (1, 3))
    assert chart is not None and chart["series"][0]["last"] == "0 nats" and chart["series"][0]["x"].tolist() == [1, 2]


def test_running_mean_makes_nothing_up_at_the_ends() -> None:
    assert running_mean(np.array([1.0, 2.0, 6.0, 3.0]), 1).tolist() == [1.5, 3.0, 11 / 3, 4.5]
    assert running_mean(np.array([5.0]), 3).tolist() == [5.0]


def test_a_long_curve_is_drawn_with_its_extremes() -> None:
    """Ten times as many points as are drawn; a shorter one whole."""
    values = np.sin(np.arange(10 * 5000) / 7)
    values[[12_345, 23_456]] = 50.0, -50.0
    drawn = drawn_points(values, 5000)
    assert len(drawn) <= 5000 + 2 and {0, 12_345, 23_456, len(values) - 1} <= set(drawn.tolist())
    assert np.all(np.diff(drawn) > 0) and np.diff(drawn).max() <= 40, "in order; two in each part of 20"
    assert drawn_points(values[:5000], 5000).tolist() == list(range(5000))


def test_columns_keep_the_places_of_steps_without_a_value() -> None:
    """Absent and infinite values have no place in a series, and are 0 in the table of a family that the step has."""
    numbers: list[dict[str, float | None]] = [
        {"learner/grad_norm": 1.0, "staleness/tokens/0": 7},
        {"learner/grad_norm": float("inf")},
        {"staleness/tokens/1": 5},
        {"learner/grad_norm": 4.0},
    ]
    columns = StepColumns(StepMetrics(step, values) for step, values in zip((3, 4, 4, 9), numbers, strict=True))
    assert [part.tolist() for part in columns.series("learner/grad_norm")] == [[3, 9], [1.0, 4.0]]
    steps, counts = columns.table("staleness/tokens/")
    assert (steps.tolist(), {age: count.tolist() for age, count in counts.items()}) == ([3, 4], {"0": [7.0, 0.0], "1": [0.0, 5.0]})
    assert len(columns) == 4 and columns.values("reward/mean") == [] and not len(columns.table("reward/component/")[0])


def test_a_report_holds_only_what_it_shows(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step's metrics, of which there may be hundreds."""
    for step in range(1, 4):
        folder.append_metrics(StepMetrics(step, {"reward/mean": 0.5, "time/train_s": 1.0, "time/reward_s": 1.0, "sync/bytes": 5.0}))
    monkeypatch.setattr(RunFolder, "read_metrics", None)
    assert overview(folder)["names"] == ["reward/mean", "time/train_s"]


def test_the_scatter_holds_trained_tokens_of_recent_steps_only(tmp_path: Path) -> None:
    reservoir = ScatterReservoir(steps=2, tokens_per_step=3)
    assert reservoir.sample() is None
    for step in (1, 2, 3):
        values = torch.arange(10.0) + 100 * step
        reservoir.add(step, values, values + 0.5, torch.full((10,), step), torch.arange(10) < 5)
    sample = reservoir.sample()
    assert sample is not None
    sample.save(tmp_path / "scatter.npz")
    back = ScatterSample.load(tmp_path / "scatter.npz")
    assert back.step.tolist() == [2, 2, 2, 3, 3, 3] == back.staleness.tolist()
    assert set(back.behavior_logprobs[:3]) <= {200.0, 201.0, 202.0, 203.0, 204.0}  # tokens 5 to 9 are not trained
    assert np.allclose(back.proximal_logprobs - back.behavior_logprobs, 0.5)
    assert back.behavior_logprobs.dtype == np.float32


def test_the_slowest_prompts_are_told_slowest_first_and_go_on_after_a_resume(folder: RunFolder) -> None:
    """Ten of twenty-five: the longest times of both parts of the run; one without a reward says so."""
    order = [7, 21, 3, 14, 0, 18, 11, 24, 5, 9, 16, 2, 20, 13, 6, 23, 1, 10, 17, 4, 22, 8, 15, 12, 19]

    async def scenario(recorder: Recorder, part: list[int], step: int) -> None:
        for seconds in part:
            errors = ((FailureKind.REWARD_TIMEOUT, "the reward took more than 10 s"),) if seconds == 24 else ()
            one = facts(seconds, 30, 10, failures=errors, prompt_id=f"train/0/<{seconds}>", generate_s=1.5, reward_s=float(seconds))
            recorder.group_finished(one, "3")
        end_step(recorder, step)
        await recorder.flush()

    for step, part in enumerate((order[:12], order[12:]), start=3):
        recorder = observe(folder).recorder
        asyncio.run(scenario(recorder, part, step))
        recorder.close()
    assert [one.prompt_id for one in folder.read_slowest()] == [f"train/0/<{seconds}>" for seconds in range(24, 14, -1)]
    assert overview(folder)["slowest"][0] == ["train/0/<24>", "24.00 s", "1.50 s", "40", "1", "3"]
    (folder.path / "slowest.json").write_text("[{")
    assert folder.read_slowest() == [] == overview(folder)["slowest"]
    (folder.path / "slowest.json").write_text("[" * 100_000)
    assert folder.read_slowest() == []
