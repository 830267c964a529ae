"""Loading and explaining any pydantic configuration: a YAML recipe plus dotted overrides, and errors that say where and what to do.

OmegaConf reads YAML and overrides (`a.b=3`, values in YAML syntax, `${...}` for references); pydantic decides what is valid.
Paths are dotted; an entry of a list has its number in it (`correction.rejection.0.upper`), which is N in explanations.
"""

from __future__ import annotations

import difflib
import enum
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import annotated_types
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from correction.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


# Loading.


def load_config(model_class: type[Model], recipe: Path | None, overrides: Sequence[str] = ()) -> Model:
    """A recipe with overrides on top, validated.

    Where an override changes the kind of a tagged union, the recipe's keys beside it belong to another variant and go.
    Args:
        model_class: what the configuration has to be.
        recipe: YAML file; None: overrides and defaults alone.
        overrides: "dotted.key=value" each; a later one wins.
    Raises: ConfigError with one line for each problem: file and line (or "command line"), key, value, reason and remedy.
    """
    lines = {} if recipe is None else _lines_of_keys(recipe)
    try:
        tree = OmegaConf.create({}) if recipe is None else _read(recipe)
        assignments = [_parse_override(text) for text in overrides]
        tags = _tag_paths(model_class)
        # Tags first: what they throw away must not be what another override has just set.
        for key, value in sorted(assignments, key=lambda assignment: _numberless(assignment[0]) not in tags):
            if _numberless(key) in tags:
                _forget_other_variant(tree, key, value)
            _assign(tree, key, value)
        data = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{recipe or 'command line'}: {str(error).splitlines()[0]}") from error
    try:
        return model_class.model_validate(data)
    except ValidationError as error:
        source = _Source(recipe, lines, tuple(key for key, _ in assignments))
        problems = [_describe(problem, model_class, data, source) for problem in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from None


def _read(recipe: Path) -> DictConfig:
    tree = OmegaConf.load(recipe)
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{recipe}: a recipe is a mapping of keys to values; this is a list.")
    return tree


def _lines_of_keys(recipe: Path) -> dict[str, int]:
    """Line of each dotted key, from 1. Raises: ConfigError for a file that isn't there or isn't YAML."""
    if not recipe.is_file():
        near = sorted(str(path) for path in recipe.parent.glob("*.y*ml")) if recipe.parent.is_dir() else []
        there = f" There are: {', '.join(near)}." if near else ""
        raise ConfigError(f"{recipe}: no such recipe file.{there}")
    try:
        OmegaConf.load(recipe)    # refuses a key that is there twice, which yaml.compose lets pass
        root = yaml.compose(recipe.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{recipe}:{line}: not valid YAML: {error.problem}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{recipe}: can't be read: {error}") from error
    return dict(_node_lines(root, ""))


def _node_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            yield path, key.start_mark.line + 1
            yield from _node_lines(value, path + ".")
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield f"{prefix}{i}", item.start_mark.line + 1
            yield from _node_lines(item, f"{prefix}{i}.")


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or key != key.strip():
        raise ConfigError(f"command line: {text!r} is no override: write KEY=VALUE without spaces, such as rollout.workers=2")
    try:
        return key, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)["value"]    # type: ignore[index,call-overload]
    except yaml.YAMLError as error:
        raise ConfigError(f"command line: {key} = {value}: not YAML; put text with special characters in quotes") from error


def _assign(tree: DictConfig, key: str, value: Any) -> None:
    parents = key.split(".")[:-1]
    for depth in range(1, len(parents) + 1):    # `section:` or `section: null` in the recipe is no obstacle
        path = ".".join(parents[:depth])
        if OmegaConf.select(tree, path) is None:
            OmegaConf.update(tree, path, {}, merge=False)
    try:
        OmegaConf.update(tree, key, value, merge=False)
    except (OmegaConfBaseException, AssertionError, TypeError, IndexError) as error:
        raise ConfigError(f"command line: {key} = {value!r}: the recipe has no such place (a list is set as a whole: KEY=[...])") from error


def _forget_other_variant(tree: DictConfig, key: str, tag: Any) -> None:
    """Empty the section whose tag `key` is, if it was given as another variant."""
    section, _, name = key.rpartition(".")
    before = OmegaConf.select(tree, key)
    if before is not None and before != tag:
        if section:
            OmegaConf.update(tree, section, {name: tag}, merge=False)
        else:
            tree.clear()


# What went wrong, in words.


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a key came from."""

    recipe: Path | None
    lines: Mapping[str, int]
    overridden: tuple[str, ...]

    def place(self, path: str) -> str:
        """File and line of a key, or of the nearest section above it that is written down."""
        for key in self.overridden:
            if path == key or path.startswith(key + ".") or (path and key.startswith(path + ".") and path not in self.lines):
                return "command line"
        if self.recipe is None:
            return "command line"
        while path and path not in self.lines:
            path = path.rpartition(".")[0]
        return f"{self.recipe}:{self.lines[path]}" if path else str(self.recipe)

    def place_of_mention(self, reason: str) -> str | None:
        """Place of an override that a validator's own words name in full; such an error is located at a whole section only."""
        return "command line" if any(re.search(rf"\b{re.escape(key)}\b", reason) for key in self.overridden) else None


def _describe(problem: ErrorDetails, model_class: type[BaseModel], data: Any, source: _Source) -> str:
    path = _data_path(problem["loc"], data)
    place = source.place(path)
    entry = {line.path: line for line in explain_lines(model_class)}.get(_numberless(path))
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{place}: {path} = {_short(value)}: no such key; the nearest is {nearest_key(model_class, path)}."
    if kind == "missing":
        meaning = f" ({entry.description.rstrip('.')})" if entry and entry.description else ""
        where = "on the command line" if source.recipe is None else "to the recipe, or on the command line"
        return f"{place}: {path} is missing{meaning}. Add it {where}: {path}={entry.type if entry else '...'}"
    if kind in ("value_error", "assertion_error"):
        reason = str(context.get("error", problem["msg"]))
        place = source.place_of_mention(reason) or place
        return f"{place}: {reason}" if not path or reason.startswith(path) else f"{place}: {path}: {reason}"
    if kind == "union_tag_invalid":
        tags = [tag.strip().strip("'") for tag in str(context["expected_tags"]).split(",")]
        name = str(context["discriminator"]).strip("'")
        near = difflib.get_close_matches(str(context["tag"]), tags, n=1, cutoff=0.0)[0]
        return f"{place}: {path}.{name} = {context['tag']}: no such {name}; the nearest is {near}, all are {', '.join(tags)}."
    if kind == "union_tag_not_found":
        name = str(context["discriminator"]).strip("'")
        return f"{place}: {path} doesn't say which {name} it is. Add {path}.{name}."
    expected = f" Expected: {entry.type}." if entry else ""
    reason = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{place}: {path} = {_short(value)}: {reason}.{expected}"


def _data_path(location: tuple[int | str, ...], data: Any) -> str:
    """pydantic's location without the names of union variants, which are no keys of the data."""
    parts: list[str] = []
    for i, part in enumerate(location):
        is_tag = isinstance(data, Mapping) and part not in data and part in data.values()
        if is_tag and i < len(location) - 1:
            continue
        parts.append(str(part))
        data = _child(data, part)
    return ".".join(parts)


def _child(data: Any, part: int | str) -> Any:
    """The entry of a mapping or list; None where there is none (defaults and presets aren't in the data)."""
    try:
        return None if isinstance(data, str) else data[part]
    except (LookupError, TypeError):
        return None


def nearest_key(model_class: type[BaseModel], path: str) -> str:
    """The valid dotted key most like `path`: one of the same section by preference, or of the same last part elsewhere."""
    keys = [line.path for line in explain_lines(model_class)]
    section, _, name = _numberless(path).rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.75)
    if close:
        return siblings[close[0]]
    namesakes = [key for key in keys if key.rpartition(".")[2] == name]
    return difflib.get_close_matches(_numberless(path), namesakes or keys, n=1, cutoff=0.0)[0]


