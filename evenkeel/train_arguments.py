"""Checks the command line of `evenkeel train` before imports that take seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evenkeel.actors.config import RunConfig
from evenkeel.actors.processes.disk_at_start import by_disk_at_start
from evenkeel.correction.errors import ConfigError
from evenkeel.recipe import Recipe, read_recipe


def run_dir_of(recipe: Path | None, words: Sequence[str], resume: Path | None) -> Path:
    """The folder that the run will have. Raises: ConfigError for what can't be read; OSError; DiskLate."""
    if resume is None:
        from evenkeel.actors.record.ownership import fresh_path

        config = recipe_of(recipe, words).config
        return config.run_dir or fresh_path(Path("runs"), config.name)
    for word in words:
        if "=" not in word and Path(word).suffix in (".yaml", ".yml"):
            raise ConfigError(f"{word}: --resume takes no recipe, {resume} holds the one that it was started with; leave it out")
    from evenkeel.actors.record.run_folder import RunFolder
    from evenkeel.resume_point import run_recipe

    by_disk_at_start(lambda: run_recipe(RunFolder.view(resume), words), "the run's settings")
    return resume


def recipe_of(recipe: Path | None, words: Sequence[str]) -> Recipe[RunConfig]:
    """The recipe of a new run. Raises: ConfigError; OSError; DiskLate."""
    return by_disk_at_start(lambda: read_recipe(RunConfig, recipe, words), f"the recipe {recipe}", disk="its disk")
