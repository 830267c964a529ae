"""The table of deadlines has every one that follows from settings: what the code waits for is read off the syntax trees, and compared."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from actors.config import DeadlinesConfig, RunConfig
from actors.settings import deadlines
from actors.settings.deadlines import as_text, table
from rollout.engine_settings.engine_config import EngineDeadlines
from tests.actors.settings.test_deadlines import run_config

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "actors" / "settings" / "deadlines.py"
PACKAGES = ("actors", "learner", "rollout")
NO_DEADLINES = {
    "deadlines.tokens_per_s": "a rate",
    "deadlines.bytes_per_s": "a rate",
    "deadlines.notice_s": "from one notice to the next",
    "init.learner.collective_timeout_s": "of init-model, which has one rank",
}
COMPUTED = {
    ("actors/pool/pool.py", "max(WINDOW_S, FEWEST_FAILED * ATTEMPTS * group_s(self._config))"): "how long failures count, no wait",
    ("actors/processes/disk_at_start.py", "max(limit_s(), _COMPUTES_S if computes else 0.0)"): "a start's looks have five minutes at least",
    ("actors/processes/silence.py", "missed * limit_s"): "how long a process has been silent",
    ("rollout/engine/heartbeat.py", "_LEAST_SHARE * limit_s"): "processor time below which an engine computes nothing",
    ("rollout/engine/heartbeat.py", "limit_s * max(stood / MISSES, missed / _MISSES_AT_WORK)"): "how long an engine has been silent",
    ("rollout/engine/heartbeat.py", "missed * limit_s"): "how long an engine has been silent",
}
"""Sums and products of deadlines outside of the table, by file and expression, and why they are none themselves."""


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings in seconds, those of each member of a union too."""
    for name, field in model.model_fields.items():
        if name.endswith("_s"):
            yield prefix + name
        for part in parts(field.annotation):
            yield from keys(part, f"{prefix}{name}.")


def parts(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation) if not isinstance(annotation, UnionType) else annotation.__args__:
        yield from parts(one)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def sources(names: Iterable[str]) -> Iterator[Path]:
    """Those with one of these names in them, which few have. All but what only reckons: a run in simulated time, a plan, the doctor's own
    short checks."""
    named = re.compile("|".join(rf"\b{name}\b" for name in names))
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not {"simulation", "plan", "doctor"} & set(path.relative_to(ROOT).parts) and named.search(path.read_text()):
                yield path


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree(path).body if isinstance(node, ast.FunctionDef)}


