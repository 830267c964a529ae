"""Which models of the learner's table an engine can be cut over ranks for, and what is read of a folder for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evenkeel.correction.errors import ConfigError
from evenkeel.engines.contract import DENSE_FAMILIES
from evenkeel.learner.hf.families import FAMILIES
from evenkeel.rollout.engine.engine import _read_model_config
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.engine_settings.engine_ranks import obstacles
from tests.tiny_models import save_tiny_model

OVER_ALL_HEADS = {kind for kind, family in FAMILIES.items() if family.qk_norm == "all_heads"}


def refused(ranks: int, key_heads: int) -> dict[str, tuple[str, str]]:
    model: dict[str, Any] = {"heads": 8, "key_heads": key_heads, "widths": [512], "experts": 8}
    engine = EngineConfig(device="cuda", tensor_parallel=ranks)
    found = {kind: list(obstacles(engine, model_type=kind, **model)) for kind in FAMILIES}
    return {kind: why[0] for kind, why in found.items() if why}


def test_norms_over_all_heads_want_all_heads() -> None:
    """SGLang's OLMoE normalises a rank's own part alone; its OLMo 2 gathers the heads, and would have those twice that two ranks hold."""
    assert {"olmo2", "olmoe"} == OVER_ALL_HEADS
    assert refused(1, key_heads=2) == {}
    assert refused(2, key_heads=8).keys() == refused(2, key_heads=2).keys() == {"olmoe"}
    of_four = refused(4, key_heads=2)
    assert of_four.keys() == OVER_ALL_HEADS
    assert "olmo2 normalises keys over all 2 key-value heads" in of_four["olmo2"][0] and "divisor" in of_four["olmo2"][1]
    assert of_four["olmoe"][1] == "Set it to 1"


WITHOUT_KEY_HEADS = {"model_type": "gpt_neox", "num_attention_heads": 8, "hidden_size": 64, "intermediate_size": 512}
"""Of a model whose config knows no key-value heads."""


def save(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_engine_is_told_of_experts_of_every_family(tmp_path: Path, kind: str) -> None:
    """Mixtral's config calls their number otherwise."""
    folder = save_tiny_model(tmp_path, kind, tie=False)
    _, _, has_experts, _ = _read_model_config(folder, EngineConfig(device="cuda"))
    assert has_experts == (FAMILIES[kind].experts is not None)


def test_the_families_without_experts_are_those_of_the_learner_s_table() -> None:
    assert set(DENSE_FAMILIES) == {kind for kind, family in FAMILIES.items() if family.experts is None}


@pytest.mark.parametrize("left_over", [{"num_experts": 6}, {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 6}])
def test_a_dense_model_with_left_over_experts_is_dense(tmp_path: Path, left_over: dict[str, Any]) -> None:
    """As for the learner. So its head may be tied, and widths that no layer has don't stand in the way of four ranks."""
    folder = save_tiny_model(tmp_path / "m", "qwen3", tie=True, num_key_value_heads=4)
    save(folder, json.loads((folder / "config.json").read_text()) | left_over)
    assert _read_model_config(folder, EngineConfig(device="cuda", tensor_parallel=4)) == (512, 1024, False, None)
    with pytest.raises(ConfigError, match="expert_parallel = 2: qwen3 has no experts"):
        _read_model_config(folder, EngineConfig(device="cuda", tensor_parallel=2, expert_parallel=2))


def test_a_config_without_key_value_heads_has_as_many_as_heads(tmp_path: Path) -> None:
    folder = save(tmp_path, WITHOUT_KEY_HEADS | {"vocab_size": 100, "max_position_embeddings": 128})
    for ranks in (1, 8):
        assert _read_model_config(folder, EngineConfig(device="cuda", tensor_parallel=ranks))[:2] == (100, 128)
    with pytest.raises(ConfigError, match=r"= 16 doesn't divide the model's 8 heads\. Set it to a common divisor, or to 1"):
        _read_model_config(folder, EngineConfig(device="cuda", tensor_parallel=16))
