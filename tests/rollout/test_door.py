"""The agent's door, asked by the unmodified openai client: the engine goes on from its own tokens, whatever the client sends back, and who
asks for anything else gets one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from evenkeel.rollout.config import AgentConfig, AgentReward, AnswerSampling, ExactMatchReward, SamplingConfig
from evenkeel.rollout.continuation import kept, unsampled
from evenkeel.rollout.door.agents import Agents
from evenkeel.rollout.door.conversation import Conversation
from evenkeel.rollout.door.door import LARGEST_BODY_BYTES
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.sampler import Player, Sampler
from evenkeel.rollout.session import Session
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tool_calls import ToolCall, calls_of, id_of_call
from evenkeel.rollout.trajectory import FinishReason, Group, Prompt, Trajectory, UnfinishedGroup
from tests.conftest import BackgroundLoop
from tests.rollout.door_scene import AT_ONE, MODEL, Script, client, opened, post, scripted, user
from tests.rollout.engine_scene import TOLERANCE, buckets_of
from tests.rollout.hf_reference import hf_model, largest_difference, perturbed, tiny_weights
from tests.rollout.test_session import expected

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "look")]


@pytest.fixture(scope="module")
def encoder(tiny_model: Path) -> ChatEncoder:
    return ChatEncoder(AutoTokenizer.from_pretrained(tiny_model))


class Proxy:
    """Between door and engine: what the engine read and what it gave, for each call."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.calls: list[tuple[Trajectory, Trajectory]] = []
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Sequence[int], *, begun: Sequence[Trajectory] = (), **how: Any) -> list[Trajectory]:
        found = await self._engine.generate(prompt_ids, begun=begun, **how)
        self.calls += zip(begun, found, strict=True)
        return found


def conversation_of(sampler: Sampler, encoder: ChatEncoder, number: int = 0) -> Conversation:
    async def begin(begun: Trajectory, line: int) -> Session:
        return sampler.session(Prompt(begun.prompt_id, "", tuple(begun.prompt_ids), ""), 0, begun=begun, line=line)

    return Conversation(unsampled((), f"train/0/{number}"), begin, encoder, max_turns=9)


