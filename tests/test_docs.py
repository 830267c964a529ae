"""What the pages tell a reader to do and where they send them: commands that the command line takes, files and headings that exist; and
docs/architecture.md and its picture name files and folders that exist."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.main import get_command

from evenkeel.actors.config import RunConfig
from evenkeel.cli import app
from evenkeel.correction.presets.methods import PRESETS
from evenkeel.explain import explain_lines

ROOT = Path(__file__).parents[1]
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*ROOT_PAGES, *sorted((ROOT / "docs").glob("*.md")), ROOT / "deploy" / "README.md"]
KEYS = [re.sub(r"\.(NAME|N)(?=\.|$)", r"\\.[^.]+", line.path) for line in explain_lines(RunConfig)]
ARCHITECTURE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "images" / "architecture.svg"
OPEN_KEYS = ("rollout.task.options", "rollout.task.chat_template_kwargs", "rollout.engine.engine_args")
"""Mappings whose keys are another package's."""


def commands(text: str) -> list[list[str]]:
    """The words after `evenkeel` of each call in code blocks and between backticks, without comments and variables of the shell."""
    blocks = re.findall(r"```(?:bash|sh)?\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = []
    for line in lines:
        call = re.match(r"(?:[A-Z_]+=\S+ )*(?:\S*/)?evenkeel ((?:[a-z]|--).*)", re.sub(r"\s{2,}#.*", "", line).strip())
        if call:
            found.append(shlex.split(call[1].split(" | ")[0].split(" && ")[0]))
    return found


def links(text: str) -> list[str]:
    """Targets of the Markdown links and pictures that stay in the repository."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def parse(words: list[str]) -> list[str]:
    """The KEY=VALUE words of a call. Raises: what typer raises for an unknown command, option or value."""
    name = words[0]
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    if len(words) == 1 and any(parameter.required for parameter in command.params):
        return []  # a page that names a command without calling it
    context = command.make_context(name, words[1:])
    settings = list(context.params.get("overrides") or [])
    first = str(context.params.get("recipe") or "")
    return [*settings, first] if "=" in first else settings


CALLS = [(page, words) for page in PAGES for words in commands(page.read_text())]


def test_there_are_commands_on_the_pages() -> None:
    """Otherwise the next test has nothing to check: each command of the command line is shown somewhere, and one page shows most."""
    assert {words[0] for _, words in CALLS} == set(get_command(app).commands)  # type: ignore[attr-defined]
    assert len({words[0] for page, words in CALLS if page.name == "command_line.md"}) >= 6


@pytest.mark.parametrize(("page", "words"), CALLS, ids=[f"{page.stem}: {' '.join(words)}" for page, words in CALLS])
def test_commands_on_the_pages_are_ones_that_the_command_line_takes(page: Path, words: list[str]) -> None:
    for setting in parse(words):
        key = setting.partition("=")[0].rstrip(".")
        assert any(re.fullmatch(known, key) for known in KEYS) or key.startswith(OPEN_KEYS), f"{page.name}: no key {key}"
    recipes = [word for word in words if word.endswith(".yaml")]
    assert [recipe for recipe in recipes if not (ROOT / recipe).is_file()] == []
    made = {re.findall(r"^model: (\S+)", path.read_text(), re.MULTILINE)[0] for path in (ROOT / "recipes").glob("*.yaml")}
    assert {word for word in words if word.startswith("models/")} <= made, f"{page.name} names a model folder that no recipe makes"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_every_page_is_reached_from_readme() -> None:
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links(page.read_text()) if not link.startswith("#")]
    assert set(PAGES) <= seen


def test_a_page_says_of_each_file_that_a_run_leaves_what_it_is() -> None:
    """Their list is the head of run_folder.py."""
    module = ast.parse((ROOT / "actors" / "record" / "run_folder.py").read_text())
    names = re.findall(r"(?:^ {4}| {2,})(\w+(?:\.\w+|/))", ast.get_docstring(module, clean=False) or "", re.MULTILINE)
    assert {"metrics.jsonl", "evaluations.jsonl", "stacks/", "report.html"} <= set(names), "the list was not read"
    table = (ROOT / "docs" / "how_it_works.md").read_text().split("## What a run leaves")[1].split("\n## ")[0]
    assert [name for name in names if f"`{name}" not in table] == []


def test_every_file_that_the_architecture_page_names_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", ARCHITECTURE.read_text()))
    assert len(named) > 50, "the page names no files: the test would pass for nothing"
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_file_and_folder_of_the_picture_exists() -> None:
    lines = [one.text or "" for one in ElementTree.parse(PICTURE).iter("{http://www.w3.org/2000/svg}text")]
    named = {name for line in lines for name in re.findall(r"\b(?:[a-z_]+/)+(?:\w+\.py)?", line)}
    assert {"actors/ranks/", "actors/record/", "evenkeel/", "lab/"} <= named, "a name was not seen"
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_number_of_presets_in_readme_is_theirs() -> None:
    assert re.findall(r"\[(\d+) published methods\]", (ROOT / "README.md").read_text()) == [str(len(PRESETS))]
