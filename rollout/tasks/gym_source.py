"""Questions of reasoning-gym's procedural data sets: training by position, held-out, demonstrations."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evenkeel.correction.errors import ConfigError, DataError
from evenkeel.rollout.config import ReasoningGymTask
from evenkeel.rollout.limited_processes.child import error_text
from evenkeel.rollout.rewards.reward_process import create_reasoning_gym
from evenkeel.rollout.tasks.questions import Question, SkippedRow, hash_share, text_key

# ----------------------------------------------------------------------------------------------------------------------
# Names of reasoning-gym's data sets and of their options, read from its sources: importing it, and what it draws with, takes a second.


def plain_options(dataset: str) -> frozenset[str]:
    """Names of a data set's options; none where the sources don't say it plainly, and reasoning-gym itself has to be asked."""
    spec = find_spec("reasoning_gym")
    folders = spec.submodule_search_locations or [] if spec is not None else []
    quoted = (f'"{dataset}"', f"'{dataset}'")
    for path in (path for folder in folders for path in sorted(Path(folder).rglob("*.py"))):
        try:
            text = path.read_text(encoding="utf-8")
            is_there = "register_dataset(" in text and any(name in text for name in quoted)
            if is_there and (found := _options(ast.parse(text), dataset)):
                return found
        except (OSError, ValueError, SyntaxError):
            continue
    return frozenset()


def _options(module: ast.Module, dataset: str) -> frozenset[str]:
    """Fields of the class that a module registers as this data set's options; none if it registers none, or none that is plain."""
    names = {
        line.targets[0].id: line.value.value
        for line in module.body
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name) and isinstance(line.value, ast.Constant)
    }
    classes = {line.name: line for line in module.body if isinstance(line, ast.ClassDef)}
    for line in module.body:
        match line:
            case ast.Expr(value=ast.Call(func=ast.Name(id="register_dataset"), args=[name, _, ast.Name(id=options), *_])):
                registered = name.value if isinstance(name, ast.Constant) else names.get(name.id) if isinstance(name, ast.Name) else None
                if registered == dataset and options in classes:
                    return _fields(classes[options])
    return frozenset()