@pytest.mark.engine
@pytest.mark.parametrize(("count", "most_turns", "updates"), [(100, 3, 1), pytest.param(1000, 8, 9, marks=pytest.mark.slow)])
@pytest.mark.timeout(3000)
def test_no_token_of_many_sessions_is_tokenised_again(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, encoder: ChatEncoder, count: int, most_turns: int, updates: int
) -> None:
    """From two turns on, with new weights in between; every other session is streamed. A proxy counts tokens that the engine is given
    otherwise than it gave them: none. The model says what its tokenizer would say in other tokens. Logprobs are those of one forward of
    transformers over a whole session, by the weights of each token."""
    proxy, begun = Proxy(engine), engine.version
    rewards = RewardPool(ExactMatchReward(processes=1))
    sampler = Sampler(proxy, {"": Player(encoder, rewards, SamplingConfig(samples_per_group=2, max_tokens=400))}, seed=3)  # type: ignore[arg-type]
    turns = [2 + number % (most_turns - 1) for number in range(count)]
    weights = [tiny_weights(tiny_model), *(perturbed(tiny_weights(tiny_model), seed=seed) for seed in range(1, updates + 1))]
    places = asyncio.Semaphore(100)

    async def talk(asking: openai.AsyncOpenAI, number: int) -> list[str]:
        messages: list[Any] = [user(f"{number} + 4 =")]
        said: list[str] = []
        async with places:
            for turn in range(turns[number]):
                if number % 2:
                    stream = await asking.chat.completions.create(model=MODEL, messages=messages, stream=True, max_tokens=8)
                    said.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
                else:
                    answer = await asking.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
                    said.append(answer.choices[0].message.content or "")
                messages += [{"role": "assistant", "content": said[-1]}, user(f"and {turn}?")]
        return said

    async def update() -> None:
        """As training would: a version each time that so many turns more were said."""
        for number in range(1, updates + 1):
            while len(proxy.calls) < number * sum(turns) // (updates + 1):
                await asyncio.sleep(0.01)
            await engine.update_weights(begun + number, buckets_of(weights[number], 2))

    async def run() -> list[tuple[Trajectory, list[str]]]:
        async with opened(encoder) as door:
            conversations = [conversation_of(sampler, encoder, number) for number in range(count)]
            addresses = [door.admit(one, AT_ONE) for one in conversations]
            async with client(addresses[0]) as asking:
                clients = [asking.with_options(base_url=one.base_url, api_key=one.key) for one in addresses]
                *said, _ = await asyncio.gather(*map(talk, clients, range(count)), update())
            return [(one.trajectory, texts) for one, texts in zip(conversations, said, strict=True)]

    sessions = engine_loop.run(run(), timeout_s=2900)
    given = {one.prompt_id: list[int]() for one, _ in sessions}
    otherwise = 0
    for before_it, whole in proxy.calls:
        before = given[whole.prompt_id]
        read = before_it.token_ids.tolist()
        otherwise += sum(a != b for a, b in zip(before, read, strict=False)) + max(0, len(before) - len(read))
        given[whole.prompt_id] = whole.token_ids.tolist()
    assert len(sessions) == count and len(proxy.calls) == sum(turns) and otherwise == 0
    others = 0
    for one, texts in sessions:
        assert [encoder.text_of(s.ids) for s in one.segments if s.sampled is not None] == texts
        others += encoder.tokenizer.encode("".join(texts), add_special_tokens=False) != one.response_ids.tolist()
    assert others > count / 2, "most texts have other tokens, encoded anew"
    assert sum(len(one.version_spans) > 1 for one, _ in sessions) >= updates, "of several versions"
    models = {begun + number: hf_model(tiny_model, of_version) for number, of_version in enumerate(weights)}
    for one, _ in sessions[:: count // 20]:
        assert largest_difference(one.behavior_logprobs, expected(models, one)[0]) < TOLERANCE


@pytest.mark.engine
def test_a_cut_connection_costs_no_turn(shared_engine: RolloutEngine, engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """A stream is cut while the turn is sampled, and the request comes again: the same turn, sampled once; and once more afterwards."""
    proxy = Proxy(shared_engine)
    rewards = RewardPool(ExactMatchReward(processes=1))
    sampler = Sampler(proxy, {"": Player(encoder, rewards, SamplingConfig(samples_per_group=2, max_tokens=400))}, seed=3)  # type: ignore[arg-type]

    async def run() -> tuple[list[str], Trajectory]:
        async with opened(encoder) as door:
            conversation = conversation_of(sampler, encoder)
            address = door.admit(conversation, AT_ONE)
            body = {"model": MODEL, "messages": [user("3 + 4 =")], "stream": True, "max_tokens": 60}
            async with (
                httpx.AsyncClient() as cut,
                cut.stream(
                    "POST", f"{address.base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {address.key}"}
                ) as response,
            ):
                assert response.status_code == 200
            async with client(address) as asking:
                answers = [await asking.chat.completions.create(model=MODEL, messages=[user("3 + 4 =")]) for _ in range(2)]
            return [one.choices[0].message.content or "" for one in answers], conversation.trajectory

    texts, trajectory = engine_loop.run(run())
    assert texts == [encoder.text_of(trajectory.response_ids)] * 2
    assert len(proxy.calls) == 1


@pytest.mark.engine
def test_tokens_for_tokens(shared_engine: RolloutEngine, engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """Both names of the field, by the session's address and by its key alone; logprobs as they train."""
    rewards = RewardPool(ExactMatchReward(processes=1))
    sampler = Sampler(shared_engine, {"": Player(encoder, rewards, SamplingConfig(samples_per_group=2, max_tokens=400))}, seed=3)

    async def run() -> None:
        async with opened(encoder) as door:
            conversation = conversation_of(sampler, encoder)
            address = door.admit(conversation, AT_ONE)
            root = address.base_url.partition("/sessions")[0]
            ids = list(encoder.encode("3 + 4 ="))
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {address.key}"}) as asking:
                for field, place in (("token_ids", root), ("input_ids", address.base_url.removesuffix("/v1"))):
                    sampling = {"temperature": 1.0, "max_tokens": 6, "logprobs": 1, "stop_token_ids": [encoder.ends.ids[0]]}
                    sampling |= {
                        "routed_experts_prompt_start": 3,
                        "skip_special_tokens": False,
                    }  # as verifiers says from its second turn on
                    answer = (await asking.post(f"{place}/inference/v1/generate", json={field: ids, "sampling_params": sampling})).json()
                    (choice,) = answer["choices"]
                    content = choice["logprobs"]["content"]
                    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
                    assert answer["usage"]["prompt_tokens"] == len(ids)
                    trajectory = conversation.trajectory
                    assert trajectory.token_ids.tolist() == [*ids, *choice["token_ids"]]
                    assert [entry["logprob"] for entry in content] == trajectory.behavior_logprobs[-len(content) :].tolist()
                    ids = [*trajectory.token_ids, 9, 10]
            other = [*ids[:3], ids[3] + 1, *ids[4:]]
            status, said = await post(address, {"token_ids": other}, at="/../inference/v1/generate")
            assert status == 400 and said.startswith(f"token 3 of the session is {ids[3]}, and {ids[3] + 1} is given there")
            for bad in (99_999, 1 << 40, -1):
                status, said = await post(address, {"token_ids": [*ids, bad]}, at="/../inference/v1/generate")
                assert status == 400 and not conversation.is_cut, said
            for stops in (3, [9, "a"], [[9]]):
                status, said = await post(
                    address, {"token_ids": ids, "sampling_params": {"stop_token_ids": stops}}, at="/../inference/v1/generate"
                )
                assert (status, said) == (400, "stop_token_ids: give a list of token ids")
            for prompt, code in (([99_999], None), ([9] * 40_000, "context_length_exceeded")):
                first = conversation_of(sampler, encoder, 1)
                its = door.admit(first, AT_ONE)
                async with httpx.AsyncClient(headers={"Authorization": f"Bearer {its.key}"}) as asking:
                    refused = await asking.post(f"{root}/inference/v1/generate", json={"token_ids": prompt})
                assert (refused.status_code, refused.json()["error"]["code"], first.is_cut) == (400, code, code is not None)
            status, said = await post(address, {"messages": [user("3 + 4 =")]})
            assert (status, said) == (400, "this session has been given token ids; a conversation in messages needs one of its own")

    engine_loop.run(run())


def test_what_was_said_comes_back_as_it_was_or_not_at_all(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """Content as a list of parts and empty fields don't make another message. What does is named, and the session goes on after it."""
    script = Script(encoder, "ab cd", "ef")

    async def run() -> None:
        async with opened(encoder) as door:
            address = door.admit(scripted(script, encoder), AT_ONE)
            asked = [user("one"), {"role": "assistant", "content": "earlier"}, user("two")]
            assert (await post(address, {"messages": asked}))[0] == 200
            answered = {"role": "assistant", "content": "ab cd", "refusal": None, "tool_calls": []}
            refused = {
                "message 0: its content was 'one', and comes back as 'One'": [user("One"), *asked[1:], answered, user("3")],
                "message 3: its content was 'ab cd', and comes back as 'ab  cd'; token 3 of that turn, ": [
                    *asked, {**answered, "content": "ab  cd"}, user("3")
                ],
                "message 3: its role was 'assistant', and comes back as 'user'": [*asked, user("ab cd"), user("3")],
                "the conversation ends before message 2, which": asked[:2],
                "nothing is new in this request": [*asked, answered],
                "message 4 is an assistant's, and the model didn't say it": [*asked, answered, asked[1], user("3")],
                "message 4 has content that is no text": [*asked, answered, {"role": "user", "content": [{"type": "image_url"}]}],
                "message 4 has no role of system": [*asked, answered, {"role": "model", "content": "x"}],
                "message 4 has the field 'audio', which": [*asked, answered, {**user("3"), "audio": {"id": "x"}}],
            }  # fmt: skip
            for sentence, messages in refused.items():
                status, said = await post(address, {"messages": messages})
                assert status == 400 and said.startswith(sentence), said
            parts = {"role": "user", "content": [{"type": "text", "text": "th"}, {"type": "text", "text": "ree"}]}
            assert (await post(address, {"messages": [*asked, answered, parts]}))[0] == 200

    engine_loop.run(run())
    whole = [
        user("one"),
        {"role": "assistant", "content": "earlier"},
        user("two"),
        {"role": "assistant", "content": "ab cd"},
        user("three"),
    ]
    assert script.read[1] == list(encoder.encode(whole))


def test_two_tools_at_once(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """What Qwen's models say to call two tools becomes two calls, streamed or not; their results, and the calls with JSON written
    otherwise, come back, and the model reads its own calls as it said them."""
    called = [{"name": "add", "arguments": {"a": 1}}, {"name": "look", "arguments": {"at": [2]}}]
    said = "both" + "".join(f"\n<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in called)
    scripts = [Script(encoder, said, "ef") for _ in range(2)]

    async def run() -> None:
        async with opened(encoder) as door:
            for script, is_streamed in zip(scripts, (False, True), strict=True):
                address = door.admit(scripted(script, encoder, calls=calls_of("qwen25", "rollout.agent")), AT_ONE)
                async with client(address) as asking:
                    options: Any = {"model": MODEL, "tools": TOOLS, "stream": is_streamed}
                    answer = await asking.chat.completions.create(messages=[user("1")], **options)
                    if is_streamed:
                        chunks = [chunk async for chunk in answer]
                        message, finish = chunks[0].choices[0].delta, chunks[-1].choices[0].finish_reason
                    else:
                        message, finish = answer.choices[0].message, answer.choices[0].finish_reason
                    calls = message.tool_calls
                    assert finish == "tool_calls" and (message.content or "").strip() == "both"
                    assert [(one.function.name, json.loads(one.function.arguments)) for one in calls] == [
                        (one["name"], one["arguments"]) for one in called
                    ]
                    back = [
                        {
                            "id": one.id,
                            "type": "function",
                            "function": {"name": one.function.name, "arguments": one.function.arguments + " "},
                        }
                        for one in calls
                    ]
                    results = [{"role": "tool", "tool_call_id": one.id, "content": f"is {one.function.name}"} for one in calls]
                    messages = [user("1"), {"role": "assistant", "content": message.content, "tool_calls": back}, *results]
                    with pytest.raises(openai.BadRequestError, match="the tools are others"):
                        await asking.chat.completions.create(messages=messages, **{**options, "tools": TOOLS[:1]})
                    answer = await asking.chat.completions.create(messages=messages, **options)
                    first = [chunk async for chunk in answer] if is_streamed else [answer]
                    said_then = first[0].choices[0].delta if is_streamed else first[0].choices[0].message
                    assert said_then.content == "ef"

    engine_loop.run(run())
    whole = [user("1"), {"role": "assistant", "content": said}, *({"role": "tool", "content": f"is {one['name']}"} for one in called)]
    assert [script.read[1] for script in scripts] == [list(encoder.encode(whole))] * 2


def test_ids_of_calls_count_in_their_conversation(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """As the model has learnt them, which is shown them (Kimi's): in a conversation that begins anew they do, too."""

    def calls(text: str, _: Any, earlier: int) -> tuple[str, list[ToolCall]]:
        return "", [ToolCall(id_of_call("kimi_k2", text[:2], earlier), text[:2], "{}")]

    async def run() -> list[str]:
        async with opened(encoder) as door:
            address = door.admit(scripted(Script(encoder, "ab", "cd", "ef", "gh"), encoder, calls=calls, max_sequences=3), AT_ONE)
            found: list[str] = []
            async with client(address) as asking:
                for question in ("1", "2"):
                    messages: list[Any] = [user(question)]
                    for _ in range(2):
                        asked = await asking.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
                        said = asked.choices[0].message.model_dump(exclude_none=True)
                        found.append(said["tool_calls"][0]["id"])
                        messages += [said, {"role": "tool", "tool_call_id": found[-1], "content": "done"}]
            return found

    assert engine_loop.run(run()) == ["functions.ab:0", "functions.cd:1", "functions.ef:0", "functions.gh:1"]


def test_a_call_that_the_parser_can_t_read_is_text(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """Half a call, and a call of a description of tools that is none; the turn isn't lost."""
    for text, tools in (('<tool_call>\n{"name": "add", ', TOOLS), ("<tool_call>\n{}\n</tool_call>", [{"function": {"name": 3}}])):

        async def run(text: str = text, tools: Any = tools) -> None:
            async with opened(encoder) as door:
                address = door.admit(scripted(Script(encoder, text), encoder, calls=calls_of("qwen25", "rollout.agent")), AT_ONE)
                status, said = await post(address, {"messages": [user("1")], "tools": tools})
                assert status == 200
                (choice,) = json.loads(said)["choices"]
                assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"

        engine_loop.run(run())


def test_what_looks_like_a_call_is_text_where_none_is_to_be_made(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """tool_choice = none, for a turn in which the program takes text alone; the tools stay in the prompt, and the next turn may call."""
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    script = Script(encoder, call, call)

    async def run() -> list[dict[str, Any]]:
        async with opened(encoder) as door:
            address = door.admit(scripted(script, encoder, calls=calls_of("qwen25", "rollout.agent")), AT_ONE)
            _, first = await post(address, {"messages": [user("1")], "tools": TOOLS, "tool_choice": "none"})
            messages = [user("1"), json.loads(first)["choices"][0]["message"], user("2")]
            _, second = await post(address, {"messages": messages, "tools": TOOLS})
            return [json.loads(answer)["choices"][0] for answer in (first, second)]

    text, called = engine_loop.run(run())
    assert (text["message"], text["finish_reason"]) == ({"role": "assistant", "content": call}, "stop")
    assert [one["function"]["name"] for one in called["message"]["tool_calls"]] == ["add"] and called["finish_reason"] == "tool_calls"


def test_what_goes_wrong_in_a_stream_is_its_last_event(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """A refusal is remembered for the people who read why the agent gave up; an error of the door's is no second answer."""

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    async def event_of(conversation: Conversation) -> Any:
        async with opened(encoder) as door, httpx.AsyncClient() as asking:
            address = door.admit(conversation, AT_ONE)
            body = {"messages": [user("1")], "tools": TOOLS, "stream": True}
            named = {"Authorization": f"Bearer {address.key}"}
            answer = await asking.post(f"{address.base_url}/chat/completions", json=body, headers=named)
            assert answer.status_code == 200
            return json.loads(answer.text.removeprefix("data: "))["error"]

    async def run() -> None:
        full = scripted(Script(encoder, "ab"), encoder, max_turns=0)
        said = await event_of(full)
        assert said["code"] == "context_length_exceeded" and said["message"] == full.refusal
        assert full.refusal == "the session has had its 0 turns (rollout.agent.max_turns)"
        assert (await event_of(scripted(Script(encoder, "ab"), encoder, calls=broken)))["message"] == "the door failed: ZeroDivisionError"

    engine_loop.run(run())


def test_nobody_else_gets_in(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """Without the key, with that of another session, by another name of the host, after the end."""

    async def run() -> None:
        async with opened(encoder) as door:
            addresses = [door.admit(scripted(Script(encoder, "ab"), encoder), AT_ONE) for _ in range(2)]
            body = {"messages": [user("1")]}
            for key in ("x", addresses[1].key):
                assert (await post(addresses[0], body, key=key))[0] == 401
            assert (await post(addresses[0], body, Host="evil.example"))[0] == 403
            async with client(addresses[0]) as asking:
                assert [model.id async for model in asking.models.list()] == [MODEL]
            assert (await post(addresses[0], body))[0] == 200
            door.end(addresses[0])
            status, said = await post(addresses[0], body)
            assert status == 410 and said.startswith("this session has ended")
            assert (await post(addresses[0], body, key="x"))[0] == 401
            assert (await post(addresses[1], body))[0] == 200

    engine_loop.run(run())


def test_connections_are_limited(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """One too many is told so, and the client asks again by itself. Two hundred that say nothing don't stay."""

    async def run() -> None:
        async with opened(encoder, connections=3) as door:
            address = door.admit(scripted(Script(encoder, "ab"), encoder), AT_ONE)
            place = urlsplit(address.base_url)
            assert place.hostname and place.port
            idle = [await asyncio.open_connection(place.hostname, place.port) for _ in range(3)]
            await asyncio.sleep(0.1)
            said = {"model": MODEL, "messages": [user("1")]}
            async with client(address, max_retries=0) as asking:
                with pytest.raises(openai.InternalServerError, match="the door has 3 connections, and takes no more at") as error:
                    await asking.chat.completions.create(**said)
            assert error.value.status_code == 503
            others = [await asyncio.open_connection(place.hostname, place.port) for _ in range(200)]
            async with asyncio.timeout(60):
                for reader, writer in others:
                    with contextlib.suppress(ConnectionError):
                        assert await reader.read() == b""
                    writer.close()
            async with client(address, max_retries=9) as asking:
                asked = asyncio.ensure_future(asking.chat.completions.create(**said))
                await asyncio.sleep(0.5)
                assert not asked.done()
                idle[0][1].close()
                assert (await asked).choices[0].message.content == "ab"
            for _, writer in idle:
                writer.close()

    engine_loop.run(run())


def test_a_connection_that_asks_nothing_is_closed_and_costs_no_turn(
    engine_loop: BackgroundLoop, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has never asked, and one that an agent has kept while it thinks: its client, which never asks twice, opens another."""
    monkeypatch.setattr("evenkeel.rollout.door.door._IDLE_S", 0.3)
    script = Script(encoder, "ab", "cd")

    async def run() -> None:
        async with opened(encoder) as door:
            address = door.admit(scripted(script, encoder), AT_ONE)
            place = urlsplit(address.base_url)
            assert place.hostname and place.port
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            async with asyncio.timeout(60):
                assert await reader.read() == b""
            writer.close()
            kept = httpx.AsyncClient(limits=httpx.Limits(keepalive_expiry=None), trust_env=False)
            async with client(address, http_client=kept, max_retries=0) as asking:
                messages: list[Any] = [user("1")]
                for said in ("ab", "cd"):
                    answer = await asking.chat.completions.create(model=MODEL, messages=messages)
                    assert answer.choices[0].message.content == said
                    messages += [{"role": "assistant", "content": said}, user("2")]
                    await asyncio.sleep(1.0)

    engine_loop.run(run())
    assert len(script.read) == 2


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_at_another_address_it_answers_to_that_one_s_name(engine_loop: BackgroundLoop, encoder: ChatEncoder, host: str) -> None:
    """And is nowhere else. A page whose name was made to mean that address brings its own name along."""

    async def run() -> None:
        async with opened(encoder, host=host) as door:
            address = door.admit(scripted(Script(encoder, "ab"), encoder), AT_ONE)
            place = urlsplit(address.base_url)
            assert place.hostname == host
            body = {"messages": [user("1")]}
            for name in ("evil.example", "localhost", "127.0.0.1"):
                status, said = await post(address, body, Host=f"{name}:{place.port}")
                assert status == 403 and said.startswith("the Host header names another place")
            assert (await post(address, body, key="x"))[0] == 401
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", place.port)
            async with client(address) as asking:
                answer = await asking.chat.completions.create(model=MODEL, messages=[user("1")])
            assert answer.choices[0].message.content == "ab"

    engine_loop.run(run())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "other"}, "model = 'other': this door has 'tiny' alone"),
        ({"temperature": 0.5}, "temperature = 0.5: the run samples at 1, and tokens would come from another distribution"),
        ({"top_p": 0.9}, "top_p = 0.9: the run samples at 1"),
        ({"top_k": 5}, "top_k = 5: the run samples at -1, and tokens would come from another distribution"),
        ({"presence_penalty": 0.1}, "presence_penalty = 0.1: tokens would"),
        ({"logit_bias": {"5": 1}}, "logit_bias = {'5': 1}: tokens would"),
        ({"n": 2}, "n = 2: a request gets one turn"),
        ({"stop": ["\n"]}, "stop = ['\\n']: a turn ends where the model ends it"),
        ({"seed": 3}, "seed = 3: the run gives each sample its own seed"),
        ({"response_format": {"type": "json_object"}}, "response_format = {'type': 'json_object'}: a grammar would"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice = 'required': a grammar would force a call"),
        ({"max_tokens": 0}, "max_tokens = 0: give a whole number"),
        ({"temprature": 1}, "temprature is nothing that the door knows; did you mean temperature?"),
        ({"messages": []}, "messages: give a list"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "message 0 has no role of system, developer, user, assistant, tool"),
        ({"stream_options": 3}, "stream_options: give an object"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last message is an assistant's"),
        ({"x" * 1_000_000: 1}, "x" * 1000),
        ({"model": "x" * 1_000_000}, f"model = '{'x' * 100}"),
    ],
)
def test_what_would_change_the_distribution_is_refused(
    engine_loop: BackgroundLoop, encoder: ChatEncoder, change: dict[str, Any], sentence: str
) -> None:
    """In one sentence; the run's own values are accepted, and the session goes on."""

    async def run() -> None:
        async with opened(encoder) as door:
            address = door.admit(scripted(Script(encoder, "ab"), encoder), AT_ONE)
            status, said = await post(address, {"messages": [user("1")], **change})
            assert status in (400, 404) and said.startswith(sentence) and len(said) < 1100, said
            same = {"model": MODEL, "temperature": 1, "top_p": 1, "top_k": -1, "n": 1, "frequency_penalty": 0, "user": "x", "stop": None}
            assert (await post(address, {"messages": [user("1")], **same}))[0] == 200

    engine_loop.run(run())


def test_a_session_that_ends_while_a_request_comes_begins_no_turn(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """Its engine would sample for a rollout that is over."""
    script = Script(encoder, "ab")

    async def run() -> bytes:
        async with opened(encoder) as door:
            address = door.admit(scripted(script, encoder), AT_ONE)
            place, _, path = address.base_url.removeprefix("http://").partition("/")
            body = json.dumps({"messages": [user("1")]}).encode()
            reader, writer = await asyncio.open_connection(*place.split(":"))
            head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {place}\r\nAuthorization: Bearer {address.key}\r\n"
            writer.write(f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n", "its head was read"
            await reader.readline()
            writer.write(body[:5])
            await asyncio.sleep(0.1)
            door.end(address)
            writer.write(body[5:])
            status = await reader.readline()
            writer.close()
            return status

    assert engine_loop.run(run()).split()[1] == b"410" and script.read == []


def test_half_a_request_is_one_sentence(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """JSON that ends, brackets without end, a body that is too long, a body that never comes; the next request is answered."""

    async def run() -> None:
        async with opened(encoder) as door:
            address = door.admit(scripted(Script(encoder, "ab"), encoder), AT_ONE)
            for body, status, sentence in (
                (b'{"messages": [', 400, "the body is no JSON"),
                (b"[" * 100_000, 400, "the body is no JSON"),
                (b'{"messages": [{"role": "user", "content": "\\udc80"}]}', 400, "the body is no JSON ('utf-8' codec can't encode"),
                (b'"text"', 400, "the body is no JSON object"),
                (b" " * (LARGEST_BODY_BYTES + 1), 413, "the body has more than"),
            ):
                found, said = await post(address, body)
                assert (found, said[: len(sentence)]) == (status, sentence)
            assert (await post(address, {}, at="/completions"))[0] == 404
            host, port = address.base_url.removeprefix("http://").partition("/")[0].split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /sessions/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await writer.drain()
            assert (await post(address, {"messages": [user("1")]}))[0] == 200
            writer.close()

    engine_loop.run(run())


def test_what_is_no_http_leaves_no_key_in_a_log(
    engine_loop: BackgroundLoop, encoder: ChatEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    """A header without a colon, a control character after the key, a method that is none, a byte before the key: each gets an answer."""
    caplog.set_level(logging.DEBUG)

    async def run() -> str:
        async with opened(encoder) as door:
            address = door.admit(scripted(Script(encoder, "ab"), encoder), AT_ONE)
            place, _, path = address.base_url.removeprefix("http://").partition("/")
            start = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {place}\r\n"
            broken = [f"{start}Authorization Bearer {address.key}", f"{start}Authorization: Bearer {address.key}\x01", f"KEY{address.key}"]
            for raw, status in [*((one, b"400") for one in broken), (f"{start}Authorization: Bearer \xff{address.key}", b"401")]:
                reader, writer = await asyncio.open_connection(*place.split(":"))
                writer.write(f"{raw}\r\n\r\n".encode("latin-1"))
                assert (await reader.readline()).split()[1] == status, raw
                writer.close()
            assert (await post(address, {"messages": [user("1")]}))[0] == 200
            return address.key

    assert engine_loop.run(run()) not in caplog.text and "a request of a session" not in caplog.text


def test_a_conversation_without_room_is_cut(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """By its turns, or by its tokens; with OpenAI's code, which clients know. What there is stays, and counts as cut."""

    async def refused(max_turns: int, new: str) -> None:
        async with opened(encoder) as door:
            script = Script(encoder, "ab")
            begin = partial(script.begin, max_tokens=20)
            conversation = Conversation(unsampled((), "p"), begin, encoder, max_turns=max_turns)
            async with client(door.admit(conversation, AT_ONE)) as asking:
                await asking.chat.completions.create(model=MODEL, messages=[user("1")])
                assert not conversation.is_cut
                again = [user("1"), {"role": "assistant", "content": "ab"}, user(new)]
                with pytest.raises(openai.BadRequestError) as error:
                    await asking.chat.completions.create(model=MODEL, messages=again)  # type: ignore[arg-type]
            assert error.value.code == "context_length_exceeded" and conversation.is_cut
            assert conversation.played is not None and conversation.played.finish_reason is FinishReason.LENGTH
            assert encoder.text_of(conversation.played.response_ids) == "ab"

    engine_loop.run(refused(1, "2"))
    engine_loop.run(refused(9, "2" * 30))


def test_a_rollout_goes_on_elsewhere_with_a_new_agent(engine_loop: BackgroundLoop, encoder: ChatEncoder) -> None:
    """Three turns, of which the last was being sampled when the worker left. An agent that asks the same gets the first two as they were,
    and the third is gone on with; one that asks something else after the first has that turn, and then what it asks now. An agent that
    needs one turn alone has one."""
    first = Script(encoder, "ab", "cd", "efefefef")

    async def talk(conversation: Conversation, *asked: str) -> list[str]:
        messages: list[Any] = []
        async with opened(encoder) as door, client(door.admit(conversation, AT_ONE)) as asking:
            for text in asked:
                messages.append(user(text))
                answer = await asking.chat.completions.create(model=MODEL, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return [one["content"] for one in messages[1::2]]

    async def run() -> None:
        conversation = scripted(first, encoder)
        await talk(conversation, "1", "2", "3")
        left = kept(replace(conversation.trajectory, finish_reason=FinishReason.ABORT), 10_000)
        again = Script(encoder, "!")
        same = Conversation(left, again.begin, encoder, max_turns=9)
        texts = await talk(same, "1", "2", "3")
        assert texts[:2] == ["ab", "cd"] and texts[2] == "efefefef!" and again.read == [left.token_ids.tolist()]
        assert same.played is not None and same.played.later == left.later
        again = Script(encoder, "xy")
        other = Conversation(left, again.begin, encoder, max_turns=9)
        assert await talk(other, "1", "TWO") == ["ab", "xy"]
        assert other.played is not None and other.played.turns == 2
        whole = [user("1"), {"role": "assistant", "content": "ab"}, user("TWO")]
        assert again.read == [list(encoder.encode(whole))]
        short = Conversation(left, Script(encoder).begin, encoder, max_turns=9)
        assert await talk(short, "1") == ["ab"]
        assert short.played is not None and encoder.text_of(short.played.answer_ids) == "ab" and short.trajectory.turns == 3

    engine_loop.run(run())


AGENT = """
import json, os, time, urllib.request

messages, reward = [], 0.0
for text in ("3 + 4 =", "and?"):
    messages.append({"role": "user", "content": text})
    body = json.dumps({"messages": messages, "max_tokens": 8}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    reward += len(messages[-1]["content"])
    open(f"asked {os.getpid()}", "w").close()
    while not os.path.exists("go on"):
        time.sleep(0.01)
json.dump(reward, open(os.environ["EVENKEEL_REWARD"], "w"))
"""


@pytest.mark.engine
def test_a_group_of_agents_goes_on_with_another_worker(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, encoder: ChatEncoder, tmp_path: Path
) -> None:
    """Three programs wait for their tools when the worker leaves. Three others go on from the turns that were sampled, to the token."""
    (tmp_path / "agent.py").write_text(AGENT)
    prompt = Prompt("train/0/0", "3 + 4 =", encoder.encode("3 + 4 ="), "7")

    async def run() -> tuple[Group | UnfinishedGroup, Group | UnfinishedGroup, Trajectory]:
        agents = await Agents.start(AgentConfig(command=("python", "agent.py"), folder=tmp_path, processes=3), MODEL, encoder, None)
        settings = SamplingConfig(samples_per_group=3, max_tokens=200)
        try:
            player = Player(encoder, RewardPool(AgentReward()), settings, agents=agents)
            first, second = (Sampler(engine, {"": player}, seed=4) for _ in range(2))
            playing = asyncio.ensure_future(first.group(prompt, group_id=1, admitted_version=0))
            while len(list(tmp_path.glob("asked *"))) < 3:
                await asyncio.sleep(0.01)
            await first.hand_back()
            left = await playing
            engine.is_leaving = False
            (tmp_path / "go on").touch()
            assert isinstance(left, UnfinishedGroup)
            whole = await second.group(prompt, group_id=1, admitted_version=0, begun=left)
            (greedy,) = await second.answer(prompt, AnswerSampling())
            return left, whole, greedy
        finally:
            engine.is_leaving = False
            await agents.close()

    left, group, greedy = engine_loop.run(run())
    assert isinstance(left, UnfinishedGroup) and isinstance(group, Group)
    assert [one.turns for one in left.answers] == [1] * 3
    models = {engine.version: hf_model(tiny_model)}
    for before, one in zip(left.answers, group.trajectories, strict=True):
        assert before.response_ids and one.token_ids[: len(before.token_ids)] == before.token_ids
        assert (one.turns, one.error) == (2, None)
        texts = [encoder.text_of(segment.ids) for segment in one.segments if segment.sampled is not None]
        assert one.reward == sum(map(len, texts))
        assert largest_difference(one.behavior_logprobs, expected(models, one)[0]) < TOLERANCE
    assert len({tuple(one.response_ids) for one in group.trajectories}) == 3, "each sample has a seed of its own"
    assert greedy.is_valid and greedy.turns == 2 and greedy.top_logprobs is None
