"""A recipe as commands other than `train` read it: keys that are called otherwise now are told. (`train` has them among a run's events.)"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from actors.commands.recipe import RecipeKeys, load_with_keys
from actors.config import RunConfig
from actors.processes.output import put


def load_told(recipe: Path | None, overrides: Sequence[str] | None) -> RunConfig:
    """As load_config; what there is to tell goes to standard error. Raises: as load_config."""
    config, keys = load_with_keys(RunConfig, recipe, overrides or [])
    tell(keys)
    return config


def tell(keys: RecipeKeys) -> None:
    """The former names among them, each with its file and line, on standard error."""
    for name in keys.former:
        put(f"warning: {name}\n", sys.stderr)
