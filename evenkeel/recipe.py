"""Loading any pydantic configuration: a YAML recipe plus dotted overrides, and errors that say where and what to do.

OmegaConf reads YAML and overrides (`a.b=3`, values in YAML syntax, `${...}` for references); pydantic decides what is valid.
Paths are dotted; an entry of a list has its number in it (`correction.rejection.0.upper`), which is N in explanations.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from evenkeel.actors.record.config_that_ran import composed, node_lines
from evenkeel.correction.errors import ConfigError, one_line, require_utf8
from evenkeel.correction.settings.base import Settings
from evenkeel.explain import (
    LISTED,
    always_derived,
    explain_lines,
    field_discriminator,
    inner_models,
    nearest_key,
    numberless,
)
from evenkeel.other_words import meant_by

Model = TypeVar("Model", bound=BaseModel)
COMMAND_LINE = "command line"
"""The place of an override."""


# Loading.


@dataclass(frozen=True, slots=True)
class Recipe(Generic[Model]):
    """A recipe with overrides on top, read once."""

    config: Model
    """Validated, and not yet resolved (actors/settings/resolve.py)."""
    given: dict[str, Any]
    """What was given, overrides merged in: as YAML it is a recipe again."""
    source: Source


def load_config(model_class: type[Model], recipe: Path | None, overrides: Sequence[str] = ()) -> Model:
    """The configuration of read_recipe. Args, Raises: as that."""
    return read_recipe(model_class, recipe, overrides).config


def read_recipe(model_class: type[Model], recipe: Path | None, overrides: Sequence[str] = ()) -> Recipe[Model]:
    """A recipe with overrides on top, validated.

    Where an override changes the kind of a tagged union, the recipe's other keys of that section belong to another variant and go.
    Args:
        model_class: what the configuration has to be.
        recipe: YAML file; None: overrides and defaults alone.
        overrides: "dotted.key=value" each; a later one wins.
    Raises: ConfigError with one line for each problem: file and line (or "command line"), key, value, reason and remedy; OSError if the
        disk doesn't give the file, which may pass.
    """
    with contextlib.suppress(FileNotFoundError):  # a folder that has been removed
        require_utf8("the working folder, ", os.getcwd())
        require_utf8("the folder for temporary files (TMPDIR), ", tempfile.gettempdir())
    try:
        tree, lines = (OmegaConf.create({}), dict[str, int]()) if recipe is None else _read(recipe)
        assignments, tags = [_parse_override(text) for text in overrides], _tag_paths(model_class)
        # Tags first: what they throw away must not be what another override has just set.
        for key, value in sorted(assignments, key=lambda assignment: numberless(assignment[0]) not in tags):
            if numberless(key) in tags:
                _forget_other_variant(tree, key, value)
            _assign(tree, key, value)
        data = cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{recipe or 'command line'}: {one_line(error)}") from error
    source = Source(recipe, lines, tuple(key for key, _ in assignments))
    problems = [
        f"{source.place(path)}: {path} = {_short(value)}: no key of a recipe, a run derives it ({meaning.rstrip('.')}). Leave it out"
        for path, meaning in always_derived(model_class).items()
        if (value := _value_at(data, path)) is not None
    ]
    try:
        config = model_class.model_validate(data)
    except ValidationError as error:
        problems += [_describe(problem, model_class, data, source) for problem in error.errors()]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return Recipe(config, data, source)


def as_recipe(section: BaseModel) -> dict[str, Any]:
    """A configuration that isn't resolved yet as a recipe that says all of it: what a run derives is left out, unless it is given."""
    return _without_derived(section, section.model_dump(mode="json"))


def _without_derived(section: BaseModel, written: Mapping[str, Any]) -> dict[str, Any]:
    is_open = frozenset[str]()
    if isinstance(section, Settings):
        is_open = section.ALWAYS_DERIVED | {name for name in section.DERIVED if not section.is_given(name)}
    found = {}
    for name, value in written.items():
        inner = getattr(section, name, None)
        if name not in is_open:
            found[name] = _without_derived(inner, value) if isinstance(inner, BaseModel) else value
    return found


