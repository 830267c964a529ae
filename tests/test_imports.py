"""What the files of this repository import from each other is there, also in tests that are seldom run, and in benchmarks. And what a test
defines within itself is called.

Read off the syntax trees, so that no engine has to be started to see it.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.test_layers import imported_from, nodes, statements

ROOT = Path(__file__).parents[1]
FOLDERS = ("correction", "engines", "rollout", "learner", "actors", "evenkeel", "lab", "benchmarks", "docs", "tests")


def source_of(module: str) -> Path | None:
    """The file of a module or package; a folder without one counts."""
    path = ROOT.joinpath(*module.split("."))
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py", path) if found.exists()), None)


@cache
def defined(path: Path) -> frozenset[str]:
    """Names that a file binds at its top level, imports and branches included."""
    if path.is_dir():
        return frozenset()
    bound = symtable.symtable(path.read_text(), str(path), "exec").get_symbols()
    return frozenset(symbol.get_name() for symbol in bound if symbol.is_assigned() or symbol.is_imported())


def missing(path: Path) -> Iterator[str]:
    """What a file imports of ours that isn't there."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (source_module := imported_from(node, path)):
            wanted = [(source_module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            if module.partition(".")[0] in FOLDERS:
                source = source_of(module)
                is_there = source is not None and (not name or name in defined(source) or source_of(f"{module}.{name}") is not None)
                # A package that makes its names when they are asked for has a test of its own.
                if not is_there and not (source is not None and "__getattr__" in defined(source)):
                    yield f"line {node.lineno}: {module}{f'.{name}' if name else ''}"


def test_every_import_of_ours_is_there() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert {path.relative_to(ROOT).parts[0] for path in files} == set(FOLDERS)
    assert {str(path.relative_to(ROOT)): found for path in files if (found := list(missing(path)))} == {}


def test_what_is_missing_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import evenkeel.correction.checksum\n"
        "from evenkeel.correction.errors import ConfigError, Nothing\nfrom evenkeel.correction import errors\n"
        "def f():\n    from evenkeel.rollout.nowhere import x\n    import torch.nowhere\n"
    )
    (tmp_path / "outside.py").write_text("from . import own\n")
    assert list(missing(tmp_path / "outside.py")) == []
    assert [text.split(": evenkeel.") for text in missing(file)] == [
        ["line 1", "correction.checksum"],
        ["line 2", "correction.errors.Nothing"],
        ["line 5", "rollout.nowhere.x"],
    ]


def uncalled(path: Path) -> Iterator[str]:
    """Functions within the tests of a file that nothing in the test names: their assertions are never made. (Others may call methods.)"""
    function = (ast.FunctionDef, ast.AsyncFunctionDef)
    tests = [node for node in nodes(path) if isinstance(node, function) and node.name.startswith("test_")]
    for test in tests:
        its = list(statements(test))[1:]
        methods = {one for node in its if isinstance(node, ast.ClassDef) for one in node.body}
        within = [node for node in its if isinstance(node, function) and node not in methods and not node.decorator_list]
        named = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} if within else set()
        yield from (f"{path.name}: {test.name}: {one.name}" for one in within if one.name not in named)


def test_what_a_test_defines_is_called() -> None:
    """Two tests of a replaced service once had a scenario that was never played."""
    assert [name for path in sorted((ROOT / "tests").rglob("test_*.py")) for name in uncalled(path)] == []


def test_what_is_not_called_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("def test_one():\n    def scenario(): assert False\n    def used(): pass\n    used()\n")
    assert list(uncalled(file)) == ["test_it.py: test_one: scenario"]
