"""Whether a model folder has a tokenizer that a task can use, for most of those that have, without importing transformers for seconds.

If the answer here isn't yes, the caller has transformers read it (chat.py), which alone says no, and why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollout.config import TaskConfig

_CLASSES = {
    *("TokenizersBackend", "PreTrainedTokenizerFast"),
    *("Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast", "GPTNeoXTokenizer", "GPTNeoXTokenizerFast"),
}
"""That transformers makes of tokenizer.json alone, if that holds a BPE."""
_SPECIAL_CASES = ("mistral", "mixtral")
"""Of these families transformers may take another file, or mends the tokenizer by the versions of the folder."""
_VERSION = re.compile(r"\d+(\.\d+)*(\.dev\d*)?")
_FLAGS = {"single_word", "lstrip", "rstrip", "normalized", "special"}
"""Of an added token."""


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_text(value: Any) -> bool:
    return type(value) is str


def _are_texts(value: Any) -> bool:
    return type(value) is list and all(map(_is_text, value))


def _is_added(value: Any) -> bool:
    """A token with its flags."""
    if type(value) is not dict or not _is_text(value.get("content")):
        return False
    return all(name == "content" or (name in _FLAGS and _is_bool(flag)) for name, flag in value.items())


def _is_token(value: Any) -> bool:
    if type(value) is dict and value.get("__type") == "AddedToken":
        return _is_added({name: one for name, one in value.items() if name != "__type"})
    return value is None or _is_text(value)


_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_FORMS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_TOKENS, _is_token),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces", "split_special_tokens", "is_local"), _is_bool),
    "add_prefix_space": lambda value: value is None or _is_bool(value),
    "chat_template": _is_text,
    "tokenizer_class": lambda value: _is_text(value) and value in _CLASSES,
    "backend": lambda value: value == "tokenizers",
    "errors": lambda value: value == "replace",
    "padding_side": lambda value: value in ("left", "right"),
    "model_max_length": lambda value: type(value) in (int, float),
    "model_input_names": _are_texts,
    **dict.fromkeys(("additional_special_tokens", "extra_special_tokens"), _are_texts),
    "added_tokens_decoder": lambda value: type(value) is dict and all(key.isdecimal() and _is_added(one) for key, one in value.items()),
}
"""What an option of tokenizer_config.json has to be like; a file with any other is not plain."""
_LEGACY_FORMS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_TOKENS, lambda value: _is_text(value) or _is_added(value)),
    "additional_special_tokens": _are_texts,
}
"""The same of special_tokens_map.json."""


def is_plainly_usable(folder: Path, task: TaskConfig) -> bool:
    """True only where `load_tokenizer` and `ChatEncoder.for_task` have nothing to say of the folder.

    Args: folder: with a config.json that is plainly trainable (learner/hf/plain_config.py).
    """
    model, options = _object(folder / "config.json"), _object(folder / "tokenizer_config.json")
    if model is None or options is None or "tokenizer_class" not in options or not _all_like(_FORMS, options):
        return False
    if model.get("model_type") in _SPECIAL_CASES or not _VERSION.fullmatch(str(model.get("transformers_version", 0))):
        return False
    legacy = _object(folder / "special_tokens_map.json", otherwise={})
    added = _object(folder / "added_tokens.json", otherwise={})
    if legacy is None or not _all_like(_LEGACY_FORMS, legacy) or added is None or not all(type(place) is int for place in added.values()):
        return False
    ends = [_text_of(each["eos_token"]) for each in (options, legacy) if "eos_token" in each]
    template = _template(folder, options)  # an unreadable one is in the way also of a task that does without
    has_template = template is not None and (template != "" or not task.apply_chat_template)
    return has_template and "eos_token" in options and _are_known(folder, ends)


def _all_like(forms: Mapping[str, Callable[[Any], bool]], options: Mapping[str, Any]) -> bool:
    return all(name in forms and forms[name](value) for name, value in options.items())


def _object(path: Path, *, otherwise: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """A file that holds one JSON object; None if it holds none. Args: otherwise: if there is no such file."""
    if not path.exists():
        return otherwise
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _text_of(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token or "")


def _template(folder: Path, options: Mapping[str, Any]) -> str | None:
    """The chat template; empty if there is none, None if it can't be told."""
    if (folder / "additional_chat_templates").exists():
        return None
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8") if path.exists() else str(options.get("chat_template", ""))
    except (OSError, ValueError):
        return None


def _are_known(folder: Path, tokens: list[str]) -> bool:
    """Whether tokenizer.json holds a BPE that has all these tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(text)
    except Exception:  # what it raises is no kind of its own
        return False
    if '"added_tokens"' not in text or not isinstance(tokenizer.model, BPE):
        return False
    return all(tokenizer.token_to_id(token) is not None for token in tokens)
