"""Every recipe loads; what two packages must agree on is checked where they are composed; batch arithmetic in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.config import RunConfig
from actors.config_tools import load_config
from correction.errors import ConfigError

ROOT = Path(__file__).parents[2]
RECIPES = [*sorted(ROOT.glob("recipes/*.yaml")), ROOT / "tests/e2e/small.yaml"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(recipe: Path) -> None:
    config = load_config(RunConfig, recipe)
    assert config.steps >= 1 and config.groups_per_step % config.learner.optimizer_steps_per_batch == 0


def small(*overrides: str) -> RunConfig:
    return load_config(RunConfig, ROOT / "tests/e2e/small.yaml", overrides)


def test_minibatches_have_to_be_of_equal_size() -> None:
    assert small("learner.optimizer_steps_per_batch=2").learner.optimizer_steps_per_batch == 2
    with pytest.raises(ConfigError, match=r"groups_per_step = 10 is not a multiple of .*= 4: .* Use 8 groups"):
        small("groups_per_step=10", "learner.optimizer_steps_per_batch=4")
    with pytest.raises(ConfigError, match="Use 4 groups"):
        small("groups_per_step=3", "learner.optimizer_steps_per_batch=4")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            "steps=7 groups_per_step=6 max_staleness=2 learner.optimizer_steps_per_batch=3 rollout.sampling.samples_per_group=5",
            "Each of 7 steps trains on 6 prompts x 5 samples = 30 trajectories of up to 48 tokens in 3 optimizer steps of 10; "
            "at most 18 prompts are under way, so no token is more than 2 versions old.",
        ),
        (
            "steps=1 max_staleness=1",
            "Each of 1 steps trains on 4 prompts x 4 samples = 16 trajectories of up to 48 tokens in one optimizer step; "
            "at most 8 prompts are under way, so no token is more than 1 version old.",
        ),
    ],
)
def test_batch_arithmetic(overrides: str, sentence: str) -> None:
    assert small(*overrides.split()).batch_arithmetic() == sentence


def test_a_run_config_survives_its_own_file(tmp_path: Path) -> None:
    """What a run writes down, a resume reads: equal to the last field, presets and unions included."""
    from actors.run_folder import RunFolder

    config = small("correction.preset=icepop", "run_dir=" + str(tmp_path / "run"))
    with RunFolder.create(tmp_path / "run", "x") as folder:
        folder.write_config(config)
    assert load_config(RunConfig, tmp_path / "run" / "config.yaml") == config
