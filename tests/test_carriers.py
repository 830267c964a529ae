"""What crosses a process or a package stands in its package's one file, frozen, and says what it is.

Read off the syntax trees, as in test_layers.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.test_layers import PACKAGES, ROOT, nodes, source_files

CARRIERS = ("actors/carriers.py", "rollout/trajectory.py", "learner/results.py")
"""What crosses a process or a package stands in its package's one file. A packed batch and what is made of it: correction/batch.py."""
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
    "actors/doctor/cut_model.py": "the doctor's Reference: what the task next to it computes",
    "actors/pool/rollout_worker.py": "WorkerSettings: what one worker is made with, next to the class that takes it",
}
UNSEEN = {"ExpertShape": "what an engine reads routed experts by, in one process"}
"""Carriers that no annotation of a call leads to."""
OF_THE_DOCTOR = {
    "CheckedEngine": "lives for one check, and is called by the file that it stands in",
    "PortListener": "a socket on another node, likewise; it is handed nothing",
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
    trees = {path: ast.parse(path.read_text()) for path in source_files("actors")}
    functions = [(path, node) for path in trees for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    takes: dict[tuple[Path | None, str], int] = {(None, "ray.remote"): 0}
    """(file of a function, None for one that others import, and its name) -> place of the argument that comes to Ray."""
    while more := {
        (path if node.name.startswith("_") else None, node.name): own.index(name)
        for path, node in functions
        if (own := [one.arg for one in node.args.args if one.arg != "self"])
        for name in handed_on(node, path, takes)
        if name in own
    }.items() - takes.items():
        takes |= dict(more)
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    homes = {node.name: (path, node) for path in trees for node in nodes(path) if isinstance(node, kinds) and node.col_offset == 0}
    return {name: homes[name] for path, tree in trees.items() for name in handed_on(tree, path, takes) if name in homes}


def handed_on(tree: ast.AST, path: Path, takes: dict[tuple[Path | None, str], int]) -> Iterator[str]:
    """Names at those places in calls to these functions, or to what such a call returns (`ray.remote(num_cpus=0)(function)`)."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            function = ast.unparse(call.func.func if isinstance(call.func, ast.Call) else call.func).removeprefix("self.")
            at = takes.get((None, function), takes.get((path, function)))
            if at is not None and len(call.args) > at and isinstance(name := call.args[at], ast.Name):
                yield name.id


def ray_actors() -> dict[str, Path]:
    return {name: path for name, (path, node) in given_to_ray().items() if isinstance(node, ast.ClassDef)}


def ray_tasks() -> set[str]:
    return given_to_ray().keys() - ray_actors().keys()


def class_of(path: Path, name: str) -> ast.ClassDef:
    (found,) = [node for node in nodes(path) if isinstance(node, ast.ClassDef) and node.name == name]
    return found


@cache
def aliases() -> dict[str, frozenset[str]]:
    """Names of types that stand for others (`Outcome = Group | Failure`), in all packages -> the names in what they stand for."""
    found: dict[str, frozenset[str]] = {}
    for node in (node for package in PACKAGES for path in source_files(package) for node in nodes(path)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Subscript | ast.BinOp):
            name = ast.unparse(node.targets[0])
            found[name] = found.get(name, frozenset()) | plain_names([node.value])
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
        waiting |= aliases().get(name, frozenset()) - found
    return found


def names_in_calls(name: str) -> set[str]:
    """Names in the annotations of a task, or of an actor's public methods and of its `__init__`."""
    _, node = given_to_ray()[name]
    methods = [one for one in getattr(node, "body", []) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    calls = [one for one in methods if not one.name.startswith("_") or one.name == "__init__"] if isinstance(node, ast.ClassDef) else [node]
    given = [arg.annotation for one in calls for arg in ast.walk(one.args) if isinstance(arg, ast.arg)]
    return names_in([*given, *(one.returns for one in calls)])


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
    assert any("token" in field for fields in explained.values() for field in fields if field), "no docstring was seen"
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
    assert set(OF_THE_DOCTOR) < ray_actors().keys() and {"this_node", "rebuilt", "_given_gpus", "checksums_of", "reference"} <= ray_tasks()
    all_carried: set[str] = set()
    for called in given_to_ray().keys() - OF_THE_DOCTOR:
        carried = within(names_in_calls(called), homes)
        assert carried or called in ray_tasks(), f"{called}: no dataclass was seen: the test would pass for nothing"
        assert {name: home for name in carried if (home := str(homes[name].relative_to(ROOT))) not in (*CARRIERS, *ELSEWHERE)} == {}, called
        assert {name for name in carried if not dataclasses(homes[name])[name]} == set(), f"{called}: not frozen"
        all_carried |= carried
    ours = {name for path in CARRIERS for name in dataclasses(ROOT / path)}
    assert ours - all_carried == set(UNSEEN), "a carrier that nobody carries, or a reason for one that is seen"
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
