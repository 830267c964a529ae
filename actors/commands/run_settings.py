"""The settings of a run against those that it had, and against what its recipe writes down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from actors.commands.recipe import RecipeKeys
from actors.config import RunConfig
from correction.engines.device_choice import is_open
from correction.settings.base import dump_with_derived


def changed_settings(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value before, value now), of the settings that differ and are given on either side. A device that is auto before, in
    the folder of an earlier version, could have been either.

    Args:
        before: with derived values, so that a setting that is given now is compared with what ran.
        now: derived or not.
    """
    old, new = _flat(before), _flat(now)
    both = ((key, old.get(key, _NOTHING), new.get(key, _NOTHING)) for key in {**old, **new})
    changed = {key: (was, now_is) for key, (was, a), (now_is, b) in both if was != now_is and not (a and b)}
    return {key: values for key, values in changed.items() if not (key.endswith(".device") and is_open(values[0]))}


def changed_derived_settings(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The same, of the settings that are derived on both sides and decided on both."""
    old, new = _flat(before), _flat(now)
    both = ((key, old[key], new[key]) for key in old.keys() & new.keys())
    changed = {key: (was, now_is) for key, (was, a), (now_is, b) in sorted(both) if was != now_is and a and b}
    return {key: (was, now_is) for key, (was, now_is) in changed.items() if was is not None and not is_open(was)}


def not_as_written(recipe: Path, now: RunConfig) -> list[str]:
    """What a recipe shows as derived, and is derived otherwise now: it was copied from the folder of another run, or written by hand.

    Args: now: with all that is derived.
    Returns: sentences. Raises: ConfigError, OSError as load_config.
    """
    shown, runs, said = RecipeKeys.of(RunConfig, recipe).derived, _flat(now), []
    other = {key: (value, runs[key][0]) for key, value in shown.items() if key in runs and runs[key][1] and value != runs[key][0]}
    if other:
        remedy = f"Outside of derived a value stays: {next(iter(other))}"
        said.append(f"{recipe}: what it shows under derived is derived anew: {listed(other)}. {remedy}")
    if unknown := shown.keys() - runs.keys():
        said.append(f"{recipe}: under derived it shows what is no setting: {', '.join(sorted(unknown))}")
    return said


def former_names(recipe: Path) -> list[str]:
    """Sentences on keys that a recipe, or the config.yaml of an earlier version, calls by a former name. Raises: as not_as_written."""
    return [f"{place} is called {present} now" for place, present in RecipeKeys.of(RunConfig, recipe).former.items()]


def listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Each key with its value before and its value now, shortened."""
    return "; ".join(f"{key} {short(old)} -> {short(new)}" for key, (old, new) in changed.items())


def short(value: Any) -> str:
    """A value as a sentence shows it."""
    text = "empty" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


_NOTHING = (None, False)


def _flat(config: RunConfig) -> dict[str, tuple[Any, bool]]:
    """Dotted key -> (value, whether it is derived)."""
    return dict(_keys(dump_with_derived(config), "", is_derived=False))


def _keys(tree: Mapping[str, Any], prefix: str, *, is_derived: bool) -> Iterator[tuple[str, tuple[Any, bool]]]:
    for key, value in tree.items():
        if key == "derived" and isinstance(value, dict):
            yield from _keys(value, prefix, is_derived=True)
        elif isinstance(value, dict) and value:
            yield from _keys(value, f"{prefix}{key}.", is_derived=is_derived)
        else:
            yield f"{prefix}{key}", (value, is_derived)
