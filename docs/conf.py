"""The pages as a site, by Sphinx: `make site`. What they say is in the pages; this file has their order, and what only the site has.

Links are those of the repository's web view: from page to page they lead to a page of the site, to any other file to a copy of it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.examples import with_marks  # noqa: E402
from docs.reference import with_site_parts  # noqa: E402

NAVIGATION = {
    "Start": ["docs/tasks", "docs/models", "docs/live_page", "recipes/README"],
    "Concepts": ["docs/how_it_works", "docs/architecture", "docs/mismatch_on_a_laptop", "docs/glossary"],
    "Choosing a correction": ["docs/choosing", "docs/correction", "docs/presets", "docs/library"],
    "Kinds of training": ["docs/agents", "docs/true_on_policy", "docs/mixture_of_experts"],
    "Sizes and GPUs": ["docs/sizing", "docs/gpu", "docs/layouts", "docs/benchmarks", "docs/limits"],
    "Operations": ["docs/operations", "docs/reliability", "docs/security", "deploy/README"],
    "Extending": ["docs/extending", "CONTRIBUTING", "CHANGELOG"],
    "Reference": ["docs/command_line", "docs/settings", "docs/metrics", "docs/python", "docs/correction_functions"],
}
"""Pages below README, which is the first, by section. A page that is missing here fails the build."""

project = "evenkeel"
extensions = ["myst_parser"]
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/*.md", "deploy/README.md", "recipes/README.md"]
exclude_patterns = [one.name for one in ROOT.iterdir() if one.is_dir() and one.name not in ("docs", "deploy", "recipes")]
myst_heading_anchors = 6  # names as the web view makes them
html_theme = "furo"
html_title = "evenkeel"
html_favicon = "images/icon.svg"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
smartquotes = False  # two dashes of an option stay two
highlight_language = "bash"
html_copy_source = False
html_show_sourcelink = False

texts: dict[str, str] = {}
"""Page -> its Markdown, with what the site adds."""


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    texts[page] = source[0] = with_site_parts(with_marks(source[0], page))
    if page == "docs/settings":
        source[0] = "---\ntocdepth: 2\n---\n" + source[0]  # beside the text its sections, not each key
    if page == root_doc:
        sections = (["```{toctree}", ":hidden:", f":caption: {name}", *pages, "```"] for name, pages in NAVIGATION.items())
        source[0] += "\n\n" + "\n\n".join("\n".join(lines) for lines in sections)


def write_markdown(app: Sphinx, error: Exception | None) -> None:
    """Each page's Markdown beside it, and llms.txt (llmstxt.org), which lists these."""
    if error:
        return
    summary = texts[root_doc].split("\n\n")[1].replace("\n", " ")
    lines = [f"# {project}", "", f"> {summary}", "", f"- [{app.env.titles[root_doc].astext()}]({root_doc}.md)"]
    for name, pages in NAVIGATION.items():
        lines += ["", f"## {name}", "", *(f"- [{app.env.titles[page].astext()}]({page}.md)" for page in pages)]
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n")
    for page, text in texts.items():
        (Path(app.outdir) / f"{page}.md").write_text(text)
    shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", fill)
    app.connect("build-finished", write_markdown)
