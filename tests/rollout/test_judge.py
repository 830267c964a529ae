"""recipes/judge.py, the reward that asks a served model, in real scoring processes with the openai package's client, against real HTTP
servers: one that fails as such servers do, and the door that serves the models of a run."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from evenkeel.rollout.config import AnswerSampling, FunctionReward
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import FailureKind, Trajectory
from tests.rollout.door_scene import Script, opened, scripted
from tests.rollout.reward_scene import answered, asked

VARIABLES = ("JUDGE_URL", "JUDGE_MODEL", "JUDGE_TOKENS", "OPENAI_API_KEY")
CONFIG = FunctionReward(
    path="judge:score", folder=Path(__file__).parents[2] / "recipes", processes=1, at_once=32, deadline_s=30.0, variables=VARIABLES
)


class Judge:
    """A server that finds the grade in the answer itself, and what it shall do before."""

    def __init__(self) -> None:
        self.requests: list[dict[str, str]] = []
        self.now = self.most = 0

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        said = (await request.json())["messages"][0]["content"].split("#####\n")[1]
        self.now, self.most = self.now + 1, max(self.most, self.now + 1)
        before = sum(one["said"] == said for one in self.requests)
        self.requests.append({"said": said})
        await asyncio.sleep(60.0 if "hangs" in said else 0.2)
        self.now -= 1
        if "busy" in said and before < 2:
            return web.Response(status=429, headers={"Retry-After": "0"})
        if "breaks" in said and before < 1:
            assert request.transport is not None
            request.transport.abort()
        if "broken" in said:
            return web.Response(status=500, headers={"Retry-After": "0"})
        content = re.sub(r"\D", "", said) or "Nobody can say."
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice], "usage": usage}
        return web.Response(body=json.dumps(body), content_type="application/json")


def graded(judge: Judge, texts: list[str], patch: pytest.MonkeyPatch, config: FunctionReward = CONFIG) -> tuple[Trajectory, ...]:
    async def served(ask: Callable[[str], Awaitable[tuple[Trajectory, ...]]]) -> tuple[Trajectory, ...]:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", judge.answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await site.start()
        try:
            return await ask(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        finally:
            await runner.cleanup()

    return asyncio.run(served(lambda url: scored(url, "secret", texts, patch, config)))


async def scored(url: str, key: str, texts: list[str], patch: pytest.MonkeyPatch, config: FunctionReward) -> tuple[Trajectory, ...]:
    patch.setenv("JUDGE_URL", url)
    patch.setenv("OPENAI_API_KEY", key)
    pool = RewardPool(config)
    try:
        return await pool.score(tuple(answered(text) for text in texts), asked("4"))
    finally:
        await pool.close()


def test_all_answers_of_a_group_are_graded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge()
    found = graded(judge, [f"it is worth {n}" for n in range(11)], monkeypatch)
    assert [one.reward for one in found] == [n / 10 for n in range(11)]
    assert len(judge.requests) == 11 and judge.most > 2, "not one or two after the other"


def test_what_passes_is_tried_again_and_what_does_not_costs_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy twice, a connection that is cut once: graded all the same. One that never works, and one that hangs, have no grade, and no other
    notices; nor has an answer with a grade that there is not. Four tries have 4.5 s of pauses between them."""
    judge = Judge()
    texts = ["busy, 7", "breaks off, 3", "broken, 9", "hangs, 9", "is worth 11", "is worth nothing", "is worth 5"]
    found = graded(judge, texts, monkeypatch, CONFIG.model_copy(update={"deadline_s": 12.0}))
    assert [one.reward for one in found] == [0.7, 0.3, None, None, None, None, 0.5]
    tries = [sum(one["said"].startswith(text) for one in judge.requests) for text in texts]
    assert tries == [3, 2, 4, 1, 1, 1, 1]
    assert "InternalServerError" in str(found[2].error) and "'11', no grade from 0 to 10" in str(found[4].error)
    assert found[3].failure is FailureKind.REWARD_TIMEOUT and "more than 12 s (rollout.reward.deadline_s)" in str(found[3].error)


def test_a_budget_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 250 tokens; a grade takes 100, so that the third is the last."""
    monkeypatch.setenv("JUDGE_TOKENS", "250")
    judge = Judge()
    found = graded(judge, [f"it is worth {n}" for n in range(5)], monkeypatch, CONFIG.model_copy(update={"at_once": 2}))
    assert sum(one.reward is not None for one in found) in (3, 4), "the two that are under way at a time may both pass the end"
    assert len(judge.requests) < 5 and "tokens are spent (JUDGE_TOKENS)" in str(found[-1].error)


def test_it_asks_what_a_run_itself_serves(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The door of a rollout worker, as a judge that a model of the run's own plays; the text goes through its chat template and back."""
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(tiny_model))

    async def ask() -> tuple[Trajectory, ...]:
        async with opened(encoder) as door:
            script = Script(encoder, "8")
            address = door.admit(scripted(script, encoder), AnswerSampling())
            found = await scored(address.base_url, address.key, ["it is worth a lot"], monkeypatch, CONFIG)
            assert "it is worth a lot" in encoder.text_of(script.read[0])
            return found

    monkeypatch.setenv("JUDGE_MODEL", "tiny")
    (one,) = asyncio.run(ask())
    assert one.reward == 0.8
