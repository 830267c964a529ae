"""The settings of a run, from what its folder shows: all that it ran with, and what of that has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from actors.config import RunConfig
from actors.record.run_folder import RunFolder
from correction.early_warning.replacement import reason_of
from correction.engines.device_choice import is_open
from correction.errors import ConfigError
from correction.settings.base import dump_with_derived, read_with_derived


def config_that_ran(folder: RunFolder) -> RunConfig:
    """The configuration with which a run has run, derived values included. To run with it once more, read it as a recipe (load_config):
    then derived values follow from the others again.

    Raises: ConfigError if config.yaml is damaged, or another version's; OSError if the disk doesn't give it.
    """
    content = folder.read_config()
    try:
        return read_with_derived(RunConfig, content)
    except ValidationError as error:
        key = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ConfigError(f"{folder.path / 'config.yaml'}: {key}: not settings of this version: {reason_of(error)}") from error


def changed_settings(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value before, value now), of the settings that differ and are given on either side.

    Args:
        before: with derived values, so that a setting that is given now is compared with what ran.
        now: derived or not.
    """
    old, new = _flat(before), _flat(now)
    both = ((key, old.get(key, _NOTHING), new.get(key, _NOTHING)) for key in {**old, **new})
    return {key: (was, now_is) for key, (was, a), (now_is, b) in both if was != now_is and not (a and b)}


def changed_derived_settings(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The same, of the settings that are derived on both sides and decided on both."""
    old, new = _flat(before), _flat(now)
    both = ((key, old[key], new[key]) for key in old.keys() & new.keys())
    changed = {key: (was, now_is) for key, (was, a), (now_is, b) in sorted(both) if was != now_is and a and b}
    return {key: (was, now_is) for key, (was, now_is) in changed.items() if was is not None and not is_open(was)}


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
