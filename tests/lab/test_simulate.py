"""The what-if of lab/simulate against closed forms, and what it takes from a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.errors import ConfigError
from lab.simulate.__main__ import main
from lab.simulate.costs import AnswerLengths, DecodeSpeed, RunCosts, RunShape
from lab.simulate.measured import measure
from lab.simulate.run import FULL_ENGINES, UNDER_WAY, Outcome, SimulatedStep, simulate

RECIPE = Path(__file__).parents[2] / "recipes" / "nano_spell_backward.yaml"
LENGTH, PROMPT = 100, 20
SPEED = DecodeSpeed(((64, 3200.0), (128, 6400.0)))
"""0.02 s a decoding step for up to 64 requests and beyond: an answer of 100 tokens takes 2 s, alone or with others."""
BATCH_TOKENS = 32 * 8 * (LENGTH + PROMPT)
ROLLOUT_S = 32 * 8 * LENGTH / (4 * 3200.0)
"""A batch's share of four full engines: 2 s."""
LENGTHS = [3, 5, 5, 6, 6, 6, 7, 10]


def run(costs: RunCosts, lengths: AnswerLengths | None = None, *, workers: int = 4, max_staleness: int = 2) -> Outcome:
    shape = RunShape(workers, 32, max_staleness, 8, 16, 64)
    return simulate(shape, costs, lengths or AnswerLengths.like([LENGTH], "one length"), prompt_tokens=PROMPT, steps=20)


@pytest.mark.parametrize("train_s", [0.5, 1.9, 2.1, 10.0])
def test_a_step_takes_as_long_as_the_slower_side(train_s: float) -> None:
    """Equal lengths, no other costs, enough staleness to keep every engine full."""
    found = run(RunCosts(SPEED, learner_token_s=train_s / BATCH_TOKENS))
    assert found.step_s == pytest.approx(max(train_s, ROLLOUT_S), rel=0.03)
    assert found.learner_share == pytest.approx(train_s / max(train_s, ROLLOUT_S), rel=0.03)


def test_a_synchronous_step_takes_as_long_as_both_sides_and_all_that_is_between() -> None:
    """64 requests an engine; every cost has its place in the step: reading the prompts, sampling, hand-over, training, publishing, sync."""
    costs = RunCosts(
        SPEED, learner_token_s=4.0 / BATCH_TOKENS, prompt_token_s=0.001, handover_s=0.3, publish_s=0.2, sync_s=0.7, pause_s=0.1
    )
    found = run(costs, max_staleness=0)
    assert found.step_s == pytest.approx(4.0 + ROLLOUT_S + 8 * PROMPT * 0.001 + 0.3 + 0.2 + 0.7, rel=1e-6)
    assert found.mean_staleness == 0.0
    assert found.learner_share + sum(found.learner_waits_s.values()) / found.seconds == pytest.approx(1.0)


def test_tokens_of_engines_that_the_learner_waits_for_are_as_old_as_the_time_says() -> None:
    """Engines with room for one batch, which take 2 s for it, a learner that takes 1 s: version k begins at 1 s of each round, so half of
    the tokens are one version old: their mean staleness is 1/2 x 1 x 2 / 2."""
    found = run(RunCosts(SPEED, learner_token_s=1.0 / BATCH_TOKENS), max_staleness=8)
    assert found.step_s == pytest.approx(ROLLOUT_S)
    assert found.mean_staleness == pytest.approx(0.5)


def test_what_the_learner_waits_for() -> None:
    """768 requests for 256 places: full engines. Places for all of them, and one answer in a thousand is 30 times as long: these."""
    slow = run(RunCosts(SPEED, learner_token_s=1e-9))
    assert slow.learner_waits_s[FULL_ENGINES] > 0.95 * slow.seconds
    tail = AnswerLengths.like([LENGTH] * 999 + [30 * LENGTH], "a tail")
    held_up = run(RunCosts(SPEED, learner_token_s=1.5 / BATCH_TOKENS), tail, workers=16)
    assert held_up.learner_waits_s[UNDER_WAY] > 0.3 * held_up.seconds


