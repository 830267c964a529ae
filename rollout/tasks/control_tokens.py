"""Control tokens come from the chat template alone: where a turn's text spells one, it stays text, and no question can forge a turn.

Most texts spell none, and are encoded as transformers does it. For others the tokenizer gets a second name for each control token: the
template's are written by that name, and the text's own are encoded as any other text, with all that is round them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from correction.errors import DataError

_NAME, _SPELT, _END = "\ufdd0", "\ufdd1", "\ufdd2"
"""Begin a second name, and what stands in place of a text's own control token; end of both. They are no characters."""


class ControlTokens:
    """Of one tokenizer: its special tokens, and what ends an answer."""

    def __init__(self, tokenizer: Any, ends: Sequence[int]) -> None:
        """Args: tokenizer: of transformers. ends: see AnswerEnds.ids."""
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        self._tokenizer, self._ends = tokenizer, ends
        # A letter or a word that is declared special is no control token: questions have it all the time.
        special = {number: token for number, token in added.items() if token.special and not str(token).isalnum()}
        special |= {number: added[number] for number in ends if number in added}
        self._tokens = {str(token): (number, token) for number, token in special.items()}
        self._texts = sorted(filter(None, self._tokens), key=len, reverse=True)  # of two that begin alike, the longer one is meant
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or "(?!)")

    def quoted(self, part: Any) -> tuple[Any, bool]:
        """Turns, or a part of them, with what spells a control token replaced; and whether there was any.

        Raises: DataError for a text that can't be told apart then.
        """
        found = False

        def spelt(match: re.Match[str]) -> str:
            nonlocal found
            found = True
            return f"{_SPELT}{self._texts.index(match[0])}{_END}"

        def quote(text: str) -> str:
            whole = self._pattern.sub(spelt, text)
            if found and any(mark in text for mark in (_NAME, _SPELT, _END)):
                raise DataError("it spells a control token of the model, and holds U+FDD0 to U+FDD2, which are no characters")
            return whole

        return _mapped(quote, part), found

    def ids(self, rendered: str) -> tuple[int, ...]:
        """Ids of the template's text of turns from `quoted`.

        Raises: DataError if the tokenizer has no way to keep what is spelt apart.
        """
        written: set[int] = set()
        names = 0

        def named(match: re.Match[str]) -> str:
            nonlocal names
            names += 1
            written.add(self._tokens[match[0]][0])
            return f"{_NAME}{self._texts.index(match[0])}{_END}"

        text = self._pattern.sub(named, rendered)
        text = re.sub(f"{_SPELT}(\\d+){_END}", lambda match: self._texts[int(match[1])], text)
        tokenizer, numbers = self._with_names
        found = tokenizer.encode(text, add_special_tokens=False).ids
        is_forged = bool({*written, *self._ends} & set(found))  # by merges of ordinary tokens
        if is_forged or sum(token in numbers for token in found) != names:
            raise DataError("it spells a control token of the model, which the model's tokenizer can't read as text")
        return tuple(numbers.get(token, token) for token in found)

    @cached_property
    def _with_names(self) -> tuple[Any, dict[int, int]]:
        """A tokenizer that knows control tokens by their second names alone; and whose they are: id -> id."""
        from tokenizers import AddedToken, Tokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise DataError("it spells a control token of the model, and only tokenizers with a tokenizer.json can read that as text")
        copy = Tokenizer.from_str(backend.to_str())
        copy.no_truncation()
        copy.no_padding()
        copy.add_special_tokens([token for _, token in self._tokens.values()])
        copy.encode_special_tokens = True
        numbers = {}
        for place, text in enumerate(self._texts):
            number, token = self._tokens[text]
            flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            name = f"{_NAME}{place}{_END}"
            copy.add_tokens([AddedToken(name, special=False, **flags)])
            numbers[copy.token_to_id(name)] = number
        return copy, numbers


def _mapped(change: Callable[[str], str], part: Any) -> Any:
    """All texts within a value of JSON changed, names of fields aside."""
    match part:
        case str():
            return change(part)
        case Mapping():
            return {name: _mapped(change, value) for name, value in part.items()}
        case list() | tuple():
            return [_mapped(change, value) for value in part]
        case _:
            return part
