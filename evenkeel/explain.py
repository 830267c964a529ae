"""Lists every key of a pydantic configuration with its type, default and meaning, and the presets; for a wrong key finds the nearest one.

It reads the types themselves, not pydantic's `model_json_schema`: that has no default where a factory makes it (27 of a run's keys), and
recipe.py needs the classes of a section's variants, so the walk would stay beside a reader of schemas.
"""

from __future__ import annotations

import difflib
import enum
import json
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from evenkeel.correction.errors import ConfigError
from evenkeel.correction.presets.methods import PRESETS, SHORT_NAMES, preset_settings
from evenkeel.correction.settings.base import Settings

LISTED = "`evenkeel config` lists those that one usually sets, `evenkeel config --explain` all"


class Variant(NamedTuple):
    """One of the models that a section can be."""

    tag: str
    """Key that says which, such as "kind"; empty: none does."""
    value: str
    """Value of the tag, or the model's name."""

    def __str__(self) -> str:
        return f"{self.tag}: {self.value}" if self.tag else self.value


@dataclass(frozen=True, slots=True)
class FieldLine:
    """One key of a configuration, as the models declare it."""

    path: str
    """Dotted; N stands for a number in a list, NAME for a key of a mapping."""
    type: str
    default: str
    """Default as one would write it; "required" when there is none."""
    description: str
    variant: Variant | None = None
    """Variant in which the key exists, when its section is a union; None: it isn't."""
    is_section: bool = False
    """Whether it has keys of its own, which follow."""
    is_derived: bool = False
    """A run derives it, unless it is given."""


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


def explain_lines(model_class: type[BaseModel], prefix: str = "", variant: Variant | None = None) -> Iterator[FieldLine]:
    """Every key of a model and of those inside it that a recipe may give, in order of declaration."""
    derived, never_given = (
        (model_class.DERIVED, model_class.ALWAYS_DERIVED) if issubclass(model_class, Settings) else (frozenset[str](), frozenset[str]())
    )
    for name, field in model_class.model_fields.items():
        if name in never_given:
            continue
        path = f"{prefix}{name}"
        inner = list(inner_models(field.annotation, path + "."))
        yield FieldLine(
            path=path,
            type=_section_text(field, [model for _, model in inner]) if inner else _type_text(_annotation(field)),
            default=_default_text(field, bool(inner)),
            description=" ".join((field.description or "").split()),
            variant=variant,
            is_section=bool(inner),
            is_derived=name in derived,
        )
        for below, model in inner:
            yield from explain_lines(model, below, _variant_of(field, model) if len(inner) > 1 else variant)


