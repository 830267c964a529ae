"""Environments in real processes, played by a model that says what a script has."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from evenkeel.rollout.config import EnvironmentConfig
from evenkeel.rollout.continuation import continued, is_begun
from evenkeel.rollout.engine_settings.request_lengths import RequestLengths
from evenkeel.rollout.environments.environments import EnvironmentPool
from evenkeel.rollout.environments.played_rollout import PlayedRollout
from evenkeel.rollout.session import Session
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import FinishReason, Prompt, Trajectory, VersionSpan, ids_of, logprobs_of

USER_ENVIRONMENTS = """
    import asyncio, json, os, subprocess, sys, time

    there, everybody = [], asyncio.Event()

    class Game:
        async def reset(self, task):
            self.said = []
            return task["prompt"]
        async def step(self, turn):
            self.said.append(turn.text)
            word = turn.text
            if word == "wait": await asyncio.sleep(0.3)
            if word == "meet":
                there.append(self)
                if len(there) == 50: everybody.set()
                await everybody.wait()
            if word == "hang": await asyncio.sleep(60)
            if word == "stubborn":
                while True:
                    try: await asyncio.sleep(60)
                    except asyncio.CancelledError: pass
            if word == "spin":
                while True: pass
            if word == "raise": raise KeyError("no such tool")
            if word == "cancel":
                inner = asyncio.create_task(asyncio.sleep(60))
                inner.cancel()
                await inner
            if word == "prints":
                print("a tool was called")
                sys.stderr.write("y" * 3_000_000)
            if word == "print": return "x" * (1 << 21), 0.0, False
            if word == "exit": sys.exit(3)
            if word == "die": os._exit(7)
            if word == "memory": bytearray(2 << 30)
            if word == "forks":
                try: children = [subprocess.Popen(["sleep", "69.5"]) for _ in range(400)]
                except BlockingIOError: raise MemoryError("no more processes")
                await asyncio.sleep(60)
            if word == "write": os.write(int(sys.argv[1]), b"0" * 4096)
            if word == "pair": return "x", 0.5
            if word == "none": return "x", None, False
            if word == "yes": return "x", 0.5, "yes"
            if word == "object": return object(), 0.5, False
            if word == "nothing": return "x" * 0 or None, 0.5, False
            if word == "nan": return "x", float("nan"), False
            if word == "half": return json.loads('"\\\\ud83d"'), 0.5, False
            if word == "ids": return [5, 6], 0.5, False
            if word == "no id": return [5, 1 << 31], 0.5, False
            if word == "end" or turn.is_cut: return None, {"right": 1.0, "cut": float(turn.is_cut)}, True
            return f"{turn.number}: {'+'.join(self.said)}", {"right": 0.25}, False

    class Compacts(Game):
        async def step(self, turn):
            if turn.text == "short":
                from evenkeel.rollout.environments.interface import NewConversation
                return NewConversation(f"so far {turn.number}: {'+'.join(self.said)}"), {"right": 0.25}, False
            return await super().step(turn)

    class ForgetsWhatItMadeShort(Compacts):
        async def step(self, turn):
            reading, *rest = await super().step(turn)
            return type(reading)(str(os.getpid())) if turn.text == "short" else reading, *rest

    class Worth(Game):
        async def cut(self): return {"right": 0.5, "left": 2.0}

    class Forgetful:
        async def reset(self, task): return task["prompt"]
        async def step(self, turn):
            if turn.text == "wait": await asyncio.sleep(0.3)
            return str(os.getpid()), 0.5, turn.text == "end"

    class Ids:
        async def reset(self, task): return [7, 8, 9]
        async def step(self, turn): return [*turn.token_ids[:1], 10 + turn.number], 1, turn.text == "end"

    class Slow(Game):
        async def reset(self, task): await asyncio.sleep(60)

    class Spins(Game):
        async def reset(self, task): time.sleep(60)

    class Closing(Game):
        async def close(self): os.mkdir(self.folder)
        async def reset(self, task):
            self.folder = task["metadata"]["folder"]
            return await super().reset(task)

    class Orderly(Closing):
        async def step(self, turn):
            try: await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.1)
                self.folder += "-after-its-step"

    class Plain:
        def reset(self, task): return "x"
        async def step(self, turn): return "x", 0.0, True

    class Breaks:
        async def reset(self, task): return task["metadata"]["file"]
        async def step(self, turn): return "x", 0.0, True
