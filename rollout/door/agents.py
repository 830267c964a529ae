"""Rollouts played by programs: for each a process with limits, an address of the door, and a file with the task.

A program that ends well has played its rollout. Its reward is what it has written to a file, or what the reward function makes of all that
follows the prompt. One that fails, hangs or asks for what isn't there costs its rollout and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenkeel.correction.errors import ConfigError, EngineError, EvenkeelError, signal_name
from evenkeel.rollout.config import NODE, AgentConfig, AnswerSampling
from evenkeel.rollout.continuation import is_unfinished, unsampled
from evenkeel.rollout.door.conversation import Conversation
from evenkeel.rollout.door.door import LOOPBACK, Address, Door
from evenkeel.rollout.engine.engine import in_answer_thread
from evenkeel.rollout.limited_processes.child import shortened
from evenkeel.rollout.limited_processes.parent import CallError, LimitedProcess, error_in
from evenkeel.rollout.limited_processes.small_file import read_small_file
from evenkeel.rollout.rewards.reward_process import SINGLE, components
from evenkeel.rollout.session import OpenSession
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tool_calls import calls_of, check_parser
from evenkeel.rollout.trajectory import FailureKind, Prompt, Trajectory

_MODULE, _SECTION = "evenkeel.rollout.door.agent_process", "rollout.agent"
# Characters of what a program says that become part of its rollout's error.
_LONGEST_SAID = 500
# Of a program.
_SPARE_CONNECTIONS = 8
Score = Callable[[Trajectory, Prompt], Awaitable[Trajectory]]
"""Gives a rollout its reward, or an error."""


def _process(config: AgentConfig, door: str = "") -> LimitedProcess:
    """Args: door: the address that its programs ask."""
    spec = config.model_dump(include={"start_deadline_s", "memory_gib", "variables"})
    spec |= {"command": list(config.command), "folder": str((config.folder or Path.cwd()).absolute()), "door": door}
    return LimitedProcess(_MODULE, spec, name="the agent", section=_SECTION)


def _connections(config: AgentConfig) -> int:
    """At a time: for each program one for each of its conversations, and some that it keeps; at most half of what this process may open."""
    may_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = config.processes * (config.max_sequences + _SPARE_CONNECTIONS)
    return needed if may_open == resource.RLIM_INFINITY else min(needed, may_open // 2)


async def check_program(config: AgentConfig) -> None:
    """Look whether a process can run the program. Raises: ConfigError, for a parser of tool calls that SGLang doesn't have, too."""
    process = _process(config)
    try:
        await process.ready()
    except CallError as error:
        raise ConfigError(str(error)) from error
    finally:
        process.kill()
    if config.tool_parser is not None:
        check_parser(config.tool_parser, _SECTION)


