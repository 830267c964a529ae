"""Imports run one way, in no circle: lab -> actors -> learner, rollout -> correction; a class name stands for one thing, and what one
reads at once has a length for that.

Read off the syntax trees, so that nothing has to be imported.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

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


_READ = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Imports, classes and functions of a file, wherever they stand in it. Each file is read by a dozen tests."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    found = []
    while waiting:  # no expression holds a statement, and most nodes are expressions
        node = waiting.pop()
        if isinstance(node, _READ):
            found.append(node)
        waiting += reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, _STATEMENTS)])
    return found


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level name) of every absolute import in a file, those inside functions and `if TYPE_CHECKING` too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_against_the_arrow(package: str) -> None:
    ours = set(PACKAGES) | set(FOLDERS)
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in source_files(package)
        for line, name in imports(path)
        if name in ours - MAY_IMPORT[package]
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


@pytest.mark.parametrize(
    ("wing", "importers"),
    [
        ("actors.record", ("actors.driver.", "actors.commands.")),
        ("actors.commands", ("actors.commands.",)),
    ],
)
def test_what_writes_a_run_down_and_the_command_line_are_no_part_of_the_actors(wing: str, importers: tuple[str, ...]) -> None:
    """The driver gives the recorder what it knows; no actor knows that anybody writes something down, or who has started it."""
    files = {module_name(path): path for path in source_files("actors")}
    inside = {name for name in files if name == wing or name.startswith(wing + ".")}
    found = {name for name, path in files.items() if name not in inside and imported_modules(path, inside)}
    assert inside and (wing == "actors.commands" or "actors.driver.controller" in found), "the test would pass for nothing"
    assert {name for name in found if not name.startswith(importers)} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_files_and_functions_stay_of_a_size_to_read(package: str) -> None:
    """Files under 400 lines, functions under 60."""
    too_long = long_files(package) + [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines"
        for path in source_files(package)
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) >= 60
    ]
    assert too_long == []


@pytest.mark.parametrize("folder", ["benchmarks", "tests", "lab"])
def test_files_of_tests_and_experiments_stay_of_a_size_to_read(folder: str) -> None:
    assert long_files(folder) == []


def long_files(folder: str) -> list[str]:
    counts = {path: len(path.read_text().splitlines()) for path in source_files(folder)}
    return [f"{path.relative_to(ROOT)}: {lines} lines" for path, lines in counts.items() if lines >= 400]


def test_no_import_circles() -> None:
    files = {module_name(path): path for package in PACKAGES for path in source_files(package)}
    graph = {name: imported_modules(path, set(files)) - {name} for name, path in files.items()}
    assert "correction.batch" in graph["correction.correct"], "no import was seen"
    TopologicalSorter(graph).prepare()  # a CycleError names the modules


def classes(path: Path) -> list[str]:
    return [node.name for node in nodes(path) if isinstance(node, ast.ClassDef)]


def test_no_class_name_twice() -> None:
    """A reader who knows a class of a package, of lab or of the benchmarks by its name must not meet another one under it elsewhere. What
    stands in for it in a test has a name of its own, too; two tests may use the same."""
    homes: dict[str, list[str]] = defaultdict(list)
    for package in (*PACKAGES, "lab", "benchmarks"):
        for path in source_files(package):
            for name in classes(path):
                homes[name].append(str(path.relative_to(ROOT)))
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    ours = set(homes)
    for path in source_files("tests"):
        for name in ours.intersection(classes(path)):
            twice[name] = [*twice.get(name, homes[name]), str(path.relative_to(ROOT))]
    assert twice == {}


CARRIERS = ("actors/carriers.py", "rollout/trajectory.py", "learner/results.py")
"""What crosses a process or a package stands in its package's one file. A packed batch and what is made of it: correction/batch.py."""
ELSEWHERE = {
    "correction/batch.py": "correction's own: what its functions take and give",
    "correction/engines/agreement.py": "correction's; the service makes one of two engines' logprobs",
    "correction/engines/weight_spec.py": "what both engines call a tensor",
    "correction/engines/processor.py": "what an engine or a learner computes with: both sides say it",
    "correction/monitor.py": "Event: the monitor makes it, an Observation takes it along",
    "correction/wide.py": "WidePlace: says, in a packed batch, where wide fields are",
    "actors/pool/rollout_worker.py": "WorkerSettings: what one worker is made with, next to the class that takes it",
}
OF_THE_DOCTOR = {
    "CheckedEngine": "lives for one check, and is called by the file that it stands in",
    "Listener": "a socket on another node, likewise; it is handed nothing",
}
"""Ray actors that are no part of a run."""


