"""The settings of a run against those that it had, and against what its recipe writes down."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from actors.commands.recipe import RecipeKeys
from actors.config import RunConfig
from actors.settings.derived import derived
from actors.settings.devices import check_types
from actors.settings.true_on_policy import refuse_contradictions
from correction.engines.device_choice import is_open
from correction.settings.base import dump_with_derived


def changed_settings(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value before, value now), of the settings that differ and are given on either side.

    Args:
        before: with derived values, so that a setting that is given now is compared with what ran. What is auto there, in a config.yaml
            that somebody has edited, could have been anything, and differs from whatever is decided now.
        now: derived or not.
    """
    old, new = _flat(before), _flat(now)
    both = ((key, old.get(key, _NOTHING), new.get(key, _NOTHING)) for key in {**old, **new})
    return {key: (was, now_is) for key, (was, a), (now_is, b) in both if was != now_is and not (a and b)}


def changed_derived_settings(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The same, of the settings that are derived on both sides, as far as it says something."""
    return _changed_derived({key: value for key, (value, is_derived) in _flat(before).items() if is_derived}, now)


def _changed_derived(before: Mapping[str, Any], now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Args: before: values that were derived, by dotted key.

    Returns: without what was left open, which has only been decided since; and without times (in seconds, _s), which follow from the
    model's bytes, whatever was set.
    """
    new = {key: value for key, (value, is_derived) in _flat(now).items() if is_derived}
    known = {key: was for key, was in sorted(before.items()) if key in new and was is not None and not is_open(was)}
    return {key: (was, new[key]) for key, was in known.items() if was != new[key] and not key.endswith("_s")}


def not_as_written(keys: RecipeKeys, now: RunConfig) -> list[str]:
    """What a recipe shows as derived, and is derived differently now: it was copied from the folder of another run, or written by hand.

    Args: now: with all that is derived.
    Returns: sentences.
    """
    said = []
    if other := _changed_derived(keys.derived, now):
        kept = next((key for key, (value, _) in other.items() if _goes_with(now, key, value)), None)
        remedy = f". To keep a value, move it out of `derived`: {kept}" if kept else ""
        said.append(f"{keys.recipe}: what it shows under derived is derived anew: {listed(other)}{remedy}")
    if unknown := keys.derived.keys() - _flat(now).keys():
        said.append(f"{keys.recipe}: under derived it shows what is no setting: {', '.join(sorted(unknown))}")
    return said


def _goes_with(now: RunConfig, key: str, value: Any) -> bool:
    """Whether a setting that is derived may be given this value beside the others that are given."""
    data: dict[str, Any] = now.model_dump(mode="json")
    *sections, name = key.split(".")
    reduce(getitem, sections, data)[name] = value
    try:
        config = derived(RunConfig.model_validate(data), has_gpu=False)  # its devices are decided
        refuse_contradictions(config)
        check_types(config)
    except ValueError:  # of pydantic, or a ConfigError
        return False
    return True


def listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Each key with its value before and its value now, shortened."""
    return "; ".join(f"{key} {short(old)} -> {short(new)}" for key, (old, new) in changed.items())


def short(value: Any) -> str:
    """A value as a sentence shows it, in YAML's words."""
    text = "empty" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
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
