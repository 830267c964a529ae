"""Dataclasses as JSON and arrays, and back: what a checkpoint holds of the queue, without anything that runs when it is read.

Numbers in a row (token ids, logprobs) go into one column for each type of number; JSON says which part of it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from array import array
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np

_ROW = "row"
"""Key in JSON for a row of numbers; its value is [column, index of the first number, how many]."""
_COLUMN = {typecode: f"array_{typecode}" for typecode in "bBhHiIlLqQfd"}
"""Column of the rows of an `array`, by its typecode."""
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
    """The value of that type again. Fields that it doesn't have are left out: earlier versions had some that nothing reads any more.

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
        code = {int: "i", float: "f"}[inner[0]]
        if not isinstance(plain, dict):  # earlier versions had tuples here, and an empty one as such
            return array(code, plain)
        row, typecode = _row(plain, columns), _TYPECODE.get(plain[_ROW][0])
        return array(typecode, row.tobytes()) if typecode else array(code, row.astype(code).tobytes())
    if dataclasses.is_dataclass(kind):
        hints = _types_of_fields(typing.cast(type, kind), tuple(names.items()))
        if isinstance(plain, list):  # earlier versions had a tuple of the same values here
            plain = dict(zip(hints, plain, strict=True))
        given = {name: of_plain(hints[name], item, columns, names) for name, item in plain.items() if name in hints}
        return typing.cast(Any, kind)(**given)
    if kind is float:
        return float(plain)
    return kind(plain) if isinstance(kind, type) and issubclass(kind, Enum) else plain


@functools.cache
def _types_of_fields(kind: type, names: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The types of a dataclass's fields. Cached: looking them up for each trajectory would take most of the time of reading a queue."""
    return typing.get_type_hints(kind, localns={**dict(names), "array": _Array})


def _row(plain: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> np.ndarray:
    column, first, length = plain[_ROW]
    row = columns[column][first : first + length]
    if len(row) != length:
        raise IndexError(f"column {column} ends before {first + length}")
    return row
