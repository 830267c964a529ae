"""The tokens that end an answer, and who names them: tokenizer, chat template, config.json, generation_config.json.

An engine by itself knows those of the two configs alone. Many chat models have others: fine-tuned from a base model whose configs they
keep, or with a template that ends a turn with a token of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIGS = ("config.json", "generation_config.json")
"""Files of a model's folder that name end tokens, and all that an engine reads of them."""
_TOKENIZER, _TEMPLATE = "tokenizer's eos_token", "chat template"
_MESSAGE_ENDS = ("<|eom_id|>",)
"""Llama's end of a message that calls a tool: templates show it with their own tools alone."""
_TEXTS = ("evenkeel-question", "evenkeel-answer", "evenkeel-next")


@dataclass(frozen=True, slots=True)
class AnswerEnds:
    """What ends an answer; the same for evaluations, filters, training, the overlong rule and demonstrations."""

    sources: Mapping[int, tuple[str, ...]]
    """By token id, who names it."""
    of_turn: int | None
    """The token with which a turn of the model ends, and a demonstration; None: nobody names one."""

    @classmethod
    def of(
        cls, tokenizer: Any, render: Callable[[list[dict[str, str]]], str] | None, configured: Mapping[str, Sequence[int]]
    ) -> AnswerEnds:
        """
        Args:
            tokenizer: of transformers.
            render: the chat template's text of some turns; None: prompts are made without one.
            configured: what each of CONFIGS names.
        """
        sources: dict[int, list[str]] = {}
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        ids = {str(token): number for number, token in added.items()}
        of_template = [] if render is None else list(_ends_of_turns(render, ids, tokenizer))
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        of_messages = [ids[name] for name in _MESSAGE_ENDS if name in ids]
        for name, tokens in {_TEMPLATE: of_template, _TOKENIZER: own, "vocabulary": of_messages, **configured}.items():
            for token in tokens:
                sources.setdefault(token, []).append(name)
        return cls({token: tuple(names) for token, names in sorted(sources.items())}, next(iter([*of_template, *own, *sources]), None))

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(self.sources)

    @property
    def unknown_to_configs(self) -> dict[int, tuple[str, ...]]:
        """Those of which the engine by itself would know nothing."""
        return {token: names for token, names in self.sources.items() if not set(names) & set(CONFIGS)}

    def without(self, response_ids: Sequence[int]) -> Sequence[int]:
        """An answer without the token that ended it, if one did: what its text is made of. All other tokens were said."""
        return response_ids[:-1] if len(response_ids) and response_ids[-1] in self.sources else response_ids


def configured_ends(folder: Path) -> dict[str, tuple[int, ...]]:
    """The end tokens that each of CONFIGS in a model's folder names; a file that can't be read names none, which others complain of."""
    return {name: tuple(dict.fromkeys(_named(folder / name))) for name in CONFIGS}


def _named(path: Path) -> Iterator[int]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    parts = [content, content.get("text_config")] if isinstance(content, dict) else []
    for part in parts:
        named = part.get("eos_token_id") if isinstance(part, dict) else None
        yield from (token for token in (named if isinstance(named, list) else [named]) if type(token) is int and token >= 0)


def _ends_of_turns(render: Callable[[list[dict[str, str]]], str], ids: Mapping[str, int], tokenizer: Any) -> Iterator[int]:
    """The token that a template puts after an answer; where it puts none, those that begin a user's or a tool's turn after it, which is
    what the model then says itself."""
    question, answer, following = _TEXTS
    asked = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for role in (None, "user", "tool"):
        try:
            text = render([*asked, {"role": role, "content": following}] if role else asked)
        except Exception:  # a template may refuse tools, or any turns
            continue
        after = text.rpartition(answer)[2].partition(following)[0] if answer in text else ""
        places = [(after.find(name), -len(name), token) for name, token in ids.items() if name.strip() and name in after]
        if places and ((token := min(places)[2]) != tokenizer.bos_token_id or token == tokenizer.eos_token_id):
            yield token
            if role is None:
                return
