"""What all settings have in common: they are frozen, and refuse unknown keys and numbers that make no sense."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from ..errors import ConfigError

LARGEST_NUMBER = 10**12
"""A terabyte in bytes, or 30,000 years of one step a second. A larger number is a slip, which would otherwise fail late, as an overflow."""


class Settings(BaseModel):
    """A section of a configuration. Its fields' docstrings are what `evenkeel config --explain` says."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False)

    DERIVED: ClassVar[frozenset[str]] = frozenset()
    """Keys that a run derives from other settings, the hardware or the model, unless they are given; their defaults hold without a run.
    null counts as not given, and so does a default that is no value, such as auto."""
    ALWAYS_DERIVED: ClassVar[frozenset[str]] = frozenset()
    """Keys that no recipe has: a run always derives them."""

    @model_validator(mode="before")
    @classmethod
    def _what_is_left_open_is_not_given(cls, given: Any) -> Any:
        return {key: value for key, value in given.items() if not cls.leaves_open(key, value)} if isinstance(given, Mapping) else given

    @classmethod
    def leaves_open(cls, key: str, value: Any) -> bool:
        """Whether a value of one of this section's keys only says that it is to be derived."""
        return key in cls.DERIVED and (value is None or (isinstance(value, str) and value == cls.model_fields[key].default))

    def is_given(self, name: str) -> bool:
        """Whether a setting has been given, and is no default."""
        return name in self.model_fields_set

    @field_validator("*")
    @classmethod
    def _is_no_slip(cls, value: Any) -> Any:
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and abs(number) > LARGEST_NUMBER:
                raise ValueError(f"{number} is beyond {LARGEST_NUMBER:.0e}, the largest number that any setting takes")
        return value


class NamedSettings(Settings):
    """Settings that a program makes by name: what is wrong with them is then a ConfigError, one sentence for each key, whether a validator
    of ours or pydantic itself has found it. Inside of another section, and by model_validate, they raise pydantic's error as all do."""

    def __init__(self, *args: Any, **values: Any) -> None:
        """Raises: ConfigError."""
        name = type(self).__name__
        if args:
            given = f"preset={args[0]!r}" if isinstance(args[0], str) else "**settings"
            raise ConfigError(f"{name} takes settings by their names: {name}({given})")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_sentence(type(self), problem) for problem in error.errors())) from error

    # pydantic's mark of its own __init__: without it, it would call this one for every nested section and for model_validate.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def _sentence(model: type[BaseModel], problem: Any) -> str:
    """What is wrong with one key. Args: problem: of ValidationError.errors()."""
    if problem["type"] == "value_error":  # of a validator of ours, which names the key
        return str(problem["ctx"]["error"])
    path = [str(part) for part in problem["loc"]]
    where = f"{model.__name__}: {'.'.join(path)} = {problem['input']!r}"
    if problem["type"] != "extra_forbidden":
        return f"{where}: {problem['msg']}"
    schema = model.model_json_schema()
    keys = {key for section in (schema, *schema.get("$defs", {}).values()) for key in section.get("properties", {})}
    near = difflib.get_close_matches(path[-1], keys, n=1, cutoff=0.5)
    return f"{where}: there is no such key" + (f"; the nearest is {near[0]}" if near else "")
