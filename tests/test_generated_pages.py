"""The generated parts of the pages are what their generator makes of the data; `make docs` writes them anew."""

from __future__ import annotations

import pytest

from docs.generate import PARTS, ROOT, diagnostics, with_part


@pytest.mark.parametrize(("name", "make"), PARTS)
def test_a_part_is_what_its_generator_makes(name: str, make) -> None:
    page = (ROOT / name).read_text()
    assert with_part(page, make) == page, "run: make docs"


def test_the_table_of_diagnostics_has_none_that_diagnose_does_not_give() -> None:
    assert "| `k3_kl` |" in diagnostics() and "reference_kl" not in diagnostics()
