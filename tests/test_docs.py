"""What the pages tell a reader to do and where they send them: commands that the command line takes, files and headings that exist; and
docs/architecture.md and its picture name files and folders that exist."""

from __future__ import annotations

import ast
import json
import re
import shlex
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from typer.main import get_command

from docs.examples import BLOCK, CHECKED, OWN_PROGRAM, how_checked
from docs.examples import commands as command_lines
from docs.reference import command_line
from evenkeel.actors.config import RunConfig
from evenkeel.cli import app
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.presets.methods import PRESETS
from evenkeel.explain import explain_lines, flat
from evenkeel.recipe import load_config

ROOT = Path(__file__).parents[1]
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*ROOT_PAGES, *sorted((ROOT / "docs").glob("*.md")), ROOT / "deploy" / "README.md", ROOT / "recipes" / "README.md"]
KEYS = [re.sub(r"\.(NAME|N)(?=\.|$)", r"\\.[^.]+", line.path) for line in explain_lines(RunConfig)]
ARCHITECTURE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "images" / "architecture.svg"
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
OPEN_KEYS = ("rollout.task.options", "rollout.task.chat_template_kwargs", "rollout.engine.engine_args")
"""Mappings whose keys are another package's."""


def name_of(page: Path) -> str:
    """As the site has it."""
    return str(page.relative_to(ROOT).with_suffix(""))


def commands(text: str) -> list[list[str]]:
    """The words after `evenkeel` of each call in code blocks and between backticks, without comments and variables of the shell."""
    lines = [line for language, code in BLOCK.findall(text) if language not in ("python", "yaml") for line in command_lines(code)]
    lines += re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    return [shlex.split(call) for line in lines for call in re.findall(r"(?:^|[\s/])evenkeel ((?:[a-z]|--)[^|&']*)", line)]


def links(text: str) -> list[str]:
    """Targets of the Markdown links and pictures that stay in the repository."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def is_key(path: str) -> bool:
    return any(re.fullmatch(known, path) for known in KEYS) or path.startswith(OPEN_KEYS)


def parse(words: list[str]) -> list[str]:
    """The KEY=VALUE words of a call. Raises: what typer raises for an unknown command, option or value."""
    name = words[0]
    command = COMMANDS[name]
    if len(words) == 1 and any(parameter.required for parameter in command.params):
        return []  # a page that names a command without calling it
    context = command.make_context(name, words[1:])
    settings = list(context.params.get("overrides") or [])
    first = str(context.params.get("recipe") or "")
    return [*settings, first] if "=" in first else settings


@cache
def recipe_takes(recipe: str, *settings: str) -> None:
    """Most calls on the pages are of one recipe, without settings. Raises: ConfigError if it doesn't take these."""
    load_config(RunConfig, ROOT / recipe, settings)


CALLS = [(page, words) for page in PAGES for words in commands(page.read_text())]
CALLS += [(Path("--help"), words) for words in commands(re.sub(r"```console.*?```", "", command_line(), flags=re.DOTALL))]


def test_there_are_commands_on_the_pages() -> None:
    """Otherwise the next test has nothing to check: each command of the command line is shown somewhere, and one page shows most."""
    assert {words[0] for _, words in CALLS} == set(COMMANDS)
    assert len({words[0] for page, words in CALLS if page.name == "command_line.md"}) >= 6


