"""Imports run one way, in no circle: lab -> actors -> learner, rollout -> correction.

Read off the syntax trees, so that nothing has to be imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from correction.engines.quick_imports import gc_paused

ROOT = Path(__file__).parents[1]
PACKAGES = ("correction", "rollout", "learner", "actors")
FOLDERS = ("deploy", "docs", "recipes", "benchmarks", "tests", "lab")
MAY_IMPORT = {
    "correction": {"correction"},
    "rollout": {"rollout", "correction"},
    "learner": {"learner", "correction"},
    "actors": {"actors", "learner", "rollout", "correction"},
}
ENGINES = {"sglang": "rollout", "megatron": "learner", "ray": "actors"}  # each engine has one home


def source_files(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} has no files: the test would pass for nothing"
    return files


_READ = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Assign)
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def nodes(path: Path) -> list[ast.AST]:
    """Imports, classes, functions and assignments of a file, wherever they stand in it. Each file is read by a dozen tests."""
    return ours[path] if path in (ours := _nodes_of_ours()) else _nodes(path)


@cache
def _nodes_of_ours() -> dict[Path, list[ast.AST]]:
    """Of all files at once: they stay, but the garbage collector would look through them again and again, which takes most of the time."""
    with gc_paused():
        return {path: _nodes(path) for top in (*PACKAGES, *FOLDERS) for path in (ROOT / top).rglob("*.py")}


def _nodes(path: Path) -> list[ast.AST]:
    return [node for node in statements(ast.parse(path.read_text())) if isinstance(node, _READ)]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk, in the order of the lines and without expressions: none holds a statement, and most nodes are expressions."""
    waiting = [tree]
    while waiting:
        yield (node := waiting.pop())
        waiting += reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, _STATEMENTS)])


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level name) of every absolute import in a file, those inside functions and `if TYPE_CHECKING` too."""
    return imports_among(nodes(path))


def imports_among(found: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in found:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_against_the_arrow(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in source_files(package)
        for line, name in imports(path)
        if name in {*PACKAGES, *FOLDERS} - MAY_IMPORT[package]
    ]
    assert wrong == []


@pytest.mark.parametrize(("name", "importers"), [("tests", {"tests"}), ("lab", {"lab", "benchmarks", "tests"})])
def test_what_only_some_may_import(name: str, importers: set[str]) -> None:
    """Tests are for tests alone; lab is for experiments, and the product doesn't need it."""
    tops = [top for top in (*PACKAGES, *FOLDERS) if any((ROOT / top).rglob("*.py"))]
    places = [(top, path, line) for top in tops for path in source_files(top) for line, its in imports(path) if its == name]
    assert places, f"nothing imports {name}: the test would pass for nothing"
    assert [f"{path.relative_to(ROOT)}:{line}" for top, path, line in places if top not in importers] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_engine_has_one_home(package: str) -> None:
    """Only actors imports ray, only rollout sglang (inside functions, as it takes seconds), only learner megatron."""
    places = [(path, line, name) for path in source_files(package) for line, name in imports(path) if name in ENGINES]
    assert {engine for engine, home in ENGINES.items() if home == package} <= {name for _, _, name in places}, "an import was not seen"
    assert [f"{path.relative_to(ROOT)}:{line} imports {name}" for path, line, name in places if ENGINES[name] != package] == []


def test_correction_imports_torch_and_pydantic_alone() -> None:
    allowed = {"correction", "torch", "pydantic"} | sys.stdlib_module_names
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in source_files("correction")
        for line, name in imports(path)
        if name not in allowed
    ]
    assert wrong == []


def module_name(path: Path, root: Path = ROOT) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported_from(node: ast.ImportFrom, path: Path, root: Path = ROOT) -> str:
    """Full name of the module that a `from ... import` names; empty if a relative one leaves the root."""
    if node.level == 0 or not path.is_relative_to(root):
        return node.module or "" if node.level == 0 else ""
    package = path.relative_to(root).parent.parts
    return ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Those of `modules` that a file imports, by their full names; those for types alone and relative ones too."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (module := imported_from(node, path)):
            inner = {f"{module}.{alias.name}" for alias in node.names} & modules
            found |= inner or {module}
    return found & modules


def test_mathematics_imports_nothing_of_the_engines() -> None:
    """correction/engines is what two engines share to agree bit by bit; the rest of correction works without it."""
    files = source_files("correction")
    modules = {module_name(path) for path in files}
    engines = {module for module in modules if module.startswith("correction.engines")}
    assert engines and len(engines) < len(modules)
    wrong = {module_name(path): found for path in files if module_name(path) not in engines if (found := imported_modules(path, engines))}
    assert wrong == {}


def test_mathematics_does_not_know_its_own_name() -> None:
    """Relative imports: the same folder is `correction` here and `evenkeel_correction` in the distribution of its own."""
    files = [path for path in source_files("correction") if "engines" not in path.relative_to(ROOT).parts]
    wrong = [f"{path.relative_to(ROOT)}:{line}" for path in files for line, name in imports(path) if name == "correction"]
    assert wrong == []
    module = ROOT / "correction" / "correct.py"
    assert {"correction.batch", "correction.shards"} <= imported_modules(module, {module_name(path) for path in files})


def private_imports(found: Iterable[ast.AST]) -> set[str]:
    named = [(one, alias.name) for one in found if isinstance(one, ast.ImportFrom) for alias in one.names if alias.name.startswith("_")]
    return {name for one, name in named if one.level or str(one.module).split(".")[0] in {*PACKAGES, *FOLDERS}}


def test_a_name_with_an_underscore_stays_in_its_module() -> None:
    assert private_imports(ast.parse("from lab.ports import _a\nfrom .sums import b, _c\nfrom torch import _C").body) == {"_a", "_c"}
    paths = (path for top in (*PACKAGES, "lab", "benchmarks") for path in source_files(top))
    assert {module_name(path): names for path in paths if (names := private_imports(nodes(path)))} == {}


def test_no_import_circles() -> None:
    files = {module_name(path): path for package in (*PACKAGES, "lab", "benchmarks") for path in source_files(package)}
    graph = {name: imported_modules(path, set(files)) - {name} for name, path in files.items()}
    assert "correction.batch" in graph["correction.correct"], "no import was seen"
    TopologicalSorter(graph).prepare()  # a CycleError names the modules


def test_no_circles_of_folders() -> None:
    """Each folder of a package counts as one place, and so does each file beside them."""
    files = {module_name(path): path for package in PACKAGES for path in source_files(package)}
    place = {name: ".".join(path.relative_to(ROOT).parts[:2]).removesuffix(".py") for name, path in files.items()}
    graph: dict[str, set[str]] = defaultdict(set)
    for name, path in files.items():
        graph[place[name]] |= {place[other] for other in imported_modules(path, set(files))} - {place[name]}
    assert "rollout.config" in graph["rollout.tasks"] and "rollout.engine_settings" in graph["rollout.config"], "no import was seen"
    TopologicalSorter(graph).prepare()  # a CycleError names the folders


def test_the_order_of_the_tests_names_files_that_exist() -> None:
    """tests/conftest.py: a file that moves would run in the middle, or start an engine of its own, and nobody would see it."""
    tree = ast.parse((ROOT / "tests" / "conftest.py").read_text())
    named = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and str(node.value).startswith("tests/")}
    paths = {name for name in named if re.fullmatch(r"[\w/.]+", name)}
    assert len(paths) > 50 and {name for name in paths if not (ROOT / name).exists()} == set()
