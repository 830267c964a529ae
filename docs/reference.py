"""Parts of pages that only the site has, because they are long and the program says the same: settings, commands, functions, recipes.

Where a page has a line that ends with `<!-- NAME: on the site -->`, the site has what the function of that name in `SITE_PARTS` returns.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import griffe
import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

import evenkeel
from evenkeel.actors.config import RunConfig
from evenkeel.cli import app
from evenkeel.explain import explain

ROOT = Path(__file__).resolve().parents[1]
QUOTES = '"""'


def settings() -> str:
    """What `evenkeel config --explain` prints, a heading a key, so that each can be found and linked."""
    lines = ["## The run", ""]
    for number, section in enumerate(explain(RunConfig).split("\n\n")):
        for place, (head, text) in enumerate(re.findall(r"^(\S.*)(?:\n {4}(.*))?", section, re.MULTILINE)):
            key, _, rest = head.partition(": ")
            declared, *notes = re.split(r" {3}\[(.*?)\]", rest)
            kind = f"`{declared}`" + "".join(f" ({note})" for note in notes if note)
            lines += [f"{'###' if place or not number else '##'} `{key}`", "", kind, "", _text(text), ""]
    return "\n".join(lines)


def command_line() -> str:
    """What `evenkeel COMMAND --help` says of each command, as typer writes it in Markdown."""
    command = get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="evenkeel"), name="evenkeel")
    text = re.sub(r"\*\*Commands\*\*:.*?(?=^#)", "", text, count=1, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^#+ `evenkeel", r"#\g<0>", text, flags=re.MULTILINE)


def python_interface() -> str:
    return _public(griffe.load("interface", search_paths=[ROOT / "evenkeel"]), evenkeel.__all__)


def correction_functions() -> str:
    package = griffe.load("correction", search_paths=[ROOT])
    return _public(package, package.exports)


def recipes() -> str:
    """Each recipe with the comment at its head."""
    heads = {path.name: re.match(r"(?:#.*\n)+", path.read_text()) for path in sorted((ROOT / "recipes").glob("*.yaml"))}
    return "\n".join(f"* [{name}]({name}): {re.sub(r'^# ?', '', head[0], flags=re.MULTILINE)}" for name, head in heads.items() if head)


SITE_PARTS: tuple[Callable[[], str], ...] = (settings, command_line, python_interface, correction_functions, recipes)


def with_site_parts(page: str) -> str:
    made = {make.__name__: make for make in SITE_PARTS}
    return re.sub(r"^.*<!-- (\w+): on the site -->$", lambda found: made[found[1]](), page, flags=re.MULTILINE)


def _public(module: griffe.Object, names: list[str]) -> str:
    """These names of a module with their docstrings, read from the source: nothing is imported."""
    return "\n\n".join("\n\n".join(_described(module[name], "##")) for name in sorted(names, key=str.lower))


def _described(found: griffe.Object | griffe.Alias, heading: str) -> Iterator[str]:
    """A heading, the declaration, the docstring, and the same of what a class has; an attribute of a class is one item."""
    one = found[found.name] if found.is_module else found.final_target if found.is_alias else found  # a function in a module of its name
    text = _docstring(one.docstring.value) if one.docstring else ""
    of_type = f"{one.name}: {one.annotation}" if one.is_attribute and one.annotation else one.name
    if one.is_attribute and heading != "##":
        yield f"* `{of_type}" + (f" = {one.value}`" if one.value else "`") + f": {text}"
        return
    yield f"{heading} `{one.name}`"
    yield f"```python\n{of_type if one.is_attribute else textwrap.dedent(one.source.partition(QUOTES)[0]).rstrip()}\n```"
    yield text
    if one.is_class:
        public = [member for member in one.members.values() if member.is_public and not member.is_alias and member.docstring]
        for member in sorted(public, key=lambda member: not member.is_attribute):
            yield from _described(member, f"{heading}#")


def _docstring(text: str) -> str:
    """The arguments as a list, what is raised as a paragraph."""
    text = re.sub(r"^(Args|Raises):", r"\n**\1:**", _text(text), flags=re.MULTILINE)
    return re.sub(r"^    (?=\S)", "* ", text, flags=re.MULTILINE)


def _text(text: str) -> str:
    """Outside of backticks no HTML, and links to the pages that are named."""
    linked = re.sub(r"(`[^`]*`)|\bdocs/(\w+)\.md", lambda found: found[1] or f"[docs/{found[2]}.md]({found[2]}.md)", text)
    return re.sub(r"`[^`]*`|<", lambda found: "\\<" if found[0] == "<" else found[0], linked)
