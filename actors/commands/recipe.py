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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from actors.commands.config_explain import LISTED, explain_lines, field_discriminator, nearest_key, numberless
from actors.commands.other_words import meant_by
from actors.record.yaml_lines import composed, node_lines
from actors.settings.keys import FormerName, former_keys, inner_models
from correction.errors import ConfigError, EvenkeelError, one_line, require_utf8

Model = TypeVar("Model", bound=BaseModel)


# Loading.


def load_config(model_class: type[Model], recipe: Path | None, overrides: Sequence[str] = ()) -> Model:
    """A recipe with overrides on top, validated.

    Where an override changes the kind of a tagged union, the recipe's other keys of that section belong to another variant and go.
    Args:
        model_class: what the configuration has to be.
        recipe: YAML file; None: overrides and defaults alone.
        overrides: "dotted.key=value" each; a later one wins. A setting's former name in the recipe gives way to one of its present name.
    Raises: ConfigError with one line for each problem: file and line (or "command line"), key, value, reason and remedy.
    """
    return load_with_keys(model_class, recipe, overrides)[0]


def load_with_keys(model_class: type[Model], recipe: Path | None, overrides: Sequence[str] = ()) -> tuple[Model, RecipeKeys]:
    """As load_config, and of the same read the keys that are read otherwise than they are written."""
    with contextlib.suppress(FileNotFoundError):  # a folder that has been removed
        require_utf8("the working folder, ", os.getcwd())
        require_utf8("the folder for temporary files (TMPDIR), ", tempfile.gettempdir())
    try:
        tree, lines = (OmegaConf.create({}), dict[str, int]()) if recipe is None else _read(recipe)
        words = [_parse_override(text) for text in overrides]
        keys = RecipeKeys.of(model_class, recipe, tree, lines, words)  # before overrides are in the tree
        former, tags = former_keys(model_class), _tag_paths(model_class)
        assignments = [(_by_present_name(key, former), value) for key, value in words]
        _refuse_derived(model_class, assignments)
        # Tags first: what they throw away must not be what another override has just set.
        for key, value in sorted(assignments, key=lambda assignment: numberless(assignment[0]) not in tags):
            if numberless(key) in tags:
                _forget_other_variant(tree, key, value)
            for name in (name for name, present in former.items() if f"{key}.".startswith(f"{present}.")):
                _remove(tree, name)
                lines.pop(name, None)
            _assign(tree, key, value)
        data = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{recipe or 'command line'}: {one_line(error)}") from error
    try:
        return model_class.model_validate(data), keys
    except ValidationError as error:
        lines |= {former[key]: line for key, line in lines.items() if key in former}
        source = _Source(recipe, lines, tuple(key for key, _ in assignments))
        problems = [_describe(problem, model_class, data, source) for problem in error.errors()]
        with keys.named():
            raise ConfigError("\n".join(dict.fromkeys(problems))) from None


@dataclass(frozen=True, slots=True)
class RecipeKeys:
    """Keys of a recipe, or of overrides, that are read otherwise than they are written."""

    recipe: Path | None
    """None: there are overrides alone."""
    derived: dict[str, Any]
    """What it shows as derived, by the dotted key of the setting: because it was copied from a run's folder, or by hand."""
    former: tuple[FormerName, ...]

    @classmethod
    def read(cls, model_class: type[BaseModel], recipe: Path, overrides: Sequence[str] = ()) -> RecipeKeys:
        """Of a file; whether its values are valid isn't asked. Raises: ConfigError, OSError as load_config."""
        return cls.of(model_class, recipe, *_read(recipe), [_parse_override(text) for text in overrides])

    @classmethod
    def of(
        cls, model_class: type[BaseModel], recipe: Path | None, tree: DictConfig, lines: Mapping[str, int], words: Sequence[tuple[str, Any]]
    ) -> RecipeKeys:
        """Args: tree, lines: as _read returns them. words: overrides, as (key, value)."""
        sections = {line.path.rpartition(".")[0] for line in explain_lines(model_class) if line.is_derived}
        data = OmegaConf.to_container(tree, resolve=False)  # a ${...} may lack what the command line gives
        shown = {section: _mapping_at(data, f"{section}.derived") for section in sections}
        derived = {f"{section}.{key!s}": value for section, keys in shown.items() for key, value in keys.items()}
        former = FormerName.all_in(model_class, recipe, lines) if recipe else []
        given = {path for key, value in words for path in _paths(key, value)}
        former += [FormerName("command line", key, present) for key, present in former_keys(model_class).items() if key in given]
        return cls(recipe, dict(sorted(derived.items())), tuple(former))

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """An error inside that is about a setting which has been given by a former name gets a note of that name and its place."""
        try:
            yield
        except EvenkeelError as error:
            for name in self.former:
                if name.is_meant_by(error):
                    error.add_note(str(name))
            raise