def names_in(node: ast.AST) -> set[str]:
    """All that it names: variables, attributes, and texts that are one name."""
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    found |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    return found | {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def lines_of_the_table() -> set[str]:
    """For each line the setting, property or function that it shows; for a private function what that calls."""
    found, own = set[str](), functions(TABLE)
    variables = {one.targets[0]: one.value for one in ast.walk(own["table"]) if isinstance(one, ast.Assign)}
    pairs = dict[str, ast.expr]()
    for target, value in variables.items():
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs |= {ast.unparse(name): one for name, one in zip(target.elts, value.elts, strict=True)}
    (listed,) = (one.value for one in own["table"].body if isinstance(one, ast.Return))
    assert isinstance(listed, ast.List)
    for line in listed.elts:
        assert isinstance(line, ast.Call) and isinstance(line.func, ast.Name)
        shown = line.args[1]
        shown = pairs.get(shown.id, shown) if isinstance(shown, ast.Name) else shown
        called = shown.func.id if isinstance(shown, ast.Call) and isinstance(shown.func, ast.Name) else ""
        if called.startswith("_"):
            found |= {one.func.id for one in ast.walk(own[called]) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
        else:
            found.add(called or (shown.attr if isinstance(shown, ast.Attribute) else ast.literal_eval(shown)))
    return found


def test_every_setting_in_seconds_is_a_line() -> None:
    known = set(keys(RunConfig))
    assert len(known) > 15 and NO_DEADLINES.keys() <= known
    assert known - NO_DEADLINES.keys() == {line.key for line in table(run_config(), 10**9) if line.key}


def test_what_the_code_takes_of_the_deadlines_is_in_the_table() -> None:
    """Settings and properties, as in `config.deadlines.disk_s`, wherever they are used."""
    used = dict[str, str]()
    for path in sources(["\\w*deadlines"]):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr.endswith("_s") and ast.unparse(node.value).endswith("deadlines"):
                used.setdefault(node.attr, str(path.relative_to(ROOT)))
    assert len(used) > 15 and {"receipts_s", "disk_s", "drain_s", "no_workers_s", "shutdown_s"} <= used.keys()
    told = lines_of_the_table() | {name.rpartition(".")[2] for name in NO_DEADLINES}
    assert {name: where for name, where in used.items() if name not in told} == {}


@pytest.mark.parametrize("section", [DeadlinesConfig, EngineDeadlines])
def test_every_property_of_the_settings_is_a_line(section: type[BaseModel]) -> None:
    derived = {name for name, value in vars(section).items() if isinstance(value, property)}
    assert derived <= lines_of_the_table()


def test_every_function_for_a_deadline_is_a_line() -> None:
    """What other files call to have one (group_s, flush_s, newer_weights_s ...)."""
    public = {name for name in functions(TABLE) if name.endswith("_s") and not name.startswith("_")}
    assert {"group_s", "flush_s", "tokens_s", "tokens_call_s", "wide_fields_call_s", "reading_s"} <= public
    assert public - lines_of_the_table() == set()


def test_no_deadline_is_computed_outside_of_the_table() -> None:
    """A sum or a product of deadlines, or the larger of two, is one more: it belongs into settings/deadlines.py, whose functions the table
    has to show. Shares and what is left of one are shorter; a clock's reading with one added is none."""
    longer = {name.rpartition(".")[2] for name in keys(RunConfig)} | {"deadline_s", "limit_s"}
    longer |= {name for name in functions(TABLE) if name.endswith("_s")}
    longer |= {name for name, value in vars(DeadlinesConfig).items() if isinstance(value, property)}
    longer -= {"tokens_per_s", "bytes_per_s", "notice_s"}
    found = {
        (str(path.relative_to(ROOT)), ast.unparse(node))
        for path in sources(longer)
        if path not in (TABLE, ROOT / "actors" / "config.py")
        for node in outermost(tree(path), longer)
    }
    assert {one for one in found if one not in COMPUTED} == set()
    assert COMPUTED.keys() - found == set(), "is not there any more"


def outermost(node: ast.AST, longer: set[str]) -> Iterator[ast.AST]:
    """The largest sums, products and maxima with one of these names in them."""
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult)
    is_max = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "max"
    if (is_sum or is_max) and names_in(node) & longer and not is_point_in_time(node):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from outermost(child, longer)


def is_point_in_time(node: ast.AST) -> bool:
    """Or the part of a start after which its notices are warnings."""
    return bool(names_in(node) & {"time", "monotonic", "clock", "now", "_now", "began", "USUAL_START"})


def test_a_wait_without_an_end_says_so() -> None:
    lines = {line.key: line for line in table(run_config(), 10**9)}
    assert as_text([lines["deadlines.no_workers_s"]]).split()[:2] == ["none", "deadlines.no_workers_s"]
    config = run_config()
    config = config.model_copy(update={"deadlines": DeadlinesConfig(no_workers_s=900.0)})
    (line,) = [line for line in table(config, 10**9) if line.key == "deadlines.no_workers_s"]
    assert as_text([line]).split()[:3] == ["900", "s", "deadlines.no_workers_s"] and line.is_set
    assert deadlines.flush_s(1800.0) in {line.seconds for line in table(config, 10**9) if not line.key}
