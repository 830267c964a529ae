"""`evenkeel doctor MODEL`: where prompts and answers end, and how long both may be, as runs, evaluations and filters go by it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import CliRunner

from evenkeel.actors.config import RunConfig
from evenkeel.cli import app
from evenkeel.correction.errors import ConfigError
from evenkeel.doctor_command import model_page
from evenkeel.preparation import check_inputs
from evenkeel.recipe import load_config
from tests.rollout.family_tokenizers import FAMILIES

RECIPE = Path(__file__).parents[2] / "recipes" / "nano_spell_backward.yaml"


def page(folder: Path, task: str = "", *overrides: str) -> dict[str, str]:
    """By name, the lines of each."""
    lines: dict[str, str] = {}
    name = ""
    for told, text in model_page(folder, task, overrides):
        name = told or name
        lines[name] = f"{lines[name]}\n{Text.from_markup(text)}" if name in lines else str(Text.from_markup(text))
    return lines


def test_a_base_model_shows_who_names_which_end_and_its_template_s_system_turn_in_the_prompt(tmp_path: Path) -> None:
    found = page(FAMILIES["Qwen2.5, a base model"].save(tmp_path / "m"))
    assert found["answers end at"] == (
        "<|endoftext|> (0): tokenizer's eos_token, config.json, generation_config.json\n<|im_end|> (2): chat template"
    )
    assert found["turns end with"] == (
        "<|im_end|>, as do a warm-up's demonstrations\nanswers also end at <|im_end|> (chat template): config.json and "
        "generation_config.json name <|endoftext|> alone, and engines are told"
    )
    said = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    assert found["prompt"].split("\n")[1:3] == ["⟦<|im_start|>⟧system", f"{said}⟦<|im_end|>⟧"]


def test_a_task_shows_its_first_prompt_and_what_its_settings_leave(tiny_model: Path) -> None:
    """A context of 128 tokens less the two that SGLang keeps, less the recipe's answers of 10; and less the seven that a prompt leaves."""
    found = page(tiny_model, str(RECIPE), "rollout.task.system_prompt=Spell.", "rollout.engine.context_length=128")
    assert "prompt and answer at most 126 tokens together, a prompt at most 121" in found["lengths"]
    assert found["lengths"].endswith("rollout.sampling.max_tokens = 10 leaves 116 for a prompt")
    lines = found["prompt"].split("\n")
    assert lines[1:3] == ["⟦<|im_start|>⟧system", "Spell.⟦<|im_end|>⟧"] and lines[-2:] == ["⟦<|im_start|>⟧assistant", ""]
    assert "Spell this word backward" in lines[4] and lines[4].endswith("⟦<|im_end|>⟧")


def test_the_command_tells_a_model_from_a_run_and_a_recipe(tiny_model: Path, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["doctor", str(tiny_model)])
    assert found.exit_code == 0 and "answers end at  <|im_end|>" in found.output
    run = shutil.copytree(tiny_model, tmp_path / "run")
    (run / "config.yaml").write_text("")
    assert "answers end at" not in CliRunner().invoke(app, ["doctor", str(run)]).output
    with pytest.raises(ConfigError, match="add --task RECIPE"):
        page(tiny_model, "", "rollout.sampling.max_tokens=3")


def test_a_start_and_doctor_say_which_ends_an_engine_by_itself_would_pass_by(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i} + 1", "answer": "{i + 1}"}}\n' for i in range(20)))
    words = ["rollout.task.kind=file", f"rollout.task.path={tmp_path / 'rows.jsonl'}", "rollout.reward.kind=exact_match"]
    config = load_config(RunConfig, RECIPE, [*words, "rollout.engine.context_length=256"])
    for name, said in (("Qwen2.5, a base model", ["<|im_end|> (chat template)"]), ("Qwen2.5-Instruct", [])):
        found = check_inputs(config, FAMILIES[name].save(tmp_path / name)).found
        notes = [str(one) for one in found if one.severity == "note" and "answers also end at" in str(one)]
        assert [end for end in said for note in notes if end in note] == said and len(notes) == len(said)
