"""What crosses a process or a package stands in its package's one file, frozen, and says what it is.

Read off the syntax trees, as in test_layers.py.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.test_layers import PACKAGES, ROOT, imported_from, module_name, nodes, source_files

CARRIERS = ("actors/carriers.py", "actors/part_carriers.py", "rollout/trajectory.py", "learner/results.py")
"""What crosses a process or a package stands in its package's file for that; actors has a second one, for what a part is made with and what
it says of itself. A packed batch and what is made of it: correction/batch.py."""
ELSEWHERE = {
    "correction/batch.py": "correction's own: what its functions take and give",
    "correction/engines/agreement.py": "correction's; the service makes one of two engines' logprobs",
    "correction/engines/weight_spec.py": "what both engines call a tensor",
    "correction/engines/processor.py": "what an engine or a learner computes with: both sides say it",
    "correction/early_warning/monitor.py": "Event: the monitor makes it, an Observation takes it along",
    "correction/wide.py": "WidePlace: says, in a packed batch, where wide fields are",
    "correction/engines/weight_bucket.py": "a bucket of weights, as both engines lay it out",
    "actors/weights/bucket_delta.py": "BucketDelta: tasks make it of two buckets, and weights of it; that is in its methods",
    "actors/doctor/facts.py": "the doctor's: what a node says of itself, next to the other facts that the rules read",
}
TUPLES = {
    "tuple[str, int]": "host and port, as Python's sockets have them",
    "tuple[StepResult | None, StepValues | None]": "num_returns: the values stay in the object store until somebody reads them",
    "tuple[None, Proximal | None]": "num_returns: the group waits for the first, the second stays in the object store; so below",
    "tuple[None, Tensor | None]": "num_returns",
    "tuple[None, SplitLogprobs | None]": "num_returns",
    "tuple[GroupOutcome, *tuple[Any, ...]]": "num_returns: tokens and wide fields of a group stay in the object store of its node",
    "tuple[dict[str, str], str]": "num_returns: checksums of all weights stay in the object store, their digest goes to the driver",
}
"""Tuples of several types in what is called from another process, with the reasons: num_returns is Ray's word for results apart."""
OF_THE_DOCTOR = {
    "PortListener": "a socket on another node: lives for one check, is called by the file that it stands in, and is handed nothing",
}
"""Ray actors that are no part of a run."""


def dataclasses(path: Path) -> dict[str, bool]:
    """Each dataclass of a file, and whether it is frozen."""
    classes = [node for node in nodes(path) if isinstance(node, ast.ClassDef)]
    marks = [(node.name, ast.unparse(mark)) for node in classes for mark in node.decorator_list]
    return {name: "frozen=True" in mark for name, mark in marks if mark.startswith("dataclass")}


@cache
def given_to_ray() -> dict[str, tuple[Path, ast.AST]]:
    """Classes and functions that the packages have Ray make actors and tasks of, with their files: what is given to ray.remote by name, or
    to a function that hands its own argument on to it, at any depth."""
    calls = {path: calls_in(ast.parse(path.read_text())) for path in source_files("actors")}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [(path, node, calls_in(node)) for path in calls for node in nodes(path) if isinstance(node, kinds)]
    takes: dict[tuple[Path | None, str], int] = {(None, "ray.remote"): 0}
    """(file of a function, None for one that others import, and its name) -> place of the argument that comes to Ray."""
    while more := {
        (path if node.name.startswith("_") else None, node.name): own.index(name)
        for path, node, its_calls in functions
        if (own := [one.arg for one in node.args.args if one.arg != "self"])
        for name in handed_on(its_calls, path, takes)
        if name in own
    }.items() - takes.items():
        takes |= dict(more)
    tops = [(path, node) for path in calls for node in nodes(path) if isinstance(node, (ast.ClassDef, *kinds)) and node.col_offset == 0]
    homes = {node.name: (path, node) for path, node in tops}
    return {name: homes[name] for path, its_calls in calls.items() for name in handed_on(its_calls, path, takes) if name in homes}


