"""Keys of earlier versions: what is wrong with their values is said with the name and the line that stand in the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from actors.commands.recipe import load_config
from actors.commands.train import train_run
from actors.config import RunConfig
from actors.record.config_that_ran import config_that_ran
from actors.record.run_folder import RunFolder
from actors.reports.run_doctor import diagnose_run
from correction.errors import ConfigError

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
