"""Keys of earlier versions: each command tells them, and refusals of their values name them as they stand in the file, with the line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from actors.commands.cli import app
from actors.commands.recipe import load_config
from actors.commands.train import train_run
from actors.config import RunConfig
from actors.record.config_that_ran import config_that_ran
from actors.record.run_folder import RunFolder
from actors.reports.run_doctor import diagnose_run
from correction.errors import ConfigError
from tests.actors.known_models import QWEN3_06B, save_config

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
COMMANDS = {
    "config": [],
    "plan": ["--gpus", "H100x1"],
    "doctor": ["--gpus", "H100x1"],
    "init-model": ["--if-missing"],
    "filter": ["--output", "none/kept.jsonl"],
    "eval": [],
}
"""Commands that read a recipe, and options; train has events instead. The last two end in an error, after they have read it."""
FORMER, PRESENT = "learner.fixed_order", "learner.batch_invariant"
CONTRADICTED = f"{PRESENT}: true with true_on_policy: false"


def with_former_name(path: Path, value: object, **others: object) -> str:
    """Have a recipe give the learner this setting by its former name. Returns: the sentence on it."""
    tree = yaml.safe_load(path.read_text())
    tree["learner"] |= {"fixed_order": value, **others}
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    (line,) = (number for number, text in enumerate(path.read_text().splitlines(), 1) if "fixed_order" in text)
    return f"{path}:{line}: {FORMER} is called {PRESENT} now"


def test_a_start_and_a_resume_that_are_refused_for_it_name_the_key_as_it_stands_there(folder: RunFolder, tmp_path: Path) -> None:
    """Whoever looks for learner.batch_invariant in that file finds nothing."""
    folder.close()
    config = folder.path / "config.yaml"
    (recipe := tmp_path / "recipe.yaml").write_text(config.read_text())
    for path, words, resume in ((recipe, [f"run_dir={tmp_path / 'new'}"], None), (config, [], folder.path)):
        said = with_former_name(path, True)
        with pytest.raises(ConfigError) as caught:
            train_run(path if resume is None else None, words, resume)
        assert str(caught.value).startswith(CONTRADICTED) and caught.value.__notes__ == [said]
    assert not (tmp_path / "new").exists()


def test_doctor_says_the_same_of_the_folder(folder: RunFolder) -> None:
    folder.close()
    path = folder.path / "config.yaml"
    said = with_former_name(path, True)
    refused = diagnose_run(RunFolder.view(folder.path)).refused
    assert refused.startswith(f"{path}: {CONTRADICTED}: ") and refused.endswith(f". {said}")
    place = with_former_name(path, 7).partition(" is called")[0]
    with pytest.raises(ConfigError, match="Input should be a valid boolean") as caught:
        config_that_ran(RunFolder.view(folder.path))
    assert str(caught.value).startswith(f"{place}: not settings of this version: ")


def test_only_a_refusal_of_this_setting_has_its_name(folder: RunFolder) -> None:
    """Some name the key, some the section and the setting."""
    path = folder.path / "config.yaml"
    notes = []
    for value, others in ((7, {}), (True, {"float32_head": True}), (True, {"threads": 0})):
        said = with_former_name(path, value, **others)
        with pytest.raises(ConfigError) as caught:
            load_config(RunConfig, path)
        notes.append(getattr(caught.value, "__notes__", []) == [said])
        tree = yaml.safe_load(path.read_text())
        tree["learner"] = {name: given for name, given in tree["learner"].items() if name not in others}
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
    assert notes == [True, True, False]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_them_once_in_the_same_words(tmp_path: Path, command: str) -> None:
    (recipe := tmp_path / "recipe.yaml").write_text(SMALL.read_text())
    in_file, model = with_former_name(recipe, False), save_config(tmp_path, QWEN3_06B)
    asked = [str(model), "--task", str(recipe)] if command == "eval" else [str(recipe), f"model={model}"]
    given = CliRunner().invoke(app, [command, *asked, "rollout.engine.fixed_order=false", *COMMANDS[command]])
    on_command_line = "command line: rollout.engine.fixed_order is called rollout.engine.batch_invariant now"
    told = [line for line in given.stderr.splitlines() if "is called" in line]
    assert told == [f"warning: {in_file}", f"warning: {on_command_line}"], given.output
    assert "is called" not in given.stdout, "which is read by programs"
