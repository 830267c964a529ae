"""Scoring of completions in processes that can be killed, awaited from an event loop.

A scorer may hang in the middle of a C function (sympy on 5^5^5^5), crash, or eat memory, and the run has to go on. So each scoring
process (limited_processes/) is ended, with all that it started, when a call passes its deadline; the next call on it meets a fresh one, and
calls on other processes never notice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evenkeel.correction.errors import ConfigError
from evenkeel.rollout.config import (
    AgentReward,
    EnvironmentReward,
    FunctionReward,
    ReasoningGymReward,
    ReasoningGymTask,
    RewardConfig,
    TaskConfig,
)
from evenkeel.rollout.continuation import unanswered
from evenkeel.rollout.limited_processes.many_calls import CallLost, ManyCalls
from evenkeel.rollout.limited_processes.parent import CallError, LimitedProcess, SettingError, error_in
from evenkeel.rollout.rewards.reward_process import SINGLE, are_parts
from evenkeel.rollout.rewards.reward_trial import in_its_form
from evenkeel.rollout.trajectory import FailureKind, FinishReason, Prompt, Trajectory

_MODULE = "evenkeel.rollout.rewards.reward_process"
# Calls of one completion until it counts as failed, if its processes are lost.
_MOST_CALLS = 4


class RewardError(ConfigError):
    """The reward gave no score when it was tried. At a first start that is a mistake in it, until somebody says otherwise; a run that has
    had scores knows that what the reward needs (a judge, a key, a disk, a process) is away for the moment."""

    def __init__(self, *message: object, remedy: str = "", is_set_up: bool = False) -> None:
        """Args: is_set_up: its settings could be honoured; it is the sample that got no score."""
        super().__init__(*message, remedy=remedy)
        self.is_set_up = is_set_up


class RewardPool:
    """`processes` scoring processes for the groups of one rollout worker; none where environments or agents give the rewards. One event
    loop uses it."""

    def __init__(self, config: RewardConfig, task: TaskConfig | None = None) -> None:
        """
        Args:
            task: the task that makes the questions; a reasoning_gym reward takes its data set from there.
        Raises: ConfigError if a reasoning_gym reward has no such task.
        """
        self._config = config
        if isinstance(config, (EnvironmentReward, AgentReward)):
            self._scorers: _InTurn | _AtOnce = _InTurn({"deadline_s": 0.0}, 0)
        else:
            several = isinstance(config, FunctionReward) and config.at_once > 1
            self._scorers = (_AtOnce if several else _InTurn)(reward_specification(config, task), config.processes)

    async def check(self, sample: Prompt | None = None, also: Sequence[str] = ()) -> list[float | str]:
        """Start all processes and score the sample's own reference answer, so that a mistake shows now and not at step 300.

        Args: also: further answers to the sample. They need a score, too, but the reward may fail on them.
        Returns: for the reference answer and each of `also` its reward, or why it has none; nothing without a sample.
        Raises: RewardError if the scorer can't be set up, fails on the reference answer, or returns None for any.
        """
        on = ""
        try:
            await self._scorers.ready()
            if sample is None or not self._scorers.processes:
                return []
            own = in_its_form(self._config.extraction, sample.answer)
            outcomes = await self._scorers.outcomes(_request(sample), [own, *also])
            for number, (tried, outcome) in enumerate(zip([own, *also], outcomes, strict=True)):
                if isinstance(outcome, CallError) and (number == 0 or outcome.is_none):
                    on = f" (tried on {sample.prompt_id} with {'its own answer' if number == 0 else 'the answer'} {tried!r:.60})"
                    raise outcome
            return [str(one) if isinstance(one, CallError) else sum(one.values()) for one in outcomes]
        except SettingError as error:
            await self.close()
            raise RewardError(str(error)) from error
        except CallError as error:
            await self.close()
            place = self._config.path if isinstance(self._config, FunctionReward) else self._config.kind
            raise RewardError(f"rollout.reward ({place}): {error}{on}", is_set_up=True) from error

    async def score(self, trajectories: tuple[Trajectory, ...], prompt: Prompt) -> tuple[Trajectory, ...]:
        """The same trajectories with reward and components, or with an error where there is none; in the same order.

        Those that have failed already or were given up by the engine are not scored, nor those that have a reward.
        """
        results = [_given_up(trajectory) for trajectory in trajectories]
        places = [place for place, trajectory in enumerate(results) if trajectory.error is None and trajectory.reward is None]
        outcomes = await self._scorers.outcomes(_request(prompt), [results[place].text for place in places])
        for place, outcome in zip(places, outcomes, strict=True):
            results[place] = _scored(results[place], outcome)
        return tuple(results)

    async def score_one(self, trajectory: Trajectory, prompt: Prompt) -> Trajectory:
        """As `score`, of one."""
        return (await self.score((trajectory,), prompt))[0]

    async def close(self) -> None:
        """Kill all scoring processes. A later call starts them again."""
        self._scorers.close()


Outcome = dict[str, float] | CallError
"""Parts of a reward, or why there is none."""
_NAMED = {"name": "the reward", "section": "rollout.reward"}


class _InTurn:
    """Processes that score one completion after the other.

    A process is started, ready after it has answered its specification, and lent to one call at a time. A call that doesn't end in an
    answer kills it, and it is started again at once: importing overlaps with the calls on the others.
    """

    def __init__(self, spec: dict[str, Any], count: int) -> None:
        self._deadline_s: float = spec["deadline_s"]
        self.processes = [LimitedProcess(_MODULE, spec, **_NAMED) for _ in range(count)]
        self._idle: asyncio.Queue[LimitedProcess] = asyncio.Queue()  # first in, first out: a fresh process gets time to import
        for process in self.processes:
            self._idle.put_nowait(process)

    async def ready(self) -> None:
        """Start all of them. Raises: SettingError, CallError."""
        for process in self.processes:
            process.start()
        for process in self.processes:
            await process.ready()

    async def outcomes(self, request: dict[str, Any], completions: Sequence[str]) -> list[Outcome]:
        """Of the completions of a question. They are divided among the processes beforehand: one that hangs delays those of the same."""
        count = min(len(self.processes), len(completions))
        found = await asyncio.gather(*(self._call(request, completions[first::count]) for first in range(count)))
        return [found[place % count][place // count] for place in range(len(completions))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()

    async def _call(self, request: dict[str, Any], completions: Sequence[str]) -> list[Outcome]:
        """One message holds them all: for a fast scorer, a message and its answer take longer than the score. A process that had to be
        killed takes along the completion that it was at, and goes on with the next one when it is up again."""
        process = await self._idle.get()
        outcomes: list[Outcome] = []
        try:
            while len(outcomes) < len(completions):
                try:
                    await process.ready()
                    rest = {**request, "completions": completions[len(outcomes) :]}
                    process.send(rest)
                    for _ in rest["completions"]:
                        reply = await process.reply(_as_reply, "one completion", limit_s=self._deadline_s, setting="deadline_s")
                        outcomes.append(_outcome(reply))
                except CallError as error:
                    outcomes.append(error)
        finally:
            self._idle.put_nowait(process)
        return outcomes


class _AtOnce:
    """Processes in each of which many calls of an asynchronous function wait side by side (limited_processes/many_calls.py).

    A call whose process is lost while it is under way is repeated in a process of its own.
    """

    def __init__(self, spec: dict[str, Any], count: int) -> None:
        self._spec = spec
        self.processes = [self._process() for _ in range(count)]
        self._places = asyncio.Semaphore(count * spec["at_once"])
        self._alone = asyncio.Semaphore(count)

    def _process(self) -> ManyCalls:
        return ManyCalls(_MODULE, self._spec, _as_numbered_reply, "one completion", **_NAMED)

    async def ready(self) -> None:
        """Start all of them. Raises: SettingError, CallError."""
        await asyncio.gather(*(process.ready() for process in self.processes))

    async def outcomes(self, request: dict[str, Any], completions: Sequence[str]) -> list[Outcome]:
        """Of the completions of a question."""
        return list(await asyncio.gather(*(self._outcome({**request, "completion": one}) for one in completions)))

    def close(self) -> None:
        for process in self.processes:
            process.close()

    async def _outcome(self, request: dict[str, Any]) -> Outcome:
        why, is_alone = CallError(""), False
        for _ in range(_MOST_CALLS):
            try:
                async with self._alone if is_alone else self._places:
                    return await (self._alone_in(request) if is_alone else self._among_others(request))
            except CallLost as error:
                why = CallError(str(error), error.kind)
                if error.was_called and is_alone:
                    break
                is_alone |= error.was_called
            except CallError as error:
                return error
        return why

    async def _among_others(self, request: dict[str, Any]) -> Outcome:
        process = min(self.processes, key=lambda one: one.users)
        process.users += 1
        try:
            await process.ready()
            return _outcome(await process.call(request, process.life))
        finally:
            process.users -= 1

    async def _alone_in(self, request: dict[str, Any]) -> Outcome:
        process = self._process()
        try:
            await process.ready()
            return _outcome(await process.call(request, process.life))
        finally:
            process.close()


def _outcome(reply: dict[str, Any]) -> Outcome:
    if "error" not in reply:
        return dict(reply["components"])
    kind = FailureKind.REWARD_TIMEOUT if "is_late" in reply else FailureKind.REWARD
    return CallError(reply["error"], kind, is_none="is_none" in reply)


def _given_up(trajectory: Trajectory) -> Trajectory:
    """The trajectory, with an error if the engine did not finish it."""
    if trajectory.error is None and (trajectory.finish_reason is FinishReason.ABORT or not trajectory.response_ids):
        return unanswered(trajectory, "the engine gave the request up: no complete answer")
    return trajectory


def _scored(trajectory: Trajectory, outcome: dict[str, float] | CallError) -> Trajectory:
    if isinstance(outcome, CallError):
        return replace(trajectory, reward=None, reward_components={}, error=str(outcome), failure=outcome.kind)
    return replace(trajectory, reward=sum(outcome.values()), reward_components={} if set(outcome) == {SINGLE} else outcome)


def reward_specification(config: RewardConfig, task: TaskConfig | None) -> dict[str, Any]:
    """What a scoring process has to know.

    Raises: ConfigError if a reasoning_gym reward has no reasoning_gym task.
    """
    spec = config.model_dump()
    if isinstance(config, ReasoningGymReward):
        if isinstance(task, ReasoningGymTask):
            spec |= {"dataset": task.dataset, "options": task.options}
        elif config.dataset is None:
            raise ConfigError("rollout.reward.kind = reasoning_gym needs rollout.task.kind = reasoning_gym: it scores only what it made")
        spec["is_of_rows"] = not isinstance(task, ReasoningGymTask)
    return spec


def _request(prompt: Prompt) -> dict[str, Any]:
    """What all completions of a question share."""
    answer = prompt.answer if isinstance(prompt.answer, str) else list(prompt.answer)
    return {"prompt": prompt.text, "answer": answer, "metadata": prompt.metadata}


def _as_reply(payload: bytes) -> dict[str, Any]:
    """The answer of a scoring process to one completion. Raises: ValueError or RecursionError if it has none of the forms that one may
    have."""
    return _checked(json.loads(payload), payload)


def _as_numbered_reply(payload: bytes) -> dict[str, Any]:
    """As _as_reply, with the number of the call."""
    reply = json.loads(payload)
    if not isinstance(reply, dict) or type(reply.get("call")) is not int:
        raise ValueError(repr(payload[:60]))
    return _checked(reply, payload) | {"call": reply["call"]}


def _checked(reply: Any, payload: bytes) -> dict[str, Any]:
    if (error := error_in(reply)) is not None:
        return {"error": error} | {flag: True for flag in ("is_none", "is_late") if reply.get(flag) is True}
    if isinstance(reply, dict) and isinstance(parts := reply.get("components"), dict) and are_parts(parts):
        return {"components": parts}
    raise ValueError(repr(payload[:60]))
