"""Environments of many rollouts in a few processes, awaited from an event loop.

What becomes of a method that takes too long: limited_processes/many_calls.py. A process that is lost takes along all of its environments;
rollouts that had called theirs then are repeated each in a process of its own, the others together.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from evenkeel.correction.errors import ConfigError
from evenkeel.rollout.config import EnvironmentConfig
from evenkeel.rollout.environments.interface import Turn
from evenkeel.rollout.limited_processes.many_calls import CallLost, ManyCalls
from evenkeel.rollout.limited_processes.parent import CallError, SettingError, error_in
from evenkeel.rollout.rewards.reward_process import are_parts
from evenkeel.rollout.tool_calls import Calls, ToolCall, calls_of, check_parser
from evenkeel.rollout.trajectory import FailureKind, Prompt

_MODULE, _SECTION = "evenkeel.rollout.environments.environment_process", "rollout.environment"
# Of a process and all that it started: hundreds of environments may have some each.
_MOST_PROCESSES = 1024


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answered to a turn."""

    reading: Any
    """Messages or token ids; None after the last turn."""
    parts: Mapping[str, float]
    """Of the turn's reward."""
    is_done: bool
    is_new: bool
    """Whether the reading begins another conversation."""


def task_of(prompt: Prompt, seed: int) -> dict[str, Any]:
    """What an environment's reset is given."""
    answer = prompt.answer if isinstance(prompt.answer, str) else list(prompt.answer)
    return {"prompt": prompt.text, "answer": answer, "metadata": prompt.metadata, "id": prompt.prompt_id, "seed": seed}


class EnvironmentPool:
    """Processes for the environments of one rollout worker. Use it from one event loop."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self._spec = config.model_dump() | {"most_processes": _MOST_PROCESSES}
        self._processes = [self._process() for _ in range(config.processes)]
        self._numbers = itertools.count()
        # Processes for one environment at a time.
        self._alone = asyncio.Semaphore(config.processes)

    @cached_property
    def calls(self) -> Calls:
        """Finds calls of tools in a turn."""
        return calls_of(self.config.tool_parser, _SECTION)

    async def check(self, sample: Prompt) -> Sequence[Mapping[str, Any]]:
        """Start all processes and reset one environment, so that a mistake shows now.

        Returns: the tools that it offers. Raises: ConfigError, with all processes closed.
        """
        if self.config.tool_parser is not None:
            check_parser(self.config.tool_parser, _SECTION)
        try:
            await asyncio.gather(*(process.ready() for process in self._processes))
            async with self.opened(task_of(sample, seed=0)) as environment:
                await environment.reset()
                await environment.close()  # before the process is killed, as one that only looks does
                tools: Sequence[Mapping[str, Any]] = environment.tools
                return tools
        except (CallError, CallLost) as error:
            await self.close()
            if isinstance(error, SettingError):
                raise ConfigError(str(error)) from error
            raise ConfigError(f"rollout.environment ({self.config.path}): {error} (tried on {sample.prompt_id})") from error

    @contextlib.asynccontextmanager
    async def opened(self, task: Mapping[str, Any], *, is_alone: bool = False) -> Any:
        """An environment for one rollout. Args: task: see interface.Environment.reset. is_alone: in a process of its own."""
        async with self._alone if is_alone else contextlib.nullcontext():
            process = self._process() if is_alone else min(self._processes, key=lambda one: one.users)
            process.users += 1
            environment = OpenEnvironment(process, next(self._numbers), {**task, "deadline_s": self.config.deadline_s})
            try:
                yield environment
            finally:
                process.users -= 1
                if is_alone:
                    with contextlib.suppress(CallError, CallLost):
                        await environment.close()
                    process.close()
                else:
                    process.tell({"do": "close", "rollout": environment.number})

    def _process(self) -> ManyCalls:
        return ManyCalls(_MODULE, self._spec, _as_answer, "a step", name="the environment", section=_SECTION)

    async def close(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.close()


class OpenEnvironment:
    """The environment of one rollout. Methods raise CallError if it failed, and CallLost."""

    def __init__(self, process: ManyCalls, number: int, task: Mapping[str, Any]) -> None:
        self.number = number
        self.seconds = 0.0
        """That it has taken so far."""
        self.tools: Sequence[Mapping[str, Any]] = ()
        """That the model may call, in OpenAI's form."""
        self.tool_calls = self.tool_errors = 0
        self._process, self._task = process, task
        # Number of the process's lives in which it lives.
        self._life = -1

    async def reset(self) -> Any:
        """The prompt: messages or token ids."""
        await self._process.ready()
        self._life = self._process.life
        answer = await self._call("reset", {"task": dict(self._task)})
        self.tools = answer["tools"]
        return answer["reading"]

    async def step(self, turn: Turn, calls: Sequence[ToolCall] = ()) -> Step:
        """Args: calls: of its tools, that the turn has."""
        answer = await self._call("step", {"turn": asdict(turn), "calls": [(call.id, call.name, call.arguments) for call in calls]})
        self.tool_calls += len(calls)
        self.tool_errors += answer["tool_errors"]
        return Step(answer["reading"], answer["parts"], answer["is_done"], answer.get("is_new") is True)

    async def cut(self) -> Mapping[str, float]:
        """Parts of what the rollout is worth that a limit has ended between two turns; none, if the environment doesn't say."""
        return dict((await self._call("cut", {}))["parts"])

    async def close(self) -> None:
        """End what is under way for it, and have it close itself."""
        await self._call("close", {})

    async def _call(self, do: str, what: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            answer = await self._process.call({"do": do, "rollout": self.number, **what}, self._life)
        finally:
            self.seconds += time.monotonic() - began
        if (error := error_in(answer)) is not None:
            raise CallError(error, FailureKind.REWARD_TIMEOUT if answer.get("is_late") is True else FailureKind.REWARD)
        return answer


def _as_answer(payload: bytes) -> dict[str, Any]:
    """An answer of an environment process. Raises: ValueError or RecursionError if it has none of the forms that one may have."""
    match json.loads(payload):
        case {"call": int(), "error": str()} as answer:
            return dict(answer)
        case {"call": int(), "reading": None | list(), "parts": dict() as parts, "is_done": bool(), "tool_errors": int()} as answer if (
            are_parts(parts)
        ):
            return dict(answer)
        case {"call": int(), "parts": dict() as parts, **others} as answer if not others and (not parts or are_parts(parts)):
            return dict(answer)
        case {"call": int(), "reading": list(), "tools": list() as tools} as answer if all(isinstance(tool, dict) for tool in tools):
            return dict(answer)
    raise ValueError(repr(payload[:60]))
