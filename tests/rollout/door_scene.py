"""A door with the real tokenizer of the tiny model: conversations over a scripted engine, and clients that ask it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai

from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.continuation import unsampled
from evenkeel.rollout.door.conversation import Conversation
from evenkeel.rollout.door.door import Address, Door
from evenkeel.rollout.engine_settings.request_lengths import RequestLengths
from evenkeel.rollout.session import Session
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import FinishReason, Trajectory, VersionSpan, ids_of, logprobs_of

AT_ONE = AnswerSampling(temperature=1.0)
MODEL = "tiny"


class Script:
    """An engine that says what it is told, turn by turn, with a logprob of -1 for each token."""

    def __init__(self, encoder: ChatEncoder, *texts: str | list[int]) -> None:
        """Args: texts: or their ids, without the one that ends a turn."""
        self.read: list[list[int]] = []
        """All tokens that each turn went on from."""
        self._encoder, self._texts = encoder, list(texts)

    async def begin(self, begun: Trajectory, line: int = 0, *, max_tokens: int = 10_000) -> Session:
        return Session(begun, self._go_on, max_tokens=max_tokens, lengths=RequestLengths(together=20_000, prompt=20_000))

    async def _go_on(self, begun: Trajectory, most: int) -> Trajectory:
        self.read.append(list(begun.token_ids))
        end = self._encoder.ends.of_turn
        assert end is not None
        text = self._texts.pop(0)
        said = [*(self._encoder.tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text), end]
        room = most - len(begun.answer_ids)
        tokens = begun.response_ids + ids_of(said[:room])
        return replace(
            begun,
            response_ids=tokens,
            behavior_logprobs=logprobs_of([-1.0] * len(tokens)),
            version_spans=(VersionSpan(0, 0, len(tokens)),),
            finish_reason=FinishReason.STOP if len(said) <= room else FinishReason.LENGTH,
            error=None,
            failure=None,
        )


def scripted(script: Script, encoder: ChatEncoder, **how: Any) -> Conversation:
    """Args: how: as of Conversation."""
    return Conversation(unsampled((), "p"), script.begin, encoder, **{"max_turns": 100} | how)


@contextlib.asynccontextmanager
async def opened(encoder: ChatEncoder, **how: Any) -> AsyncIterator[Door]:
    door = await Door.opened(MODEL, encoder, **how)
    try:
        yield door
    finally:
        await door.close()


def client(address: Address, **options: Any) -> openai.AsyncOpenAI:
    """The package's own, which repeats what it could not send."""
    return openai.AsyncOpenAI(base_url=address.base_url, api_key=address.key, **options)


async def post(address: Address, body: Any, *, at: str = "/chat/completions", key: str | None = None, **headers: str) -> tuple[int, str]:
    """(status, the sentence of an error or the whole body)."""
    named = {"Authorization": f"Bearer {address.key if key is None else key}"} | headers
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    async with httpx.AsyncClient(timeout=60.0) as asking:  # of 32 MiB, on a busy machine
        answer = await asking.post(address.base_url + at, headers=named, **content)
    found = answer.json()
    return answer.status_code, found["error"]["message"] if "error" in found else answer.text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
