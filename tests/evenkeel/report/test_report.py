"""The page of a run: self-contained, true to the folder's numbers, and there for a run that has only begun."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any
from unittest import mock

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
from evenkeel.report import report
from evenkeel.report.plots import _CURVES as CURVES
from evenkeel.report.plots import MOST_POINTS, Plot, StepColumns, draw_curves, draw_plots, drawn_points, running_mean
from evenkeel.report.report import clipped_rows, summary_rows, worker_rows, write_report
from evenkeel.rollout.trajectory import FailureKind
from tests.actors.cases import facts
from tests.actors.record.recorder_cases import end_step, observe


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
    folder.write_trajectories(steps, "sampled: <script>alert(1)</script>")
    folder.event("warning", "a reward raised <ValueError>")


@pytest.fixture(scope="module")
def pictures() -> list[Plot]:
    """Those of the page of the finished run."""
    return []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, pictures: list[Plot]) -> tuple[RunFolder, str]:
    """A run of 40 steps, and its page; the tests that look at it add nothing to it."""
    folder = made(tmp_path_factory.mktemp("finished"))
    fill(folder, 40)

    def drawn(*given: Any) -> list[Plot]:
        pictures.extend(draw_plots(*given))
        return pictures

    with mock.patch.object(report, "draw_plots", drawn):
        return folder, write_report(folder).read_text()


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
    page = write_report(folder).read_text()
    assert "<td>0</td><td>1 to 3</td><td>6</td><td>60 (50%)</td><td>20%</td>" in page
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
    page = write_report(folder).read_text()
    assert html.escape("'<so>' 8, 'wait' 5", quote=True) in page.replace("&#34;", "&quot;").replace("&#39;", "&#x27;")
    (folder.path / "model" / "tokenizer.json").unlink()
    assert clipped_rows(folder) == [("positive advantage", "4 8, 3 5"), ("negative advantage", "5 2")]


def test_a_finished_run(finished: tuple[RunFolder, str]) -> None:
    _, page = finished
    assert "Finished after 40 steps." in page and "nano &lt;sum&gt;" in page
    accuracies = "0.500 [0.450, 0.550] on 512 problems", "0.900 [0.850, 0.950] on 512 problems"
    for shown in (*accuracies, "+0.400", "1 min 20 s", "4e-11 nats", "4e-05 nats"):
        assert shown in page, shown
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert {
        "Held-out accuracy",
        "Reward",
        "Parts of the reward",
        "k3 KL from behaviour to proximal policy",
        "Spread of the log-ratio",
        "Entropy",
        "Gradient norm",
        "Staleness",
        "Throughput",
        "Share of time that each side waits",
        "Length of sampled and of trained answers",
        "pi_prox against mu",
    } <= set(titles)
    assert page.count("<figcaption>") == page.count("<svg") == len(titles)
    assert "a reward raised &lt;ValueError&gt;" in page


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
    page = write_report(folder).read_text()
    assert "at least one of k answers is right" in page and "pass@8" in page


def test_the_page_says_how_many_answers_could_not_be_scored(folder: RunFolder) -> None:
    for step, unscored in ((0, 0), (40, 170)):
        numbers = {"held_out/accuracy": 0.5, "held_out/wilson_low": 0.45, "held_out/wilson_high": 0.55, "held_out/problems": 512}
        folder.append_evaluation(StepMetrics(step, numbers | {"held_out/unscored": unscored}))
    page = write_report(folder).read_text()
    assert page.count("170 of them not scored") >= 1 and "0 of them not scored" not in page.replace("170 of them", "")


def test_warnings_of_the_monitor(finished: tuple[RunFolder, str], tmp_path: Path) -> None:
    """A section of their own, and lines on the curves at the steps of watches and alarms; they are not repeated among the errors."""
    done, calm = finished
    assert "Nothing that the monitor follows has grown" in calm
    with RunFolder.open(shutil.copytree(done.path, tmp_path / "run")) as folder:
        for step, state in ((12, State.WATCH), (20, State.ALARM), (31, State.OK)):
            folder.append_monitor_event(Event(step, "k3_kl", state, 0.01, 8.0, f"k3_kl <grows> {state}"))
            folder.event({State.OK: "info"}.get(state, state.value), f"step {step}: k3_kl <grows> {state}")
        page = write_report(folder).read_text()
    section = page.split("<h2>Early warning</h2>")[1].split("<h2>")[0]
    assert re.findall(r'<li class="(\w+)"><time>step (\d+)</time>', section) == [("watch", "12"), ("alarm", "20"), ("ok", "31")]
    assert "k3_kl &lt;grows&gt; alarm" in section
    assert "grows" not in page.split("<h2>Warnings and errors</h2>")[1].split("<h2>")[0]
    # One dotted and one dashed line more in each picture over steps; the recovery has none.
    curves = len(CURVES) - sum(title not in page for title in (f"<h3>{curve.title}</h3>" for curve in CURVES))
    dashes = re.compile(r"stroke-dasharray")
    assert len(dashes.findall(page)) - len(dashes.findall(calm)) == 2 * curves > 10


def test_nothing_is_fetched_and_nothing_of_the_run_is_run(finished: tuple[RunFolder, str]) -> None:
    """Samples are text of a model: they must not become markup. Namespaces are the only addresses."""
    _, page = finished
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "<script" not in page and html.escape("<script>") in page
    assert not re.search(r"<(link|img|iframe)\b", page)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_only_begun(folder: RunFolder, steps: int) -> None:
    if steps:
        folder.append_metrics(step_metrics(1))
    page = write_report(folder).read_text()
    assert ("No step is finished yet." if steps == 0 else "Stands at step 1 of 40.") in page


@pytest.mark.usefixtures("finished")
def test_pictures_take_the_colours_of_the_page(pictures: list[Plot]) -> None:
    assert len(pictures) > 10
    for plot in pictures:
        ElementTree.fromstring(plot.svg)  # well-formed
        assert "var(--ink)" in plot.svg and "var(--grid)" in plot.svg
        assert not re.search(r"fill: *(#000000|black)|stroke: *(#000000|black)", plot.svg), plot.title


@pytest.mark.usefixtures("finished")
def test_pictures_of_one_page_share_no_ids(pictures: list[Plot]) -> None:
    """An id that two pictures have would cut curves of one with the frame of the other."""
    clips = [set(re.findall(r'<clipPath id="([^"]+)"', plot.svg)) for plot in pictures]
    assert sum(map(len, clips)) == len(set().union(*clips))


def test_values_that_are_not_finite_are_left_out_of_curves(folder: RunFolder) -> None:
    fill(folder, 3)  # step 2 has an infinite gradient norm
    norm = next(curves for curves in CURVES if curves.title == "Gradient norm")
    assert draw_curves(norm, StepColumns(folder.read_metrics())) is not None
    assert draw_curves(norm, StepColumns([StepMetrics(1, {"learner/grad_norm": float("nan")})])) is None


def test_summary_takes_maxima_as_maxima() -> None:
    steps = StepColumns([StepMetrics(1, {"mismatch/k3": 3e-12}), StepMetrics(2, {"mismatch/k3": 1e-12})])
    rows = dict(summary_rows(steps, [], {"steps": 2}))
    assert rows["mismatch k3 KL, largest"] == "3e-12 nats" and rows["steps"] == "2 of 2"
    assert not any("accuracy" in row for row in rows)


def test_running_mean_makes_nothing_up_at_the_ends() -> None:
    assert running_mean(np.array([1.0, 2.0, 6.0, 3.0]), 1).tolist() == [1.5, 3.0, 11 / 3, 4.5]
    assert running_mean(np.array([5.0]), 3).tolist() == [5.0]


def test_a_long_curve_is_drawn_with_its_extremes() -> None:
    """Ten times as many points as are drawn; one of usual length whole."""
    values = np.sin(np.arange(10 * MOST_POINTS) / 7)
    values[[12_345, 23_456]] = 50.0, -50.0
    drawn = drawn_points(values)
    assert len(drawn) <= MOST_POINTS + 2 and {0, 12_345, 23_456, len(values) - 1} <= set(drawn.tolist())
    assert np.all(np.diff(drawn) > 0) and np.diff(drawn).max() <= 40, "in order; two in each part of 20"
    assert drawn_points(values[:MOST_POINTS]).tolist() == list(range(MOST_POINTS))


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
    """Of a step's metrics, of which there may be hundreds, in one pass: no list of all steps."""
    for step in range(1, 4):
        folder.append_metrics(StepMetrics(step, {"reward/mean": 0.5, "time/train_s": 1.0, "time/reward_s": 1.0, "sync/bytes": 5.0}))
    seen: list[StepColumns] = []
    monkeypatch.setattr(RunFolder, "read_metrics", None)
    monkeypatch.setattr(report, "draw_plots", lambda steps, *_: seen.append(steps) or [])
    write_report(folder)
    (columns,) = seen
    assert set(columns._columns) == {"step", "reward/mean", "time/train_s"}


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
    page = write_report(folder).read_text()
    assert "Slowest prompts" in page and "train/0/&lt;24&gt;" in page and "train/0/&lt;14&gt;" not in page
    row = page[page.index("train/0/&lt;24&gt;") :].split("</tr>")[0]
    assert re.findall(r"<td[^>]*>([^<]*)", row) == ["24.00 s", "1.50 s", "40", "1", "3"]
    (folder.path / "slowest.json").write_text("[{")
    assert folder.read_slowest() == [] and "Slowest prompts" not in write_report(folder).read_text()
    (folder.path / "slowest.json").write_text("[" * 100_000)
    assert folder.read_slowest() == []
