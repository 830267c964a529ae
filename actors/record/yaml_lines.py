"""On which line of a YAML file a key stands, for errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml


def composed(path: Path) -> yaml.Node | None:
    """The tree of a file; None: it is empty. Raises: yaml.YAMLError, OSError, UnicodeDecodeError."""
    root: yaml.Node | None = yaml.compose(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return root


def node_lines(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Each dotted key, with the number in it for an entry of a list, and its line, from 1."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            yield path, key.start_mark.line + 1
            yield from node_lines(value, path + ".")
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield f"{prefix}{i}", item.start_mark.line + 1
            yield from node_lines(item, f"{prefix}{i}.")
