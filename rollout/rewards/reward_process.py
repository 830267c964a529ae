"""What runs in a scoring process (limited_processes/child.py), started and ended by rewards.py.

It imports the standard library and what the one scorer needs; never torch. The specification is a `RewardConfig` as a dict. Every further
message is a request with several completions of one question. Each of them is answered, in order and as soon as it is scored, by
{"components": ...} or {"error": why}. With at_once above 1 a request has one completion and a number, which its answer has, too.
"""

from __future__ import annotations

import inspect
import logging
import math
import pickle
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from evenkeel.rollout.limited_processes.child import LoadError, error_text, import_named, receive, run, send

SINGLE = "reward"
"""Name of the only component when a reward is a bare number."""
LARGEST = 1e18
"""Largest magnitude of a reward and of each of its parts. Advantages, gradients and their norms are float32, which ends at 3.4e38, and are
squared and summed: the square of this leaves room for the sum of a hundred."""
MOST_PARTS, LONGEST_NAME = 128, 256
"""Parts of one reward, and characters of a part's name. Each becomes a metric."""
GYM_ENTRY = "reasoning_gym_entry"
"""Column of a row that holds the entry of its reasoning-gym question, as `as_json` writes it."""
_TUPLE, _SET, _ITEMS = "__tuple__", "__set__", "__items__"

Scorer = Callable[[dict[str, Any]], Any]
"""Takes a request (prompt, completion, answer, metadata), returns a number or a dict of numbers."""


class NoScoreError(TypeError):
    """A scorer has returned None, as a function does that comes to its end without a return."""


def serve(connection: socket.socket, spec: dict[str, Any]) -> None:
    """Answer requests until the socket is closed."""
    at_once = spec.get("at_once", 1) > 1
    try:
        score = build_scorer(spec)
    except LoadError as error:
        send(connection, {"error": str(error)})
        return
    send(connection, {"ready": True})
    if at_once:
        _serve_many(connection, score, spec)
        return
    while (request := receive(connection)) is not None:
        completions, shared = request.pop("completions"), pickle.dumps(request)
        for completion in completions:  # each meets the metadata as they came, whatever a scorer does to them
            send(connection, score_request(score, {**pickle.loads(shared), "completion": completion}))


def _serve_many(connection: socket.socket, score: Scorer, spec: dict[str, Any]) -> None:
    """Answer requests, each with one completion, side by side."""
    from evenkeel.rollout.limited_processes.answer_calls import answer_calls  # with asyncio, see _awaited

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"components": components(await score(request))}
        except NoScoreError as error:
            return _no_score(error)

    answer_calls(connection, answer, spec, name="the reward", section="rollout.reward")


def _no_score(error: NoScoreError) -> dict[str, Any]:
    return {"error": f"the reward gave no score: {error}", "is_none": True}


def score_request(score: Scorer, request: dict[str, Any]) -> dict[str, Any]:
    """{"components": {name: value}} of one completion, or {"error": reason}, with "is_none" if the scorer returned None."""
    try:
        return {"components": components(score(request))}
    except NoScoreError as error:
        return _no_score(error)
    except MemoryError:
        return {"error": "the reward ran out of memory (rollout.reward.memory_gib)"}
    except Exception as error:
        return {"error": f"the reward raised {error_text(error)}"}


def components(value: Any) -> dict[str, float]:
    """Named parts of what a scorer returned; a bare number is called "reward".

    Raises: ValueError or TypeError if it is no number, not finite or too large; ValueError for too many parts, or a name that no metric can
    have.
    """
    named = value if isinstance(value, dict) else {SINGLE: value}
    if not named:
        raise ValueError("an empty dict has no sum; return at least one part")
    if len(named) > MOST_PARTS:
        raise ValueError(f"a reward of {len(named)} parts; each becomes a metric, and it may have {MOST_PARTS}")
    for name in map(str, named):
        if len(name) > LONGEST_NAME:
            raise ValueError(f"{name[:LONGEST_NAME]!a}... names a part with {len(name)} characters, and may have {LONGEST_NAME}")
        if not is_part_name(name):
            raise ValueError(f"{name!a} names a part, which becomes part of a metric's name: use printable characters without a slash")
    parts = {str(name): _finite(name, part) for name, part in named.items()}
    if abs(total := sum(parts.values())) > LARGEST:
        raise ValueError(f"the sum of its parts, {total:g}, is too large: a reward is at most {LARGEST:g}, above or below 0")
    return parts


