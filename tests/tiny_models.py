"""Hugging Face folders small enough for a test: random weights, real configurations, and a tokenizer where one is wanted."""

from __future__ import annotations

import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CLASSES = {
    "qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral", "olmo2": "Olmo2", "glm4": "Glm4",
    "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "olmoe": "Olmoe",
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
}


def save_tiny_model(folder: Path, family: str = "qwen3", *, tie: bool = True, seed: int = 0, **shape: Any) -> Path:
    """The folder, with the weights of a two-layer model and the vocabulary of `save_tiny_tokenizer`.

    Matrices have a standard deviation of 0.15, so that distributions are far from uniform; norms and biases get values that matter, too.
    Args:
        shape: over the configuration that stands here.
    """
    import torch

    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tie,
        "rms_norm_eps": 1e-6,
        "bos_token_id": SPECIAL_TOKENS.index("<bos>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
        "dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files(family, json.dumps(settings | _OF_FAMILY.get(family, {}) | shape), seed).items():
        (folder / name).write_bytes(content)
    torch.manual_seed(seed)  # what a test draws next is the same, whoever was the first to make such a model
    return folder


@lru_cache(maxsize=32)
def _files(family: str, settings: str, seed: int) -> dict[str, bytes]:
    """A model's files by name. Many tests want the same one, and transformers takes a tenth of a second to make it.

    Args: settings: of its configuration, as JSON.
    """
    import torch
    import transformers

    config = getattr(transformers, f"{_CLASSES[family]}Config")(**json.loads(settings))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{_CLASSES[family]}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15).add_(1.0 if parameter.ndim == 1 else 0.0)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def save_tiny_tokenizer(folder: Path) -> Path:
    """Byte-level BPE of 512 tokens, learnt from sums, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [f"{a} + {b} = {a + b}" for a in range(60) for b in range(60)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder
