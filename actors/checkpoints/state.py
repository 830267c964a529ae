"""What a restart needs besides the learner's own state, saved in the same checkpoint at the same moment.

Saved after a step is settled, while the learner is idle: the book's counts and contents (finished groups whole, groups in flight by
their prompts, with what there is of them by then), and the step. The position in the data is the book's count of admitted prompts,
because they are admitted in order; a group's number is its prompt's position. Which task a position is of follows from `mixture`.

JSON and arrays: reading them runs nothing. A prompt is kept without its metadata, which may be anything; the task makes it again
(`with_prompts_of`), and has to make the same.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from evenkeel.actors.carriers import Notify, Ticket
from evenkeel.actors.groups.ledger import HandOver, Ledger, LedgerMark, at_once, imbalance_of
from evenkeel.actors.groups.snapshot import BookSnapshot
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.errors import DataError, EngineError
from evenkeel.learner.hf.tensor_files import saving
from evenkeel.learner.weights.file_sums import unreadable
from evenkeel.rollout.trajectory import Prompt

STATE, COLUMNS = "controller.json", "groups.safetensors"
_NAMES = {"Prompt": Prompt, "EngineError": EngineError}
_ENCODER = json.JSONEncoder(default=float)  # float: numpy's numbers


class OtherVersionError(DataError):
    """A checkpoint is complete, but was written by another version of evenkeel."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """The correction that an alarm has put in the place of the configured one; saved with a checkpoint."""

    configured: CorrectionConfig
    correction: CorrectionConfig


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """What `monitor.length_decay` knows of the batches so far; saved with a checkpoint."""

    first: tuple[float, ...] = ()
    """Mean tokens of an answer in each of the first batches, from which the level is; no more than it takes."""
    long_batches: int = 0
    """Batches in a row that were long, since the rate was last multiplied."""
    rate_scale: float = 1.0
    """Factor on the learning rate by now."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state of a run between two steps, except for the learner's."""

    step: int
    """Steps done."""
    weight_version: int
    """Version of the learner's weights: one a step."""
    elapsed_s: float
    """Wall time of the run, all its parts together."""
    book: BookSnapshot
    totals: dict[str, float]
    """Running totals of counters, by metric name."""
    monitor: Mapping[str, Any] | None
    """State of the early warning (Monitor.state_dict), after the diagnostics of this step, or of an earlier one if the run was ended in a
    hurry; None: there is none."""
    replacement: Replacement | None = None
    """The correction that an alarm has put in the place of the configured one; None: none has."""
    ledger: LedgerMark | None = None
    """Position in the ledger; None: it had no line yet."""
    data: str = ""
    """Fingerprint of the training questions (Task.fingerprint); empty: not known."""
    lengths: AnswerLengths = AnswerLengths()
    settings: dict[str, Any] = field(default_factory=dict)
    """The run's settings, with which the book's groups were sampled; its folder may have those of a resume that saved nothing yet."""
    mixture: dict[str, Any] = field(default_factory=dict)
    """What decides the tasks of prompts (Mixture.state); empty: the beginning's."""

    def save(self, folder: Path) -> None:
        """Write into a checkpoint's state folder. Raises: OSError."""
        columns = Columns()
        book = _with_prompts(self.book, lambda prompt, _: replace(prompt, metadata={}))
        correction = self.replacement and {
            "configured": self.replacement.configured.model_dump(mode="json"),
            "correction": self.replacement.correction.model_dump(mode="json"),
        }
        names = ("step", "weight_version", "elapsed_s", "totals", "monitor", "data", "settings", "mixture")
        plain = {name: getattr(self, name) for name in names}
        plain |= {"book": as_plain(book, columns), "ledger": as_plain(self.ledger, columns), "replacement": correction}
        plain |= {"lengths": dataclasses.asdict(self.lengths)}
        with (folder / STATE).open("w", encoding="utf-8") as file:
            file.writelines(_ENCODER.iterencode(plain))  # json.dumps would hold the interpreter's lock, and the event loop, for all groups
        with saving(folder / COLUMNS) as path:
            save_file(columns.arrays(), path)

    @classmethod
    def load(cls, folder: Path) -> TrainingState:
        """Read from a checkpoint's state folder; prompts have no metadata yet.

        Raises: DataError if it is missing, damaged or out of balance;
            OSError for what may pass.
        """
        path = folder / STATE
        if not path.exists():
            raise DataError(
                f"{path} is missing, so {folder.parent} is not a complete checkpoint. Remove that folder to resume from an older one."
            )
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            (folder / COLUMNS).open("rb").close()  # safetensors' own errors have no number, which tells damage from what may pass
            columns = load_file(folder / COLUMNS)
            book = of_plain(BookSnapshot, plain.pop("book"), columns, _NAMES)
            ledger = of_plain(LedgerMark | None, plain.pop("ledger"), columns, _NAMES)
            corrections = plain.pop("replacement")
            replacement = corrections and Replacement(**{k: CorrectionConfig.model_validate(v) for k, v in corrections.items()})
            lengths = plain.pop("lengths")
            lengths = AnswerLengths(**lengths | {"first": tuple(lengths["first"])})
            state = cls(book=book, ledger=ledger, replacement=replacement, lengths=lengths, **plain)
        except OSError as error:
            raise unreadable(Path(error.filename or path), error, "no state can be read from it") from error
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise DataError(f"{path}: damaged, no state can be read from it ({type(error).__name__}: {error})") from error
        if found := imbalance_of(state.book, state.ledger):
            raise DataError(f"{path}: the checkpoint has lost or doubled prompts: {found}")
        return state

    def with_prompts_of(self, train_prompt: Callable[[int], Prompt]) -> TrainingState:
        """The same with whole prompts. Raises: DataError if another question is at a prompt's position, naming both."""

        def found(saved: Prompt, position: int) -> Prompt:
            prompt = train_prompt(position)
            if (prompt.prompt_id, prompt.text, prompt.answer) != (saved.prompt_id, saved.text, saved.answer):
                raise DataError(
                    f"its question {position} is {prompt.prompt_id} {prompt.text[:60]!r}, but the run asked {saved.prompt_id} "
                    f"{saved.text[:60]!r} there"
                )
            return prompt

        return replace(self, book=_with_prompts(self.book, found))


def open_ledger(path: Path, state: TrainingState | None, notify: Notify, hand_over: HandOver = at_once) -> Ledger:
    """The ledger of a run that begins, or goes on from a state.

    Args:
        notify: takes level and sentence, if the file is not what the checkpoint knows.
        hand_over: see Ledger.
    """
    if state is None:
        return Ledger(path, hand_over=hand_over)
    ledger, warning = Ledger.resumed(path, state.book, state.ledger, hand_over=hand_over)
    if warning:
        notify("warning", warning)
    return ledger


def other_version(folder: Path, which: str, reason: str) -> OtherVersionError:
    """Args: folder: of the checkpoint."""
    return OtherVersionError(
        f"{folder}: written by {which} of evenkeel ({reason}), and only that can go on with it. "
        f"Start a new run from its weights: model={folder / 'hf'}"
    )


def _with_prompts(book: BookSnapshot, prompt_of: Callable[[Prompt, int], Prompt]) -> BookSnapshot:
    """Args: prompt_of: takes a prompt and its position."""

    def changed(of: Any) -> Any:
        return replace(of, prompt=prompt_of(of.prompt, of.group_id))

    tickets: tuple[Ticket, ...] = tuple(map(changed, book.in_flight))
    return replace(book, in_flight=tickets, finished=tuple(map(changed, book.finished)))


# Dataclasses as JSON and arrays, and back: what a checkpoint holds of the book, without anything that runs when it is read.
#
# Numbers in a row (token ids, logprobs) go into one column for each type of number; JSON says which part of it.

