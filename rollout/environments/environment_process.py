"""What runs in an environment process (limited_processes/child.py), started and ended by environments.py.

One event loop has an instance of the user's class for each rollout. A request has a number, that of its rollout, and what to do: reset,
step, cut or close. The answer comes whenever it is there, with the request's number, and what was returned or {"error": why}.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evenkeel.rollout.environments.interface import NewConversation, Turn
from evenkeel.rollout.limited_processes.answer_calls import answer_calls
from evenkeel.rollout.limited_processes.child import LoadError, import_named, run, send
from evenkeel.rollout.rewards.reward_process import components

if TYPE_CHECKING:
    from evenkeel.rollout.environments.tools import Tools

LONGEST = 1 << 20
"""Characters, or token ids, that an environment may have the model read at a time."""


def serve(connection: socket.socket, spec: dict[str, Any]) -> None:
    """Answer requests until the socket is closed. Args: spec: an `EnvironmentConfig` as a dict."""
    try:
        make = _environment(spec)
        tools = _tools(spec, make)
    except LoadError as error:
        send(connection, {"error": str(error)})
        return
    send(connection, {"ready": True})
    answer_calls(connection, _Server(make, tools).answer, spec, name="the environment", section="rollout.environment")


def _environment(spec: dict[str, Any]) -> Callable[[], Any]:
    """Raises: LoadError."""
    setting, path = "rollout.environment.path", spec["path"]
    found = import_named(setting, path, spec["folder"], "a class")
    for name in ("reset", "step"):
        if not inspect.iscoroutinefunction(getattr(found, name, None)):
            raise LoadError(f"{setting} = {path}: it has no `async def {name}` (docs/agents.md)")
    return found


def _tools(spec: dict[str, Any], make: Any) -> Tools | None:
    """Half of a step's time is for its calls. Raises: LoadError."""
    setting, parser = f"rollout.environment.path = {spec['path']}", spec["tool_parser"]
    if not getattr(make, "tools", None):
        if parser is not None:
            raise LoadError(f"rollout.environment.tool_parser = {parser}, and {spec['path']} has no `tools` to call; leave one of them out")
        return None
    if parser is None:
        raise LoadError(f"{setting}: it has tools, and no parser for the model's calls; set rollout.environment.tool_parser, e.g. qwen25")
    from evenkeel.rollout.environments.tools import Tools  # with pydantic, and few environments have any

    return Tools(make, setting, spec["deadline_s"] / 2)


class _Server:
    def __init__(self, make: Callable[[], Any], tools: Tools | None) -> None:
        self._make, self._tools = make, tools
        self._environments: dict[int, Any] = {}
        # What is under way for each rollout.
        self._tasks: dict[int, asyncio.Task[Any]] = {}

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        rollout = request["rollout"]
        if request["do"] == "close":
            await self._close(rollout)
            return {"parts": {}}
        task = asyncio.current_task()
        assert task is not None
        self._tasks[rollout] = task
        try:
            return await self._done(rollout, request)
        finally:
            del self._tasks[rollout]

    async def _close(self, rollout: int) -> None:
        """Whatever is under way for it is cancelled: what that makes after the environment was closed, nobody would close."""
        try:
            if (task := self._tasks.get(rollout)) is not None:
                task.cancel()
                await asyncio.wait([task])
        finally:
            if (environment := self._environments.pop(rollout, None)) is not None and hasattr(environment, "close"):
                await environment.close()

    async def _done(self, rollout: int, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "reset":
            environment = self._environments[rollout] = self._make()
            offered = [] if self._tools is None else self._tools.schemas
            return {"reading": _reading(await environment.reset(request["task"]), "reset"), "tools": offered}
        if request["do"] == "cut":
            environment = self._environments[rollout]
            return {"parts": components(await environment.cut()) if hasattr(environment, "cut") else {}}
        environment, turn, errors = self._environments[rollout], request["turn"], 0
        if self._tools is not None:
            turn["results"], errors = await self._tools.results(environment, request["calls"])
        returned = await environment.step(Turn(**turn))
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise TypeError(f"step returned {returned!r:.80}; it returns (what the model reads next, reward, whether it is done)")
        reading, reward, is_done = returned
        if not isinstance(is_done, bool):
            raise TypeError(f"step returned {is_done!r:.80} for whether it is done, and not True or False")
        is_new = isinstance(reading, NewConversation)
        read = None if is_done else _reading(reading.reading if is_new else reading, "step")
        step = {"reading": read, "is_new": is_new and not is_done, "parts": components(reward), "is_done": is_done}
        return step | {"tool_errors": errors}


def _reading(value: Any, do: str) -> Any:
    """As JSON can hold it. Raises: TypeError, ValueError."""
    is_list = isinstance(value, list | tuple)
    if is_list and value and all(type(token) is int for token in value):
        _refuse_long(len(value), "token ids", do)
        if (least := min(value)) < 0 or (least := max(value)) >= 1 << 31:
            raise ValueError(f"{do} returned the token id {least} for the model to read, which no vocabulary has")
        return list(value)
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    elif not is_list or not value or not all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in value):
        raise TypeError(
            f"{do} returned {value!r:.80} for the model to read; it may be a text, messages with role and content, or token ids"
        )
    written = json.dumps(value, ensure_ascii=False)
    _refuse_long(len(written), "characters", do)
    written.encode()  # half of a surrogate pair is no text
    return json.loads(written)


def _refuse_long(length: int, what: str, do: str) -> None:
    if length > LONGEST:
        raise ValueError(f"{do} returned {length} {what} for the model to read, and may return {LONGEST}")


if __name__ == "__main__":
    run(serve)
