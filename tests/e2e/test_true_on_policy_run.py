"""`true_on_policy: true` through the command line: every batch is compared, a difference ends the run with its name, or is corrected."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.e2e.launch import RECIPE, ROOT, Run, evenkeel

pytestmark = pytest.mark.engine


def run_to_its_end(run_dir: Path, *words: str, timeout_s: float = 400.0) -> Run:
    run = Run(run_dir, *words, f"run_dir={run_dir}")
    try:
        run.wait(timeout_s)
    finally:
        run.close()
    return run


def assert_all_equal(run: Run, steps: int) -> None:
    assert run.process.returncode == 0, run.output()[-4000:]
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert (line["true_on_policy/equal_share"], line["true_on_policy/max_abs_difference"]) == (1.0, 0.0)
        assert line["true_on_policy/tokens"] == line["staleness/tokens/0"] > 100
        assert line["mismatch/k3"] == line["mismatch/max_abs_log_ratio"] == 0.0
        assert line.get("sync/probe_max_abs_difference", 0.0) == 0.0
        assert line["learner/grad_norm"] > 0, "equal bits at later versions would be a matter of course"
    assert any("sync/probe_max_abs_difference" in line for line in lines)  # a line has what was received by then


def test_five_steps(small_model: Path, tmp_path: Path) -> None:
    overrides = ["true_on_policy=true", "max_staleness=0", "steps=5", "checkpoint.every_steps=0"]
    run = run_to_its_end(tmp_path / "run", str(RECIPE), f"model={small_model}", *overrides)
    assert_all_equal(run, 5)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["learner.tensor_parallel=2", "learner.data_parallel=2", "learner.dtype=bfloat16"])
def test_three_steps_of_other_learners(tmp_path: Path, setting: str) -> None:
    model = tmp_path / "model"
    made = evenkeel("init-model", str(RECIPE), f"model={model}", "init.architecture.key_value_heads=2")  # one for each of two ranks
    assert made.returncode == 0, made.stdout + made.stderr
    overrides = [setting, "true_on_policy=true", "max_staleness=0", "steps=3", "checkpoint.every_steps=0"]
    run = run_to_its_end(tmp_path / "run", str(RECIPE), f"model={model}", *overrides)
    assert_all_equal(run, 3)


@pytest.mark.slow
def test_fifty_steps_of_the_nano_recipe(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "nano_true_on_policy.yaml"
    model = tmp_path / "model"
    made = evenkeel("init-model", str(recipe), f"model={model}", timeout_s=600.0)
    assert made.returncode == 0, made.stdout + made.stderr
    run = run_to_its_end(
        tmp_path / "run", str(recipe), f"model={model}", "steps=50", "learner.decay_steps=112", "evaluation.every_steps=0", timeout_s=1500.0
    )
    assert_all_equal(run, 50)


def test_what_it_cannot_honour_is_refused_before_anything_starts(small_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    refused = evenkeel(
        "train", str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", "true_on_policy=true", "learner.tensor_parallel=3",
        "rollout.engine.weight_update_mode=in_place",
    )  # fmt: skip
    assert refused.returncode != 0
    assert "learner.tensor_parallel = 3" in refused.stderr + refused.stdout
    assert "weight_update_mode = in_place" in refused.stderr + refused.stdout
    assert not run_dir.exists()


def test_the_recipe_differs_from_the_plain_one_in_the_mode_alone() -> None:
    names = ("nano_true_on_policy", "nano_spell_backward")
    exact, plain = (yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text()) for name in names)
    different = {key for key in exact | plain if exact.get(key) != plain.get(key)}
    assert different == {"name", "true_on_policy", "max_staleness", "correction"}
