"""config.json of models that everybody has, as numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
QWEN3_06B = _QWEN3 | {
    "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_8B = _QWEN3 | {
    "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12_288,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B_A3B = _QWEN3 | {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_31_8B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128_256, "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14_336, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
}  # fmt: skip
QWEN25_7B: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 152_064, "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18_944, "max_position_embeddings": 32_768, "tie_word_embeddings": False,
}  # fmt: skip


def save_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
