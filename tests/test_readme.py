"""README names things that exist, and leaves nothing to fill in."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_files_that_readme_names_exist() -> None:
    """Links and recipes in README point to files of the repository."""
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    recipes = re.findall(r"recipes/[\w.]+\.yaml", README)
    assert links and recipes
    missing = [path for path in [*links, *recipes] if not (ROOT / path).exists()]
    assert not missing


def test_nothing_is_left_to_fill_in() -> None:
    """Measured figures stand in README, not their placeholders."""
    assert "@@" not in README
