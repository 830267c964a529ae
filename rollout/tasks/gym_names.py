"""Names of reasoning-gym's data sets and of their options, read from its sources: importing it, and what it draws with, takes a second."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def plain_options(dataset: str) -> frozenset[str]:
    """Names of a data set's options; none where the sources don't say it plainly, and reasoning-gym itself has to be asked."""
    spec = find_spec("reasoning_gym")
    folders = spec.submodule_search_locations or [] if spec is not None else []
    quoted = (f'"{dataset}"', f"'{dataset}'")
    for path in (path for folder in folders for path in sorted(Path(folder).rglob("*.py"))):
        try:
            text = path.read_text(encoding="utf-8")
            is_there = "register_dataset(" in text and any(name in text for name in quoted)
            if is_there and (found := _options(ast.parse(text), dataset)):
                return found
        except (OSError, ValueError, SyntaxError):
            continue
    return frozenset()


def _options(module: ast.Module, dataset: str) -> frozenset[str]:
    """Fields of the class that a module registers as this data set's options; none if it registers none, or none that is plain."""
    names = {
        line.targets[0].id: line.value.value
        for line in module.body
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name) and isinstance(line.value, ast.Constant)
    }
    classes = {line.name: line for line in module.body if isinstance(line, ast.ClassDef)}
    for line in module.body:
        match line:
            case ast.Expr(value=ast.Call(func=ast.Name(id="register_dataset"), args=[name, _, ast.Name(id=options), *_])):
                registered = name.value if isinstance(name, ast.Constant) else names.get(name.id) if isinstance(name, ast.Name) else None
                if registered == dataset and options in classes:
                    return _fields(classes[options])
    return frozenset()


def _fields(options: ast.ClassDef) -> frozenset[str]:
    """Fields of a dataclass without bases."""
    if options.bases or [ast.unparse(one).partition("(")[0] for one in options.decorator_list] != ["dataclass"]:
        return frozenset()
    lines = [line for line in options.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
    return frozenset(line.target.id for line in lines if not {"ClassVar", "InitVar"} & set(_words(line.annotation)))  # type: ignore[union-attr]


def _words(annotation: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]
