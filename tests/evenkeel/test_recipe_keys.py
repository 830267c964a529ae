"""Keys in brackets, and names that are no text."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from evenkeel.actors.config import RunConfig
from evenkeel.actors.record.run_folder import own
from evenkeel.correction.errors import ConfigError
from evenkeel.plan.shape import check_is_model
from evenkeel.recipe import load_config

SMALL = Path(__file__).parents[1] / "e2e" / "small.yaml"


def refusal(recipe: Path, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, recipe, words)
    return str(caught.value)


@pytest.mark.parametrize("word", ["learner[dtype]=bfloat16", "[learner][dtype]=bfloat16", "learner.dtype=bfloat16"])
def test_brackets_are_another_way_to_write_a_dotted_key(word: str) -> None:
    """OmegaConf reads them so; all that looks at keys has to see the same one."""
    assert load_config(RunConfig, SMALL, [word]) == load_config(RunConfig, SMALL, ["learner.dtype=bfloat16"])


NO_KEYS = ["learner[dtype", "learner.dtype]", "learner[]", "learner.[dtype]", "learner[dty]pe", ".learner.dtype", "ray.env[a.b]"]


@pytest.mark.parametrize("word", [f"{key}=x" for key in NO_KEYS])
def test_brackets_that_name_nothing_are_no_setting(word: str) -> None:
    assert refusal(SMALL, word).startswith(f"command line: {word!r} is not a setting: write KEY=VALUE")


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
