"""Imports run one way, in no circle: lab -> evenkeel -> actors -> learner, rollout -> engines -> correction. What is handed over is frozen.

Read off the syntax trees, so that nothing has to be imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("correction", "engines", "rollout", "learner", "actors", "evenkeel")
FOLDERS = ("deploy", "docs", "recipes", "benchmarks", "tests", "lab")
BELOW = {
    "correction": set[str](),
    "engines": {"correction"},
    "rollout": {"engines", "correction"},
    "learner": {"engines", "correction"},
    "actors": {"learner", "rollout", "engines", "correction"},
    "evenkeel": {"actors", "learner", "rollout", "engines", "correction"},
}
ENGINES = {"sglang": "rollout", "megatron": "learner", "ray": "actors"}  # each has one home
CARRIERS = ("actors/carriers.py", "rollout/trajectory.py", "learner/results.py", "correction/batch.py")


def source_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, f"{folders} have no files: the test would pass for nothing"
    return found


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Imports, classes, functions and assignments of a file, wherever they stand in it."""
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Assign)
    return [node for node in statements(ast.parse(path.read_text())) if isinstance(node, kinds)]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk, in the order of the lines and without expressions: none holds a statement, and most nodes are expressions."""
    waiting = [tree]
    while waiting:
        yield (node := waiting.pop())
        below = [child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case))]
        waiting += reversed(below)


def module_name(path: Path, root: Path = ROOT) -> str:
    """As it is imported: the packages' folders stand beside `evenkeel/`, which has a link to each."""
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    return f"evenkeel.{name}" if name.split(".")[0] in PACKAGES[:-1] else name


def imported_from(node: ast.ImportFrom, path: Path, root: Path = ROOT) -> str:
    """Full name of the module that a `from ... import` names; empty if a relative one leaves the root."""
    if node.level == 0 or not path.is_relative_to(root):
        return node.module or "" if node.level == 0 else ""
    package = module_name(path.parent / "__init__.py", root).split(".")
    return ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full name of a module, or of what is imported from one) of every import in a file, those within functions too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (module := imported_from(node, path)):
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def home(name: str) -> str:
    """The package of ours, the folder beside them, or the library that a full name begins with."""
    first, *rest = name.split(".")
    return rest[0] if first == "evenkeel" and rest and rest[0] in PACKAGES else first


def places(found: list[tuple[Path, int, str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line} imports {name}" for path, line, name in found]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_along_the_arrow(package: str) -> None:
    found = [(path, line, name) for path in source_files(package) for line, name in imports(path)]
    assert any(home(name) in BELOW[package] | {package} for _, _, name in found), "no import was seen"
    allowed = BELOW[package] | {package}
    assert places([one for one in found if home(one[2]) in {*PACKAGES, *FOLDERS} - allowed]) == []


@pytest.mark.parametrize(("name", "importers"), [("tests", {"tests"}), ("lab", {"lab", "benchmarks", "tests"})])
def test_tests_and_lab_are_imported_by_few(name: str, importers: set[str]) -> None:
    found = [(path, line, its) for path in source_files(*PACKAGES, "lab", "benchmarks", "tests") for line, its in imports(path)]
    assert any(home(its) == name for _, _, its in found), f"nothing imports {name}: the test would pass for nothing"
    assert places([one for one in found if home(one[2]) == name and one[0].relative_to(ROOT).parts[0] not in importers]) == []


def test_each_engine_has_one_home() -> None:
    """Only actors imports ray, only rollout sglang, only learner megatron. The doctor's gather.py asks nodes by Ray, without a run."""
    files = [path for path in source_files(*PACKAGES) if path != ROOT / "evenkeel" / "doctor" / "gather.py"]
    found = [(path, line, name) for path in files for line, name in imports(path) if home(name) in ENGINES]
    assert {home(name) for _, _, name in found} == set(ENGINES), "an import was not seen"
    assert places([one for one in found if ENGINES[home(one[2])] != one[0].relative_to(ROOT).parts[0]]) == []


def test_correction_imports_torch_and_pydantic_alone_and_does_not_know_its_own_name() -> None:
    """The folder is evenkeel.correction here, evenkeel_correction in the distribution of its own: its imports of itself are relative."""
    allowed = {"correction", "torch", "pydantic"} | sys.stdlib_module_names
    found = [(path, line, name) for path in source_files("correction") for line, name in imports(path)]
    assert places([one for one in found if home(one[2]) not in allowed]) == []
    absolute = [node for path in source_files("correction") for node in nodes(path) if isinstance(node, ast.ImportFrom) and node.level == 0]
    assert [ast.unparse(node) for node in absolute if (node.module or "").split(".")[0] == "evenkeel"] == []


def test_nothing_is_imported_by_a_folder_s_bare_name() -> None:
    """`from actors.config import ...` works here, where the folder lies at the root, and makes a second copy of each class."""
    everywhere = source_files(*PACKAGES, "lab", "benchmarks", "tests", "docs")
    found = [(path, line, name) for path in everywhere for line, name in imports(path) if name.split(".")[0] in PACKAGES[:-1]]
    assert places(found) == []


def test_a_name_with_an_underscore_stays_in_its_module() -> None:
    found = [(path, line, name) for path in source_files(*PACKAGES, "lab", "benchmarks") for line, name in imports(path)]
    ours = [one for one in found if one[2].split(".")[0] in ("evenkeel", "lab", "benchmarks")]
    assert len(ours) > 500, "no import was seen"
    assert places([one for one in ours if one[2].rpartition(".")[2].startswith("_")]) == []


def module_graph() -> dict[str, set[str]]:
    files = {module_name(path): path for path in source_files(*PACKAGES, "lab", "benchmarks")}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        named = {name for _, name in imports(path)}
        graph[module] = {name if name in files else name.rpartition(".")[0] for name in named} & files.keys() - {module}
    return graph


def test_imports_make_no_circle() -> None:
    graph = module_graph()
    assert "evenkeel.correction.batch" in graph["evenkeel.correction.correct"], "no import was seen"
    TopologicalSorter(graph).prepare()  # a CycleError names the modules


def test_folders_make_no_circle() -> None:
    """Each folder of a package counts as one place, and so does each file beside them."""
    graph: dict[str, set[str]] = {}
    for module, its in module_graph().items():
        depth = 3 if home(module) != "evenkeel" else 2
        place = ".".join(module.split(".")[:depth])
        others = {".".join(other.split(".")[: 3 if home(other) != "evenkeel" else 2]) for other in its}
        graph.setdefault(place, set()).update(others - {place})
    assert "evenkeel.rollout.config" in graph["evenkeel.rollout.tasks"], "no import was seen"
    TopologicalSorter(graph).prepare()  # a CycleError names the folders


@pytest.mark.parametrize("name", CARRIERS)
def test_what_is_handed_over_is_frozen(name: str) -> None:
    classes = [node for node in nodes(ROOT / name) if isinstance(node, ast.ClassDef)]
    marks = {node.name: mark for node in classes for one in node.decorator_list if (mark := ast.unparse(one)).startswith("dataclass")}
    assert len(marks) > 2 and all("frozen=True" in mark for mark in marks.values()), marks


def test_the_order_of_the_tests_names_files_that_exist() -> None:
    """tests/conftest.py: a file that moves would run in the middle, or start an engine of its own, and nobody would see it."""
    tree = ast.parse((ROOT / "tests" / "conftest.py").read_text())
    named = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and str(node.value).startswith("tests/")}
    assert len(named) > 5 and {name for name in named if not (ROOT / name).exists()} == set()
