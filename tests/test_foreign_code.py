"""Code in a model folder is never run, whatever its config.json says, and nobody at a terminal is asked whether it may."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenkeel.correction.errors import DataError
from evenkeel.learner.hf.folder import read_config, side_files
from evenkeel.rollout.engine.engine import _read_model_config
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.tasks.chat import load_tokenizer
from tests.tiny_models import save_tiny_tokenizer

CODE = """
from pathlib import Path
Path("WAS_RUN").touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class OwnConfig(PretrainedConfig):
    model_type = "of_nobody"
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a config and a tokenizer that name classes of its own."""
    made = save_tiny_tokenizer(tmp_path)
    (made / "own.py").write_text(CODE.replace("WAS_RUN", str(made / "was_run")))
    (made / "config.json").write_text(json.dumps({"model_type": "of_nobody", "auto_map": {"AutoConfig": "own.OwnConfig"}}))
    settings = json.loads((made / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


@pytest.mark.parametrize(
    "load",
    [read_config, load_tokenizer, lambda folder: _read_model_config(folder, EngineConfig(device="cpu"))],
    ids=["learner", "tokenizer", "engine"],
)
def test_no_code_of_a_model_folder_is_run(folder: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[Path], Any]) -> None:
    """A user who would answer "y" included."""
    asked = list[str]()
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "y")
    with pytest.raises((DataError, ValueError), match=r"custom code|trust_remote_code"):
        load(folder)
    assert asked == [] and not (folder / "was_run").exists()


def test_a_run_and_its_checkpoints_take_no_code_along(folder: Path) -> None:
    kept = side_files(folder)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= kept.keys() and "own.py" not in kept
