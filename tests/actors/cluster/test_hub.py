"""Models of the hub, against a stand-in of it on loopback: what is downloaded how often, what a run records, what is said."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from evenkeel.actors.cluster.hub import config_folder, model_folder, obstacle_here, outline_folder, pinned
from evenkeel.actors.config import HubName, RunConfig
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.cli import app
from evenkeel.correction.errors import ConfigError, DataError
from evenkeel.learner.hf.nano import NanoModelConfig, build_nano_model
from evenkeel.preparation import prepare
from evenkeel.recipe import read_recipe
from evenkeel.resume_point import find_resume_point, recipe_as_kept, with_absolute_paths
from tests.actors.cluster.hub_scene import FILES, NAME, WANTED, offline, recipe
from tests.e2e.launch import RECIPE
from tests.hub_stand_in import Repository, StandInHub


@pytest.mark.parametrize("text", ["hf:acme/tiny", "hf:/acme/tiny", "hf://acme/tiny"])
def test_a_name_is_written_in_one_form(text: str) -> None:
    """A path makes one slash of two, and a recipe's `model` is one."""
    assert recipe(f"model={text}").model == NAME
    assert str(recipe(f"model={text}@refs/pr/1").model) == "hf:acme/tiny@refs/pr/1"


@pytest.mark.parametrize("text", ["hf:", "hf:a/b/c", "hf:acme/ti ny", "hf:acme/tiny@"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write hf:ORGANISATION/NAME"):
        recipe(f"model={text!r}")


def test_a_folder_is_no_name() -> None:
    assert HubName.of("models/nano-spell-backward") is None
    assert model_folder(Path("models/none")) == Path("models/none")


def test_a_model_is_downloaded_once_without_other_forms_of_its_weights(server: StandInHub) -> None:
    folder = model_folder(NAME)
    assert {path.name for path in folder.iterdir()} == WANTED
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)
    asked = len(server.requests)
    assert model_folder(NAME) == folder
    assert server.requests[asked:] == ["GET /api/models/acme/tiny"], "which commit main is by now, and nothing else"


def test_config_json_alone_is_enough_for_a_plan_and_is_no_whole_copy(server: StandInHub) -> None:
    folder = config_folder(NAME)
    assert {path.name for path in folder.iterdir()} == {"config.json"}
    assert {path.name for path in model_folder(NAME).iterdir()} == WANTED


def test_who_starts_a_run_takes_no_weights(server: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config and tokenizer, which are no whole copy either; once the weights are here, the whole folder."""
    small = {name for name in WANTED if not name.endswith(".safetensors")}
    folder, has_weights = outline_folder(NAME)
    assert not has_weights and {path.name for path in folder.iterdir()} == small
    with monkeypatch.context() as without_network:
        offline(without_network)
        assert outline_folder(NAME) == (folder, False) and obstacle_here(NAME)
    assert outline_folder(model_folder(NAME)) == (folder, True)
    assert outline_folder(NAME) == (folder, True)


def test_a_run_is_judged_before_any_weights_are_downloaded(server: StandInHub, tmp_path: Path) -> None:
    """All that is checked on the driver's side: the model is 61 GB for some, and the driver's machine may have no GPU."""
    size = NanoModelConfig(layers=1, hidden_size=64, heads=2, key_value_heads=1, head_dim=32)
    build_nano_model(tmp_path / "nano", ["spell this 0123456789"], size)
    files = {path.name: path.read_bytes() for path in (tmp_path / "nano").iterdir()}
    server.repositories["models/acme/nano"] = Repository()
    server.repositories["models/acme/nano"].commit(files)
    config = pinned(recipe("model=hf:acme/nano", f"run_dir={tmp_path}", "rollout.reward={kind: reasoning_gym}"))[0]
    with pytest.raises(ConfigError, match=r"num_attention_heads = 2 in the model's config\.json can't be divided"):
        prepare(recipe(f"model={config.model}", "learner.tensor_parallel=4"))
    resolved, _, _ = prepare(config)
    assert resolved.model == config.model and server.sent("model.safetensors") == 0 and server.sent("tokenizer.json") == 1
    assert resolved.deadlines.start_s > 0


def test_a_run_keeps_its_commit_when_the_model_goes_on(server: StandInHub) -> None:
    repository = server.repositories["models/acme/tiny"]
    config, said = pinned(recipe())
    first = repository.commits[0][0]
    assert str(config.model) == f"hf:acme/tiny@{first}" and first in said[0]
    repository.commit({"config.json": b'{"model_type": "llama"}'})
    assert (model_folder(config.model) / "config.json").read_bytes() == FILES["config.json"]
    assert (model_folder(NAME) / "config.json").read_bytes() != FILES["config.json"]
    assert pinned(config)[0].model == config.model


def test_a_resume_takes_the_recorded_commit_and_no_other(server: StandInHub, tmp_path: Path) -> None:
    read = read_recipe(RunConfig, RECIPE, [f"model={NAME}"])
    config = pinned(with_absolute_paths(read.config))[0]
    with RunFolder.create(tmp_path / "run", "x") as folder:
        folder.write_recipe(recipe_as_kept(read, config))
        folder.write_config(config)
        commit = server.repositories["models/acme/tiny"].commit({"config.json": b"{}"})
        again = find_resume_point(folder, []).recipe.config
    assert again.model == config.model and commit not in str(again.model)


def test_offline_the_cache_is_enough_and_the_hub_is_not_asked(server: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, commit = model_folder(pinned(recipe())[0].model), server.repositories["models/acme/tiny"].commits[0][0]
    model_folder(NAME)
    asked = len(server.requests)
    offline(monkeypatch)
    assert str(pinned(recipe())[0].model) == f"hf:acme/tiny@{commit}"
    assert model_folder(NAME) == folder and not obstacle_here(NAME)
    assert len(server.requests) == asked


def test_a_hub_that_is_away_is_no_obstacle_to_what_is_in_the_cache(server: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    config = pinned(recipe())[0]
    folder = model_folder(config.model)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert model_folder(config.model) == folder
    with pytest.raises(DataError, match=r"hf:acme/other: not complete in the cache, .*cache, and http://127.0.0.1:9.* set model to"):
        model_folder(Path("hf:acme/other"))
    assert not obstacle_here(config.model) and "http://127.0.0.1:9 can't be reached" in obstacle_here(Path("hf:acme/other"))


def test_a_download_that_breaks_goes_on_where_it_was(server: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come in whole parts is on the disk and not asked for again: of files of a model parts of 10 MiB, here of 1,000 bytes."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    server.break_after = 20_500  # either of the two large files is longer
    folder = model_folder(NAME)
    broken = [name for name, asked in server.ranges.items() if len(asked) > 1]
    assert server.break_after is None and len(broken) == 1, "it did break"
    assert server.ranges[broken[0]] == ["", "bytes=20000-"]
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)


def test_of_a_download_that_ended_half_way_the_whole_files_stay(server: StandInHub) -> None:
    model_folder(NAME)
    (gone,) = [path for path in model_folder(NAME).iterdir() if path.name == "model-00002-of-00002.safetensors"]
    gone.resolve().unlink()
    gone.unlink()
    model_folder(NAME)
    assert (server.sent("model-00001-of-00002.safetensors"), server.sent("model-00002-of-00002.safetensors")) == (1, 2)


def test_two_processes_of_a_machine_download_once(server: StandInHub, tmp_path: Path) -> None:
    """As a user has it: the environment names hub and cache, and both start at the same time."""
    cache = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    program = "import sys, pathlib; from evenkeel.actors.cluster.hub import model_folder; print(model_folder(pathlib.Path(sys.argv[1])))"
    both = [
        subprocess.Popen([sys.executable, "-c", program, str(NAME)], env=os.environ | cache, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=120)[0].strip() for process in both}
    assert len(folders) == 1 and Path(folders.pop()).is_relative_to(tmp_path / "home")
    assert {name: server.sent(name) for name in WANTED} == dict.fromkeys(WANTED, 1)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("hf:acme/none", "has no such model, or it is private"),
        ("hf:acme/tiny@no-such-branch", "it has no revision no-such-branch"),
        ("hf:acme/gated", "its owner asks for an agreement. Accept it at http://127.0.0.1"),
    ],
)
def test_what_the_hub_refuses_is_said_in_a_sentence(server: StandInHub, model: str, said: str) -> None:
    server.repositories["models/acme/gated"] = Repository(is_gated=True)
    server.repositories["models/acme/gated"].commit(FILES)
    with pytest.raises(DataError, match=said):
        model_folder(Path(model))


def test_offline_without_a_copy_is_said(server: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    config_folder(NAME)
    (model_folder(NAME) / "tokenizer.json").unlink()
    offline(monkeypatch)
    for model in ("hf:acme/never-seen", str(NAME)):  # the second lacks a file
        with pytest.raises(DataError, match=r"not complete in the cache, .* offline mode is on \(HF_HUB_OFFLINE\). Run `hf download acme/"):
            model_folder(Path(model))
    assert re.fullmatch(r"not complete in the cache, .*, and offline mode is on \(HF_HUB_OFFLINE\)", obstacle_here(NAME))
    with pytest.raises(DataError, match="offline mode is on"):
        pinned(recipe("model=hf:acme/never-seen"))


def test_too_little_space_is_said_before_anything_is_downloaded(server: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sum(len(FILES[name]) for name in WANTED)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=needed, used=0, free=needed - 1))
    with pytest.raises(DataError, match=r"0.000128 GB have still to be downloaded, but .*cache has 0.000128 GB free. Make room"):
        model_folder(NAME)
    assert obstacle_here(NAME).startswith("0.000128 GB have still to be downloaded, but "), "a node says so before a run starts"
    assert sum(server.sent(name) for name in WANTED) == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=needed, used=0, free=needed))
    model_folder(NAME)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("hf:acme/none", r"http://127\.0\.0\.1:\d+ has no such model, or it is private"),
        ("hf:acme/tiny@no-such-branch", "it has no revision no-such-branch"),
        ("hf:acme/gated", "its owner asks for an agreement"),
    ],
)
def test_a_node_says_what_the_hub_refused_and_not_that_it_is_away(server: StandInHub, model: str, said: str) -> None:
    """Doctor names the model, the node and a remedy round it."""
    server.repositories["models/acme/gated"] = Repository(is_gated=True)
    server.repositories["models/acme/gated"].commit(FILES)
    assert re.fullmatch(said, obstacle_here(Path(model)))


def test_a_model_of_the_hub_is_not_made(server: StandInHub) -> None:
    done = CliRunner().invoke(app, ["init-model", str(RECIPE), f"model={NAME}"])
    assert isinstance(done.exception, ConfigError) and "a model of the hub" in str(done.exception)
