"""evenkeel simulate: what it takes from a run's folder, what it prints and draws, and what it refuses in a sentence."""

from __future__ import annotations

import functools
import io
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from actors.commands.cli import app
from actors.commands.measured_costs import MeasuredRun, shape_of
from actors.commands.recipe import load_config
from actors.commands.simulate_views import cheapest, recommendation, show_outcomes
from actors.config import RunConfig
from actors.record.run_folder import RunFolder
from actors.settings.derived import derived
from actors.simulation.costs import AnswerLengths, DecodeSpeed, RunCosts, RunShape
from actors.simulation.outcome import Outcome
from actors.simulation.run import simulate
from correction.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "recipes" / "nano_spell_backward.yaml"
SPEEDS = ["--decode", "64:3200,512:6400", "--learner-speed", "5000", "--lengths", "5,9"]
TRUE_COSTS = RunCosts(
    DecodeSpeed(((64, 1200.0), (512, 2400.0))),
    learner_token_s=1 / 4000,
    prompt_token_s=1 / 12000,
    handover_s=0.1,
    publish_s=0.05,
    sync_s=0.2,
    pause_s=0.15,
)
LENGTHS = [3, 5, 5, 6, 6, 6, 7, 10]
PROMPT = 14


@functools.cache
def true_outcome(workers: int, max_staleness: int) -> Outcome:
    """Of 40 steps with TRUE_COSTS."""
    shape = RunShape(workers, 64, max_staleness, 8, 128, 512)
    return simulate(shape, TRUE_COSTS, AnswerLengths.like(LENGTHS, "true"), prompt_tokens=PROMPT, steps=40)


def record(folder: Path, max_staleness: int) -> Outcome:
    """A run's folder as a run would write it whose engines and learner take exactly TRUE_COSTS."""
    found = true_outcome(1, max_staleness)
    sequences = 64 * 8
    mean = found.tokens / found.steps / sequences
    tokens = sequences * (mean + PROMPT)
    learner_waits_s = found.step_s - tokens / 4000 - 0.05
    step = {
        "time/step_s": found.step_s,
        "time/train_s": tokens / 4000,
        "wait/learner_s": learner_waits_s,
        "wait/rollout_share": 1 - found.occupied_s / found.seconds,
        "throughput/rollout_tokens_per_s": found.tokens_per_s,
        "throughput/learner_tokens_per_s": 4000.0,
        "length/trained_tokens": mean,
        "staleness/mean": found.mean_staleness,
        "time/sync_s": 0.2,
        "time/pause_s": 0.15,
    }
    folder.mkdir()
    recipe = yaml.safe_load(RECIPE.read_text()) | {"max_staleness": max_staleness}
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": i + 1} | step) + "\n" for i in range(20)))
    evaluation = {"step": 0, "held_out/problems": 64, "held_out/response_tokens": mean, "held_out/seconds": 64 * mean / 1200}
    (folder / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    for i in range(20):
        RunFolder(folder).append_answer_lengths(i + 1, LENGTHS)
    return found


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_run_s_folder_says_what_its_engines_and_its_learner_took(tmp_path: Path, max_staleness: int) -> None:
    """From numbers that a simulation wrote with known costs: the costs come out, and other shapes are predicted as those costs have it."""
    record(tmp_path / "run", max_staleness)
    measured = MeasuredRun.of(tmp_path / "run", cores=float("inf"))
    assert measured.prompt_tokens == PROMPT
    assert measured.costs.learner_token_s == pytest.approx(1 / 4000)
    assert measured.costs.prompt_token_s == pytest.approx(1 / 12000), "a forward pass: a third of training"
    assert (measured.costs.sync_s, measured.costs.pause_s) == pytest.approx((0.2, 0.15))
    assert measured.costs.publish_s == pytest.approx(0.05)
    assert measured.costs.handover_s == pytest.approx(0.1, abs=0.02)
    assert sorted(set(measured.lengths.recorded)) == sorted(set(LENGTHS))
    assert measured.costs.decode.points[0] == (64, pytest.approx(1200.0))
    assert measured.costs.decode.points[1] == (512, pytest.approx(2400.0, rel=0.03))
    for workers, bound in ((1, 0), (1, 1), (2, 0), (2, 1)):
        shape = RunShape(workers, 64, bound, 8, 128, 512)
        true = true_outcome(workers, bound)
        found = simulate(shape, measured.costs, measured.lengths.afresh(), prompt_tokens=measured.prompt_tokens, steps=40)
        assert found.step_s == pytest.approx(true.step_s, rel=0.05)
        assert found.mean_staleness == pytest.approx(true.mean_staleness, abs=0.1)


def test_what_groups_wait_for_on_their_ways_is_the_run_s_own_measure(tmp_path: Path) -> None:
    """By its metrics: tickets 0.03 s after a step, a call 0.05 s there and back, rewards 0.01 s, a hand-over of 0.1 s, however long the
    learner waits. One step in ten is held up by 1 s after training: 0.1 s of the mean, and nothing of a median."""
    record(tmp_path / "run", 1)
    metrics = tmp_path / "run" / "metrics.jsonl"
    ways = {"time/admission_s": 0.03, "time/call_s": 0.05, "time/reward_s": 0.01, "wait/handover_s": 0.1}
    lines = [json.loads(line) | ways for line in metrics.read_text().splitlines()]
    lines += [line | {"step": line["step"] + 20} for line in lines[:5]]  # 25 lines, of which the last 20 count
    for line in lines[9::10]:
        line["time/step_s"] += 1.0
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    costs = MeasuredRun.of(tmp_path / "run", cores=2.0).costs
    assert (costs.admission_s, costs.dispatch_s, costs.answer_s, costs.handover_s) == pytest.approx((0.03, 0.025, 0.035, 0.1))
    assert costs.publish_s == pytest.approx(0.05 + 0.1)


def test_a_run_of_few_steps_says_too_little(tmp_path: Path) -> None:
    record(tmp_path / "run", 1)
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:9]))
    with pytest.raises(ConfigError, match="4 steps to measure from"):
        MeasuredRun.of(tmp_path / "run", cores=2.0)


