"""What all settings have in common: they are frozen, and refuse unknown keys and numbers that make no sense."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler  # pydantic itself has this name since 2.8 only

from ..errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

LARGEST_NUMBER = 10**12
"""A terabyte in bytes, or 30,000 years of one step a second. A larger number is a slip, which would otherwise fail late, as an overflow."""

_WITH_DERIVED: dict[str, Any] = {"with_derived": True}
"""The context of dump_with_derived and read_with_derived."""


class Settings(BaseModel):
    """A section of a configuration. Its fields' docstrings are what `evenkeel config --explain` says."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False)

    FORMER_NAMES: ClassVar[dict[str, str]] = {}
    """Former name -> present name of keys, for recipes and files of earlier versions."""

    @model_validator(mode="before")
    @classmethod
    def _take_former_names(cls, given: Any) -> Any:
        return cls._by_present_names(given) if isinstance(given, Mapping) else given

    @classmethod
    def _by_present_names(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises: ValueError if a setting is given by both of its names."""
        for name in cls.FORMER_NAMES.keys() & given.keys():
            if cls.FORMER_NAMES[name] in given:
                raise ValueError(f"{cls.FORMER_NAMES[name]} and {name} are one setting: remove {name}, its former name")
        return {cls.FORMER_NAMES.get(key, key): value for key, value in given.items()}

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


class DerivedSettings(Settings):
    """A section some of whose values are derived, unless they are given: from other settings, the hardware or the model.

    A derived value never counts as given. A dump leaves it out, and whoever reads that derives it anew, so that it follows when settings
    change. `dump_with_derived` adds derived values under the key `derived` of their section, to show what ran; `read_with_derived` reads
    them back, and a plain read ignores them.
    """

    DERIVED: ClassVar[frozenset[str]] = frozenset()
    """Keys that are derived unless they are given. Their defaults hold where nothing is derived. null counts as not given,
    and so does a default that is no value, such as auto, even where a recipe writes it down."""

    def is_given(self, name: str) -> bool:
        """Whether a setting has been given, and so is neither derived nor a default."""
        return name in self.model_fields_set

    def derived(self, values: Mapping[str, Any]) -> Self:
        """A copy with these values for those keys of DERIVED that are not given; what was derived of other keys before stays.

        Raises: pydantic's ValidationError for values that the section refuses in a recipe, too.
        """
        new = {name: value for name, value in values.items() if not self.is_given(name)}
        if unknown := new.keys() - self.DERIVED:
            raise ValueError(f"{type(self).__name__}: {', '.join(sorted(unknown))}: not among the keys that are derived")
        known = {name: value for name, value in self if self.is_given(name) or name in self.DERIVED}
        return _without_having_been_given(type(self).model_validate(known | new), self.DERIVED - self.model_fields_set)

    def completed(self, values: Mapping[str, Any]) -> Self:
        """As `derived`, for values that no section refuses: nothing is validated again."""
        new = {name: value for name, value in values.items() if not self.is_given(name)}
        return _without_having_been_given(self.model_copy(update=new), new)

    def left_open(self, *names: str) -> Self:
        """A copy in which these settings aren't given."""
        own = {name: value for name, value in self if name not in names}
        return type(self).model_construct(_fields_set=self.model_fields_set - set(names), **own)

    def as_given(self) -> Self:
        """A copy without what was derived: those settings have their defaults."""
        return self.left_open(*(self.DERIVED - self.model_fields_set))

    @model_validator(mode="wrap")
    @classmethod
    def _derived_is_not_given(cls, given: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if not isinstance(given, Mapping):
            return handler(given)
        present = cls._by_present_names(given)  # now, as this comes before _take_former_names
        own = {key: value for key, value in present.items() if not cls._is_left_open(key, value)}
        shown = own.pop("derived", None) or {}
        if not isinstance(shown, Mapping):
            raise ValueError(f"derived = {shown!r}: under derived a run shows what it has derived, key by key; remove it")
        if info.context is not _WITH_DERIVED:
            return handler(own)
        ran = {key: value for key, value in shown.items() if key in cls.DERIVED - own.keys()}
        return _without_having_been_given(handler(own | ran), ran.keys())

    @classmethod
    def _is_left_open(cls, key: str, value: Any) -> bool:
        """Whether a given value only says that it is to be derived."""
        return key in cls.DERIVED and (value is None or (isinstance(value, str) and value == cls.model_fields[key].default))

    @model_serializer(mode="wrap")
    def _leave_derived_out(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        not_given = self.DERIVED - self.model_fields_set
        kept = {name: value for name, value in written.items() if name not in not_given}
        if info.context is _WITH_DERIVED:
            kept["derived"] = {name: value for name, value in written.items() if name in not_given}
        return kept


def dump_with_derived(config: BaseModel, **options: Any) -> dict[str, Any]:
    """The configuration as JSON data, with the derived values of every DerivedSettings in it under the key `derived` of their section.

    Args: options: of pydantic's model_dump.
    """
    return config.model_dump(mode="json", context=_WITH_DERIVED, **options)


def read_with_derived(model_class: type[Model], data: Mapping[str, Any]) -> Model:
    """What dump_with_derived has written, its derived values as well: they are there, and count as derived.

    Raises: pydantic's ValidationError.
    """
    return model_class.model_validate(data, context=_WITH_DERIVED)


def with_derived_beside_given(written: Mapping[str, Any]) -> dict[str, Any]:
    """What dump_with_derived has written, with each derived value beside the given ones of its section: for who compares runs."""
    given = {key: with_derived_beside_given(value) if isinstance(value, Mapping) else value for key, value in written.items()}
    return given.pop("derived", {}) | given


def _without_having_been_given(settings: Model, names: Iterable[str]) -> Model:
    settings.model_fields_set.difference_update(names)
    return settings
