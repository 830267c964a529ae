"""Text to token ids: the model's tokenizer and its chat template. From here on only ids travel.

A conversation is rendered as it grows: the prompt, then, after each turn of the model, what follows it (ChatEncoder.following). What the
model has said is never tokenised again."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from evenkeel.correction.errors import ConfigError, DataError, not_read
from evenkeel.rollout.config import RolloutConfig, TaskConfig, named

# ----------------------------------------------------------------------------------------------------------------------
# Control tokens come from the chat template alone: where a turn's text spells one, it stays text, and no question can forge a turn.
#
# Most texts spell none, and are encoded as transformers does it. For others the tokenizer gets a second name for each control token: the
# template's are written by that name, and the text's own are encoded as any other text, with all that is round them.

# Begin a second name, and what stands in place of a text's own control token; end of both. They are no characters.
_NAME, _SPELT, _END = "\ufdd0", "\ufdd1", "\ufdd2"


class ControlTokens:
    """The special tokens of one tokenizer, and what ends an answer."""

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


# ----------------------------------------------------------------------------------------------------------------------
# The tokens that end an answer, and who names them: tokenizer, chat template, config.json, generation_config.json.
#
# An engine by itself knows those of the two configs alone. Many chat models have others: fine-tuned from a base model whose configs they
# keep, or with a template that ends a turn with a token of its own.

CONFIGS = ("config.json", "generation_config.json")
"""Files of a model's folder that name end tokens, and all that an engine reads of them."""
_TOKENIZER, _TEMPLATE = "tokenizer's eos_token", "chat template"
# Llama's end of a message that calls a tool: templates show it with their own tools alone.
_MESSAGE_ENDS = ("<|eom_id|>",)
_TEXTS = ("evenkeel-question", "evenkeel-answer", "evenkeel-next")


@dataclass(frozen=True, slots=True)
class AnswerEnds:
    """What ends an answer; the same for evaluations, filters, training, the overlong rule and demonstrations."""

    sources: Mapping[int, tuple[str, ...]]
    """Who names a token, by its id."""
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
        """Ends of which the engine by itself would know nothing."""
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


def common(known: Sequence[Any], given: Sequence[Any]) -> int:
    """Length of what both begin with."""
    return next((i for i, (a, b) in enumerate(zip(known, given, strict=False)) if a != b), min(len(known), len(given)))


