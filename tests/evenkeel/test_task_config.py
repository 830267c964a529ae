"""`evenkeel eval`'s configuration: a recipe's, or one made up around a data set's name, with sizes that the model has room for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.errors import DataError
from evenkeel.task_config import LONGEST_ANSWER, meant_model, model_context, task_config


def folder(tmp_path: Path, shape: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


@pytest.mark.parametrize(
    ("context", "answer"),
    [(128, 32), (1024, 256), (32_768, 256), (8, 2)],
)
def test_an_answer_takes_a_quarter_of_a_small_context(tmp_path: Path, context: int, answer: int) -> None:
    """256 tokens do not fit into the 128 of a nano model; the rest is room for the question, less what SGLang keeps: 2 of the context, 7
    beyond a prompt."""
    model = folder(tmp_path, {"max_position_embeddings": context})
    config = task_config(model, "chain_sum", [], problems=7)
    assert config.rollout.sampling.max_tokens == answer
    assert config.rollout.with_context(model_context(model)).longest_prompt(config.rollout.only_entry) == min(
        context - answer - 2, context - 7
    )
    assert (config.rollout.task.held_out_size, config.rollout.reward.kind) == (7, "reasoning_gym")


def test_overrides_come_last(tmp_path: Path) -> None:
    model = folder(tmp_path, {"max_position_embeddings": 128})
    config = task_config(model, "chain_sum", ["rollout.sampling.max_tokens=100"], problems=7)
    assert config.rollout.sampling.max_tokens == 100


def test_the_context_of_a_model_with_a_text_part_is_that_part_s(tmp_path: Path) -> None:
    assert model_context(folder(tmp_path, {"text_config": {"max_position_embeddings": 64}, "vision_config": {}})) == 64


def test_a_folder_without_a_usable_config_is_left_to_who_reads_it(tmp_path: Path) -> None:
    assert model_context(tmp_path) == 4 * LONGEST_ANSWER
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert model_context(tmp_path) == 4 * LONGEST_ANSWER


def test_a_recipe_keeps_its_own_sizes() -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "nano_chain_sum.yaml"
    config = task_config(Path("models/none"), str(recipe), [], problems=9)
    assert (config.rollout.sampling.max_tokens, config.rollout.task.held_out_size, str(config.model)) == (8, 9, "models/none")


def test_the_model_of_a_run_and_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    """What was evaluated best; of a run without evaluations the newest. A model's folder is taken as it is."""
    run = RunFolder.create(tmp_path / "run", "x")
    run.write_text("config.yaml", "name: x\n")
    with pytest.raises(DataError, match="this run has no checkpoint"):
        meant_model(run.path)
    for step in (1, 2):
        with run.checkpoint(step) as checkpoint:
            checkpoint.hf.mkdir(exist_ok=True)
            (checkpoint.hf / "config.json").write_text("{}")
    first, newest = run.checkpoints()
    assert meant_model(run.path) == (newest.hf, run.path / "recipe.yaml")
    run.append_evaluation(StepMetrics(1, {"held_out/wilson_low": 0.4}))
    assert meant_model(run.path)[0] == first.hf
    assert meant_model(newest.path) == (newest.hf, None) and meant_model(newest.hf) == (newest.hf, None)
    assert meant_model(tmp_path / "none") == (tmp_path / "none", None) and meant_model(Path("hf:a/b")) == (Path("hf:a/b"), None)
