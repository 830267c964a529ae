"""A model on a stand-in of the hub, and recipes that name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenkeel.actors.config import RunConfig
from evenkeel.recipe import load_config
from tests.e2e.launch import RECIPE

NAME = Path("hf:acme/tiny")
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "model-00001-of-00002.safetensors": bytes(range(256)) * 400,
    "model-00002-of-00002.safetensors": bytes(reversed(range(256))) * 100,
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": b"the same again",
    "onnx/model.safetensors": b"and again",
    "consolidated.safetensors": b"and again",
}
WANTED = {name for name in FILES if "/" not in name and not name.endswith(".bin") and not name.startswith("consolidated")}


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def recipe(*overrides: str) -> RunConfig:
    return load_config(RunConfig, RECIPE, [f"model={NAME}", *overrides])
