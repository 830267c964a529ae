"""README's figure of presets is the number of presets; its links and commands are checked in test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

from evenkeel.correction.presets.methods import PRESETS

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_number_of_presets_in_readme_is_theirs() -> None:
    assert re.findall(r"\[(\d+) published methods\]", README) == [str(len(PRESETS))]
