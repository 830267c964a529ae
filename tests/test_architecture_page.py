"""docs/architecture.md and its picture name files and folders that exist, and arrows that are the imports."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PICTURE = ElementTree.fromstring((ROOT / "docs" / "images" / "architecture.svg").read_text())


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", PAGE))
    assert len(named) > 50, "the page names no files: the test would pass for nothing"
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_file_and_folder_of_the_picture_exists() -> None:
    lines = [one.text or "" for one in PICTURE.iter("{http://www.w3.org/2000/svg}text")]
    named = {name for line in lines for name in re.findall(r"\b(?:[a-z_]+/)+(?:\w+\.py)?", line)}
    assert {"actors/ranks/", "actors/record/", "evenkeel/", "lab/"} <= named, "a name was not seen"
    assert {name for name in named if not (ROOT / name).exists()} == set()