def _fields(options: ast.ClassDef) -> frozenset[str]:
    """Fields of a dataclass without bases."""
    if options.bases or [ast.unparse(one).partition("(")[0] for one in options.decorator_list] != ["dataclass"]:
        return frozenset()
    lines = [line for line in options.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
    return frozenset(line.target.id for line in lines if not {"ClassVar", "InitVar"} & set(_words(line.annotation)))  # type: ignore[union-attr]


def _words(annotation: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]


logger = logging.getLogger(__name__)

# How many of the questions that can't be asked are remembered.
_NAMED = 1000
# Most questions drawn for one training position until one is on the training side. At a held-out share of a tenth all of them are held out
# with a probability of 1e-16.
_CANDIDATES = 16
# Training positions served by one reasoning-gym data set object. Each has a seed of its own, because many data sets draw entry i from
# Random(seed + i). With fewer there are more objects, each of which may read a whole corpus; with more the wait for one is longer where it
# makes all its entries at once.
_POSITIONS = 256
# Seeds that are tried for a data set object that raises while it is made.
_SEEDS = 4
# Errors that say nothing about a question: with these the next start may make it.
_OF_THE_MACHINE = (MemoryError, OSError)
_NOTICE_S = 10.0


class ReasoningGymSource:
    """A procedural data set; its questions have no end, and a hash of the text decides on which side each is."""

    questions_per_epoch = distinct_train_questions = None

    def __init__(self, config: ReasoningGymTask, excess: Callable[[Question], str | None]) -> None:
        """
        Args:
            excess: why a question's text can't be asked (too long), or None; such a question is passed over, as is one that raises.
        Raises: ConfigError for an unknown data set or option.
        """
        self._config = config
        self._excess = excess
        self._open: dict[str, tuple[int, Any]] = {}
        self._refused: dict[str, SkippedRow] = {}
        self._last_refused = ""
        self._held_out: tuple[Question, ...] | None = None
        check_names(config)
        try:
            self._chunk("train", 0)
        except _OF_THE_MACHINE:
            raise
        except Exception as error:
            raise ConfigError(f"rollout.task.options = {config.options}: reasoning-gym's {config.dataset} refuses them: {error}") from error

    @property
    def name(self) -> str:
        return f"reasoning-gym {self._config.dataset}"

    @property
    def skipped(self) -> tuple[SkippedRow, ...]:
        return tuple(self._refused.values())

    @property
    def held_out(self) -> tuple[Question, ...]:
        if self._held_out is None:
            self._held_out = tuple(self._find_held_out())
        return self._held_out

    def train_question(self, position: int) -> Question:
        return self._training_side("train", position)

    def demonstration_questions(self) -> Iterator[Question]:
        position = 0
        while True:
            yield self._training_side("demonstrations", position)
            position += 1

    def _training_side(self, stream: str, position: int) -> Question:
        """The first question of this position's candidates that is on the training side, can be made, and fits."""
        chunk, slot = divmod(position, _POSITIONS)
        self._last_refused = ""
        for index in range(slot * _CANDIDATES, (slot + 1) * _CANDIDATES):
            question, share = self._made(stream, chunk, index)
            if question is None or share < self._config.held_out_fraction:
                continue
            if self._fits(stream, chunk, index, question):
                return question
        last = self._last_refused and f"; the last that can't be asked: {self._last_refused}"
        raise DataError(
            f"{self.name}: {_CANDIDATES} questions in a row are held out or too long, or raise ({len(self._refused)} can't be asked so "
            f"far{last}). A resume would meet them again: start a new run with a task of more or shorter questions, from a checkpoint "
            f"(model=RUN_DIR/checkpoints/step_.../hf) if there is one"
        )

    def _find_held_out(self) -> Iterator[Question]:
        """Distinct questions of the held-out side; gives up when four times the expected number of tries was not enough."""
        wanted = self._config.held_out_size
        tries = int(4 * wanted / self._config.held_out_fraction)
        seen: set[str] = set()
        next_notice = time.monotonic() + _NOTICE_S
        for number in range(tries):
            chunk, index = divmod(number, _POSITIONS * _CANDIDATES)
            question, share = self._made("held_out", chunk, index)
            key = "" if question is None else text_key(question.text)
            is_new = key not in seen and share < self._config.held_out_fraction
            if question is not None and is_new and self._fits("held_out", chunk, index, question):
                seen.add(key)
                yield question
            if len(seen) == wanted:
                return
            if time.monotonic() > next_notice:
                logger.info("%s: %d of %d held-out questions found after %d tries", self.name, len(seen), wanted, number + 1)
                next_notice = time.monotonic() + _NOTICE_S

    def _made(self, stream: str, chunk: int, index: int) -> tuple[Question | None, float]:
        """A question and its hash share; without one, the same at each start, if making it raises or its text can't be encoded."""
        try:
            question = _as_question(self._chunk(stream, chunk)[index])
            return question, hash_share(question.text)
        except _OF_THE_MACHINE:
            raise
        except Exception as error:
            self._refuse(stream, chunk, index, f"making it raised {error_text(error)}")
            return None, 1.0

    def _fits(self, stream: str, chunk: int, index: int, question: Question) -> bool:
        try:
            reason = self._excess(question)
        except DataError as error:
            reason = str(error)
        if reason is not None:
            self._refuse(stream, chunk, index, reason)
        return reason is None

    def _refuse(self, stream: str, chunk: int, index: int, reason: str) -> None:
        place = f"{self.name}, {stream}, entry {chunk}/{index}"
        self._last_refused = f"{place}: {reason}"
        if len(self._refused) < _NAMED:  # each epoch has its own, without end
            self._refused[place] = SkippedRow(place, reason)

    def _chunk(self, stream: str, chunk: int) -> Any:
        """The data set object of a stretch of a stream; the last one of each stream is kept. Raises: what making it raises."""
        number, found = self._open.get(stream, (None, None))
        if number != chunk:
            found = self._create(stream, chunk)
            self._open[stream] = (chunk, found)
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found

    def _create(self, stream: str, chunk: int) -> Any:
        """The data set object of the first seed with which it can be made, or what the last one raised: many make all entries at once."""
        for attempt in range(_SEEDS):
            key = f"{self._config.seed}/{stream}/{chunk}{f'/{attempt}' * (attempt > 0)}".encode()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % 2**31  # numpy's seeds end at 2**32
            try:
                return create_reasoning_gym(self._config.dataset, self._config.options, seed=seed, size=_POSITIONS * _CANDIDATES)
            except _OF_THE_MACHINE:
                raise
            except Exception as error:
                last = error
        return last


def _as_question(entry: dict[str, Any]) -> Question:
    answer = entry["answer"]
    return Question(entry["question"], "" if answer is None else str(answer), metadata=dict(entry))


def check_names(config: ReasoningGymTask) -> None:
    """Raises: ConfigError for a data set or an option that reasoning-gym doesn't have, with the nearest one."""
    if (plain := plain_options(config.dataset)) and plain >= config.options.keys():
        return
    import reasoning_gym  # noqa: F401 - fills the table of data sets
    from reasoning_gym.factory import DATASETS

    if config.dataset not in DATASETS:
        raise ConfigError(
            f"rollout.task.dataset = {config.dataset}: reasoning-gym has no such data set among its {len(DATASETS)}",
            remedy=_nearest(config.dataset, DATASETS),
        )
    names = [f.name for f in dataclasses.fields(DATASETS[config.dataset][1])]
    for option in config.options:
        if option not in names:
            raise ConfigError(
                f"rollout.task.options.{option}: {config.dataset} has no such option (it has {', '.join(names)})",
                remedy=_nearest(option, names),
            )


def _nearest(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.4)
    return f"did you mean {found[0]}?" if found else ""