# More characters than a token has in most texts.
_CHARACTERS_PER_TOKEN = 16


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
        if self.apply_chat_template and self._leaves_out_questions():
            raise DataError(
                "the model's chat template leaves out what is asked: two questions give the same prompt",
                remedy="mend chat_template.jinja (or chat_template in tokenizer_config.json): a turn's content is a text, no list of parts",
            )

    @classmethod
    def of_folder(cls, folder: Path, task: TaskConfig) -> ChatEncoder:
        """The encoder, as of `for_task`, of a model's folder. Raises: DataError, ConfigError as load_tokenizer and for what a task can't
        use."""
        return cls.for_task(load_tokenizer(folder), task, configured=configured_ends(folder))

    @classmethod
    def of_entries(cls, folder: Path, rollout: RolloutConfig, *, is_limited: bool = False) -> dict[str, ChatEncoder]:
        """The encoders of a run's tasks, by name. Raises: as of_folder, naming the task where there are several.

        Args: is_limited: the engines' context is decided, and prompts too long for it are refused; else the tasks' own limits alone.
        """
        tokenizer, configured, found = load_tokenizer(folder), configured_ends(folder), {}
        for entry in rollout.entries:
            with named(entry):
                encoder = cls.for_task(tokenizer, entry.task, rollout.longest_prompt(entry) if is_limited else None, configured)
                found[entry.name] = replace(encoder, limit=rollout.prompt_limit(entry)) if is_limited else encoder
        return found

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
        by_configs = f"name {' and '.join(named)} alone" if named else "name no end"
        return f"answers also end at {told}: {' and '.join(CONFIGS)} {by_configs}, and engines are told"

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.tokenizer, self.ends.ids)

    def _rendered(self, turns: list[dict[str, Any]]) -> str:
        """The template's text of some turns, without the beginning of an answer."""
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, **self.chat_template_kwargs))

    def _leaves_out_questions(self) -> bool:
        try:
            first, second = (self._rendered([{"role": "user", "content": text}]) for text in _TEXTS[::2])
        except Exception:  # it refuses the turns: `encode` says of which row
            return False
        return first == second

    def text_of(self, response_ids: Sequence[int]) -> str:
        """An answer as its scorer sees it, and people: all that the model said, other special tokens included; not the token that ended
        it."""
        said = self.ends.without(response_ids)
        return str(self.tokenizer.decode(list(said), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode(self, asked: str | Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Ids of the whole prompt, generation prompt included; see `excess` for its length.

        Args:
            asked: text of a user turn, or turns with role and content, which have a system prompt of their own if they begin with one. What
                spells a control token there is text. Without a template it is the token: the text is then the whole prompt.
            tools: that the model may call, in OpenAI's form, for the template.
        Raises: DataError for turns without a chat template, or that it refuses (a role that it doesn't know, for instance), and as
            ControlTokens.
        """
        if not self.apply_chat_template:
            if not isinstance(asked, str):
                raise DataError(f"a conversation of {len(asked)} turns needs the chat template; set rollout.task.apply_chat_template: true")
            text = asked if self.system_prompt is None else f"{self.system_prompt}\n\n{asked}"
            ids, bos = tuple(self.tokenizer.encode(text)), getattr(self.tokenizer, "bos_token_id", None)
            return ids[1:] if bos is not None and ids[:2] == (bos, bos) else ids  # its author has written the beginning, too
        messages, is_quoted = self._control_tokens.quoted(self._turns(asked))
        found = self._templated(messages, tools, tokenize=not is_quoted)
        return self._control_tokens.ids(found) if is_quoted else tuple(found)

    def following(
        self,
        asked: str | Sequence[Mapping[str, Any]],
        said_ids: Sequence[int],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Ids of what the model reads after one of its turns: the rest of that turn as the template ends it, new turns, generation prompt.

        The template's text of the whole conversation has to begin with the very text that the model was given and what it said then.
        Args:
            asked: as `encode`: all that came before the turn, earlier turns of the model with all of their texts (text_of) as content.
            said_ids: of the turn, its end included if it has one.
            new: what comes after it.
            tools: as for the prompt.
        Raises: DataError as `encode`, and for a template that rewrites what was read or said, naming the first token that differs.
        """
        if not self.apply_chat_template:
            raise DataError("a conversation needs the chat template; set rollout.task.apply_chat_template: true")
        before = self._turns(asked)
        turn = {"role": "assistant", "content": self.text_of(said_ids)}
        turns, is_quoted = self._control_tokens.quoted([*before, turn, *map(dict, new)])
        whole = str(self._templated(turns, tools, tokenize=False))
        given = str(self._templated(turns[: len(before)], tools, tokenize=False))
        known = given + turns[len(before)]["content"]
        if not whole.startswith(known):
            begins = whole.removeprefix(given).partition(turns[len(before)]["content"])[0]
            if begins.strip() and whole.startswith(given) and given == self._rendered(turns[: len(before)]):
                raise DataError(
                    f"the model's chat template has no generation prompt: it writes {begins[:40]!r} before a turn that is over, and "
                    "nothing where one begins, so the next turn would not go on from its own tokens; add one to chat_template.jinja"
                )
            raise DataError(self._rewritten(known, whole, said_ids, turns[len(before)]["content"]))
        rest, end = whole[len(known) :], str(self.tokenizer.decode([self.ends.of_turn], skip_special_tokens=False))
        if len(said := self.ends.without(said_ids)) < len(said_ids):
            rest = rest.removeprefix(str(self.tokenizer.decode(list(said_ids[len(said) :]), skip_special_tokens=False)))
        # The end of a turn before it, as in the conversation: some tokenizers begin a text with a blank of their own.
        ids = self._control_tokens.ids(end + rest) if is_quoted else tuple(self.tokenizer.encode(end + rest, add_special_tokens=False))
        return ids[1:]

    def _rewritten(self, known: str, whole: str, said_ids: Sequence[int], said: str) -> str:
        place = common(known, whole)
        into = place - (len(known) - len(said))
        what = "what the model was given or said before"
        if into >= 0:
            number = self.token_at(said_ids, into)
            what = f"what the model said: token {number} of its turn, {self.name_of(said_ids[number])!r}, is the first that differs"
        was, became = known[place : place + 20], whole[place : place + 20]
        return (
            f"the model's chat template rewrites {what} ({was!r} became {became!r}), so its next turn would not go on from its own tokens; "
            "take a template that keeps all turns as they are (chat_template.jinja)"
        )

    def token_at(self, said_ids: Sequence[int], character: int) -> int:
        """Number of the token of an answer in which a character of its text lies; the last token for what comes after the text."""
        found = bisect_right(range(len(said_ids)), character, key=lambda i: len(self.text_of(said_ids[: i + 1])))
        return min(found, len(said_ids) - 1)

    def _turns(self, asked: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """All turns, the recipe's system prompt included."""
        turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else [dict(turn) for turn in asked]
        if self.system_prompt is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self.system_prompt})
        return turns

    def _templated(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, tokenize: bool) -> Any:
        """The template's text of some turns and the beginning of an answer, or its ids. Raises: DataError if it refuses the turns."""
        offered = {"tools": [dict(tool) for tool in tools]} if tools else {}
        try:
            return self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=tokenize, return_dict=False, **offered, **self.chat_template_kwargs
            )
        except (MemoryError, OSError):
            raise
        except Exception as error:  # the template is a program: jinja2's errors, and whatever its expressions raise
            roles = ", ".join(dict.fromkeys(turn["role"] for turn in turns))
            said = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            raise DataError(f"the model's chat template refuses its turns, of {roles:.200} ({said})") from error

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