def _numberless(path: str) -> str:
    return ".".join("N" if part.isdigit() else part for part in path.split("."))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Explaining.


@dataclass(frozen=True, slots=True)
class FieldLine:
    """One key of a configuration, as the models declare it."""

    path: str
    """Dotted; N stands for a number in a list, NAME for a key of a mapping."""
    type: str
    default: str
    """As one would write it; "required" when there is none."""
    description: str
    variant: str = ""
    """The tag ("kind: clip") under which the key exists, when its section is a tagged union."""
    is_section: bool = False
    """It has keys of its own, which follow."""


def explain_lines(model_class: type[BaseModel], prefix: str = "", variant: str = "") -> Iterator[FieldLine]:
    """Every key of a model and of those inside it, in order of declaration."""
    for name, field in model_class.model_fields.items():
        path = f"{prefix}{name}"
        inner = list(_inner_models(field.annotation, path + "."))
        yield FieldLine(
            path=path,
            type=_section_text(field, [model for _, model in inner]) if inner else _type_text(_annotation(field)),
            default=_default_text(field, bool(inner)),
            description=" ".join((field.description or "").split()),
            variant=variant,
            is_section=bool(inner),
        )
        for below, model in inner:
            yield from explain_lines(model, below, _variant_of(field, model) if len(inner) > 1 else variant)


