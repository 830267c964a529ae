"""Where a config.json passes without transformers, it passes with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenkeel.learner.hf.folder import check_trainable, expected_shapes
from evenkeel.learner.hf.plain_config import _FORMS, is_plainly_trainable, plain_sizes
from tests.actors.known_models import LLAMA_31_8B, QWEN3_8B, QWEN3_30B_A3B, QWEN25_7B

_EXPERTS = {"num_experts_per_tok": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3_8B,
    "qwen3_moe": QWEN3_30B_A3B,
    "qwen2": QWEN25_7B,
    "llama": LLAMA_31_8B,
    "mistral": LLAMA_31_8B | {"model_type": "mistral", "sliding_window": None},
    "olmo2": LLAMA_31_8B | {"model_type": "olmo2"},
    "glm4": LLAMA_31_8B
    | {"model_type": "glm4", "attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "eos_token_id": [151_329, 151_336]},
    "mixtral": LLAMA_31_8B | _EXPERTS | {"model_type": "mixtral", "num_local_experts": 16, "router_jitter_noise": 0.0},
    "olmoe": LLAMA_31_8B
    | _EXPERTS
    | {"model_type": "olmoe", "num_experts": 64, "num_key_value_heads": 32, "clip_qkv": None, "rms_norm_eps": 1e-5},
}
OF_THE_HUB = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151_643,
    "eos_token_id": 151_645, "hidden_act": "silu", "initializer_range": 0.02, "max_window_layers": 36, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1_000_000, "sliding_window": None, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False,
}  # fmt: skip
"""What the hub's files of Qwen3 say apart from the sizes."""
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}
VALUES = [None, True, False, 0, 1, 3, -1, 4096, 0.5, 1.0, 2.0, float("inf"), "", "gelu", "float64", "bfloat16", [], ["x"], {}, YARN]
VALUES += [{"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "x"}, {"rope_theta": "x"}, ["full_attention"] * 36]
VALUES += [["full_attention"] * 2]


def changed(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One option taken away, or one with a value that may not be its own."""
    yield config
    yield OF_THE_HUB | config
    yield from ({key: value for key, value in config.items() if key != gone} for gone in config)
    yield from (config | {name: value} for name in _FORMS for value in VALUES)


@pytest.mark.parametrize("kind", MODELS)
def test_what_passes_passes_transformers_too(tmp_path: Path, kind: str) -> None:
    """A refusal would be an error here. Sizes of tensors are transformers', too. Of two layers, and of few experts: all are alike."""
    model = MODELS[kind] | {"num_hidden_layers": 2}
    model |= {name: 8 for name in ("num_experts", "num_local_experts") if name in model}
    passed = [one for one in changed(model) if is_plainly_trainable(one)]
    for one in passed:
        (tmp_path / "config.json").write_text(json.dumps(one))
        of_transformers = check_trainable(tmp_path, has_weights=False)
        if (sizes := plain_sizes(one)) is not None:
            sizes.num_hidden_layers = of_transformers.num_hidden_layers = 1  # all are alike, as experts are
            if hasattr(of_transformers, "num_experts"):
                assert sizes.num_experts == of_transformers.num_experts
                sizes.num_experts = of_transformers.num_experts = 2
            assert expected_shapes(sizes) == expected_shapes(of_transformers)
    assert passed[:2] == [model, OF_THE_HUB | model]
    assert len(passed) > 80, "values that are fine are among them"


@pytest.mark.parametrize(
    "options",
    [
        {"use_sliding_window": True, "sliding_window": 4096},
        {"rope_scaling": YARN},
        {"rope_parameters": YARN},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention"] * 35 + ["sliding_attention"]},
        {"num_attention_heads": 0},
        {"hidden_size": "4096"},
        {"model_type": "gemma3_text"},
        {"model_type": "mistral"},
        {"model_type": "glm4"},
        {"quantization_config": {"quant_method": "fp8"}},
        {"an_option_of_tomorrow": True},
    ],
)
def test_what_may_be_in_the_way_is_for_transformers_to_say(options: dict[str, Any]) -> None:
    assert not is_plainly_trainable(QWEN3_8B | options)


@pytest.mark.parametrize("kind", MODELS)
def test_sizes_that_the_file_leaves_to_transformers_are_for_transformers_to_say(kind: str) -> None:
    config = MODELS[kind]
    assert plain_sizes(config) is not None and plain_sizes(OF_THE_HUB | config) is not None
    for gone in {"tie_word_embeddings", *(["head_dim"] if kind in ("qwen3", "qwen3_moe", "glm4") else [])}:
        assert plain_sizes({key: value for key, value in config.items() if key != gone}) is None
    assert plain_sizes(config | {"num_experts": 4, "num_local_experts": 5}) is None
