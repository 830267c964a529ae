"""Dotted keys of a configuration: of the models inside a type, and those that are called otherwise than they were."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel

from correction.settings.base import Settings


def inner_models(annotation: Any, prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The models inside a type, each with the dotted prefix of its keys."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield prefix, annotation
    elif origin is Annotated:
        yield from inner_models(arguments[0], prefix)
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from inner_models(argument, prefix)
    elif origin in (list, tuple, Sequence):
        yield from inner_models(arguments[0], prefix + "N.")
    elif origin in (dict, Mapping):
        yield from inner_models(arguments[1], prefix + "NAME.")


@cache
def former_keys(model_class: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Former dotted key -> present one."""
    own = model_class.FORMER_NAMES if issubclass(model_class, Settings) else {}
    found = {prefix + former: prefix + present for former, present in own.items()}
    for name, field in model_class.model_fields.items():
        for below, model in inner_models(field.annotation, f"{prefix}{name}."):
            found |= former_keys(model, below)
    return found


@dataclass(frozen=True, slots=True)
class FormerName:
    """A setting that a file or an override calls by a former name."""

    place: str
    """File and line, or "command line"."""
    former: str
    present: str
    """Both are dotted keys."""

    @classmethod
    def all_in(cls, model_class: type[BaseModel], path: Path, lines: Mapping[str, int]) -> list[FormerName]:
        """Of a YAML file. Args: lines: of its dotted keys, from 1."""
        return [cls(f"{path}:{lines[key]}", key, present) for key, present in former_keys(model_class).items() if key in lines]

    def __str__(self) -> str:
        return f"{self.place}: {self.former} is called {self.present} now"

    def is_meant_by(self, error: Exception) -> bool:
        """Whether an error is about this setting: it has the whole of its present key, or section and name, apart."""
        section, _, name = self.present.rpartition(".")
        has_key, has_section, has_name = (re.search(rf"(?<![\w.]){re.escape(key)}\b", str(error)) for key in (self.present, section, name))
        return bool(has_key or (has_section and has_name))