def explain(model_class: type[BaseModel], section: str = "") -> str:
    """Every key with its type, default and meaning, as plain text: two lines a key, an empty one before each section.

    Args: section: dotted key to restrict it to. Raises: ConfigError if there is no such key.
    """
    shown = [line for line in explain_lines(model_class) if not section or (line.path + ".").startswith(section + ".")]
    if not shown:
        raise ConfigError(f"{section}: no such key; the nearest is {nearest_key(model_class, section)}.")
    blocks = []
    for line in shown:
        if line.variant and line.variant == f"{line.path.rpartition('.')[2]}: {line.default}":
            continue    # the tag itself, which stands beside the section's name
        when = f"   [{line.variant}]" if line.variant else ""
        head = f"{line.path}: {line.type} = {line.default}"
        head = f"\n{head}" if line.is_section else head
        blocks.append(f"{head}{when}\n    {line.description}" if line.description else head + when)
    return "\n".join(blocks).lstrip("\n")


def _annotation(field: FieldInfo) -> Any:
    annotation: Any = field.annotation
    for constraint in field.metadata:
        annotation = Annotated[annotation, constraint]
    return annotation


def _inner_models(annotation: Any, prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The models inside a type, each with the dotted prefix of its keys."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield prefix, annotation
    elif origin is Annotated:
        yield from _inner_models(arguments[0], prefix)
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _inner_models(argument, prefix)
    elif origin in (list, tuple, Sequence):
        yield from _inner_models(arguments[0], prefix + "N.")
    elif origin in (dict, Mapping):
        yield from _inner_models(arguments[1], prefix + "NAME.")


def _discriminator(annotation: Any) -> str | None:
    """Name of the tag in a (possibly optional, possibly listed) tagged union."""
    if typing.get_origin(annotation) is Annotated:
        for extra in annotation.__metadata__:
            if isinstance(extra, FieldInfo) and isinstance(extra.discriminator, str):
                return extra.discriminator
    return next((found for part in typing.get_args(annotation) if (found := _discriminator(part))), None)


def _field_discriminator(field: FieldInfo) -> str | None:
    return field.discriminator if isinstance(field.discriminator, str) else _discriminator(field.annotation)


def _variant_of(field: FieldInfo, model: type[BaseModel]) -> str:
    tag = _field_discriminator(field)
    return f"{tag}: {model.model_fields[tag].default}" if tag else model.__name__


def _tag_paths(model_class: type[BaseModel], prefix: str = "") -> set[str]:
    """Dotted keys that choose the variant of a tagged union."""
    found: set[str] = set()
    for name, field in model_class.model_fields.items():
        tag = _field_discriminator(field)
        for below, model in _inner_models(field.annotation, f"{prefix}{name}."):
            found |= _tag_paths(model, below)
            if tag:
                found.add(below + tag)
    return found


def _section_text(field: FieldInfo, models: list[type[BaseModel]]) -> str:
    tag = _field_discriminator(field)
    if tag is None:
        return _type_text(field.annotation)
    variants = " | ".join(str(model.model_fields[tag].default) for model in models)
    optional = " | null" if type(None) in typing.get_args(field.annotation) else ""
    return f"section, {tag}: {variants}{optional}"


def _type_text(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        text, bounds = _type_text(arguments[0]), "".join(_constraint_text(extra) for extra in annotation.__metadata__)
        return f"{text.removesuffix(' | null')}{bounds} | null" if text.endswith(" | null") else text + bounds
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type_text(argument) for argument in arguments))
    if origin is not None:
        inner = ", ".join("..." if argument is Ellipsis else _type_text(argument) for argument in arguments)
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    if annotation is None or annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " | ".join(str(member.value) for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {"Path": "path"}.get(getattr(annotation, "__name__", ""), getattr(annotation, "__name__", str(annotation)))


def _constraint_text(constraint: object) -> str:
    match constraint:
        case annotated_types.Gt(bound):
            return f" > {bound}"
        case annotated_types.Ge(bound):
            return f" >= {bound}"
        case annotated_types.Lt(bound):
            return f" < {bound}"
        case annotated_types.Le(bound):
            return f" <= {bound}"
        case FieldInfo():
            return "".join(_constraint_text(inner) for inner in constraint.metadata)
        case _:
            return ""


def _default_text(field: FieldInfo, has_keys: bool) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True) if field.default is PydanticUndefined else field.default
    if isinstance(default, BaseModel):
        tag = _field_discriminator(field)
        return f"{tag}: {getattr(default, tag)}" if tag else "as below"
    if has_keys and default in ((), [], {}):
        return "empty"
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default.value) if isinstance(default, enum.Enum) else str(default)