class Agents:
    """Programs of one rollout worker: `processes` at a time. All belong to one event loop."""

    def __init__(self, config: AgentConfig, door: Door, encoder: ChatEncoder, score: Score | None) -> None:
        """Args: score: None: the program writes its reward. Raises: ConfigError for a parser of tool calls that SGLang doesn't have."""
        self._config, self._door, self._encoder, self._score = config, door, encoder, score
        self._calls = calls_of(config.tool_parser, _SECTION, encoder.tokenizer)
        self._processes = [_process(config, door.host) for _ in range(config.processes)]
        self._idle: asyncio.LifoQueue[LimitedProcess] = asyncio.LifoQueue()  # so that no more are started than are needed
        for process in self._processes:
            self._idle.put_nowait(process)

    @classmethod
    async def start(
        cls, config: AgentConfig, model: str, encoder: ChatEncoder, score: Score | None, *, node: Callable[[], str] = lambda: LOOPBACK
    ) -> Agents:
        """
        Args:
            model: the name that agents ask for.
            node: finds the address of this node, for a door that is to listen there.
        Raises: ConfigError for a program that isn't there, or an address that this machine doesn't have.
        """
        host = node() if config.bind == NODE else config.bind
        try:
            door = await Door.opened(model, encoder, host, _connections(config))
        except OSError as error:
            remedy = f"give an address of each node that has rollout workers, or {NODE}"
            raise ConfigError(f"rollout.agent.bind = {config.bind}: the door can't listen on {host} ({error})", remedy=remedy) from error
        agents = None
        try:
            agents = cls(config, door, encoder, score)
            await agents._processes[-1].ready()
        except BaseException as error:
            await (door.close() if agents is None else agents.close())
            if isinstance(error, CallError):
                raise ConfigError(str(error)) from error
            raise
        return agents

    async def close(self) -> None:
        """End all programs, and the door."""
        for process in self._processes:
            process.kill()
        await self._door.close()

    def rollout(
        self, prompt: Prompt, begun: Trajectory | None, how: AnswerSampling, outage_s: Callable[[], float] = lambda: 0.0
    ) -> AgentRollout:
        """Args: begun: what another worker has of it. how: it is sampled. outage_s: seconds so far without an engine, which no deadline
        counts."""
        return AgentRollout(self, prompt, begun, how, outage_s)

    # -- for a rollout of this file ----------------------------------------------------------------------------------

    def conversation(self, begun: Trajectory, open_session: OpenSession) -> Conversation:
        config = self._config
        limits = {"max_turns": config.max_turns, "max_sequences": config.max_sequences}
        return Conversation(begun, open_session, self._encoder, **limits, calls=self._calls)

    @contextlib.asynccontextmanager
    async def ran(self, conversation: Conversation, prompt: Prompt, how: AnswerSampling) -> AsyncIterator[_Program]:
        """A program that plays a conversation. It is ended with the block, its address and its files with it. Raises: CallError."""
        process = await self._idle.get()
        try:
            try:
                folder = Path(tempfile.mkdtemp(prefix="agent-"))
            except OSError as error:
                raise CallError(f"the agent's program can't be given its task ({error})") from error
            address = self._door.admit(conversation, how)
            try:
                yield _Program(process, folder, address, self._door.model, prompt, writes_reward=self._score is None)
            finally:
                self._door.end(address)
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        finally:
            self._idle.put_nowait(process)

    @property
    def deadline_s(self) -> float:
        return self._config.deadline_s

    async def scored(self, one: Trajectory, prompt: Prompt, program: _Program) -> Trajectory:
        """The rollout with its text, and its reward or an error."""
        text = await in_answer_thread(lambda: self._encoder.text_of(one.answer_ids))
        one = replace(one, text=text)
        if self._score is not None:
            return await self._score(one, prompt)
        try:
            parts = program.reward()
        except (OSError, ValueError, TypeError, RecursionError) as error:
            why = f"the agent's reward can't be used: {program.quoted(str(error))}"
            return replace(one, reward=None, error=why, failure=FailureKind.REWARD)
        return replace(one, reward=sum(parts.values()), reward_components={} if set(parts) == {SINGLE} else parts)


class _Program:
    """One start of an agent's program."""

    def __init__(self, process: LimitedProcess, folder: Path, address: Address, model: str, prompt: Prompt, *, writes_reward: bool) -> None:
        """Raises: CallError if the task can't be written down."""
        self._process, self._reward, self._key = process, folder / "reward.json", address.key
        task = folder / "task.json"
        answer = prompt.answer if isinstance(prompt.answer, str) else list(prompt.answer)
        content = {"id": prompt.prompt_id, "prompt": prompt.text, "answer": answer, "metadata": prompt.metadata}
        try:
            task.write_text(json.dumps(content, default=str))
        except (OSError, TypeError, ValueError) as error:
            raise CallError(f"the agent's program can't be given its task ({error})") from error
        self._variables = {
            "OPENAI_BASE_URL": address.base_url,
            "OPENAI_API_KEY": address.key,
            "OPENAI_MODEL": model,
            "EVENKEEL_TASK": str(task),
        } | ({"EVENKEEL_REWARD": str(self._reward)} if writes_reward else {})

    async def ready(self) -> None:
        """Wait for the process that will start it. Raises: CallError."""
        await self._process.ready()

    async def ended(self) -> str:
        """Start it. Returns: why it failed; empty: it ended well. Raises: CallError if it was killed, for a limit."""
        self._process.send({"variables": self._variables})
        reply = await self._process.reply(_as_end, "a rollout")
        if "error" in reply:
            return str(reply["error"])
        code, said = reply["code"], self.quoted(reply["said"].strip().rpartition("\n")[2])
        how = f"signal {signal_name(-code)}" if code < 0 else f"exit code {code}"
        return f"the agent's program ended with {how}" + (f": {said}" if said else "") if code else ""

    def quoted(self, said: str) -> str:
        """What it said, for an error's text: without its key, and not at any length."""
        return shortened(said.replace(self._key, "KEY"), _LONGEST_SAID)

    def reward(self) -> dict[str, float]:
        """Its parts. Raises: OSError, ValueError, TypeError, RecursionError."""
        try:
            return components(json.loads(read_small_file(self._reward)))
        except FileNotFoundError:
            raise ValueError("it has written none to the file EVENKEEL_REWARD") from None


