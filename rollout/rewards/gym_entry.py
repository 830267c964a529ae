"""Entries of reasoning-gym as JSON and back, so that a question can stand in a file with what its scorer needs.

Entries hold tuples, sets and keys that are no text, and scorers compare them: JSON alone would make lists and text of these. Standard
library only: the scoring process imports it.
"""

from __future__ import annotations

from typing import Any

COLUMN = "reasoning_gym_entry"
"""Column of a row that holds the entry, as `as_json` writes it."""
_TUPLE, _SET, _ITEMS = "__tuple__", "__set__", "__items__"


def as_json(value: Any, place: str = "entry") -> Any:
    """The value as JSON can hold it: a tuple or set as an object with one tag, a mapping with other keys than text as a list of its items.

    Args:
        place: what to call the value in the message.
    Raises: TypeError naming the place and type of what can't be written.
    """
    match value:
        case None | bool() | str():
            return value
        case int() | float() if type(value) in (int, float) and value == value and abs(value) != float("inf"):
            return value
        case list():
            return [as_json(item, f"{place}[{i}]") for i, item in enumerate(value)]
        case tuple() if type(value) is tuple:
            return {_TUPLE: [as_json(item, f"{place}[{i}]") for i, item in enumerate(value)]}
        case set() | frozenset() if type(value) is set:
            return {_SET: [as_json(item, place) for item in sorted(value, key=repr)]}
        case dict() if all(type(key) is str for key in value) and not value.keys() & {_TUPLE, _SET, _ITEMS}:
            return {key: as_json(item, f"{place}.{key}") for key, item in value.items()}
        case dict():
            return {_ITEMS: [[as_json(key, place), as_json(item, f"{place}[{key!r}]")] for key, item in value.items()]}
    raise TypeError(f"{place} is {type(value).__name__} ({value!r:.60})")


def from_json(value: Any) -> Any:
    """The inverse."""
    match value:
        case list():
            return [from_json(item) for item in value]
        case {"__tuple__": items}:
            return tuple(from_json(item) for item in items)
        case {"__set__": items}:
            return {from_json(item) for item in items}
        case {"__items__": items}:
            return {from_json(key): from_json(item) for key, item in items}
        case dict():
            return {key: from_json(item) for key, item in value.items()}
    return value
