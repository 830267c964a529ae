"""The configuration with which a run has run, from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from actors.config import RunConfig
from actors.record.run_folder import RunFolder
from actors.record.yaml_lines import composed, node_lines
from actors.settings.keys import FormerName
from correction.early_warning.replacement import reason_of
from correction.errors import ConfigError
from correction.settings.base import read_with_derived


def config_that_ran(folder: RunFolder) -> RunConfig:
    """The configuration with which a run has run, derived values included. To run with it once more, read it as a recipe (load_config):
    then derived values follow from the others again.

    Raises: ConfigError if config.yaml is damaged, or another version's; OSError if the disk doesn't give it.
    """
    return settings_that_ran(folder.read_config(), folder.path / "config.yaml")


def settings_that_ran(content: Mapping[str, Any], path: Path) -> RunConfig:
    """The same of what config.yaml says. Args: path: of it, for the error. Raises: ConfigError if it is another version's; OSError."""
    try:
        return read_with_derived(RunConfig, content)
    except ValidationError as error:
        key, lines = ".".join(str(part) for part in error.errors()[0]["loc"]), dict(node_lines(composed(path)))
        section, dot, name = key.rpartition(".")
        former = (one.former for one in FormerName.all_in(RunConfig, path, lines) if one.present == key)
        shown = f"{section}{dot}derived.{name}"
        key = next((one for one in (key, *former, shown) if one in lines), key)  # what is given goes before what was derived
        remedy = "Remove it there: a resume derives it anew" if key == shown else ""
        place = f"{path}:{lines[key]}" if key in lines else str(path)
        raise ConfigError(f"{place}: {key}: not settings of this version: {reason_of(error)}", remedy=remedy) from error


def former_names_in(path: Path) -> list[FormerName]:
    """Settings that stand in a config.yaml by their former names. Raises: OSError."""
    return FormerName.all_in(RunConfig, path, dict(node_lines(composed(path))))
