"""The configuration with which a run has run, and the recipe that it was given, from its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from evenkeel.actors.config import RunConfig
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.early_warning.replacement import reason_of
from evenkeel.correction.errors import ConfigError


def config_that_ran(folder: RunFolder) -> RunConfig:
    """The settings of config.yaml. Raises: ConfigError if it is damaged, or another version's; OSError if the disk doesn't give it."""
    return _validated(folder.read_config(), folder.path / "config.yaml")


def recipe_given(folder: RunFolder) -> RunConfig:
    """The settings of recipe.yaml, not resolved. Raises: as config_that_ran."""
    folder.check_recipe()
    try:
        content = yaml.safe_load(folder.recipe_path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder.recipe_path}: not valid YAML: {' '.join(str(error).split())}") from error
    return _validated(content, folder.recipe_path)


def _validated(content: Mapping[str, Any], path: Path) -> RunConfig:
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        key, lines = ".".join(str(part) for part in error.errors()[0]["loc"]), dict(node_lines(composed(path)))
        place = f"{path}:{lines[key]}" if key in lines else str(path)
        raise ConfigError(f"{place}: {key}: not settings of this version: {reason_of(error)}") from error


# On which line of a YAML file a key stands, for errors.


def composed(path: Path) -> yaml.Node | None:
    """The tree of a file; None: it is empty. Raises: yaml.YAMLError, OSError, UnicodeDecodeError."""
    root: yaml.Node | None = yaml.compose(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return root


def node_lines(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Each dotted key, with the number in it for an entry of a list, and its line, from 1."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            yield path, key.start_mark.line + 1
            yield from node_lines(value, path + ".")
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield f"{prefix}{i}", item.start_mark.line + 1
            yield from node_lines(item, f"{prefix}{i}.")
