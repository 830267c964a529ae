"""Where a tokenizer passes without transformers, it passes with it; and what a data set of reasoning-gym asks for is read as it says it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.config import FileTask
from rollout.tasks.chat import ChatEncoder, load_tokenizer
from rollout.tasks.gym_names import plain_options
from rollout.tasks.plain_tokenizer import _CLASSES, _FORMS, _LEGACY_FORMS, is_plainly_usable
from tests.tiny_models import save_tiny_tokenizer

FAMILIES = ("qwen3", "qwen2", "llama", "olmo2", "glm4", "qwen3_moe", "olmoe")
TASK, BARE = FileTask(path=Path("rows.jsonl")), FileTask(path=Path("rows.jsonl"), apply_chat_template=False)
PLAIN = {"content": "<eos>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
VALUES = [None, True, 0, 1.5, "", "x", "<eos>", "<nowhere>", "left", [], ["<im_x>"], [PLAIN], {}, PLAIN, PLAIN | {"__type": "AddedToken"}]
VALUES += [{"content": "<eos>", "__type": "AddedToken"}, {"2": PLAIN}, {"600": PLAIN | {"content": "<new>"}}, {"2": {"content": "<eos>"}}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the hub: the template in tokenizer_config.json, added tokens there too."""
    folder = save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizers") / "whole")
    template = folder / "chat_template.jinja"
    options = json.loads((folder / "tokenizer_config.json").read_text())
    options |= {"chat_template": template.read_text(), "tokenizer_class": "Qwen2Tokenizer", "clean_up_tokenization_spaces": False}
    options |= {"added_tokens_decoder": {"2": PLAIN}, "model_max_length": 131_072, "errors": "replace", "split_special_tokens": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    template.unlink()
    return folder


def changed(whole: Path, folder: Path) -> Iterator[None]:
    """The folder, with one option after the other taken away or given another value; whole files, too."""
    options = json.loads((whole / "tokenizer_config.json").read_text())

    def write(name: str, content: Any) -> None:
        (folder / name).write_text(json.dumps(content) if not isinstance(content, str) else content)

    shutil.copytree(whole, folder)
    yield
    for kind in FAMILIES:
        write("config.json", {"model_type": kind})
        for name in sorted(_CLASSES):
            write("tokenizer_config.json", options | {"tokenizer_class": name})
            yield
    for name in (*_FORMS, "an_option_of_tomorrow"):
        write("tokenizer_config.json", {key: value for key, value in options.items() if key != name})
        yield
        for value in VALUES:
            write("tokenizer_config.json", options | {name: value})
            yield
    for added in (True, False):  # without them, transformers reads the older files
        write("tokenizer_config.json", {key: one for key, one in options.items() if added or key != "added_tokens_decoder"})
        for file, forms in (("special_tokens_map.json", _LEGACY_FORMS), ("added_tokens.json", ["<new>", "<eos>"])):
            for content in ("{", "[]", *({name: value} for name in forms for value in VALUES)):
                write(file, content)
                yield
            (folder / file).unlink()
    whole_text = (whole / "tokenizer.json").read_text()
    parts = json.loads(whole_text)
    for content in ("{", {}, *({key: value for key, value in parts.items() if key != gone} for gone in parts), {**parts, "model": {}}):
        write("tokenizer.json", content)
        yield
    write("tokenizer.json", whole_text)
    write("tokenizer_config.json", options | {"chat_template": ""})
    for content in ("", "{{ messages }}"):
        write("chat_template.jinja", content)
        yield
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    yield


@pytest.mark.filterwarnings("ignore")
def test_what_passes_passes_transformers_too(whole: Path, tmp_path: Path) -> None:
    """A refusal would be an error here."""
    passed = tried = 0
    for _ in changed(whole, tmp_path / "changed"):
        for task in (TASK, BARE):
            tried += 1
            if is_plainly_usable(tmp_path / "changed", task):
                passed += 1
                ChatEncoder.for_task(load_tokenizer(tmp_path / "changed"), task)
    assert passed > 200 and tried > 2 * passed, "values that are fine are among them, and others"


@pytest.mark.parametrize("kind", FAMILIES)
def test_folders_as_they_are_pass(whole: Path, tmp_path: Path, kind: str) -> None:
    """Such as the hub has, and such as transformers saves."""
    for number, folder in enumerate((whole, save_tiny_tokenizer(tmp_path / "saved"))):
        copy = shutil.copytree(folder, tmp_path / str(number))
        (copy / "config.json").write_text(json.dumps({"model_type": kind, "transformers_version": "4.51.0"}))
        assert is_plainly_usable(copy, TASK) and is_plainly_usable(copy, BARE)


def test_what_transformers_has_to_say_something_of_does_not_pass(whole: Path, tmp_path: Path) -> None:
    """A tokenizer that isn't in tokenizer.json, or no BPE; no template; another class; families of which it may take other files."""
    cases = [
        ("tokenizer.json", None),
        ("tokenizer_config.json", None),
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["their.Tokenizer", None]}}),
        ("tokenizer_config.json", {"eos_token": None}),
        ("tokenizer_config.json", {"eos_token": "<nowhere>"}),
        ("tokenizer_config.json", {"chat_template": ""}),
        ("config.json", {"model_type": "mistral"}),
        ("config.json", {"transformers_version": "the newest"}),
        ("tokenizer.json", {"model": {"type": "WordLevel", "vocab": {"<eos>": 0, "<|im_end|>": 1}, "unk_token": "<eos>"}}),
    ]
    for number, (name, content) in enumerate(cases):
        folder = shutil.copytree(whole, tmp_path / str(number))
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | content))
        assert not is_plainly_usable(folder, TASK), (name, content)


def test_options_of_every_data_set_are_read_as_the_package_has_them() -> None:
    """The other way, to compare with: reasoning-gym imported. In here, as each of several pytest processes reads this file."""
    import reasoning_gym  # noqa: F401 - fills the table of data sets
    from reasoning_gym.factory import DATASETS

    assert {name: set(plain_options(name)) for name in DATASETS} == {
        name: {field.name for field in dataclasses.fields(options)} for name, (_, options) in DATASETS.items()
    }
    assert plain_options("spell_backwards") == plain_options("") == frozenset()