def are_parts(parts: dict[str, Any]) -> bool:
    """Whether this could have come out of `components`."""
    if not 0 < len(parts) <= MOST_PARTS or not all(map(is_part_name, parts)):
        return False
    return all(type(part) is float and abs(part) <= LARGEST for part in parts.values()) and abs(sum(parts.values())) <= LARGEST


def is_part_name(name: str) -> bool:
    """Whether this is a valid name for a part of a reward, and so for the end of a metric's name."""
    return name.isprintable() and "/" not in name and 0 < len(name) <= LONGEST_NAME


def _finite(name: str, part: Any) -> float:
    if part is None:
        raise NoScoreError(f"{name} = None is no number; return one for every answer, 0.0 for a wrong one")
    if isinstance(part, str) or not hasattr(part, "__float__"):
        raise TypeError(f"{name} = {part!r} is no number; return a float, or a dict of floats")
    try:
        number = float(part)
    except OverflowError as error:  # a whole number of 400 digits
        raise ValueError(f"{name} is too large: a reward is at most {LARGEST:g}, above or below 0") from error
    if not math.isfinite(number):
        raise ValueError(f"{name} = {number} is not finite")
    if abs(number) > LARGEST:
        raise ValueError(f"{name} = {number:g} is too large: a reward is at most {LARGEST:g}, above or below 0")
    return number


# --- scorers --------------------------------------------------------------------------------------------------------


def build_scorer(spec: dict[str, Any]) -> Scorer:
    """The scorer of a specification, with everything imported that it needs.

    Raises: LoadError.
    """
    extract = build_extraction(spec["extraction"])
    score = _SCORERS[spec["kind"]](spec)
    return lambda request: score({**request, "completion": extract(request["completion"])})


def build_extraction(spec: dict[str, Any]) -> Callable[[str], str]:
    """The function that cuts the answer out of a completion; it returns "" where there is none."""
    if spec["kind"] == "whole":
        return lambda text: text
    if spec["kind"] == "last_line":
        return lambda text: next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    if spec["kind"] == "after":
        return lambda text: text.rpartition(spec["marker"])[2].strip() if spec["marker"] in text else ""
    pattern = re.compile(spec["pattern"], re.DOTALL)
    return lambda text: _last_match(pattern, text)


def _last_match(pattern: re.Pattern[str], text: str) -> str:
    last = None
    for last in pattern.finditer(text):  # noqa: B007 - only the last one counts
        pass
    if last is None:
        return ""
    return str((last[1] if pattern.groups else last[0]) or "").strip()


def create_reasoning_gym(name: str, options: dict[str, Any], *, seed: int, size: int) -> Any:
    """A reasoning-gym data set; the options are those of its own config class."""
    import reasoning_gym

    if name == "composite":  # the only one whose options are objects
        from reasoning_gym.composite import DatasetSpec

        options = {**options, "datasets": [DatasetSpec(**spec) for spec in options.get("datasets", [])]}
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)


def _reasoning_gym(spec: dict[str, Any]) -> Scorer:
    try:
        dataset = create_reasoning_gym(spec["dataset"], spec["options"], seed=0, size=1)
    except Exception as error:
        raise LoadError(f"rollout.reward.dataset = {spec['dataset']}: reasoning-gym can't make it: {error}") from error
    if not spec["is_of_rows"]:
        return lambda request: dataset.score_answer(request["completion"], entry=request["metadata"])

    def score(request: dict[str, Any]) -> Any:
        if GYM_ENTRY not in request["metadata"]:
            raise ValueError(f"the row has no column {GYM_ENTRY}, which `evenkeel filter` writes and the scorer needs")
        return dataset.score_answer(request["completion"], entry=from_json(request["metadata"][GYM_ENTRY]))

    return score


def accepted(answer: str | Sequence[str]) -> Sequence[str]:
    """The answers that are right, of a reference answer or a list of them."""
    return (answer,) if isinstance(answer, str) else answer