def _value_at(data: Any, path: str) -> Any:
    """The value at a dotted key of plain data; None: there is none."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _read(recipe: Path) -> tuple[DictConfig, dict[str, int]]:
    """Returns: what the file says; the line of each dotted key, from 1.

    Raises: ConfigError for a file that isn't there, isn't YAML or is a list; OSError if the disk doesn't give it, which may pass.
    """
    if not recipe.is_file():
        folder, reason = (recipe, "a folder, not a recipe file") if recipe.is_dir() else (recipe.parent, "no such recipe file")
        near = sorted(str(path) for path in folder.glob("*.y*ml") if path.is_file())
        there = f" There are: {', '.join(near)}." if near else ""
        raise ConfigError(f"{recipe}: {reason}.{there}")
    if recipe.name == "config.yaml" and (beside := recipe.with_name("recipe.yaml")).is_file():
        raise ConfigError(f"{recipe}: that is what a run has run with, resolved; its recipe is {beside}")
    try:
        tree = OmegaConf.load(recipe)  # refuses a key that is there twice, which yaml.compose lets pass
        root = composed(recipe)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{recipe}:{line}: not valid YAML: {error.problem}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(recipe)) from error  # one of reading names no file
        raise ConfigError(f"{recipe}: can't be read: {one_line(error)}") from error  # OmegaConf has an OSError for a scalar
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{recipe}: a recipe is a mapping of keys to values; this is a list.")
    return tree, dict(node_lines(root))


def _parse_override(text: str) -> tuple[str, Any]:
    require_utf8("command line: ", text)
    key, equals, value = text.partition("=")
    key = re.sub(r"\[([^.\[\]]+)\](?=[.\[]|$)", r".\1", key).removeprefix("." if key.startswith("[") else "")  # OmegaConf's a[b] is a.b
    if not equals and text.endswith((".yaml", ".yml")):
        raise ConfigError(f"command line: {text!r} is a second recipe: give one, before any KEY=VALUE")
    if not equals or not all(key.split(".")) or key != key.strip() or "[" in key or "]" in key:
        raise ConfigError(f"command line: {text!r} is not a setting: write KEY=VALUE without spaces, such as rollout.workers=2")
    try:
        return key, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)["value"]  # type: ignore[index,call-overload]
    except yaml.YAMLError as error:
        raise ConfigError(f"command line: {key} = {value}: not YAML; put text with special characters in quotes") from error


def _assign(tree: DictConfig, key: str, value: Any) -> None:
    parents = key.split(".")[:-1]
    for depth in range(1, len(parents) + 1):  # `section:` or `section: null` in the recipe is no obstacle
        path = ".".join(parents[:depth])
        if (found := OmegaConf.select(tree, path)) is None:
            OmegaConf.update(tree, path, {}, merge=False)
        elif not OmegaConf.is_config(found):
            raise ConfigError(f"command line: {key} = {value!r}: {path} is {found!r} there, no section")
    try:
        OmegaConf.update(tree, key, value, merge=False)
    except (OmegaConfBaseException, AssertionError, TypeError, IndexError) as error:
        raise ConfigError(f"command line: {key} = {value!r}: the recipe has no such place (a list is set as a whole: KEY=[...])") from error


@cache
def _tag_paths(model_class: type[BaseModel], prefix: str = "") -> set[str]:
    """Dotted keys that choose the variant of a tagged union."""
    found: set[str] = set()
    for name, field in model_class.model_fields.items():
        tag = field_discriminator(field)
        for below, model in inner_models(field.annotation, f"{prefix}{name}."):
            found |= _tag_paths(model, below)
            if tag:
                found.add(below + tag)
    return found


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


# Kinds of pydantic's problems that say no more than the type with its bounds, which is printed anyway.
_SAID_BY_THE_TYPE = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal", "literal_error", "enum"})


@dataclass(frozen=True, slots=True)
class Source:
    """Where a key came from."""

    recipe: Path | None
    lines: Mapping[str, int]
    overridden: tuple[str, ...]

    def place(self, path: str) -> str:
        """File and line of a key, or of the nearest section above it that is written down."""
        for key in self.overridden:
            if path == key or path.startswith(key + ".") or (path and key.startswith(path + ".") and path not in self.lines):
                return COMMAND_LINE
        if self.recipe is None:
            return COMMAND_LINE
        while path and path not in self.lines:
            path = path.rpartition(".")[0]
        return f"{self.recipe}:{self.lines[path]}" if path else str(self.recipe)

    def exact(self, path: str) -> str:
        """File and line of a key that is written down, or "command line"; empty: it is nowhere."""
        if any(f"{path}.".startswith(f"{key}.") for key in self.overridden):
            return COMMAND_LINE
        return f"{self.recipe}:{self.lines[path]}" if path in self.lines else ""

    def place_of_mention(self, reason: str) -> str | None:
        """The override that a validator's message names in full. pydantic locates such an error at a whole section only."""
        return COMMAND_LINE if any(re.search(rf"\b{re.escape(key)}\b", reason) for key in self.overridden) else None