def dataclasses(path: Path) -> dict[str, bool]:
    """Each dataclass of a file, and whether it is frozen."""
    classes = [node for node in nodes(path) if isinstance(node, ast.ClassDef)]
    marks = [(node.name, ast.unparse(mark)) for node in classes for mark in node.decorator_list]
    return {name: "frozen=True" in mark for name, mark in marks if mark.startswith("dataclass")}


def ray_actors() -> dict[str, Path]:
    """Classes that the packages have Ray make actors of, with their files: what is given to ray.remote by name, or to a function that hands
    its own argument on to it."""
    trees = [ast.parse(path.read_text()) for path in source_files("actors")]
    inside = [(node, {one.arg for one in node.args.args}) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    makers = {"ray.remote"} | {node.name for node, arguments in inside if arguments & set(first_arguments(node, {"ray.remote"}))}
    homes = {name: path for path in source_files("actors") for name in classes(path)}
    return {name: homes[name] for tree in trees for name in first_arguments(tree, makers) if name in homes}


def first_arguments(tree: ast.AST, functions: set[str]) -> Iterator[str]:
    """Names that stand first in calls to these functions, or to what such a call returns."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and call.args and isinstance(name := call.args[0], ast.Name):
            function = call.func.func if isinstance(call.func, ast.Call) else call.func
            if ast.unparse(function) in functions:
                yield name.id


def class_of(path: Path, name: str) -> ast.ClassDef:
    (found,) = [node for node in nodes(path) if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def names_in(expressions: Iterable[ast.expr | None]) -> set[str]:
    return {part.id for one in expressions if one is not None for part in ast.walk(one) if isinstance(part, ast.Name)}


def names_in_calls(path: Path, actor: str) -> set[str]:
    """Names in the annotations of an actor's public methods, and of its `__init__`."""
    methods = [node for node in class_of(path, actor).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = [node for node in methods if not node.name.startswith("_") or node.name == "__init__"]
    given = [one.annotation for node in public for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return names_in([*given, *(node.returns for node in public)])


def names_in_fields(path: Path, name: str) -> set[str]:
    """Names in the annotations of a class's fields, and of its bases."""
    found = class_of(path, name)
    return names_in([*found.bases, *(one.annotation for one in found.body if isinstance(one, ast.AnnAssign))])


def within(names: set[str], homes: dict[str, Path]) -> set[str]:
    """Those of the names that have a home, and all that lie in their fields, at any depth."""
    found: set[str] = set()
    waiting = names & homes.keys()
    while waiting:
        found.add(name := waiting.pop())
        waiting |= (names_in_fields(homes[name], name) & homes.keys()) - found
    return found


@pytest.mark.parametrize("name", [*CARRIERS, "correction/batch.py"])
def test_what_is_handed_over_is_frozen(name: str) -> None:
    found = dataclasses(ROOT / name)
    assert len(found) > 2 and all(found.values()), found


def test_a_call_to_an_actor_carries_what_stands_in_the_files_of_carriers() -> None:
    """Itself, or in a field of what it carries. A field that says Any holds a reference to an object of the store."""
    homes = {name: path for package in PACKAGES for path in source_files(package) for name in dataclasses(path)}
    actors = ray_actors()
    assert set(OF_THE_DOCTOR) < set(actors)
    all_carried: set[str] = set()
    for actor in actors.keys() - OF_THE_DOCTOR:
        carried = within(names_in_calls(actors[actor], actor), homes)
        assert carried, f"{actor}: no dataclass was seen: the test would pass for nothing"
        assert {name: home for name in carried if (home := str(homes[name].relative_to(ROOT))) not in (*CARRIERS, *ELSEWHERE)} == {}, actor
        assert {name for name in carried if not dataclasses(homes[name])[name]} == set(), f"{actor}: not frozen"
        all_carried |= carried
    assert {"VersionSpan", "Event", "WidePlace"} <= all_carried, "what lies in fields was not seen"
    assert {str(homes[name].relative_to(ROOT)) for name in all_carried} >= set(ELSEWHERE), "a reason for what nobody carries"


def test_every_part_with_a_heartbeat_is_among_the_actors() -> None:
    """Every Ray actor of a run has one, but for the rollout worker, whose engine has a heartbeat of its own."""
    found = {
        node.name
        for path in source_files("actors")
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and {"HeartbeatActor", "SequentialHeartbeatActor"} & set(map(ast.unparse, node.bases))
    }
    assert found | {"RolloutWorker"} == ray_actors().keys() - OF_THE_DOCTOR
