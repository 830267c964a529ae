"""`evenkeel train RECIPE --smoke`: the model that it makes, what it sets, what becomes of its folder. For real: tests/e2e/test_smoke.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel import smoke
from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.errors import DataError
from evenkeel.doctor.start_checks import check_on_paper
from evenkeel.learner.hf.folder import read_json
from evenkeel.recipe import load_config
from evenkeel.smoke import cut_config, make_model, smoke_run
from tests.actors.known_models import QWEN3_8B, QWEN3_30B_A3B, save_config
from tests.e2e.launch import RECIPE, refused
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

RECIPES = Path(__file__).parents[2] / "recipes"


def config_of(*overrides: str, recipe: str = "qwen3_8b_8gpu") -> RunConfig:
    return load_config(RunConfig, RECIPES / f"{recipe}.yaml", overrides)


def test_cut_model_keeps_widths_and_vocabulary_and_has_a_layer_for_each_stage() -> None:
    stages = config_of("learner.pipeline_parallel=4", "learner.data_parallel=1")
    dense = cut_config(QWEN3_8B | {"layer_types": ["full_attention"] * 36}, stages)
    assert dense == QWEN3_8B | {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    assert cut_config(QWEN3_8B, config_of())["num_hidden_layers"] == 2


def test_cut_model_has_experts_that_both_sides_can_divide() -> None:
    """Each token goes to 8: 16 are the fewest among which it chooses, and 24 of those that 12 ranks share."""
    four = "learner.expert_parallel=4", "learner.tensor_parallel=1", "learner.sequence_parallel=false", "learner.data_parallel=4"
    engines = "rollout.engine.tensor_parallel=6", "rollout.engine.expert_parallel=6"
    assert cut_config(QWEN3_30B_A3B, config_of(*four))["num_experts"] == 16
    assert cut_config(QWEN3_30B_A3B, config_of(*four, *engines))["num_experts"] == 24
    assert cut_config(QWEN3_8B | {"num_experts": 6}, config_of())["num_experts"] == 6, "left over: no layer has them"


@pytest.mark.parametrize(("family", "tie"), [("qwen3", True), ("qwen3", False), ("qwen3_moe", False)])
def test_made_model_is_one_that_a_run_takes(tmp_path: Path, family: str, tie: bool) -> None:
    """Config, tokenizer and every tensor, as a start checks them; and each weight is drawn."""
    import torch
    from transformers import AutoModelForCausalLM

    whole = save_tiny_model(save_tiny_tokenizer(tmp_path / "whole"), family, tie=tie, num_hidden_layers=3)
    config = load_config(RunConfig, RECIPE, [f"model={tmp_path / 'cut'}", "rollout.reward={kind: reasoning_gym}"])
    make_model(tmp_path / "cut", whole, cut_config(read_json(whole / "config.json"), config))
    _, facts = check_on_paper(with_devices(config, has_gpu=False))
    assert (facts.refused, facts.lacking, facts.shape.layers) == ((), (), 2)
    assert (tmp_path / "cut" / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "cut", dtype=torch.float32)
    assert all(bool(parameter.isfinite().all()) and float(parameter.detach().std()) > 0.05 for parameter in model.parameters())


def test_step_has_few_groups_and_goes_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few as optimizer steps and data-parallel ranks can divide: 2 steps, 8 ranks with 4 answers to a question."""
    whole = save_tiny_model(save_tiny_tokenizer(tmp_path / "whole"))
    layout = ["learner.data_parallel=8", "learner.optimizer_steps_per_batch=2", "groups_per_step=64"]
    words = [*layout, f"model={whole}", f"run_dir={tmp_path / 'run'}", "dynamic_sampling=true", "metrics.views=[wandb]"]
    found: list[RunConfig] = []

    def train(recipe: Path, overrides: list[str], resume: None, **_: bool) -> Any:
        found.append(load_config(RunConfig, recipe, overrides))
        raise DataError("planted")

    monkeypatch.setattr(smoke, "train_run", train)
    with pytest.raises(DataError, match="planted") as stopped:
        smoke_run(RECIPE, words, lambda _: None)
    (config,) = found
    assert (config.steps, config.groups_per_step, config.dynamic_sampling, config.metrics.views) == (1, 4, False, ("tensorboard",))
    (folder,) = tmp_path.glob("smoke-small-*")
    assert config.model.parent == config.run_dir.parent == folder, "beside the run's folder, which all nodes see"  # type: ignore[union-attr]
    assert stopped.value.__notes__ == [f"smoke: it failed, and all of it is in {folder}"]


def test_run_that_ends_before_its_step_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as after a Ctrl-C, of which `train` itself says 0: it has a checkpoint."""
    whole = save_tiny_model(save_tiny_tokenizer(tmp_path / "whole"))
    monkeypatch.setattr(smoke, "train_run", lambda *_, **__: SimpleNamespace(steps=0, exit_code=0))
    said: list[str] = []
    assert smoke_run(RECIPE, [f"model={whole}", f"run_dir={tmp_path / 'run'}"], said.append) == 1
    assert said[-1].startswith("smoke: ended before its step. All of it is in ") and list(tmp_path.glob("smoke-small-*"))


@pytest.mark.parametrize("words", [["--retries", "1"], ["--discard-groups"], ["--resume", "runs/x"]])
def test_smoke_is_a_run_of_its_own(words: list[str]) -> None:
    assert "leave --resume, --retries and --discard-groups out" in refused("train", str(RECIPE), "--smoke", *words)


def test_model_that_can_t_be_trained_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    run_dir = f"run_dir={tmp_path / 'runs' / 'x'}"
    assert "no such folder. Name a" in refused("train", str(RECIPE), "--smoke", f"model={tmp_path / 'none'}", run_dir)
    other = save_config(tmp_path / "other", QWEN3_8B | {"model_type": "gpt2"})
    assert "model_type = gpt2 can't be trained" in refused("train", str(RECIPE), "--smoke", f"model={other}", run_dir)
    assert not (tmp_path / "runs").exists()
