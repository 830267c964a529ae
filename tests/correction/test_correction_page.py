"""docs/correction.md names every diagnostic, and settings and presets that exist; its example runs."""

from __future__ import annotations

import re
from pathlib import Path

from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.diagnostics.quantities import DIAGNOSTICS
from evenkeel.correction.presets.methods import PRESETS

PAGE = Path(__file__).parents[2] / "docs" / "correction.md"


def test_every_diagnostic_is_on_the_page() -> None:
    """Checked by name, apart from how the table is made: each number of its own, or as a copy with a prefix."""
    page = PAGE.read_text()
    for name in DIAGNOSTICS:
        assert f"`{name}`" in page or (name.startswith(("mismatch_", "stale_")) and f"`{name.split('_', 1)[1]}`" in page), name


def test_settings_that_the_page_names_exist() -> None:
    """The second column of the table of parts: keys of the config."""
    table = PAGE.read_text().split("## The parts")[1].split("\n## ")[0]
    keys = re.findall(r"^\| [^|]+ \| `(\w+)` \|", table, re.MULTILINE)
    assert len(keys) == 10 and set(keys) <= set(CorrectionConfig.model_fields)


def test_findings_name_presets_that_exist() -> None:
    """The last column. On the first five the sources contradict each other, as the text above them says."""
    section = PAGE.read_text().split("## What was found")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    named = [set(re.findall(r"`([^`]+)`", row[3])) for row in rows if len(row) > 3]
    assert len(rows) == 10 and set().union(*named) <= set(PRESETS) and all(named[:8])
    assert all(len(row[2]) > 20 for row in rows[:5])


def test_example_runs() -> None:
    """The page's code, on a small batch."""
    from tests.correction.fixtures import THETA as PROBABILITIES
    from tests.correction.fixtures import flat_log, worked_example

    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    scope = {"batch": worked_example(), "target_logprobs": flat_log(PROBABILITIES).requires_grad_()}
    exec(code, scope)
    assert scope["config"].importance.upper == 3 and scope["numbers"]["tokens"] == 9 and scope["loss"].isfinite()