def test_a_run_whose_engines_sampled_nothing_says_so(tmp_path: Path) -> None:
    record(tmp_path / "run", 1)
    metrics = tmp_path / "run" / "metrics.jsonl"
    idle = [json.loads(line) | {"throughput/rollout_tokens_per_s": 0.0} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in idle))
    with pytest.raises(ConfigError, match="its engines sampled nothing"):
        MeasuredRun.of(tmp_path / "run", cores=2.0)


def test_the_command_prints_a_row_for_each_shape_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "sizes.png"
    words = ["simulate", str(RECIPE), *SPEEDS, "--workers", "2,1", "--max-staleness", "0,1", "--steps", "10", "--picture", str(picture)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["1"], ["2"]) and "%" in line]
    assert [row[:2] for row in rows if row[1] in "01"] == [["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]]
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("words", [["learner.device=cuda"], ["rollout.engine.device=cuda"], ["rollout.engine.quantization=float8_block"]])
def test_a_recipe_for_gpus_is_simulated_where_there_are_none(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.settings.devices.visible_gpus", lambda: 0)
    done = CliRunner().invoke(app, ["simulate", str(RECIPE), *words, *SPEEDS, "--workers", "1", "--max-staleness", "1", "--steps", "10"])
    assert done.exit_code == 0, done.exception


def test_the_shape_of_a_run_is_the_one_that_ran_not_what_its_recipe_says(tmp_path: Path) -> None:
    """Slots and requests of an engine follow from the device, and the run's was a GPU."""
    record(tmp_path / "run", 1)
    path = tmp_path / "run" / "config.yaml"
    recipe = yaml.safe_load(path.read_text())
    del recipe["rollout"]["engine"]["max_running_requests"]
    path.write_text(yaml.safe_dump(recipe))
    RunFolder(tmp_path / "run").write_config(derived(load_config(RunConfig, path), has_gpu=True))
    shape = MeasuredRun.of(tmp_path / "run", cores=float("inf")).shape
    assert (shape.max_running_requests, shape.slots) == (256, 64)
    done = CliRunner().invoke(app, ["simulate", str(path), *SPEEDS, "--steps", "5", "--picture", str(tmp_path / "p.png")])
    assert "64 slots and 256 requests" in " ".join(done.stdout.split()), done.output


def elastic(folder: Path, low: int, high: int) -> Path:
    """The recipe with a pool that follows the load and begins with the fewest workers."""
    recipe = yaml.safe_load(RECIPE.read_text())
    del recipe["rollout"]["workers"]
    recipe["rollout"] |= {"min_workers": low, "max_workers": high}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(recipe | {"max_staleness": 1}))
    return path


def test_an_elastic_recipe_is_simulated_with_the_workers_that_it_begins_with(tmp_path: Path) -> None:
    recipe = elastic(tmp_path, 4, 8)
    assert shape_of(load_config(RunConfig, recipe)).workers == 4
    done = CliRunner().invoke(app, ["simulate", str(recipe), *SPEEDS, "--steps", "5", "--picture", str(tmp_path / "p.png")])
    assert "4 workers with max_staleness 1: 100% of the most" in done.stdout, done.output


def with_pools(folder: Path, sizes: list[int]) -> None:
    """The run's steps again, each with as many workers."""
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(lines) == len(sizes)
    metrics.write_text("".join(json.dumps(line | {"pool/workers": size}) + "\n" for line, size in zip(lines, sizes, strict=True)))


def test_an_elastic_run_is_measured_with_the_workers_that_it_had(tmp_path: Path) -> None:
    """The one worker of the recorded run has its decode speed, whatever the pool might have become. The first five steps don't count."""
    record(tmp_path / "run", 1)
    alone = MeasuredRun.of(tmp_path / "run", cores=float("inf"))
    elastic(tmp_path / "run", 2, 8)
    with_pools(tmp_path / "run", [2] * 5 + [1] * 15)
    measured = MeasuredRun.of(tmp_path / "run", cores=float("inf"))
    assert measured.shape == alone.shape and measured.shape.workers == 1
    assert measured.costs == alone.costs


def test_an_elastic_run_whose_pool_changed_size_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "run", 1)
    elastic(tmp_path / "run", 1, 8)
    with_pools(tmp_path / "run", [1] * 10 + [2] * 5 + [4] * 5)
    with pytest.raises(ConfigError, match=r"had 1 to 4 workers in the 15 steps .* give --run a run with a fixed pool"):
        MeasuredRun.of(tmp_path / "run", cores=2.0)


def test_without_recorded_lengths_the_steps_means_are_taken(tmp_path: Path) -> None:
    record(tmp_path / "run", 1)
    (tmp_path / "run" / "answer_lengths.jsonl").unlink()
    assert set(MeasuredRun.of(tmp_path / "run", cores=2.0).lengths.recorded) == {round(sum(LENGTHS) / len(LENGTHS))}


def test_answers_that_were_cut_and_left_out_are_no_part_of_the_prompts(tmp_path: Path) -> None:
    """Of the 512 answers of a step 128 were cut at 16 tokens and not trained; at steps 8 and 16 all were, and the learner had nothing."""
    record(tmp_path / "run", 1)
    (tmp_path / "run" / "answer_lengths.jsonl").unlink()
    metrics, lines = tmp_path / "run" / "metrics.jsonl", []
    for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()):
        seconds, wait_s = 384 * (6 + PROMPT) / 4000, line["wait/learner_s"] + line["time/train_s"] - 384 * (6 + PROMPT) / 4000
        line |= {"time/train_s": seconds, "wait/learner_s": wait_s, "length/trained_tokens": 6.0, "length/sampled_tokens": 8.5}
        line |= {"staleness/tokens/0": 300.0, "staleness/tokens/8+": 384 * 6.0 - 300.0}
        if line["step"] in (8, 16):
            line |= {"throughput/learner_tokens_per_s": 0.0}
            line = {name: value for name, value in line.items() if not name.startswith(("staleness/", "length/trained"))}
        lines.append(json.dumps(line) + "\n")
    metrics.write_text("".join(lines))
    measured = MeasuredRun.of(tmp_path / "run", cores=float("inf"))
    assert (measured.prompt_tokens, measured.steps) == (PROMPT, 13)
    assert measured.costs.learner_token_s == pytest.approx(1 / 4000)
    assert set(measured.lengths.recorded) == {8}, "engines sample the long ones, too"