@settings(max_examples=30, deadline=None)
@given(
    shape=st.builds(
        RunShape,
        workers=st.integers(1, 4),
        groups_per_step=st.integers(1, 6),
        max_staleness=st.integers(0, 3),
        samples_per_group=st.just(2),
        slots=st.integers(1, 5),
        max_running_requests=st.integers(1, 20),
    ),
    token_s=st.floats(1e-6, 1e-2),
    sync_s=st.floats(0.0, 5.0),
)
def test_nothing_is_trained_twice_and_nothing_is_too_old(shape: RunShape, token_s: float, sync_s: float) -> None:
    """In any shape: each batch is whole, every group is trained once, no token is older than max_staleness."""
    steps: list[SimulatedStep] = []
    costs = RunCosts(SPEED, token_s, prompt_token_s=1e-4, handover_s=0.1, publish_s=0.1, sync_s=sync_s, pause_s=sync_s / 2)
    lengths = AnswerLengths.lognormal(40, 400, max_tokens=2000)
    simulate(shape, costs, lengths, prompt_tokens=PROMPT, steps=12, on_step=steps.append)
    trained = [group_id for step in steps for group_id in step.group_ids]
    assert len(trained) == len(set(trained)) == len(steps) * shape.groups_per_step
    assert all(0 <= age <= shape.max_staleness for step in steps for age in step.tokens_by_staleness)


def record(folder: Path, max_staleness: int) -> Outcome:
    """A run's folder as a run would write it whose engines decode 64 requests at 1,200 and 512 at 2,400 tokens/s, and whose learner trains
    on 4,000 tokens/s; hand-over 0.1 s, publication 0.05 s, sync 0.2 s."""
    costs = RunCosts(DecodeSpeed(((64, 1200.0), (512, 2400.0))), 1 / 4000, 1 / 12000, 0.1, 0.05, 0.2, 0.15)
    shape = RunShape(1, 64, max_staleness, 8, 128, 512)
    found = simulate(shape, costs, AnswerLengths.like(LENGTHS, "true"), prompt_tokens=PROMPT, steps=40)
    mean = found.tokens / found.steps / (64 * 8)
    tokens = 64 * 8 * (mean + PROMPT)
    step = {
        "time/step_s": found.step_s,
        "time/train_s": tokens / 4000,
        "wait/learner_s": found.step_s - tokens / 4000 - 0.05,
        "wait/handover_s": 0.1,
        "wait/rollout_share": 1 - found.occupied_s / found.seconds,
        "throughput/rollout_tokens_per_s": found.tokens_per_s,
        "throughput/learner_tokens_per_s": 4000.0,
        "length/trained_tokens": mean,
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
    """From numbers that a simulation wrote with known costs: the costs come out."""
    record(tmp_path / "run", max_staleness)
    measured = measure(tmp_path / "run")
    assert measured.prompt_tokens == PROMPT
    assert measured.costs.learner_token_s == pytest.approx(1 / 4000)
    assert measured.costs.prompt_token_s == pytest.approx(1 / 12000), "a forward pass: a third of training"
    assert (measured.costs.handover_s, measured.costs.publish_s) == pytest.approx((0.1, 0.05))
    assert measured.costs.decode.points == ((64, pytest.approx(1200.0)), (512, pytest.approx(2400.0, rel=0.03)))


def test_it_prints_a_row_for_each_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines and learner as fast as said: two workers sample nearly twice as much as one, since the learner is faster than both."""
    speeds = ["--decode", "64:3200,512:6400", "--learner-speed", "500000", "--lengths", "5,9"]
    main([str(RECIPE), *speeds, "--workers", "1,2", "--max-staleness", "1", "--steps", "20"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:7].strip().isdigit()]
    assert [one[:2] for one in rows] == [["1", "1"], ["2", "1"]]
    assert 1.5 < float(rows[1][4]) <= 2.0
    with pytest.raises(SystemExit, match="give --decode, --learner-speed and --lengths"):
        main([str(RECIPE)])
    with pytest.raises(ConfigError, match="doesn't exist"):
        measure(tmp_path / "no run")
