"""docs/gpu.md: what it says closes a finding is there, and every step says where it was run."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gpu.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if re.match(r"\| [AB]\d+b? \|", line)]


def test_every_finding_has_a_row_in_order() -> None:
    of_a = [name for i in range(15) for name in (f"A{i}", f"A{i}b") if name in ("A4b", "A7b") or not name.endswith("b")]
    assert [row[0] for row in ROWS] == of_a + [f"B{i}" for i in range(1, 15)]


def test_what_is_closed_names_a_test_that_exists_and_what_is_open_names_none() -> None:
    """Looked for in the texts: to import every test file, with torch, Ray and SGLang, would take a minute."""
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name, _, state, by, commits in ROWS:
        tests, files = re.findall(r"`(test_\w+)`", by), re.findall(r"`(tests/[\w/]+\.py)`", by)
        assert bool(tests or files) == bool(commits) == (not state.startswith("open: ")), f"{name}: {state}"
        assert [one for one in tests if f"def {one}(" not in sources] == [] and [one for one in files if not (ROOT / one).is_file()] == []


def slow() -> set[str]:
    """Names of tests, and of files of tests, that `make test` leaves out. Only files that have such tests are parsed."""
    found = set[str]()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "pytest.mark.slow" not in (text := path.read_text()):
            continue
        if is_whole := re.search(r"^pytestmark = .*pytest\.mark\.slow", text, re.MULTILINE) is not None:
            found.add(str(path.relative_to(ROOT)))
        for one in ast.parse(text).body:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and (
                is_whole or "pytest.mark.slow" in map(ast.unparse, one.decorator_list)
            ):
                found.add(one.name)
    return found


def test_slow_tests_are_marked_in_the_table() -> None:
    named = [(name, bool(mark)) for row in ROWS for name, mark in re.findall(r"`((?:tests/[\w/]+\.py)|test_\w+)`( \(slow\))?", row[3])]
    marked = {name for name, is_marked in named if is_marked}
    assert marked and marked == {name for name, _ in named} & slow()
    assert not marked & {name for name, is_marked in named if not is_marked}, "everywhere"


def test_every_commit_that_is_named_is_in_the_history() -> None:
    whole = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, check=False)
    if whole.stdout.strip() != "false":
        pytest.skip("no whole history here")
    named = {commit for row in ROWS for commit in row[4].split(", ") if commit}
    listed = subprocess.run(["git", "log", "--format=%H"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(named) > 10 and {one for one in named if not any(commit.startswith(one) for commit in listed)} == set()


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