"""
TEMPLATE_WITH_TOOLS = (
    "{% for tool in tools or [] %}<|im_start|>tool\n{{ tool | tojson }}<|im_end|>\n{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}{{ ' ' + m['name'] + ' ' + m['tool_call_id'] if m['role'] == 'tool' else '' }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = Prompt("train/0/0", "1 + 2 = ", (1,), "3")


def write_user_module(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "user_environments.py").write_text(textwrap.dedent(USER_ENVIRONMENTS))
    patch.syspath_prepend(str(folder))


def environment(name: str = "Game", **settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"path": f"user_environments:{name}", "processes": 1, **settings})


class ScriptedModel:
    """Says the next text of a rollout's script whenever it is its turn; each token has the logprob minus one, and weights of version 0."""

    def __init__(self, folder: Path, *, max_tokens: int = 2000, **encoder: Any) -> None:
        """Args: max_tokens: after the prompt."""
        self._max_tokens = max_tokens
        self.encoder = ChatEncoder(AutoTokenizer.from_pretrained(folder), **encoder)
        self.version = 0

    def said(self, text: str, most: int = 10**6) -> list[int]:
        return [*self.encoder.tokenizer.encode(text, add_special_tokens=False), self.encoder.ends.of_turn][:most]  # type: ignore[list-item]

    async def rollout(self, script: Sequence[str], pool: EnvironmentPool, begun: Trajectory | None = None) -> Trajectory:
        return await self.playing(script, pool, begun)[1]

    def playing(
        self,
        script: Sequence[str],
        pool: EnvironmentPool,
        begun: Trajectory | None = None,
        *,
        prompt: Prompt = PROMPT,
        stopped_in: int | None = None,
    ) -> tuple[PlayedRollout, asyncio.Task[Trajectory]]:
        """Args: stopped_in: the turn that is being sampled when the rollout is told to stop."""

        async def go_on(line: int, answer: Trajectory, most: int) -> Trajectory:
            assert is_begun(answer)
            if answer.turns - 1 == stopped_in:
                played.stop()
            before = [0, *(place + 1 for place, text in enumerate(script) if text == "short")]  # at which a conversation ends
            whole = self.said(script[before[line] + answer.turns - 1])
            ids = whole[: most - len(answer.answer_ids)]
            spans = (VersionSpan(self.version, 0, len(ids)),)
            ends = FinishReason.STOP if len(ids) == len(whole) else FinishReason.LENGTH
            rest = Trajectory("", answer.token_ids, ids_of(ids), logprobs_of([-1.0] * len(ids)), spans, ends)
            await asyncio.sleep(0)
            return continued(answer, rest) if answer.response_ids else replace(rest, prompt_id=answer.prompt_id)

        async def session(so_far: Trajectory, line: int) -> Session:
            return Session(so_far, partial(go_on, line), max_tokens=self._max_tokens, lengths=RequestLengths.within(5 * self._max_tokens))

        played = PlayedRollout(prompt, 3, begun, pool, self.encoder)
        return played, asyncio.create_task(played.play(session))

    def read(self, one: Trajectory) -> str:
        """All of it as text."""
        return str(self.encoder.tokenizer.decode(list(one.token_ids), skip_special_tokens=False))


def in_a_pool(config: EnvironmentConfig, work: Callable[[EnvironmentPool], Any]) -> Any:
    async def run() -> Any:
        pool = EnvironmentPool(config)
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(run())