class AgentRollout:
    """One rollout; played once."""

    def __init__(
        self, agents: Agents, prompt: Prompt, begun: Trajectory | None, how: AnswerSampling, outage_s: Callable[[], float]
    ) -> None:
        self._agents, self._prompt, self._how, self._outage_s = agents, prompt, how, outage_s
        self._begun = unsampled(prompt.token_ids, prompt.prompt_id) if begun is None else begun
        self._ended: Trajectory | None = None
        self._conversation: Conversation | None = None
        self._is_stopped = asyncio.Event()

    @property
    def trajectory(self) -> Trajectory:
        """What there is of it."""
        return self._ended or (self._begun if self._conversation is None else self._conversation.trajectory)

    def stop(self) -> None:
        """Have it end soon, wherever its program is."""
        self._is_stopped.set()

    async def play(self, open_session: OpenSession) -> Trajectory:
        """The trajectory: with its reward; with an error of the program; or what there is, if the engine gives it up or it was stopped.

        Raises: EngineError of the engine, which is of all rollouts.
        """
        try:
            self._ended = self._begun if not is_unfinished(self._begun) else await self._played(open_session)
        except CallError as error:
            self._ended = self._failed(str(error), error.kind)
        return self._ended

    async def _played(self, open_session: OpenSession) -> Trajectory:
        """Raises: CallError if the program wasn't started, or was killed; EngineError."""
        conversation = self._conversation = self._agents.conversation(self._begun, open_session)
        async with self._agents.ran(conversation, self._prompt, self._how) as program:
            if self._is_stopped.is_set() or not await self._is_ready(program):  # it has waited for others
                return conversation.trajectory
            began = time.monotonic()
            ended = asyncio.ensure_future(program.ended())
            stopped = asyncio.ensure_future(self._is_stopped.wait())
            try:
                await self._until_one_of({ended, stopped, conversation.failed})
                if self._is_stopped.is_set():
                    await conversation.turn_over()
                    return conversation.trajectory
                if conversation.failed.done():
                    return self._lost(conversation.failed.result())
                why, played = ended.result(), conversation.played
                if why and not conversation.is_cut:
                    return self._failed(why + (f" (the door had refused: {conversation.refusal})" if conversation.refusal else ""))
                if played is None:
                    return self._failed(f"the agent's program ended without a turn of the model {conversation.refusal}".strip())
                played = replace(played, tool_s=max(0.0, time.monotonic() - began - conversation.sampling_s))
                return await self._agents.scored(played, self._prompt, program)
            finally:
                for task in (ended, stopped):
                    task.cancel()
                await asyncio.wait({ended, stopped})

    async def _is_ready(self, program: _Program) -> bool:
        """Wait for the process that will start it. Returns: False: this was stopped meanwhile. Raises: CallError."""
        tasks = ready, stopped = asyncio.ensure_future(program.ready()), asyncio.ensure_future(self._is_stopped.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return False
            ready.result()
            return True
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_one_of(self, events: set[asyncio.Future[Any]]) -> None:
        """Raises: CallError when none has come within the deadline."""
        limit_s = self._agents.deadline_s
        until = time.monotonic() + limit_s - self._outage_s()
        while (left_s := until + self._outage_s() - time.monotonic()) > 0:
            if (await asyncio.wait(events, timeout=left_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                return
        said = f"the agent took more than {limit_s:g} s for a rollout (rollout.agent.deadline_s); its process was killed"
        raise CallError(said, FailureKind.REWARD_TIMEOUT)

    def _lost(self, error: EvenkeelError) -> Trajectory:
        """Raises: EngineError."""
        if isinstance(error, EngineError):
            raise error
        return self._failed(str(error), FailureKind.ENGINE)

    def _failed(self, why: str, kind: FailureKind = FailureKind.REWARD) -> Trajectory:
        return replace(self.trajectory, reward=None, reward_components={}, error=why, failure=kind)


def _as_end(payload: bytes) -> dict[str, Any]:
    """What the process says of a program's end. Raises: ValueError."""
    reply = json.loads(payload)
    if (error := error_in(reply)) is not None:
        return {"error": error}
    match reply:
        case {"code": int(), "said": str()}:
            return dict(reply)
    raise ValueError(repr(payload[:60]))