def _mapping_at(data: Any, path: str) -> dict[Any, Any]:
    """The mapping at a dotted key of plain data; empty: there is none."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def _read(recipe: Path) -> tuple[DictConfig, dict[str, int]]:
    """Returns: what the file says; the line of each dotted key, from 1.

    Raises: ConfigError for a file that isn't there, isn't YAML or is a list; OSError if the disk doesn't give it, which may pass.
    """
    if not recipe.is_file():
        folder, reason = (recipe, "a folder, not a recipe file") if recipe.is_dir() else (recipe.parent, "no such recipe file")
        near = sorted(str(path) for path in folder.glob("*.y*ml") if path.is_file())
        there = f" There are: {', '.join(near)}." if near else ""
        raise ConfigError(f"{recipe}: {reason}.{there}")
    try:
        tree = OmegaConf.load(recipe)    # refuses a key that is there twice, which yaml.compose lets pass
        root = composed(recipe)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{recipe}:{line}: not valid YAML: {error.problem}") from error
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(recipe)) from error  # one of reading names no file
        raise ConfigError(f"{recipe}: can't be read: {error}") from error  # OmegaConf has an OSError for a scalar
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
        return key, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)["value"]    # type: ignore[index,call-overload]
    except yaml.YAMLError as error:
        raise ConfigError(f"command line: {key} = {value}: not YAML; put text with special characters in quotes") from error


def _refuse_derived(model_class: type[BaseModel], assignments: Sequence[tuple[str, Any]]) -> None:
    """Raises: ConfigError for an override of what a section shows as derived. (A recipe may have been copied from a run's folder.)"""
    paths = [path for key, value in assignments for path in _paths(key, value) if "derived" in path]
    lines = list(explain_lines(model_class)) if paths else []
    sections = {line.path.rpartition(".")[0] for line in lines if line.is_derived}
    cut = [(path, *path.partition(".derived")) for path in paths]
    shown = [(path, section, rest[1:]) for path, section, _, rest in cut if section in sections and rest[:1] in ("", ".")]
    if shown:
        path, section, below = shown[-1]
        setting = f"{section}.{below.partition('.')[0]}"  # below it may be what only looks like a key of its value
        setting = former_keys(model_class).get(setting, setting)
        remedy = f"set {setting} itself" if setting in {line.path for line in lines if not line.is_section} else "leave it out"
        raise ConfigError(f"command line: {path}: that shows what a run has derived; {remedy}")


def _paths(key: str, value: Any) -> Iterator[str]:
    """A dotted key and those above it, and all keys in its value."""
    names = key.split(".")
    yield from (".".join(names[:i]) for i in range(1, len(names) + 1))
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _paths(f"{key}.{name}", inner)


def _remove(tree: DictConfig, key: str) -> None:
    section, _, name = key.rpartition(".")
    if isinstance(found := OmegaConf.select(tree, section) if section else tree, DictConfig):
        found.pop(name, None)


def _assign(tree: DictConfig, key: str, value: Any) -> None:
    parents = key.split(".")[:-1]
    for depth in range(1, len(parents) + 1):    # `section:` or `section: null` in the recipe is no obstacle
        path = ".".join(parents[:depth])
        if (found := OmegaConf.select(tree, path)) is None:
            OmegaConf.update(tree, path, {}, merge=False)
        elif not OmegaConf.is_config(found):
            raise ConfigError(f"command line: {key} = {value!r}: {path} is {found!r} there, no section")
    try:
        OmegaConf.update(tree, key, value, merge=False)
    except (OmegaConfBaseException, AssertionError, TypeError, IndexError) as error:
        raise ConfigError(f"command line: {key} = {value!r}: the recipe has no such place (a list is set as a whole: KEY=[...])") from error


def _by_present_name(key: str, former: Mapping[str, str]) -> str:
    """A dotted key that is, or begins with, a former name. Args: former: as former_keys returns them."""
    return next((present + key.removeprefix(name) for name, present in former.items() if f"{key}.".startswith(f"{name}.")), key)


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


_SAID_BY_THE_TYPE = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal", "literal_error", "enum"})
"""Kinds of pydantic's problems that say no more than the type with its bounds, which is printed anyway."""


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
        """The override that a validator's message names in full. pydantic locates such an error at a whole section only."""
        return "command line" if any(re.search(rf"\b{re.escape(key)}\b", reason) for key in self.overridden) else None


def _describe(problem: ErrorDetails, model_class: type[BaseModel], data: Any, source: _Source) -> str:
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
    """For a key that exists, but in another variant of its section's tagged union: which, and what to do."""
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