# Key in JSON for a row of numbers; its value is [column, index of the first number, how many].
_ROW = "row"
# Column of the rows of an `array`, by its typecode.
_COLUMN = {typecode: f"array_{typecode}" for typecode in "bBhHiIlLqQfd"}
_TYPECODE = {column: typecode for typecode, column in _COLUMN.items()}


_T = typing.TypeVar("_T")


class _Array(typing.Generic[_T]):
    """Stands for `array` in annotations: until Python 3.12 array[int] is one for type checkers only."""


class Columns:
    """Rows of numbers one after the other, by type; 64-bit ones of tuples, those of an `array` as it has them."""

    def __init__(self) -> None:
        self._rows: dict[str, list[np.ndarray]] = {}
        self._lengths: dict[str, int] = {}

    def add(self, column: str, row: np.ndarray) -> dict[str, Any]:
        """Returns: what stands for it in JSON."""
        first = self._lengths.get(column, 0)
        self._rows.setdefault(column, []).append(row)
        self._lengths[column] = first + len(row)
        return {_ROW: [column, first, len(row)]}

    def arrays(self) -> dict[str, np.ndarray]:
        """[numbers of all rows] by column."""
        return {column: np.concatenate(rows) for column, rows in self._rows.items()}


def as_plain(value: Any, columns: Columns) -> Any:
    """What JSON holds of a value of dataclasses, tuples, texts, numbers and enumerations; rows of numbers go to the columns.

    Raises: TypeError for anything else.
    """
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name), columns) for field in dataclasses.fields(value)}
    if isinstance(value, array):
        return columns.add(_COLUMN[value.typecode], np.frombuffer(value, dtype=value.typecode) if value else np.zeros(0, value.typecode))
    if isinstance(value, tuple | list):
        kinds = {type(item) for item in value}
        if kinds in ({int}, {float}):
            return columns.add(f"tuple_{kinds.pop().__name__}", np.array(value))
        return [as_plain(item, columns) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: as_plain(item, columns) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} ({value!r:.60}) can't be kept in a checkpoint")


def of_plain(kind: Any, plain: Any, columns: Mapping[str, np.ndarray], names: Mapping[str, Any]) -> Any:
    """The value of that type again.

    Args:
        names: types that the annotations name and that are not imported where they stand.
    Raises: KeyError, TypeError, ValueError, IndexError or AttributeError if it is none.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if plain is None else of_plain(next(k for k in inner if k is not type(None)), plain, columns, names)
    if origin is tuple:
        if isinstance(plain, dict):
            return tuple(_row(plain, columns).tolist())
        kinds = [inner[0]] * len(plain) if inner[1:] == (Ellipsis,) else inner
        return tuple(of_plain(k, item, columns, names) for k, item in zip(kinds, plain, strict=True))
    if origin is dict:
        return {of_plain(inner[0], key, columns, names): of_plain(inner[1], item, columns, names) for key, item in plain.items()}
    if origin is _Array:
        return array(_TYPECODE[plain[_ROW][0]], _row(plain, columns).tobytes())
    if dataclasses.is_dataclass(kind):
        hints = _types_of_fields(typing.cast(type, kind), tuple(names.items()))
        given = {name: of_plain(hints[name], item, columns, names) for name, item in plain.items()}
        return typing.cast(Any, kind)(**given)
    if kind is float:
        return float(plain)
    return kind(plain) if isinstance(kind, type) and issubclass(kind, Enum) else plain


@functools.cache
def _types_of_fields(kind: type, names: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The types of a dataclass's fields. Cached: looking them up for each trajectory would take most of the time of reading a book."""
    return typing.get_type_hints(kind, localns={**dict(names), "array": _Array})


def _row(plain: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> np.ndarray:
    column, first, length = plain[_ROW]
    row = columns[column][first : first + length]
    if len(row) != length:
        raise IndexError(f"column {column} ends before {first + length}")
    return row
