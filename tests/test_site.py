"""The documentation as a site: a wrong link fails its build, the reference is whole; slow, as `make site` builds the whole in CI: it has no
warning, nothing comes from elsewhere, search works."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from playwright import sync_api as playwright
from typer.main import get_command

import evenkeel
import evenkeel.correction
from docs.reference import with_site_parts
from evenkeel.actors.config import RunConfig
from evenkeel.cli import app
from evenkeel.explain import explain_lines
from tests.evenkeel.dashboard.conftest import browser  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[1]
COMMAND = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "sphinx-build" in line).split()[1:]
"""The options of `make site`; the last two are from where and to where."""


def build(source: Path, into: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", *COMMAND[:-4], "-c", ROOT / "docs", *options, source, into]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    """To a page, to a heading elsewhere or here, to a file; those beside them are right."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "other.md").write_text("# Other\n\n## A heading\n")
    (source / "data.txt").write_text("1\n")
    right = ["other.md", "other.md#a-heading", "#page", "data.txt", "https://example.org/gone"]
    wrong = ["gone.md", "other.md#no-such-heading", "#nor-here", "gone.txt"]
    (source / "page.md").write_text("\n\n".join(["# Page", *(f"[link]({link})" for link in [*right, *wrong])]) + "\n")
    done = build(source, tmp_path / "built", "-D", "root_doc=page", "-D", "include_patterns=*.md")
    found = [line for line in done.stderr.splitlines() if "page.md:" in line]
    assert done.returncode != 0 and len(found) == len(wrong), done.stderr
    assert [link for link, line in zip(wrong, found, strict=True) if link.rpartition("#")[2] not in line] == []


def test_the_reference_is_whole() -> None:
    """Every key (the kind of a section is on the section's line), command and public name."""
    names = ("settings", "command_line", "python", "correction_functions")
    markdown = {name: with_site_parts((ROOT / "docs" / f"{name}.md").read_text()) for name in names}
    keys = set(re.findall(r"^##+ `([\w.]+)`", markdown["settings"], re.MULTILINE))
    elsewhere = tuple(f"{key}." for key in re.findall(r"`([\w.]+)`\n\n.*\(keys as in ", markdown["settings"]))
    left_out = {line.path for line in explain_lines(RunConfig)} - keys
    assert len(keys) > 300 and [key for key in left_out if not key.endswith(".kind") and not key.startswith(elsewhere)] == []
    commands = set(re.findall(r"^### `evenkeel ([\w-]+)`", markdown["command_line"], re.MULTILINE))
    assert commands == set(get_command(app).commands)  # type: ignore[attr-defined]
    for name, package in (("python", evenkeel), ("correction_functions", evenkeel.correction)):
        assert re.findall(r"^## `(\w+)`", markdown[name], re.MULTILINE) == sorted(package.__all__, key=str.lower)
    assert "on the site -->" not in "".join(markdown.values())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make site` does it."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


class Assets(HTMLParser):
    """What a page loads by itself, and where its own links lead."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if tag == "a":
            self.linked.append(given.get("href", ""))
        else:
            self.loaded += [given[name] for name in ("src", "href", "srcset", "data", "poster") if name in given]


@pytest.mark.slow
def test_nothing_comes_from_another_host(site: Path) -> None:
    """Neither by a page nor by a style sheet; every file that a page loads is there."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = Assets(page).loaded
        assert [one for one in loaded if re.match(r"\w+:|//", one)] == [], page
        assert loaded and [one for one in loaded if not one.startswith("#") and not (page.parent / one.partition("?")[0]).exists()] == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert [
        one
        for one in re.findall(r"url\(([^)]*)\)|@import ([^;]*)", styles)
        if re.search(r"//", "".join(one).replace("http://www.w3.org", ""))
    ] == []


@pytest.mark.slow
def test_llms_txt_lists_each_page_in_the_form_of_llmstxt_org(site: Path) -> None:
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[0] == "# evenkeel" and lines[2].startswith("> Asynchronous reinforcement learning")
    assert sum(line.startswith("## ") for line in lines) >= 6
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+\.md)\)", "\n".join(lines), re.MULTILINE)
    pages = {str(page.relative_to(site).with_suffix(".md")) for page in site.rglob("*.html")} - {"index.md", "search.md", "genindex.md"}
    assert set(listed) == pages and all((site / one).is_file() for one in listed)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *what: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_search_finds_a_setting_and_leads_to_it(address: str, width: int, browser: playwright.Browser) -> None:  # noqa: F811
    """Typed on the start page; a page isn't wider than its window, its console has no complaint, and it asks no other host."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda asked: complaints.append(asked.url) if not asked.url.startswith((address, "data:")) else None)
    page.goto(address)
    if width == 400:
        page.click("label[for=__navigation]:visible")
    page.fill("input[name=q]:visible", "max_staleness")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    page.wait_for_function("() => /found \\d+ page/.test(document.body.innerText)")
    found = page.locator("#search-results li a")
    found.get_by_text("Settings > max_staleness", exact=True).click()
    page.wait_for_selector("h1")
    assert page.locator("h1").inner_text().startswith("Settings") and page.url.endswith("/docs/settings.html#max-staleness")
    assert page.locator(":target h3").inner_text().startswith("max_staleness") and page.locator(":target").is_visible()
    for place in ("/index.html", "/docs/presets.html", "/docs/correction_functions.html", "/docs/extending.html"):
        page.goto(address + place)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, place
    assert complaints == []
    page.close()
