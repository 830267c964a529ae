"""`true_on_policy: true` through the command line: every batch is compared, a difference ends the run with its name, or is corrected; and
synchronous runs repeat from their seed, however many requests run together, and across kill -9 and resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from actors.record.run_folder import RunFolder
from correction.engines.checksum import tensor_checksum
from tests.e2e.launch import RECIPE, ROOT, Run, evenkeel

pytestmark = pytest.mark.engine

SYNCHRONOUS = [
    "true_on_policy=true",
    "max_staleness=0",
    "dynamic_sampling=true",                        # which groups fill a batch must not depend on which are finished first
    "rollout.reward.path=e2e_reward:begins_with_vowel",
    "evaluation.temperature=1.0",
    "metrics.trajectories_per_step=4",
    "checkpoint.every_steps=5",
]


def run_to_its_end(run_dir: Path, *words: str, timeout_s: float = 400.0) -> Run:
    run = Run(run_dir, *words)
    try:
        run.wait(timeout_s)
    finally:
        run.close()
    assert run.process.returncode == 0, run.output()[-4000:]
    return run


def synchronous(run_dir: Path, model: Path, *words: str) -> list[str]:
    return [str(RECIPE), f"model={model}", f"run_dir={run_dir}", *SYNCHRONOUS, *words]


@pytest.fixture(scope="module")
def five_steps(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run_dir = tmp_path_factory.mktemp("exact") / "run"
    return run_to_its_end(run_dir, *synchronous(run_dir, small_model, "steps=5", "rollout.engine.max_running_requests=64"))


def assert_all_equal(run: Run, steps: int) -> None:
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert (line["true_on_policy/equal_share"], line["true_on_policy/max_abs_difference"]) == (1.0, 0.0)
        assert line["true_on_policy/tokens"] == line["staleness/tokens/0"] > 100
        assert line["mismatch/k3"] == line["mismatch/max_abs_log_ratio"] == 0.0
        assert line.get("sync/probe_max_abs_difference", 0.0) == 0.0
        assert line["learner/grad_norm"] > 0, "equal bits at later versions would be a matter of course"
    assert any("sync/probe_max_abs_difference" in line for line in lines)  # a line has what was received by then


def what_happened(run: Run) -> dict[str, Any]:
    """All of a run that the clock has no part in: weights, questions, answers, rewards, updates."""
    folder = RunFolder.view(run.run_dir)
    weights = load_file(folder.latest_checkpoint().hf / "model.safetensors")
    numbers = ("learner/loss", "learner/grad_norm", "reward/mean", "staleness/tokens/0", "groups/discarded_total")
    return {
        "weights": {name: tensor_checksum(tensor) for name, tensor in weights.items()},
        "steps": [[line[name] for name in numbers] for line in run.metrics()],
        "prompts": sorted((entry["step"], entry["prompt_id"], entry["outcome"]) for entry in run.ledger()),
        "answers": [path.read_text() for kind in ("step", "held_out") for path in folder.trajectory_files(kind)],
    }


def assert_same(run: Run, reference: Run) -> None:
    found, expected = what_happened(run), what_happened(reference)
    assert len(expected["answers"]) == len(expected["steps"]) + 2
    for name in ("prompts", "answers", "steps", "weights"):         # in the order in which one thing leads to the other
        assert found[name] == expected[name], name


def test_five_steps(five_steps: Run) -> None:
    assert_all_equal(five_steps, 5)


def test_the_number_of_requests_in_flight_changes_nothing(five_steps: Run, small_model: Path, tmp_path: Path) -> None:
    run = run_to_its_end(
        tmp_path / "run", *synchronous(tmp_path / "run", small_model, "steps=5", "rollout.engine.max_running_requests=5")
    )
    assert any(entry["outcome"] != "trained" for entry in run.ledger()), "groups were to be replaced"
    assert_same(run, five_steps)


@pytest.fixture
def killed(small_model: Path, tmp_path: Path) -> Iterator[Run]:
    """A run of ten steps that lost its driver after the checkpoint of step 5."""
    run_dir = tmp_path / "killed"
    run = Run(run_dir, *synchronous(run_dir, small_model, "steps=10", "rollout.engine.max_running_requests=8"))
    try:
        run.wait_until(lambda: (run_dir / "config.yaml").exists() and bool(RunFolder.view(run_dir).checkpoints()), "a checkpoint")
        run.kill()
        yield run
    finally:
        run.close()


@pytest.mark.slow
def test_ten_steps_are_five_and_kill_and_resume_and_five(killed: Run, small_model: Path, tmp_path: Path) -> None:
    resumed = run_to_its_end(killed.run_dir, "--resume", str(killed.run_dir))
    assert "going on from step 5" in resumed.events()
    whole = run_to_its_end(
        tmp_path / "whole", *synchronous(tmp_path / "whole", small_model, "steps=10", "rollout.engine.max_running_requests=64")
    )
    assert_same(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    ["learner.tensor_parallel=2", "learner.data_parallel=2", "learner.dtype=bfloat16", "learner.dtype=bfloat16 learner.tensor_parallel=2"],
)
def test_three_steps_of_other_learners(tmp_path: Path, settings: str) -> None:
    model = tmp_path / "model"
    made = evenkeel("init-model", str(RECIPE), f"model={model}", "init.architecture.key_value_heads=2")  # one for each of two ranks
    assert made.returncode == 0, made.stdout + made.stderr
    run_dir = tmp_path / "run"
    overrides = [f"run_dir={run_dir}", *settings.split(), "true_on_policy=true", "max_staleness=0", "steps=3", "checkpoint.every_steps=0"]
    assert_all_equal(run_to_its_end(run_dir, str(RECIPE), f"model={model}", *overrides), 3)


@pytest.mark.slow
def test_fifty_steps_of_the_nano_recipe(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "nano_true_on_policy.yaml"
    model = tmp_path / "model"
    made = evenkeel("init-model", str(recipe), f"model={model}", timeout_s=600.0)
    assert made.returncode == 0, made.stdout + made.stderr
    overrides = [f"model={model}", f"run_dir={tmp_path / 'run'}", "steps=50", "learner.decay_steps=112", "evaluation.every_steps=0"]
    run = run_to_its_end(tmp_path / "run", str(recipe), *overrides, timeout_s=1500.0)
    assert_all_equal(run, 50)


def test_what_it_cannot_honour_is_refused_before_anything_starts(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    refused = evenkeel(
        "train", str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", "true_on_policy=true", "learner.threads=3",
        "rollout.engine.weight_update_mode=in_place",
    )  # fmt: skip
    assert refused.returncode != 0
    assert "learner.threads = 3" in refused.stderr + refused.stdout
    assert "weight_update_mode = in_place" in refused.stderr + refused.stdout
    assert not run_dir.exists()


def test_the_recipe_differs_from_the_plain_one_in_the_mode_alone() -> None:
    """And in dynamic sampling: a synchronous run has nobody who would wait for groups that are sampled again."""
    names = ("nano_true_on_policy", "nano_spell_backward")
    exact, plain = (yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text()) for name in names)
    different = {key for key in exact | plain if exact.get(key) != plain.get(key)}
    assert different == {"name", "true_on_policy", "max_staleness", "correction", "dynamic_sampling"}
