"""Text to token ids: the model's tokenizer and its chat template. From here on only ids travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from correction.errors import ConfigError, DataError, not_read
from rollout.config import RolloutConfig, TaskConfig
from rollout.tasks.answer_ends import CONFIGS, AnswerEnds, configured_ends
from rollout.tasks.control_tokens import ControlTokens


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a Hugging Face model folder.

    Raises: DataError if the folder or its tokenizer is missing or unusable.
    """
    folder = Path(folder)
    if not folder.is_dir():
        remedy = f"make one with `evenkeel init-model {folder}`, or download a model there"
        raise DataError(f"model = {folder}: no such folder", remedy=remedy)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")):
        raise DataError(f"model = {folder}: the folder has no tokenizer (no tokenizer.json)", remedy="copy the model's own into it")
    from transformers import AutoTokenizer  # takes seconds

    try:
        if (rules := folder / "tokenizer.json").exists():
            rules.read_bytes()  # for the disk's cache: if the disk hangs, tokenizers' own read keeps all other threads from running
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)  # unset, it asks at a terminal
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True  # `excess` says it, of the row
        return tokenizer
    except Exception as error:
        reason = " ".join(str(error).split())  # transformers' texts have several lines
        said = f"unusable tokenizer ({type(error).__name__}: {reason})"
        place = getattr(error, "filename", None) if isinstance(error, PermissionError) else None
        raise not_read(place or f"model = {folder}", error, said, remedy="copy the files afresh") from error


_CHARACTERS_PER_TOKEN = 16
"""More characters than a token has in most texts."""