@pytest.mark.parametrize(("page", "words"), CALLS, ids=[f"{page.stem}: {' '.join(words)}" for page, words in CALLS])
def test_commands_on_the_pages_are_ones_that_the_command_line_takes(page: Path, words: list[str]) -> None:
    settings = parse(words)
    assert [one for one in settings if not is_key(one.partition("=")[0].rstrip("."))] == []
    recipes = [word for word in words if word.endswith(".yaml")] or ["recipes/nano_spell_backward.yaml"]
    assert [recipe for recipe in recipes if not (ROOT / recipe).is_file()] == []
    recipe_takes(recipes[0], *(one for one in settings if re.search("=.*[a-z0-9]", one)))  # FOLDER is the reader's
    made = {re.findall(r"^model: (\S+)", path.read_text(), re.MULTILINE)[0] for path in (ROOT / "recipes").glob("*.yaml")}
    assert {word for word in words if word.startswith("models/")} <= made, f"{page.name} names a model folder that no recipe makes"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_keys_within_the_text_are_keys(page: Path) -> None:
    """`learner.lora.rank`, `rollout.workers=2` and the like between backticks; names of files and modules look the same."""
    sections = {key.partition(".")[0] for key in KEYS}
    found = re.findall(r"`([a-z_]+)(\.[a-z_0-9.]*[a-z_0-9])(?=[=:`.])", BLOCK.sub("", page.read_text()))
    others = (".py", ".jsonl", ".util.client.server")
    assert [head + tail for head, tail in found if head in sections and not tail.endswith(others) and not is_key(head + tail)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_metrics_within_the_text_are_listed(page: Path) -> None:
    """`mismatch/k3` and the like between backticks, as docs/metrics.md has them, which tests compare with what a run may write."""
    listed = set(re.findall(r"`([a-z_]+/[a-z_0-9]+)", (ROOT / "docs" / "metrics.md").read_text()))
    groups = {name.partition("/")[0] for name in listed}
    found = {name for name in re.findall(r"`([a-z_]+/[a-z_0-9]+)`", BLOCK.sub("", page.read_text())) if name.partition("/")[0] in groups}
    assert {name for name in found - listed if not (ROOT / name).exists()} == set()


OWN_CALLS = [(page, line) for page in PAGES for _, code in BLOCK.findall(page.read_text()) for line in command_lines(code)]
OWN_CALLS = [(page, part) for page, line in OWN_CALLS for part in line.split(" && ") if OWN_PROGRAM.match(part)]


@pytest.mark.parametrize(("page", "line"), OWN_CALLS, ids=lambda value: value if isinstance(value, str) else value.stem)
def test_options_of_the_repository_s_own_programs_exist(page: Path, line: str) -> None:
    """Read from the source: to start all of these would take minutes."""
    found = OWN_PROGRAM.match(line)
    assert found
    path = ROOT / (found[1] if found[1].endswith(".py") else found[1].replace(".", "/"))
    files = [path] if path.suffix else [path.with_suffix(".py")] if path.with_suffix(".py").exists() else list(path.glob("*.py"))
    source = "".join(file.read_text() for file in files)
    assert [option for option in re.findall(r" (--[a-z-]+)", line) if not re.search(rf"{option}\b", source)] == [], line


NEEDED = """
{model: m, steps: 1, groups_per_step: 1, rollout: {task: {kind: file, path: q.jsonl}, reward: {kind: exact_match},
 sampling: {samples_per_group: 2, max_tokens: 8}}}
"""


def test_yaml_on_the_pages_is_of_a_recipe(tmp_path: Path) -> None:
    """Each block, each of its alternatives, and `section: {...}` within the text, is what a run takes beside the keys that it needs."""
    (tmp_path / "needed.yaml").write_text(NEEDED)
    read = 0
    for page in PAGES:
        text = page.read_text()
        blocks = [code for language, code in BLOCK.findall(text) if language == "yaml"]
        parts = [re.sub(r"^(?= )", "rollout:\n", part) for code in blocks for part in code.split("  # or\n")]
        parts += re.findall(r"`(\w+: \{[^`\n]*\})`", BLOCK.sub("", text))
        for part in parts:
            tree = yaml.safe_load(part)
            if set(tree) <= set(CorrectionConfig.model_fields):
                tree = {"correction": tree}
            if set(tree) <= set(RunConfig.model_fields):
                words = [f"{key}={json.dumps(value)}" for key, value in flat(tree).items()]
                words += ["rollout.task=null", "rollout.reward=null"] if "tasks" in tree.get("rollout", {}) else []
                load_config(RunConfig, tmp_path / "needed.yaml", words)
                read += 1
    assert read >= 18


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_the_site_says_of_examples_holds(page: Path) -> None:
    """Each block has its sentence, each sentence its block, and a test that a sentence names reads the page."""
    name, blocks = name_of(page), BLOCK.findall(page.read_text())
    for language, code in blocks:
        assert how_checked(name, language, code)
    for begin, sentence in CHECKED.get(name, {}).items():
        assert sum(code.startswith(begin) for _, code in blocks) == 1, f"{page.name}: {begin}"
        for test in re.findall(r"tests/\S+\.py", sentence):
            assert page.name in (ROOT / test).read_text() or "Not run" in sentence, f"{test} doesn't read {page.name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []  # a link to a folder has no page on the site
    for link in links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
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


def test_presets_that_the_guide_names_exist() -> None:
    table = (ROOT / "docs" / "choosing.md").read_text().split("| begin with |")[1].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split(" | ")[1])}
    assert len(named) >= 8 and named <= set(PRESETS)


def test_number_of_presets_in_readme_is_theirs() -> None:
    assert re.findall(r"\[(\d+) published methods\]", (ROOT / "README.md").read_text()) == [str(len(PRESETS))]