def test_a_run_s_lengths_can_be_replaced(tmp_path: Path) -> None:
    record(tmp_path / "run", 1)
    words = ["simulate", str(RECIPE), "--run", str(tmp_path / "run"), "--steps", "5", "--picture", str(tmp_path / "p.png")]
    assert "120 answers" in " ".join(CliRunner().invoke(app, words).stdout.split())
    assert "lognormal, p50 3, p99 9" in " ".join(CliRunner().invoke(app, [*words, "--lengths", "3,9"]).stdout.split())


def test_engines_get_the_cores_that_the_rest_of_the_run_leaves(tmp_path: Path) -> None:
    """A synchronous step waits for the engine, which has half a core of the two that are there."""
    words = ["simulate", str(RECIPE), *SPEEDS, "--max-staleness", "0", "--steps", "5", "--picture", str(tmp_path / "p.png"), "--cores", "2"]
    rates = []
    for given in ([], ["--other-cores", "1.5"]):
        rows = [line.split() for line in CliRunner().invoke(app, [*words, *given]).stdout.splitlines()]
        rates += [float(row[3].replace(",", "")) for row in rows if row[:2] == ["1", "0"]]
    assert rates[1] < 0.7 * rates[0]
    record(tmp_path / "run", 1)
    assert MeasuredRun.of(tmp_path / "run", cores=2.0, other_cores=0.4).costs.other_cores == 0.4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "evenkeel simulate needs --decode, --learner-speed, --lengths, or --run RUN_DIR"),
        (["--decode", "8:100", "--lengths", "5,9"], "evenkeel simulate needs --learner-speed, or --run"),
        (["--lengths", "500,100"], "p50 500 and p99 100 tokens: the median has to be 1 or more, and not above p99"),
        (["--lengths", "many"], "--lengths many: give two numbers"),
        (["--workers", "0"], "--workers 0: give whole numbers from 1 on"),
        (["--workers", "8-16"], "--workers 8-16: give whole numbers"),
        (["--max-staleness", "-1"], "--max-staleness -1: give whole numbers from 0 on"),
        (["--workers", ",".join(map(str, range(1, 51))), "--max-staleness", "0,1,2"], "more than 100 runs"),
        (["--decode", "0:100", *SPEEDS[2:]], "0:100"),
        (["--decode", "fast"], "--decode fast: give REQUESTS:TOKENS_PER_S"),
        ([*SPEEDS[:2], "--learner-speed", "0"], "--learner-speed 0: a speed is above 0"),
        (["rollout.slots=0", *SPEEDS], "rollout.slots = 0"),
        (["--picture", "nowhere/p.png"], "--picture nowhere/p.png: name a .png file in a folder that exists"),
        (["--run", "runs/none"], "runs/none: not a run folder"),
        ([*SPEEDS, "--other-cores", "1"], "--other-cores 1: give the machine's cores as well"),
        ([*SPEEDS, "--cores", "2", "--other-cores", "2"], "--other-cores 2: give the machine's cores as well, which have to be more"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(words: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["simulate", str(RECIPE), *words])
    assert isinstance(done.exception, ConfigError)
    assert sentence in str(done.exception) and "\n" not in str(done.exception)


def outcome(workers: int, max_staleness: int, rate: float) -> Outcome:
    ages = Counter({max_staleness: int(rate)})
    return Outcome(workers, max_staleness, steps=1, seconds=1.0, tokens=int(rate), train_s=0.5, tokens_by_staleness=ages)


def test_the_cheapest_that_is_nearly_the_best() -> None:
    """960 is within 5 % of 1000, 940 is not. Workers cost more than staleness."""
    found = [outcome(8, 1, 500), outcome(8, 4, 960), outcome(16, 1, 970), outcome(16, 2, 1000), outcome(8, 2, 940)]
    assert (cheapest(found).workers, cheapest(found).max_staleness) == (8, 4)
    assert "No larger max_staleness was tried" in recommendation(found), "8 is not the largest number of workers, 4 is the largest bound"


def test_the_table_is_whole_on_a_narrow_terminal() -> None:
    text = io.StringIO()
    show_outcomes(Console(file=text, width=60), [outcome(8, 1, 500), outcome(16, 1, 900)])
    assert any(line.split()[:5] == ["16", "1", "1", "900", "1.80"] for line in text.getvalue().splitlines())