@dataclass(frozen=True)
class ChatEncoder:
    """Turns the text of a user turn into the ids that the engine is given, and its answers into texts; knows what ends an answer."""

    tokenizer: Any
    """A transformers tokenizer."""
    max_prompt_tokens: int | None = None
    """Longest prompt, tokens; None: no limit."""
    limit: str = "rollout.task.max_prompt_tokens"
    """What that comes from, for people."""
    system_prompt: str | None = None
    """Text of a system turn before it."""
    apply_chat_template: bool = True
    """False: the bare text."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the chat template."""
    configured: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """End tokens that the model's config.json and generation_config.json name, as configured_ends gives them."""

    def __post_init__(self) -> None:
        if self.apply_chat_template and not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                "rollout.task.apply_chat_template = true, but the model's tokenizer has no chat template",
                remedy="set rollout.task.apply_chat_template: false, or put chat_template.jinja into the model folder",
            )
        if self.ends.of_turn is None:
            nobody = f"the model's tokenizer has no eos_token, and {' and '.join(CONFIGS)} name no eos_token_id, so no answer could end"
            raise DataError(nobody, remedy="set eos_token in tokenizer_config.json")

    @classmethod
    def of_folder(cls, folder: Path, task: TaskConfig, rollout: RolloutConfig | None = None) -> ChatEncoder:
        """As `for_task`, of a model's folder. Raises: DataError, ConfigError as load_tokenizer and for what a task can't use.

        Args: rollout: with the engines' context decided, for the longest prompt; None: the task's own limit.
        """
        longest = None if rollout is None else rollout.longest_prompt
        encoder = cls.for_task(load_tokenizer(folder), task, longest, configured_ends(folder))
        return replace(encoder, limit=rollout.prompt_limit) if rollout else encoder

    @classmethod
    def for_task(
        cls,
        tokenizer: Any,
        task: TaskConfig,
        max_prompt_tokens: int | None = None,
        configured: Mapping[str, Sequence[int]] | None = None,
    ) -> ChatEncoder:
        """The encoder that a task's settings ask for; `max_prompt_tokens` from RolloutConfig.longest_prompt."""
        return cls(
            tokenizer,
            max_prompt_tokens=max_prompt_tokens if max_prompt_tokens is not None else task.max_prompt_tokens,
            system_prompt=task.system_prompt,
            apply_chat_template=task.apply_chat_template,
            chat_template_kwargs=task.chat_template_kwargs,
            configured=configured or {},
        )

    @cached_property
    def ends(self) -> AnswerEnds:
        """The tokens that end an answer."""
        return AnswerEnds.of(self.tokenizer, self._rendered if self.apply_chat_template else None, self.configured)

    def name_of(self, token: int) -> str:
        """A token's own text, for people."""
        return str(self.tokenizer.convert_ids_to_tokens(token) or f"token {token}")

    @property
    def remark(self) -> str | None:
        """A sentence about ends that an engine by itself would pass by; None: config.json and generation_config.json name them all."""
        if not (unknown := self.ends.unknown_to_configs):
            return None
        told = " and ".join(f"{self.name_of(token)} ({', '.join(names)})" for token, names in unknown.items())
        named = [self.name_of(token) for token in self.ends.ids if token not in unknown]
        return f"answers also end at {told}: {' and '.join(CONFIGS)} name {' and '.join(named) or 'none'} alone, and engines are told"

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.tokenizer, self.ends.ids)

    def _rendered(self, turns: list[dict[str, Any]]) -> str:
        """The template's text of some turns, without the beginning of an answer."""
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, **self.chat_template_kwargs))

    def text_of(self, response_ids: Sequence[int]) -> str:
        """An answer as its scorer sees it, and people: all that the model said, other special tokens included; not the token that ended
        it."""
        said = self.ends.without(response_ids)
        return str(self.tokenizer.decode(list(said), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode(self, asked: str | Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Ids of the whole prompt, generation prompt included; see `excess` for its length.

        Args:
            asked: text of a user turn, or turns with role and content, which have a system prompt of their own if they begin with one. What
                spells a control token there is text. Without a template it is the token: the text is then the whole prompt.
        Raises: DataError for turns without a chat template, or that it refuses (a role that it doesn't know, for instance), and as
            ControlTokens.
        """
        if not self.apply_chat_template:
            if not isinstance(asked, str):
                raise DataError(f"a conversation of {len(asked)} turns needs the chat template; set rollout.task.apply_chat_template: true")
            text = asked if self.system_prompt is None else f"{self.system_prompt}\n\n{asked}"
            ids, bos = tuple(self.tokenizer.encode(text)), getattr(self.tokenizer, "bos_token_id", None)
            return ids[1:] if bos is not None and ids[:2] == (bos, bos) else ids  # its author has written the beginning, too
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else [dict(turn) for turn in asked]
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        messages, is_quoted = self._control_tokens.quoted(messages)
        try:
            found = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=not is_quoted, return_dict=False, **self.chat_template_kwargs
            )
        except (MemoryError, OSError):
            raise
        except Exception as error:  # the template is a program: jinja2's errors, and whatever its expressions raise
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            said = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            raise DataError(f"the model's chat template refuses its turns, of {roles:.200} ({said})") from error
        return self._control_tokens.ids(found) if is_quoted else tuple(found)

    def encode_demonstration(self, asked: str | Sequence[Mapping[str, Any]], answer: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(prompt ids, answer ids with the token that ends a turn): what supervised training needs.

        The two are encoded apart, as they are when the policy answers, so that no token straddles the border.
        """
        answer_ids = self.tokenizer.encode(answer, add_special_tokens=False)
        assert self.ends.of_turn is not None
        return self.encode(asked), (*answer_ids, self.ends.of_turn)

    def excess(self, asked: str | Sequence[Mapping[str, Any]]) -> str | None:
        """Why this prompt can't be asked, or None if it fits.

        Of a text that is far too long only its beginning is encoded: one of twice the tokens that fit settles it.
        Raises: DataError as `encode`.
        """
        if self.max_prompt_tokens is None:
            self.encode(asked)  # which may refuse it
            return None
        beginning = _CHARACTERS_PER_TOKEN * (self.max_prompt_tokens + 1)
        while isinstance(asked, str) and beginning < len(asked):
            if (length := len(self.encode(asked[:beginning]))) > 2 * self.max_prompt_tokens:
                return self._too_long(f"over {length}")
            beginning *= 4
        length = len(self.encode(asked))
        return None if length <= self.max_prompt_tokens else self._too_long(str(length))

    def _too_long(self, length: str) -> str:
        return f"its prompt has {length} tokens, more than the {self.max_prompt_tokens} that fit ({self.limit})"