def _math_verify(spec: dict[str, Any]) -> Scorer:
    """A scorer by math-verify, without math-verify's own timeouts: after five seconds they call a comparison "unequal", which would be
    trained as a wrong answer. Here the reward's deadline ends a long comparison, and it counts as failed.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns in each process that its timeouts are off

    def read(answer: str) -> Any:
        is_marked_up = re.search(r"(?<!\\)\$|\\boxed", answer)  # an escaped dollar is money, not the start of a formula
        return parse(answer if is_marked_up else f"\\boxed{{{answer}}}", parsing_timeout=None)

    def score(request: dict[str, Any]) -> float:
        references = [reference for answer in accepted(request["answer"]) if (reference := read(answer))]
        if not references:
            raise ValueError(f"math-verify can't read the reference answer {request['answer']!r}")
        found = parse(request["completion"], parsing_timeout=None)
        rounding = spec["float_rounding"]
        return float(any(verify(one, found, float_rounding=rounding, timeout_seconds=None) for one in references))

    score({"answer": "1/2", "completion": "0.5"})  # the first call compiles grammars, which the first completion should not pay for
    return score


def _exact_match(spec: dict[str, Any]) -> Scorer:
    def normal(text: str) -> str:
        return text.strip().casefold() if spec["ignore_case"] else text.strip()

    return lambda request: float(normal(request["completion"]) in map(normal, accepted(request["answer"])))


def _function(spec: dict[str, Any]) -> Scorer:
    function = import_named("rollout.reward.path", spec["path"], spec["folder"], "a function")
    wanted = _accepted_names(function, spec["path"])
    is_alone = spec["at_once"] == 1
    if not is_alone and not inspect.iscoroutinefunction(function):
        raise LoadError(
            f"rollout.reward.at_once = {spec['at_once']}: {spec['path']} is no `async def`, so its calls would come one after the other "
            "all the same; make it one that awaits what takes time, or leave at_once out and raise rollout.reward.processes"
        )

    def score(request: dict[str, Any]) -> Any:
        result = function(**{name: request[name] for name in wanted})
        return _awaited(result) if is_alone and inspect.isawaitable(result) else result

    return score


def _awaited(result: Awaitable[Any]) -> Any:
    import asyncio  # a third of a scoring process's start, and few rewards need it

    async def wait() -> Any:
        return await result

    return asyncio.run(wait())


def _accepted_names(function: Callable[..., Any], path: str) -> tuple[str, ...]:
    """Which of the four arguments the function takes."""
    offered = ("prompt", "completion", "answer", "metadata")
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    unknown = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in offered]
    if unknown:
        raise LoadError(f"rollout.reward.path = {path}: the function asks for {', '.join(unknown)}; it can have {', '.join(offered)}")
    return tuple(name for name in names if name in offered)


_SCORERS: dict[str, Callable[[dict[str, Any]], Scorer]] = {
    "reasoning_gym": _reasoning_gym,
    "math_verify": _math_verify,
    "exact_match": _exact_match,
    "function": _function,
}

# --- reasoning-gym's entries ------------------------------------------------------------------------------------------
# They hold tuples, sets and keys that are no text, and scorers compare them: JSON alone would make lists and text of these.


def as_json(value: Any, place: str = "entry") -> Any:
    """The value as JSON can hold it: a tuple or set as an object with one tag, a mapping with other keys than text as a list of its items.

    Args:
        place: what to call the value in the message.
    Raises: TypeError naming the place and type of what can't be written.
    """
    match value:
        case None | bool() | str():
            return value
        case int() | float() if type(value) in (int, float) and value == value and abs(value) != float("inf"):
            return value
        case list():
            return [as_json(item, f"{place}[{i}]") for i, item in enumerate(value)]
        case tuple() if type(value) is tuple:
            return {_TUPLE: [as_json(item, f"{place}[{i}]") for i, item in enumerate(value)]}
        case set() | frozenset() if type(value) is set:
            return {_SET: [as_json(item, place) for item in sorted(value, key=repr)]}
        case dict() if all(type(key) is str for key in value) and not value.keys() & {_TUPLE, _SET, _ITEMS}:
            return {key: as_json(item, f"{place}.{key}") for key, item in value.items()}
        case dict():
            return {_ITEMS: [[as_json(key, place), as_json(item, f"{place}[{key!r}]")] for key, item in value.items()]}
    raise TypeError(f"{place} is {type(value).__name__} ({value!r:.60})")


def from_json(value: Any) -> Any:
    """The inverse."""
    match value:
        case list():
            return [from_json(item) for item in value]
        case {"__tuple__": items}:
            return tuple(from_json(item) for item in items)
        case {"__set__": items}:
            return {from_json(item) for item in items}
        case {"__items__": items}:
            return {from_json(key): from_json(item) for key, item in items}
        case dict():
            return {key: from_json(item) for key, item in value.items()}
    return value


if __name__ == "__main__":
    run(serve)