@cache
def always_derived(model_class: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Dotted key -> meaning, of the keys that no recipe has, because a run always derives them."""
    found: dict[str, str] = {}
    for name, field in model_class.model_fields.items():
        if issubclass(model_class, Settings) and name in model_class.ALWAYS_DERIVED:
            found[f"{prefix}{name}"] = " ".join((field.description or "").split())
        for below, model in inner_models(field.annotation, f"{prefix}{name}."):
            found |= always_derived(model, below)
    return found


def explain(model_class: type[BaseModel], section: str = "") -> str:
    """Every key with its type, default and meaning, as plain text: two lines a key, an empty one before each section. What is the same in
    several kinds of a section stands there once, and so does a section whose keys another one has, too.

    Args: section: dotted key to restrict it to. Raises: ConfigError if there is no such key.
    """
    shown = [line for line in explain_lines(model_class) if not section or (line.path + ".").startswith(section + ".")]
    if not shown:
        near = nearest_key(model_class, section)
        raise ConfigError(f"{section}: no such key; {f'the nearest is {near}' if near else LISTED}.")
    tags: dict[FieldLine, list[Variant]] = {}
    for line in shown:
        tags.setdefault(replace(line, variant=None), []).extend([line.variant] if line.variant else [])
    first_with: dict[tuple[FieldLine, ...], str] = {}
    blocks, left_out = [], ""
    for line, variants in tags.items():
        name = line.path.rpartition(".")[2]
        if (left_out and line.path.startswith(left_out)) or any(variant == (name, line.default) for variant in variants):
            continue  # the latter: the tag itself, which is on the line of the section's name
        of_all = {one.value for one in variants} >= _kinds_at(tags, line.path.rpartition(".")[0])
        values = dict.fromkeys(one.value for one in variants)
        when = f"   [{variants[0].tag + ': ' if variants[0].tag else ''}{' or '.join(values)}]" if variants and not of_all else ""
        head = f"{line.path}: {line.type} = {line.default}{'   [derived in a run unless it is given]' if line.is_derived else ''}"
        below = tuple(replace(one, path=one.path.removeprefix(line.path)) for one in tags if one.path.startswith(f"{line.path}."))
        known = first_with.setdefault(below, line.path) if line.is_section else line.path
        left_out = f"{line.path}." if known != line.path else left_out
        same = f"   [keys as in {known}]" if known != line.path else ""
        head = f"\n{head}" if line.is_section else head
        blocks.append(f"{head}{when}{same}\n    {line.description}" if line.description else f"{head}{when}{same}")
    return "\n".join(blocks).lstrip("\n")


def explain_values(config: BaseModel, origin: Callable[[str], str], section: str = "") -> str:
    """Every key of a configuration that isn't resolved yet, with its value, where that comes from, and its meaning: two lines a key.

    Args:
        origin: where a dotted key is written down; empty: nowhere.
        section: dotted key to restrict it to.
    Raises: ConfigError if there is no such key.
    """
    lines = {line.path: line for line in explain_lines(type(config))}
    blocks = []
    for path, value in flat(config.model_dump(mode="json")).items():
        line = lines.get(numberless(path))
        if line is None or (section and not f"{path}.".startswith(f"{section}.")):
            continue
        of_nobody = "default, or the preset's" if path.startswith("correction.") else "default"
        place = origin(path) or ("derived when the run starts" if line.is_derived else of_nobody)
        shown = "" if line.is_derived and not origin(path) else f" {json.dumps(value, ensure_ascii=False)}"
        blocks.append(f"{path}:{shown}   [{place}]\n    {line.description}")
    if not blocks:
        near = nearest_key(type(config), section)
        raise ConfigError(f"{section}: no such key; {f'the nearest is {near}' if near else LISTED}.")
    return "\n".join(blocks)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Plain data by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def _kinds_at(tags: Mapping[FieldLine, Sequence[Variant]], section: str) -> set[str]:
    """The variants of a section, by their values."""
    return {one.value for line, variants in tags.items() if line.path.rpartition(".")[0] == section for one in variants}


BASICS = (
    *("model", "steps", "groups_per_step", "max_staleness", "run_dir"),
    *("rollout.task", "rollout.task.path", "rollout.reward", "rollout.workers"),
    *("rollout.sampling.samples_per_group", "rollout.sampling.max_tokens", "rollout.engine.context_length"),
    *("learner.learning_rate", "learner.warmup_steps", "learner.tokens_per_microbatch"),
    *("correction.preset", "correction.kl.coefficient"),
    *("evaluation.every_steps", "checkpoint.every_steps"),
)
"""What nearly every run sets, or should have looked at."""


def explain_basics(model_class: type[BaseModel]) -> str:
    """The keys that one usually sets, as explain has them, and where the others are."""
    lines = {line.path: line for line in reversed(list(explain_lines(model_class)))}
    blocks = [f"{path}: {(one := lines[path]).type} = {one.default}\n    {one.description}" for path in BASICS]
    counts = f"These are {len(BASICS)} of {sum(not line.is_section for line in lines.values())} settings"
    return "\n".join([*blocks, "", f"{counts}; `evenkeel config --section rollout.task` has those of a section, --explain all."])


def nearest_key(model_class: type[BaseModel], path: str) -> str:
    """The valid dotted key most like `path`: one of the same section by preference, then of the same last part elsewhere, then of a last
    part spelt nearly so. Empty: none is like it."""
    keys = [line.path for line in explain_lines(model_class)]
    section, _, name = numberless(path).rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.75):
        return siblings[close[0]]
    if namesakes := [key for key in keys if key.rpartition(".")[2] == name]:
        return difflib.get_close_matches(numberless(path), namesakes, n=1, cutoff=0.0)[0]
    elsewhere = {key.rpartition(".")[2]: key for key in reversed(keys)}
    close = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.8)
    return elsewhere[close[0]] if close else ""


def numberless(path: str) -> str:
    """The path as `FieldLine` has it: N for the number of an entry of a list."""
    return ".".join("N" if part.isdigit() else part for part in path.split("."))


def _annotation(field: FieldInfo) -> Any:
    annotation: Any = field.annotation
    for constraint in field.metadata:
        annotation = Annotated[annotation, constraint]
    return annotation


def _discriminator(annotation: Any) -> str | None:
    """Name of the tag in a (possibly optional, possibly listed) tagged union."""
    if typing.get_origin(annotation) is Annotated:
        for extra in annotation.__metadata__:
            if isinstance(extra, FieldInfo) and isinstance(extra.discriminator, str):
                return extra.discriminator
    return next((found for part in typing.get_args(annotation) if (found := _discriminator(part))), None)


def field_discriminator(field: FieldInfo) -> str | None:
    """Name of the tag of a field that is a tagged union."""
    return field.discriminator if isinstance(field.discriminator, str) else _discriminator(field.annotation)


def _variant_of(field: FieldInfo, model: type[BaseModel]) -> Variant:
    tag = field_discriminator(field)
    return Variant(tag, str(model.model_fields[tag].default)) if tag else Variant("", model.__name__)


def _section_text(field: FieldInfo, models: list[type[BaseModel]]) -> str:
    tag = field_discriminator(field)
    if tag is None:
        return _type_text(field.annotation)
    variants = " | ".join(str(model.model_fields[tag].default) for model in models)
    optional = " | null" if type(None) in typing.get_args(field.annotation) else ""
    return f"section, {tag}: {variants}{optional}"


def _type_text(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        bounds = " and".join(sorted(filter(None, map(_constraint_text, annotation.__metadata__)), reverse=True))  # the lower one first
        others = [one for one in typing.get_args(arguments[0]) if one is not type(None)]
        is_optional = type(None) in typing.get_args(arguments[0])
        return f"{_type_text(typing.Union[*others])}{bounds} | null" if is_optional else _type_text(arguments[0]) + bounds
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
            return " and".join(sorted(filter(None, map(_constraint_text, constraint.metadata)), reverse=True))
        case _:
            return ""


def _default_text(field: FieldInfo, has_keys: bool) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={}) if field.default is PydanticUndefined else field.default
    if isinstance(default, BaseModel):
        tag = field_discriminator(field)
        return f"{tag}: {getattr(default, tag)}" if tag else "as below"
    if has_keys and default in ((), [], {}):
        return "empty"
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default.value) if isinstance(default, enum.Enum) else str(default)


# Columns under which a table of three columns would be a column of single words.
_NARROW = 80
SYMBOLS = (
    "mu: the policy that sampled the token (the engine); pi_prox: the learner's, with the weights from which the update starts; pi_theta: "
    "the learner's while it is updated. rho = pi_prox / mu, r = pi_theta / pi_prox, q = pi_theta / mu. A: the advantage. s: a sequence's "
    "geometric mean of r. geo: geometric mean over a sequence; prod: product over it. sg: no gradient. 1[...]: 1 if it holds, else 0. M: a "
    "mask that drops what has left the trust region. PPO(x): PPO's clipped objective on the ratio x."
)
"""What the letters in the presets' formulas mean."""
_GO_ON = "`evenkeel presets NAME` shows what one of them optimises, its settings and its source; `correction.preset=NAME` takes it."


def show_presets(console: Console) -> None:
    """All presets. In a file or pipe one line each, so that they can be searched."""
    if not console.is_terminal:
        wide = max(map(len, PRESETS))
        for name, preset in PRESETS.items():
            print(f"{name:<{wide}}  {preset.when}  [{preset.source}]", file=console.file)
        return
    if console.width < _NARROW:
        for name, preset in PRESETS.items():
            console.print(Text(name, style="bold"))
            console.print(Padding(Text(preset.when), (0, 0, 0, 2)))
            console.print(Padding(Text(preset.source, style="dim"), (0, 0, 0, 2)))
    else:
        table = Table("preset", "when to use it", "source", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
        table.columns[0].no_wrap = True
        table.columns[1].ratio, table.columns[2].ratio = 3, 2
        for name, preset in PRESETS.items():
            table.add_row(Text(name, style="bold"), Text(preset.when), Text(preset.source, style="dim"))
        console.print(table)
    console.print(Text(f"\n{_GO_ON}"))


def show_preset(console: Console, name: str) -> None:
    """One preset: what it optimises, when to use it, what to choose, what was found with it, its source, and its settings as YAML.

    Raises: ConfigError with the nearest name.
    """
    settings = preset_settings(name)
    preset = PRESETS[name]
    parts = [("optimises", preset.formula), ("use it", preset.when)]
    if preset.open_constant:
        parts.append(("choose", preset.open_constant))
    if preset.found:
        parts.append(("what was found", preset.found))
    parts.append(("source", preset.source))
    console.print(Text(name, style="bold"))
    for title, text in parts:
        _block(console, title, text)
    meant = [f"{short}: {title}" for short, title in SHORT_NAMES.items() if short in preset.found + preset.source]
    for line in meant:
        _indented(console, line)
    _block(console, "settings (a key that isn't here has its default)", "")
    _indented(console, yaml.safe_dump({"correction": settings}, sort_keys=False, default_flow_style=False).rstrip())
    _block(console, "symbols", SYMBOLS)


def _block(console: Console, title: str, text: str) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    if text:
        _indented(console, text)


def _indented(console: Console, text: str) -> None:
    """On a terminal wrapped at its width; in a file or pipe never."""
    if console.is_terminal:
        console.print(Padding(Text(text), (0, 0, 0, 2)))
    else:
        print(textwrap.indent(text, "  "), file=console.file)
