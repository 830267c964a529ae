"""What all settings have in common: frozen, no unknown keys, no number that makes no sense."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

LARGEST_NUMBER = 10**12
"""A terabyte, or a step a second for 30,000 years: what is larger is a slip, and would fail late, as an overflow."""


class Settings(BaseModel):
    """A section of a configuration. Its fields' docstrings are what `evenkeel config --explain` says."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False)

    FORMER_NAMES: ClassVar[dict[str, str]] = {}
    """Former names of keys, which recipes and files of earlier versions have: by these the present one."""

    @model_validator(mode="before")
    @classmethod
    def _take_former_names(cls, given: Any) -> Any:
        if isinstance(given, dict) and (former := cls.FORMER_NAMES.keys() & given.keys()):
            for name in former:
                if cls.FORMER_NAMES[name] in given:
                    raise ValueError(f"{cls.FORMER_NAMES[name]} and {name} are one setting: leave {name}, its former name, out")
            return {cls.FORMER_NAMES.get(key, key): value for key, value in given.items()}
        return given

    @field_validator("*")
    @classmethod
    def _is_no_slip(cls, value: Any) -> Any:
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and abs(number) > LARGEST_NUMBER:
                raise ValueError(f"{number} is beyond {LARGEST_NUMBER:.0e}, the largest number that any setting takes")
        return value
