"""A rollout played in an environment: the model's turns from an engine, what it reads in between from the environment.

What there is of it is a Trajectory at any time: its engine owes it a turn, or its environment a step. Another engine goes on from it: the
environment is begun again, and has to answer the turns so far as it did before, to the token; if it doesn't, the rollout is begun again.
An environment may begin conversations anew: each is a sequence of the rollout, and the last one goes on.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from evenkeel.correction.errors import DataError
from evenkeel.rollout.continuation import is_begun, is_unfinished, unsampled
from evenkeel.rollout.engine.engine import in_answer_thread
from evenkeel.rollout.environments.environments import EnvironmentPool, OpenEnvironment, Step, task_of
from evenkeel.rollout.environments.interface import Turn
from evenkeel.rollout.limited_processes.many_calls import CallLost
from evenkeel.rollout.limited_processes.parent import CallError
from evenkeel.rollout.rewards.reward_process import SINGLE
from evenkeel.rollout.session import OpenSession, Session
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tool_calls import ToolCall
from evenkeel.rollout.trajectory import FailureKind, FinishReason, Prompt, Trajectory, ids_of

T = TypeVar("T")
# Times that a rollout is begun again before it counts as failed.
_MOST_BEGINNINGS = 8


class _Stopped(Exception):
    """The worker leaves."""


class _OtherAnswer(Exception):
    """The environment didn't answer as it had before."""


