"""docs/gpu.md: every step says where it was run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gpu.md").read_text()

PLACES = (
    *("on no machine with a GPU", "as on one GPU", "a Ray that counts GPUs which aren't there", "any machine: it needs no GPU"),
    *("rules about GPUs with facts that were made up", "on CPUs", "on a CPU", "on one machine", "nowhere", "in a test", "a test has"),
    *("gloo", "Ray's schema", "on one H200", "on one H100", "NCCL on one GPU"),
)
"""Where steps were run, in the page's words. Another place is added here by who was there."""


def test_every_step_says_where_it_was_run() -> None:
    hour = PAGE.split("## The first hour on a GPU")[1].split("\n## ")[0]
    steps = [line for line in PAGE.replace(hour, "").splitlines() if re.match(r"\| \d+\. ", line)]
    assert len(steps) >= 15
    for step in steps:
        cells = step.split("|")
        assert len(cells) == 5, step
        where = rest = cells[3]
        for place in PLACES:
            rest = rest.replace(place, "")
        assert rest != where and not re.search(r"GPU|NVIDIA|[ABHL]\d{2,3}\b", rest), f"{step}: where was it run?"


def test_the_first_hour_says_of_each_step_what_was_seen() -> None:
    """Commands of evenkeel are looked at by tests/test_docs.py."""
    hour = PAGE.split("## The first hour on a GPU")[1].split("\n## ")[0]
    steps = re.findall(r"^\| (\d+)\. .* \| (.*) \|$", hour, re.MULTILINE)
    assert [number for number, _ in steps] == [str(number) for number in range(1, len(steps) + 1)] and len(steps) > 5
    assert [seen for _, seen in steps if not (seen == "nowhere yet" or seen.startswith(("H200: ", "[on one H100]")))] == []
