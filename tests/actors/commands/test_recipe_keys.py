"""Keys that are read otherwise than they are written: in brackets, by a former name, under `derived`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import yaml

from actors.commands.recipe import RecipeKeys, load_config, load_with_keys
from actors.commands.run_settings import not_as_written
from actors.config import RunConfig
from actors.plan.shape import check_is_model
from actors.record.ownership import own
from actors.settings.derived import derived
from actors.settings.keys import FormerName
from actors.settings.true_on_policy import resolved
from correction.errors import ConfigError
from correction.settings.base import dump_with_derived
from tests.tiny_models import save_tiny_model

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


def refusal(recipe: Path, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, recipe, words)
    return str(caught.value)


def with_given(folder: Path, name: str, value: bool) -> Path:
    """A recipe that gives this setting of the learner."""
    tree = yaml.safe_load(SMALL.read_text())
    tree["learner"][name] = value
    (recipe := folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return recipe


@pytest.mark.parametrize("word", ["learner[dtype]=bfloat16", "[learner][dtype]=bfloat16", "learner.dtype=bfloat16"])
def test_brackets_are_another_way_to_write_a_dotted_key(word: str) -> None:
    """OmegaConf reads them so; all that looks at keys has to see the same one."""
    assert load_config(RunConfig, SMALL, [word]) == load_config(RunConfig, SMALL, ["learner.dtype=bfloat16"])


def test_a_derived_value_in_brackets_is_refused_as_with_dots() -> None:
    for dotted, bracketed in [
        ("rollout.derived.slots=1", "rollout[derived][slots]=1"),
        ("rollout.derived.slots=1", "rollout[derived].slots=1"),
        ("learner.derived.dtype=bfloat16", "[learner].derived[dtype]=bfloat16"),
    ]:
        assert refusal(SMALL, bracketed) == refusal(SMALL, dotted)


NO_KEYS = ["learner[dtype", "learner.dtype]", "learner[]", "learner.[dtype]", "learner[dty]pe", ".learner.dtype", "ray.env[a.b]"]


@pytest.mark.parametrize("word", [f"{key}=x" for key in NO_KEYS])
def test_brackets_that_name_nothing_are_no_setting(word: str) -> None:
    assert refusal(SMALL, word).startswith(f"command line: {word!r} is not a setting: write KEY=VALUE")


@pytest.mark.parametrize("in_file", ["batch_invariant", "fixed_order"])
@pytest.mark.parametrize("word", ["learner.fixed_order=false", "learner[fixed_order]=false", "learner={fixed_order: false}"])
def test_a_former_name_on_the_command_line_replaces_the_setting_and_is_told(tmp_path: Path, in_file: str, word: str) -> None:
    recipe = with_given(tmp_path, in_file, True)
    config, keys = load_with_keys(RunConfig, recipe, [word])
    assert config.learner.is_given("batch_invariant") and not config.learner.batch_invariant
    told = FormerName("command line", "learner.fixed_order", "learner.batch_invariant")
    assert keys.former[-1] == told and len(keys.former) == (2 if in_file == "fixed_order" else 1)
    assert RecipeKeys.read(RunConfig, recipe, [word]) == keys, "a resume tells the same"


@pytest.mark.parametrize("in_file", ["batch_invariant", "fixed_order", "threads"])
def test_what_is_wrong_below_a_former_name_is_placed_on_the_command_line(tmp_path: Path, in_file: str) -> None:
    recipe = with_given(tmp_path, in_file, True) if in_file != "threads" else SMALL
    assert refusal(recipe, "learner.fixed_order.x=7").startswith("command line: learner.batch_invariant")


def test_only_a_value_that_would_be_taken_is_advised_to_be_moved_out_of_derived(tmp_path: Path) -> None:
    """A contradiction or a value that is not allowed would be refused there."""
    model = save_tiny_model(tmp_path)

    def said(of_engine: dict[str, object], slots: int, *words: str) -> str:
        config = load_config(RunConfig, SMALL, [f"model={model}", *words])
        now, tree = resolved(derived(config, has_gpu=False)), dump_with_derived(config)
        assert now.rollout.slots == 16
        tree["learner"]["derived"] = tree["weight_sync"]["derived"] = {}
        tree["rollout"]["derived"], tree["rollout"]["engine"]["derived"] = {"slots": slots}, of_engine
        (recipe := tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        (sentence,) = not_as_written(RecipeKeys.read(RunConfig, recipe), now)
        return sentence.partition("derived anew: ")[2]

    advice = ". To keep a value, move it out of `derived`: "
    other_type, of_dtype = "learner.dtype=bfloat16", "rollout.engine.dtype float32 -> bfloat16"
    assert said({"dtype": "float32"}, 16, other_type) == of_dtype, "the learner sends another type"
    assert said({"batch_invariant": False}, 16, "true_on_policy=true") == "rollout.engine.batch_invariant false -> true"
    assert said({}, -3) == "rollout.slots -3 -> 16", "not a number of slots"
    assert said({"dtype": "float32"}, 3, other_type) == f"{of_dtype}; rollout.slots 3 -> 16{advice}rollout.slots"


def test_a_name_that_is_not_utf8_is_refused_by_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As old archives have them, in Latin-1. On the command line, as the folder of the start, of temporary files, of a model, of a run."""
    named = "not UTF-8, the only form .* Rename that folder or file"
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    with pytest.raises(ConfigError, match=rf"^command line: run_dir={tmp_path}/caf\\xe9: {named}"):
        load_config(RunConfig, SMALL, [f"run_dir={folder}"])
    with pytest.raises(ConfigError, match=rf"^model = {tmp_path}/caf\\xe9: {named}"):
        check_is_model(folder)
    with pytest.raises(ConfigError, match=rf"^run_dir = {tmp_path}/caf\\xe9: {named}"):
        own(folder)
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match=rf"^the folder for temporary files \(TMPDIR\), {tmp_path}/caf\\xe9: {named}"):
        load_config(RunConfig, SMALL)
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=rf"^the working folder, {tmp_path}/caf\\xe9: {named}"):
        load_config(RunConfig, SMALL)