def calls_in(tree: ast.AST) -> list[tuple[str, list[ast.expr]]]:
    """Functions that are called there, or whose result is (`ray.remote(num_cpus=0)(function)`), with the arguments by place."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(ast.unparse(one.func.func if isinstance(one.func, ast.Call) else one.func).removeprefix("self."), one.args) for one in calls]


def handed_on(calls: list[tuple[str, list[ast.expr]]], path: Path, takes: dict[tuple[Path | None, str], int]) -> Iterator[str]:
    """Names at those places in calls to these functions."""
    for function, arguments in calls:
        at = takes.get((None, function), takes.get((path, function)))
        if at is not None and len(arguments) > at and isinstance(name := arguments[at], ast.Name):
            yield name.id


def ray_actors() -> dict[str, Path]:
    return {name: path for name, (path, node) in given_to_ray().items() if isinstance(node, ast.ClassDef)}


def ray_tasks() -> set[str]:
    return given_to_ray().keys() - ray_actors().keys()


def class_of(path: Path, name: str) -> ast.ClassDef:
    (found,) = [node for node in nodes(path) if isinstance(node, ast.ClassDef) and node.name == name]
    return found


@cache
def aliases() -> dict[str, list[ast.expr]]:
    """Names of types that stand for others (`Outcome = Group | Failure`), in all packages -> what they stand for."""
    found: dict[str, list[ast.expr]] = defaultdict(list)
    for node in (node for package in PACKAGES for path in source_files(package) for node in nodes(path)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Subscript | ast.BinOp):
            found[ast.unparse(node.targets[0])].append(node.value)
    return found


def plain_names(expressions: Iterable[ast.expr | None]) -> frozenset[str]:
    """Names in annotations, those in quotes too."""
    parts = [part for one in expressions if one is not None for part in ast.walk(one)]
    quoted = " ".join(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
    return frozenset(re.findall(r"\w+", quoted)) | {part.id for part in parts if isinstance(part, ast.Name)}


def names_in(expressions: Iterable[ast.expr | None]) -> set[str]:
    """The same, with those that aliases stand for."""
    found: set[str] = set()
    waiting = set(plain_names(expressions))
    while waiting:
        found.add(name := waiting.pop())
        waiting |= plain_names(aliases().get(name, [])) - found
    return found


@cache
def classes_of_actors() -> dict[str, ast.ClassDef]:
    return {node.name: node for path in source_files("actors") for node in nodes(path) if isinstance(node, ast.ClassDef)}


def called_of(node: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """A task itself; of an actor `__init__` and the public methods, those of its bases too."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node]
    assert isinstance(node, ast.ClassDef)
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    bases = [classes_of_actors()[name] for name in map(ast.unparse, node.bases) if name in classes_of_actors()]
    own = [one for one in methods if not one.name.startswith("_") or one.name == "__init__"]
    return own + [method for base in bases for method in called_of(base)]


def annotations_of(name: str) -> list[ast.expr]:
    """Those of all that a call to an actor or a task takes and returns."""
    calls = called_of(given_to_ray()[name][1])
    given = [arg.annotation for one in calls for arg in ast.walk(one.args) if isinstance(arg, ast.arg)]
    return [one for one in (*given, *(call.returns for call in calls)) if one is not None]


def mixed_tuples(annotations: list[ast.expr]) -> set[str]:
    """Tuples of several types in annotations and in the aliases that these name, at any depth."""
    found: set[str] = set()
    waiting, seen = list(annotations), set[str]()
    while waiting:
        for part in ast.walk(waiting.pop()):
            if isinstance(part, ast.Subscript) and ast.unparse(part.value) == "tuple" and isinstance(part.slice, ast.Tuple):
                kinds = {ast.unparse(kind) for kind in part.slice.elts} - {"..."}
                found |= {ast.unparse(part)} if len(kinds) > 1 else set()
            elif isinstance(part, ast.Name) and part.id not in seen:
                seen.add(part.id)
                waiting += aliases().get(part.id, [])
    return found


def names_in_fields(path: Path, name: str) -> set[str]:
    """Names in the annotations of a class's fields, and of its bases."""
    found = class_of(path, name)
    return names_in([*found.bases, *(one.annotation for one in found.body if isinstance(one, ast.AnnAssign))])


def within(names: set[str], homes: dict[str, Path]) -> set[str]:
    """Those of the names that have a home, their subclasses, and all that lie in their fields, at any depth."""
    bases = {name: names_in(class_of(path, name).bases) for name, path in homes.items()}
    found: set[str] = set()
    waiting = names & homes.keys()
    while waiting:
        found.add(name := waiting.pop())
        below = {one for one, its in bases.items() if name in its}
        waiting |= (below | names_in_fields(homes[name], name) & homes.keys()) - found
    return found


@pytest.mark.parametrize("name", [*CARRIERS, "correction/batch.py"])
def test_what_is_handed_over_is_frozen(name: str) -> None:
    found = dataclasses(ROOT / name)
    assert len(found) > 2 and all(found.values()), found


