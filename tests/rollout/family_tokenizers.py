"""Small tokenizers of the families that are trained here: their own special tokens, the shape of their published chat templates, and the
end tokens that their published configs name. The vocabularies are bytes and single characters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

_GENERATION = "{% if add_generation_prompt %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + _GENERATION
    + "<|im_start|>assistant\n{% endif %}"
)
_QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\n"
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n{% endif %}" + CHATML
)
_QWEN3 = (
    "{% for m in messages %}{% set content = m.content or '' %}"
    "{% if m.role == 'assistant' %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ content.strip('\n') }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endif %}{% endfor %}"
    + _GENERATION
    + "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_LLAMA2 = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    + _GENERATION
    + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
_TULU = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content + eos_token }}"
    "{% if not loop.last %}\n{% endif %}{% else %}<|{{ m.role }}|>\n{{ m.content + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}<|assistant|>\n{% endif %}{% endfor %}"
)
_GLM4 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}" + _GENERATION + "<|assistant|>{% endif %}"
)
_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}" + _GENERATION + "<｜Assistant｜><think>\n{% endif %}"
)
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA3_TOKENS = tuple(
    f"<|{name}|>" for name in ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag")
)


@dataclass(frozen=True)
class Family:
    """A published model's tokenizer and configs."""

    model_type: str
    """That of its config.json, a key of learner.hf.families.FAMILIES."""
    special: Sequence[str]
    """Its special tokens, by id from 0."""
    eos: str
    """The tokenizer's eos_token."""
    template: str
    """Jinja."""
    ends: Sequence[str]
    """What ends its answers, by id."""
    of_turn: str
    """What ends a turn."""
    bos: str | None = None
    """The tokenizer's bos_token."""
    config: Sequence[str] = ()
    """eos_token_id of config.json; empty: as eos."""
    generation: Sequence[str] = ()
    """The same of generation_config.json; empty: as config.json's."""
    added: Sequence[str] = ()
    """Added tokens that aren't special."""
    like_sentencepiece: bool = False
    """Blanks are marked and put before the text, as Llama 2 and Mistral do it; otherwise bytes, as GPT-2 does."""

    def save(self, folder: Path) -> Path:
        """The folder: tokenizer and configs, no weights."""
        tokenizer = self.tokenizer()
        tokenizer.save_pretrained(folder)
        ids = {token: number for number, token in enumerate(self.special)}
        for name, ends in {"config": self.config, "generation_config": self.generation or self.config}.items():
            content = {"model_type": self.model_type, "eos_token_id": [ids[end] for end in ends or (self.eos,)]}
            (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    def tokenizer(self) -> Any:
        """Of transformers."""
        from transformers import PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if not self.like_sentencepiece else ["▁", *map(chr, range(33, 127)), "\n"]
        pairs = [("a", "b"), ("1", "2"), ("o", "r"), ("▁" if self.like_sentencepiece else "Ġ", "a"), ("<", "|"), ("<", "/")]
        words = [*self.special, *self.added, *alphabet, *(a + b for a, b in pairs)]
        inner = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, pairs, unk_token=None))
        if self.like_sentencepiece:
            inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        else:
            inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in self.special])
        inner.add_tokens([AddedToken(token, normalized=False) for token in self.added])
        fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=self.eos, bos_token=self.bos)
        fast.chat_template = self.template
        return fast


FAMILIES = {
    "Qwen3": Family(
        "qwen3", _QWEN_TOKENS, "<|im_end|>", _QWEN3, _QWEN_TOKENS[::2], "<|im_end|>",
        generation=("<|im_end|>", "<|endoftext|>"), added=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "Qwen3-MoE": Family(
        "qwen3_moe", _QWEN_TOKENS, "<|im_end|>", _QWEN3, _QWEN_TOKENS[::2], "<|im_end|>", generation=("<|im_end|>", "<|endoftext|>"),
    ),
    "Qwen2.5, a base model": Family("qwen2", _QWEN_TOKENS, "<|endoftext|>", _QWEN25, _QWEN_TOKENS[::2], "<|im_end|>"),
    "Qwen2.5-Instruct": Family(
        "qwen2", _QWEN_TOKENS, "<|im_end|>", _QWEN25, _QWEN_TOKENS[::2], "<|im_end|>", generation=("<|im_end|>", "<|endoftext|>"),
    ),
    "R1's distilled Qwen": Family(
        "qwen2", ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>"), "<｜end▁of▁sentence｜>", _R1,
        ("<｜end▁of▁sentence｜>",), "<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>", added=("<think>", "</think>"),
    ),
    "Llama 2": Family("llama", ("<unk>", "<s>", "</s>"), "</s>", _LLAMA2, ("</s>",), "</s>", bos="<s>", like_sentencepiece=True),
    "Llama 3": Family(
        "llama", _LLAMA3_TOKENS, "<|eot_id|>", _LLAMA3, ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "<|eot_id|>",
        bos="<|begin_of_text|>", config=("<|end_of_text|>",),
    ),
    "Mistral": Family(
        "mistral", ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), "</s>", _MISTRAL, ("</s>",), "</s>", bos="<s>", like_sentencepiece=True,
    ),
    "Mixtral": Family("mixtral", ("<unk>", "<s>", "</s>"), "</s>", _MISTRAL, ("</s>",), "</s>", bos="<s>", like_sentencepiece=True),
    "OLMo 2": Family(
        "olmo2", ("<|endoftext|>", "<|pad|>"), "<|endoftext|>", _TULU, ("<|endoftext|>",), "<|endoftext|>", bos="<|endoftext|>",
    ),
    "OLMoE": Family("olmoe", ("<|endoftext|>", "<|padding|>"), "<|endoftext|>", _TULU, ("<|endoftext|>",), "<|endoftext|>",
                    bos="<|endoftext|>", added=("  ", "    ")),
    "GLM-4": Family(
        "glm4", ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"), "<|endoftext|>", _GLM4,
        ("<|endoftext|>", "<|user|>", "<|observation|>"), "<|user|>",
    ),
}  # fmt: skip
"""By a name for people."""