def _describe(problem: ErrorDetails, model_class: type[BaseModel], data: Any, source: Source) -> str:
    path = _data_path(problem["loc"], data)
    place = source.place(path)
    entry = {line.path: line for line in explain_lines(model_class)}.get(numberless(path))
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        if reason := _of_another_kind(path, problem["loc"], model_class):
            return f"{place}: {path} = {_short(value)}: {reason}"
        return f"{place}: {_no_such_key(path, value, model_class)}"
    if kind == "missing":
        meaning = f" ({entry.description.rstrip('.')})" if entry and entry.description else ""
        if entry and entry.is_section:
            how = f"a key at a time: {path}.KEY=VALUE" if source.recipe is None else f"to the recipe, as `{path.rpartition('.')[2]}:`"
            return f"{place}: {path} is missing{meaning}. Add the section {how}; `evenkeel config --section {path}` lists its keys"
        where = "on the command line" if source.recipe is None else "to the recipe, or on the command line"
        return f"{place}: {path} is missing{meaning}. Add it {where}: {path}=VALUE{f' ({entry.type})' if entry else ''}"
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
    if entry and (kind.endswith(("_parsing", "_type")) or kind in _SAID_BY_THE_TYPE):
        return f"{place}: {path} = {_short(value)}: expected {entry.type}."
    reason = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{place}: {path} = {_short(value)}: {reason}.{f' Expected: {entry.type}.' if entry else ''}"


def _no_such_key(path: str, value: Any, model_class: type[BaseModel]) -> str:
    """What was meant: a setting that other trainers call so, or the one that is spelt nearly so."""
    leaf, below = path, value
    while isinstance(below, Mapping) and len(below) == 1:  # sections of another trainer, as one key has made them
        ((name, below),) = below.items()
        leaf = f"{leaf}.{name}"
    for key, given in ((leaf, below), (path, value)):
        if (meant := meant_by(key)) and (not meant.key or meant.key in {line.path for line in explain_lines(model_class)}):
            return f"{key} = {_short(given)}: no such key; {meant}."
    near = nearest_key(model_class, path)
    return f"{path} = {_short(value)}: no such key; {f'the nearest is {near}' if near else LISTED}."


def _of_another_kind(path: str, location: tuple[int | str, ...], model_class: type[BaseModel]) -> str | None:
    """The variant of its section's tagged union in which a key exists that this one lacks, and what to do."""
    variants = [line.variant for line in explain_lines(model_class) if line.path == numberless(path) and line.variant]
    if not variants:
        return None
    section, _, name = path.rpartition(".")
    tag = variants[0].tag
    return (
        f"{name} belongs to {' or '.join(map(str, variants))}, but {section}.{tag} is {location[-2]}. "
        f"Leave it out, or set {section}.{tag} to {' or '.join(variant.value for variant in variants)}."
    )


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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
