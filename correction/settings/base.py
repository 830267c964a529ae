"""What all settings have in common: they are frozen, and refuse unknown keys and numbers that make no sense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

LARGEST_NUMBER = 10**12
"""A terabyte in bytes, or 30,000 years of one step a second. A larger number is a slip, which would otherwise fail late, as an overflow."""

_WITH_DERIVED: dict[str, Any] = {"with_derived": True}
"""The context of dump_with_derived."""


class Settings(BaseModel):
    """A section of a configuration. Its fields' docstrings are what `evenkeel config --explain` says."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False)

    FORMER_NAMES: ClassVar[dict[str, str]] = {}
    """Former name -> present name of keys, for recipes and files of earlier versions."""

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


class DerivedSettings(Settings):
    """A section some of whose values are derived from other sections, unless they are set.

    A dump leaves derived values out, and whoever reads it derives them anew. `dump_with_derived` adds them under the key `derived`, to show
    what ran; that key is ignored when the section is read.
    """

    DERIVED: ClassVar[frozenset[str]] = frozenset()
    """Keys that are derived unless they are set. Their defaults hold where nothing is derived."""

    def derived(self, values: Mapping[str, Any]) -> Self:
        """A copy with these values for the keys of DERIVED that are not set; values derived before are dropped."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        open_ = self.DERIVED - self.model_fields_set
        new = {name: values.get(name, type(self).model_fields[name].default) for name in open_}
        return type(self).model_construct(_fields_set=set(self.model_fields_set), **{**own, **new})

    @model_validator(mode="before")
    @classmethod
    def _forget_derived(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and isinstance(given.get("derived"), Mapping):
            return {key: value for key, value in given.items() if key != "derived"}
        return given

    @model_serializer(mode="wrap")
    def _leave_derived_out(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        unset = self.DERIVED - self.model_fields_set
        kept = {name: value for name, value in written.items() if name not in unset}
        if info.context is _WITH_DERIVED:
            kept["derived"] = {name: value for name, value in written.items() if name in unset}
        return kept


def dump_with_derived(config: BaseModel) -> dict[str, Any]:
    """The configuration as JSON data, with the derived values of every DerivedSettings in it under the key `derived` of their section."""
    return config.model_dump(mode="json", context=_WITH_DERIVED)