@pytest.mark.parametrize("name", [*CARRIERS, "correction/batch.py"])
def test_each_field_of_a_carrier_says_what_it_is(name: str) -> None:
    """In its docstring, or in that of the same field or property of a class that its own class's docstring names."""
    bodies = {one: class_of(ROOT / name, one).body for one in dataclasses(ROOT / name)}
    explained = {one: {field_of(field) for field, text in pairwise(body) if is_text(text)} for one, body in bodies.items()}
    for one, body in bodies.items():
        explained[one] |= {part.name for part in body if isinstance(part, ast.FunctionDef) and is_text(part.body[0])}
    assert sum(map(len, explained.values())) > 10, "no docstring was seen"
    bare = []
    for one, body in bodies.items():
        named = [other for other in re.findall(r"\w+", ast.get_docstring(class_of(ROOT / name, one)) or "") if other in explained]
        known = explained[one].union(*(explained[other] for other in named))
        bare += [f"{one}.{field}" for field in filter(None, map(field_of, body)) if field not in known]
    assert bare == []


def field_of(statement: ast.stmt) -> str | None:
    return statement.target.id if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) else None


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)


def test_a_call_to_an_actor_or_a_task_carries_what_stands_in_the_files_of_carriers() -> None:
    """Itself, or in a field of what it carries. A field that says Any holds a reference to an object of the store."""
    homes = {name: path for package in PACKAGES for path in source_files(package) for name in dataclasses(path)}
    assert set(OF_THE_DOCTOR) < ray_actors().keys()
    assert {"this_node", "rebuilt", "_given_places", "checksums_of"} <= ray_tasks()
    all_carried: set[str] = set()
    for called in given_to_ray().keys() - OF_THE_DOCTOR:
        carried = within(names_in(annotations_of(called)), homes)
        assert carried or called in ray_tasks(), f"{called}: no dataclass was seen: the test would pass for nothing"
        assert {name: home for name in carried if (home := str(homes[name].relative_to(ROOT))) not in (*CARRIERS, *ELSEWHERE)} == {}, called
        assert {name for name in carried if not dataclasses(homes[name])[name]} == set(), f"{called}: not frozen"
        all_carried |= carried
    ours = {name for path in CARRIERS for name in dataclasses(ROOT / path)}
    imported = {name for its in imported_elsewhere().values() for name in its}
    assert ours - all_carried - imported == set(), "a carrier that nobody carries"
    assert {"VersionSpan", "Event", "WidePlace"} <= all_carried, "what lies in fields was not seen"
    assert {str(homes[name].relative_to(ROOT)) for name in all_carried} >= set(ELSEWHERE), "a reason for what nobody carries"


def imported_elsewhere() -> dict[Path, set[str]]:
    """Dataclasses and named tuples that modules of other packages import, by the file that they stand in."""
    homes = {module_name(path): path for package in PACKAGES for path in source_files(package)}
    found: dict[Path, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path in source_files(package):
            for node in nodes(path):
                home = homes.get(imported_from(node, path)) if isinstance(node, ast.ImportFrom) else None
                if home is not None and not home.is_relative_to(ROOT / package):
                    found[home] |= {alias.name for alias in node.names} & (dataclasses(home).keys() | named_tuples(home))
    return found


def named_tuples(path: Path) -> set[str]:
    return {node.name for node in nodes(path) if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases)}


def test_a_call_to_an_actor_or_a_task_takes_and_returns_no_tuple_of_several_types() -> None:
    """A carrier says what each value is, in which shape and unit; in a tuple only its reader knows. The exceptions are listed."""
    found = {called: mixed_tuples(annotations_of(called)) for called in given_to_ray().keys() - OF_THE_DOCTOR}
    assert {called: wrong for called, its in found.items() if (wrong := its - TUPLES.keys())} == {}
    assert set().union(*found.values()) == TUPLES.keys(), "a reason for a tuple that nobody sends"


def test_every_part_with_a_heartbeat_is_among_the_actors() -> None:
    """Every Ray actor of a run has one, but for the rollout worker, whose engine has a heartbeat of its own."""
    found = {
        node.name
        for path in source_files("actors")
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and {"HeartbeatActor", "SequentialHeartbeatActor"} & set(map(ast.unparse, node.bases))
    }
    assert found | {"RolloutWorker"} == ray_actors().keys() - OF_THE_DOCTOR
