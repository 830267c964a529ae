"""`true_on_policy: true` through the command line: runs of other learners and of the nano recipe, and across kill -9 and resume.

The fast suite's such run is that of tests/e2e/test_several_workers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.exact_runs import EXACT, assert_all_equal, assert_same, run_to_its_end
from tests.e2e.launch import RECIPE, ROOT, Run, evenkeel, refused

pytestmark = pytest.mark.engine

SYNCHRONOUS = [*EXACT, "max_staleness=0", "checkpoint.every_steps=5"]


def synchronous(run_dir: Path, model: Path, *words: str) -> list[str]:
    return [str(RECIPE), f"model={model}", f"run_dir={run_dir}", *SYNCHRONOUS, *words]


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
    assert_same(resumed, whole, evaluations=2)


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
@pytest.mark.timeout(2400)
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
    said = refused(
        "train", str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", "true_on_policy=true", "learner.threads=3",
        "rollout.engine.weight_update_mode=in_place",
    )  # fmt: skip
    assert "learner.threads = 3" in said and "weight_update_mode = in_place" in said
    assert not run_dir.exists()


def test_the_recipe_differs_from_the_plain_one_in_the_mode_alone() -> None:
    """And in dynamic sampling: a synchronous run has nobody who would wait for groups that are sampled again."""
    names = ("nano_true_on_policy", "nano_spell_backward")
    exact, plain = (yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text()) for name in names)
    different = {key for key in exact | plain if exact.get(key) != plain.get(key)}
    assert different == {"name", "true_on_policy", "max_staleness", "correction", "dynamic_sampling"}
