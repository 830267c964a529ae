"""A Qwen3 or Qwen3-MoE model of a few million parameters with its own tokenizer: something to train where no weights can be had.

The result is a plain Hugging Face folder: config.json, safetensors, tokenizer with a chat template, generation_config.json.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from evenkeel.correction.errors import DataError
from evenkeel.correction.settings.base import Settings

if TYPE_CHECKING:  # reading settings must not cost the import of torch
    from torch import Tensor

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, as Qwen has it."""
ROLES = ("user", "assistant", "system")
"""Words of the template itself."""


class NanoModelConfig(Settings):
    """Shape of the nano model."""

    layers: int = Field(default=4, ge=1, le=1000)
    """Transformer layers."""
    hidden_size: int = Field(default=256, ge=1, le=10**5)
    """Width of the residual stream."""
    heads: int = Field(default=4, ge=1, le=10**4)
    """Query heads."""
    key_value_heads: int = Field(default=2, ge=1, le=10**4)
    """Key-value heads; must divide heads."""
    head_dim: int = Field(default=64, ge=2, le=10**4)
    """Channels of a head, even."""
    intermediate_size: int = Field(default=768, ge=1, le=10**6)
    """Width of the gated feed-forward layer, or of each expert."""
    experts: int = Field(default=0, ge=0, le=10**4)
    """Experts in each layer, a Qwen3-MoE model then; 0: none, a dense Qwen3."""
    experts_per_token: int = Field(default=2, ge=1)
    """Experts that a token is sent to."""
    max_position_embeddings: int = Field(default=512, ge=2, le=10**8)
    """Longest sequence, prompt and answer."""
    max_vocab_size: int = Field(default=512, ge=260, le=10**7)
    """Most tokens of the tokenizer: 256 bytes, 3 special tokens, and the most common words of the given texts."""
    word_share: float = Field(default=0.5, gt=0, le=1)
    """A word is a token of its own if it occurs in at least this share of the texts. Words that all questions share become tokens; what
    varies stays letters and digits, which a nano model can compute with."""
    lowercase: bool = False
    """Read capitals as small letters: half the letters to learn, for tasks where case doesn't count. Text no longer round-trips then."""
    tie_word_embeddings: bool = True
    """One matrix for input embedding and output projection."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position embedding."""
    init_std: float = Field(default=0.02, gt=0, le=10.0)
    """Standard deviation of the initial matrices."""
    seed: int = 0
    """Seed of the initial weights."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.heads % self.key_value_heads:
            raise ValueError(f"key_value_heads = {self.key_value_heads} must divide heads = {self.heads}")
        if 0 < self.experts <= self.experts_per_token:
            raise ValueError(f"experts_per_token = {self.experts_per_token} must be less than experts = {self.experts}: nothing to route")
        if self.experts and self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings = true with experts: SGLang's Qwen3-MoE has a head of its own. Set it to false")
        return self


def build_nano_model(folder: str | os.PathLike[str], texts: Iterable[str], config: NanoModelConfig | None = None) -> int:
    """Write the folder.

    Args:
        texts: what the tokenizer takes its words from: questions of the task.
    Returns: the number of parameters, an embedding that is also the head counted once.
    Raises: DataError if the folder holds a model already.
    """
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM, Qwen3MoeForCausalLM

    from evenkeel.learner.hf import folder as hf_folder

    config, target = config or NanoModelConfig(), Path(folder)
    if (target / "config.json").exists():
        raise DataError(f"{target}: holds a model already; remove it or choose another folder")
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = _fast_tokenizer(train_tokenizer(list(texts), config.max_vocab_size, config.word_share, lowercase=config.lowercase), config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = (Qwen3MoeForCausalLM if config.experts else Qwen3ForCausalLM)(_hf_config(config, tokenizer))
    tokenizer.save_pretrained(target)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)
    generation = {"do_sample": True, "temperature": 1.0, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    GenerationConfig(**generation).save_pretrained(target)  # type: ignore[no-untyped-call]
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {name: weight for name, weight in _unfused(model.state_dict()) if name not in tied}
    hf_folder.write_shards(target, [weights])
    return sum(parameter.numel() for parameter in model.parameters())


def _unfused(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """transformers holds a layer's experts in one tensor, files hold them one by one."""
    for name, weight in state.items():
        base, _, leaf = name.rpartition(".")
        if not base.endswith(".experts"):
            yield name, weight
            continue
        for number, expert in enumerate(weight):
            parts = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True) if leaf == "gate_up_proj" else [(leaf, expert)]
            yield from ((f"{base}.{number}.{part}.weight", tensor.contiguous()) for part, tensor in parts)


def train_tokenizer(texts: Sequence[str], max_vocab_size: int, word_share: float = 0.5, *, lowercase: bool = False) -> Tokenizer:
    """Byte-level tokens, the words that most texts share, and the phrase with which all of them begin; any text round-trips.

    There are no merges: a word is looked up whole (ignore_merges), and otherwise falls into bytes. So letters of a word that varies
    are never glued together, and every digit is a token of its own. The common beginning ("Spell this word backward: ") is one token,
    because a nano model's time goes into tokens, and that one says it all.
    """
    pieces = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    counts = Counter(piece for text in texts for piece in {piece for piece, _ in pieces.pre_tokenize_str(text)} if len(piece) > 1)
    common = [piece for piece, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count >= word_share * len(texts)]
    words = dict.fromkeys([PAD, START, END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *ROLES, *common])
    vocabulary = {word: i for i, word in enumerate(list(words)[:max_vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, START, END])
    beginning = _common_beginning(texts)
    if len(texts) > 1 and len(beginning) > 1:
        tokenizer.add_tokens([AddedToken(beginning, normalized=False)])
    return tokenizer


def _common_beginning(texts: Sequence[str]) -> str:
    """The longest common prefix of all texts: that of the first and the last in alphabetical order."""
    first, last = min(texts, default=""), max(texts, default="")
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def _fast_tokenizer(tokenizer: Tokenizer, config: NanoModelConfig) -> Any:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _hf_config(config: NanoModelConfig, tokenizer: Any) -> Any:
    from transformers import Qwen3Config, Qwen3MoeConfig

    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "initializer_range": config.init_std,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if not config.experts:
        return Qwen3Config(**settings)
    experts: dict[str, Any] = {
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.intermediate_size,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**settings, **experts)