class PlayedRollout:
    """One rollout; played once."""

    def __init__(self, prompt: Prompt, seed: int, begun: Trajectory | None, pool: EnvironmentPool, encoder: ChatEncoder) -> None:
        """Args: seed: of its tokens, and its environment's. begun: what another engine has of it."""
        self.trajectory = unsampled(prompt.token_ids, prompt.prompt_id) if begun is None else begun
        """What there is of it."""
        self._prompt, self._pool, self._encoder = prompt, pool, encoder
        self._task = task_of(prompt, seed)
        self._is_stopped = False
        self._waiting: asyncio.Future[Any] | None = None

    def stop(self) -> None:
        """Have it end soon: without what its environment is at."""
        self._is_stopped = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def play(self, open_session: OpenSession) -> Trajectory:
        """The trajectory: with its reward; with an error of the environment; or what there is, if the engine gives it up or it was stopped.

        Raises: as RolloutEngine.generate, but DataError, which is of this rollout alone.
        """
        if not is_unfinished(self.trajectory):
            return self.trajectory
        is_alone, why = False, ""
        for _ in range(_MOST_BEGINNINGS):
            try:
                async with self._pool.opened(self._task, is_alone=is_alone) as environment:
                    return await self._played(environment, open_session)
            except _Stopped:
                return self.trajectory
            except _OtherAnswer as error:
                why = f"its environment answered otherwise when its turns were repeated ({error})"
                self.trajectory = unsampled(self._prompt.token_ids, self._prompt.prompt_id)
            except CallLost as error:
                why = str(error)
                if error.was_called and is_alone:
                    break
                is_alone |= error.was_called
            except CallError as error:
                return self._failed(str(error), error.kind)
            except DataError as error:
                return self._failed(str(error))
        return self._failed(why)

    def _failed(self, why: str, kind: FailureKind = FailureKind.REWARD) -> Trajectory:
        self.trajectory = replace(self.trajectory, reward=None, reward_components={}, error=why, failure=kind)
        return self.trajectory

    async def _played(self, environment: OpenEnvironment, open_session: OpenSession) -> Trajectory:
        known = list(self.trajectory.sequences if self.trajectory.response_tokens else ())
        reading: Any = await self._of(environment.reset)
        ended, rewards = list[Trajectory](), list[Mapping[str, float]]()
        while reading is not None:
            conversation = _Conversation(self._encoder, reading, environment.tools)
            prompt_ids = await in_answer_thread(conversation.prompt)
            begun = replace(known.pop(0), branches=()) if known else unsampled(prompt_ids, self._prompt.prompt_id)
            if begun.prompt_ids != ids_of(prompt_ids):
                raise _OtherAnswer("another prompt")
            session = await open_session(begun, len(ended))
            sequence, reading = await self._sequence(environment, conversation, session, ended, rewards, is_known=bool(known))
            if is_begun(sequence):
                return self.trajectory
            ended.append(sequence)
        *branches, last = ended
        parts = {name: sum(of_turn.get(name, 0.0) for of_turn in rewards) for name in dict.fromkeys(chain.from_iterable(rewards))}
        self.trajectory = replace(
            last,
            branches=tuple(branches),
            reward=sum(parts.values()),
            reward_components={} if set(parts) <= {SINGLE} else parts,
            turn_rewards=tuple(sum(of_turn.values()) for of_turn in rewards),
            tool_s=environment.seconds,
            tool_calls=environment.tool_calls,
            tool_errors=environment.tool_errors,
        )
        return self.trajectory

    async def _sequence(
        self,
        environment: OpenEnvironment,
        conversation: _Conversation,
        session: Session,
        ended: Sequence[Trajectory],
        rewards: list[Mapping[str, float]],
        *,
        is_known: bool,
    ) -> tuple[Trajectory, Any]:
        """One conversation to its end.

        Args: ended: those before. rewards: of the turns so far, by part. is_known: it is whole, and followed by another one.
        Returns: it, and what the next one begins with; None: there is none.
        """
        limits, turns_before, begun = self._pool.config, sum(one.turns for one in ended), session.trajectory
        turn, *later = _turns(begun)
        for number, (reading, following) in enumerate(zip(begun.later, later, strict=True)):
            step = await self._step(environment, turn, turns_before + number, is_cut=False, rewards=rewards)
            ends = step.is_done or step.is_new
            if ends or ids_of(await in_answer_thread(partial(conversation.after, turn, step.reading))) != reading.ids:
                raise _OtherAnswer(f"after turn {turns_before + number}")
            turn = following
        suffix: Sequence[int] = ()
        while True:
            if suffix or is_begun(begun):
                sampled = await session.sample(suffix, max_tokens=limits.max_turn_tokens)
                begun = session.trajectory
                self.trajectory = replace(begun, branches=tuple(ended), tool_s=environment.seconds)
                if is_begun(begun):
                    return begun, None
                if sampled is None:
                    await self._add_worth(environment, rewards)
                    return begun, None
                turn = sampled.ids
            turns = turns_before + begun.turns
            is_cut = begun.finish_reason is FinishReason.LENGTH
            step = await self._step(environment, turn, turns - 1, is_cut=is_cut, rewards=rewards)
            if is_known:
                if not step.is_new:
                    raise _OtherAnswer(f"after turn {turns - 1}")
                return begun, step.reading
            if step.is_done or is_cut:
                return begun, None
            is_over = step.is_new and len(ended) + 1 >= limits.max_sequences
            if is_over or turns >= limits.max_turns or environment.seconds >= limits.max_tool_s:
                await self._add_worth(environment, rewards)
                return replace(begun, finish_reason=FinishReason.LENGTH), None
            if step.is_new:
                return begun, step.reading
            suffix = await in_answer_thread(partial(conversation.after, turn, step.reading))

    async def _step(
        self, environment: OpenEnvironment, said: Sequence[int], number: int, *, is_cut: bool, rewards: list[Mapping[str, float]]
    ) -> Step:
        """The environment's answer to a turn, its reward added to the others."""

        def read() -> tuple[str, Sequence[ToolCall]]:
            text, calls = self._encoder.text_of(said), self._pool.calls
            return text, calls(text, environment.tools, environment.tool_calls)[1] if environment.tools and not is_cut else ()

        text, calls = await in_answer_thread(read)
        step = await self._of(partial(environment.step, Turn(text, tuple(said), number, is_cut), calls))
        rewards.append(step.parts)
        return step

    async def _add_worth(self, environment: OpenEnvironment, rewards: list[Mapping[str, float]]) -> None:
        """Ask what a rollout is worth that is cut between two turns: it is the last turn's."""
        more = await self._of(environment.cut)
        if more:
            last = rewards.pop()
            rewards.append({name: last.get(name, 0.0) + more.get(name, 0.0) for name in dict.fromkeys([*last, *more])})

    async def _of(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What an environment answers. Raises: _Stopped."""
        if self._is_stopped:
            raise _Stopped
        waiting: asyncio.Future[T] = asyncio.ensure_future(ask())
        self._waiting = waiting
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
            raise _Stopped from None
        finally:
            self._waiting = None


def _turns(one: Trajectory) -> list[array[int]]:
    """Token ids of each turn; of one that isn't begun, none."""
    starts = [0, *(reading.after for reading in one.later)]
    return [one.response_ids[start:end] for start, end in zip(starts, [*starts[1:], len(one.response_ids)], strict=True)]


class _Conversation:
    """What was read and said so far, as the chat template has it, or token ids where an environment gives these."""

    def __init__(self, encoder: ChatEncoder, asked: Any, tools: Sequence[Mapping[str, Any]]) -> None:
        self._encoder, self._asked, self._tools = encoder, asked, tools
        self._is_of_ids = isinstance(asked[0], int)

    def prompt(self) -> Sequence[int]:
        """Raises: DataError."""
        return list(self._asked) if self._is_of_ids else self._encoder.encode(self._asked, self._tools)

    def after(self, said: Sequence[int], reading: Any) -> Sequence[int]:
        """Ids of what the model reads after a turn. Raises: DataError."""
        if isinstance(reading[0], int) != self._is_of_ids:
            raise DataError(
                "the environment's first prompt was messages, and what follows is token ids, or the other way round; take one form"
            )
        if self._is_of_ids:
            return list(reading)
        ids = self._encoder.following(self._asked, said, reading, self._tools)
        self._asked = [*self._asked, {"role": "assistant", "content": self._encoder.text_of(said)}, *reading]
        return ids
