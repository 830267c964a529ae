"""The agents' door, asked by agent loops and training clients as PyPI has them, each in a virtual environment of its own by locked
versions, since they want other packages than SGLang."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from evenkeel.rollout.config import AgentConfig
from evenkeel.rollout.door.agents import Agents
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import Prompt, Trajectory
from tests.conftest import BackgroundLoop
from tests.rollout.door_scene import AT_ONE, MODEL, Script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LOCKS = Path(__file__).parent / "clients"
BUILT = Path(__file__).parents[2] / "models" / "clients"
"""Where the environments are kept for the next run."""


def python_of(client: str) -> Path:
    """The interpreter of a client's own environment, made where it isn't there yet: minutes, and PyPI."""
    lock = LOCKS / f"{client}.txt"
    folder = BUILT / f"{client}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    if not (folder / "whole").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", "-r", lock], check=True)
        (folder / "whole").touch()
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def encoder(tiny_model: Path) -> ChatEncoder:
    return ChatEncoder(AutoTokenizer.from_pretrained(tiny_model))


Play = Callable[[Path, str, Script, Prompt], Trajectory]


@pytest.fixture
def play(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> Play:
    """A program's rollout: (interpreter, program, what the model says, question)."""

    def played(python: Path, program: str, script: Script, prompt: Prompt) -> Trajectory:
        (tmp_path / "agent.py").write_text(program)

        async def run() -> Trajectory:
            command = (str(python), "agent.py")
            config = AgentConfig(command=command, folder=tmp_path, processes=1, tool_parser="qwen25", start_deadline_s=120)
            agents = await Agents.start(config, MODEL, encoder, None)
            try:
                return await agents.rollout(prompt, None, AT_ONE).play(script.begin)
            finally:
                await agents.close()

        return engine_loop.run(run(), timeout_s=600)

    return played


LOOP = """
import asyncio, json, os
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
task = json.load(open(os.environ["EVENKEEL_TASK"]))

@function_tool
def add(a: int, b: int) -> str:
    return str(a + b)

async def main():
    model = OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], AsyncOpenAI())
    agent = Agent(name="adder", instructions="Add.", tools=[add], model=model)
    if task["metadata"]["is_streamed"]:
        result = Runner.run_streamed(agent, task["prompt"])
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, task["prompt"])
    json.dump(float(result.final_output == task["answer"]), open(os.environ["EVENKEEL_REWARD"], "w"))

asyncio.run(main())
"""


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_loop_calls_two_tools_at_once(play: Play, encoder: ChatEncoder, is_streamed: bool) -> None:
    """openai-agents: it sends the calls back in its own writing, and the results in one request; the model reads its calls as it said
    them."""
    calls = [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": {"a": 10, "b": 20}}]
    called = "\n".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in calls)
    script = Script(encoder, called, "3 and 30")
    prompt = Prompt("train/0/0", "1 + 2, 10 + 20", (1,), "3 and 30", {"is_streamed": is_streamed})
    one = play(python_of("openai_agents"), LOOP, script, prompt)
    assert (one.error, one.reward, one.turns, one.sequence_count) == (None, 1.0, 2, 1)
    first, second = (encoder.tokenizer.decode(read, skip_special_tokens=False) for read in script.read)
    assert second.startswith(f"{first}{called}<|im_end|>") and second.count("3<|im_end|>") == second.count("30<|im_end|>") == 1


CUT = """
import asyncio, json, os
from urllib.parse import urlsplit
from openai import AsyncOpenAI

door = os.environ["OPENAI_BASE_URL"]
answers, broken = [], []

async def relay(reader, writer):
    from_door, to_door = await asyncio.open_connection("127.0.0.1", urlsplit(door).port)
    async def ask():
        while data := await reader.read(1 << 16):
            to_door.write(data)
    asking = asyncio.create_task(ask())
    seen = b""
    while data := await from_door.read(20):
        seen += data
        if b"data: {" in seen and not answers:
            break
        writer.write(data)
    answers.append(seen)
    asking.cancel()
    for one in (writer, to_door):
        one.close()

async def main():
    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    here = door.replace(str(urlsplit(door).port), str(server.sockets[0].getsockname()[1]), 1)
    client, messages = AsyncOpenAI(base_url=here, max_retries=0, default_headers={"Host": urlsplit(door).netloc}), []
    for text in ("1 + 2", "3 + 4"):
        messages.append({"role": "user", "content": text})
        while len(messages) % 2:
            try:
                stream = await client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, stream=True)
                said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                messages.append({"role": "assistant", "content": said})
            except Exception as error:
                broken.append(f"{type(error).__name__}: {error}")
    json.dump(float(len(broken)), open(os.environ["EVENKEEL_REWARD"], "w"))

asyncio.run(main())
"""


def test_a_stream_that_is_cut_in_the_middle_is_asked_for_again(play: Play, encoder: ChatEncoder) -> None:
    """By the openai package: between it and the door a relay breaks the first stream off within its turn. The same request gets the same
    turn, which is sampled once, and the session goes on after it."""
    script = Script(encoder, "3", "7")
    one = play(python_of("openai_agents"), CUT, script, Prompt("train/0/0", "", (1,), ""))
    assert (one.error, one.reward, one.turns, one.sequence_count) == (None, 1.0, 2, 1)
    assert len(script.read) == 2 and encoder.text_of(one.response_ids[: len(one.response_ids) // 2]) == "3"


TRAINER = """
import asyncio, json, os
from types import SimpleNamespace
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import Trace
from verifiers.v1.types import AssistantMessage, SamplingConfig, UserMessage

task = json.load(open(os.environ["EVENKEEL_TASK"]))

async def main():
    base = os.environ["OPENAI_BASE_URL"]
    config = TrainClientConfig(base_url=base, api_key_var="OPENAI_API_KEY", renderer_model_name=task["metadata"]["tokenizer"])
    client, trace, messages, seen = TrainClient(config), Trace.model_construct(nodes=[], tools=[], calls=[]), [], []
    for text in ("1 + 2", "3 + 4", "5"):
        messages.append(UserMessage(content=text))
        turn = prepare_turn(trace, list(messages))
        body = {"model": os.environ["OPENAI_MODEL"], "messages": []}
        answer = await client.get_response(ChatDialect(), body, SamplingConfig(temperature=1.0, max_tokens=20), "session", turn)
        turn.commit(answer)
        messages.append(answer.message)
        tokens = answer.tokens
        seen.append({"prompt": tokens.prompt_ids, "completion": tokens.completion_ids, "logprobs": tokens.completion_logprobs,
                     "content": answer.message.content})
    json.dump(seen, open("seen.json", "w"))
    json.dump(1.0, open(os.environ["EVENKEEL_REWARD"], "w"))

asyncio.run(main())
"""
TEXTS = ["12 + 34", "41 + 23", "10 + 20"]


def test_verifiers_train_client_goes_on_from_its_tokens(play: Play, encoder: ChatEncoder, tiny_model: Path, tmp_path: Path) -> None:
    """Three turns by the token door, rendered by itself. (For a tokenizer of no family that it knows it renders all messages anew, so the
    model's words are those that the tokenizer writes so.)"""
    question = Prompt("train/0/0", "", (1,), "", {"tokenizer": str(tiny_model)})
    one = play(python_of("verifiers"), TRAINER, Script(encoder, *TEXTS), question)
    assert (one.error, one.reward, one.turns, one.sequence_count) == (None, 1.0, 3, 1)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [turn["content"] for turn in seen] == TEXTS
    assert [*seen[-1]["prompt"], *seen[-1]["completion"]] == one.token_ids.tolist()
    assert [value for turn in seen for value in turn["logprobs"]] == one.behavior_logprobs.tolist()


TOOLS = """
import verifiers.v1 as vf

class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> str:
        "The sum of two numbers."
        return str(a + b)

class SumData(vf.TaskData):
    answer: str

class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace):
        return float(trace.last_reply.strip() == self.data.answer)

if __name__ == "__main__":
    Adder.run()
"""
HARNESS = """
import asyncio, json, os, sys
from pathlib import Path

here = os.environ["PYTHONPATH"] = os.environ["HOME"] = os.getcwd()
import verifiers.v1 as vf
from tools import Sum, SumData
from verifiers.v1.runtimes.base import Runtime

async def by_this_interpreter(self, script, env=None, *, activate=True):
    program = Path(here, "chat.py")
    program.write_text(script)
    return [sys.executable, str(program)]

Runtime.prepare_uv_script = by_this_interpreter
task = json.load(open(os.environ["EVENKEEL_TASK"]))

async def main():
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    config = vf.AgentConfig(harness={"id": "null"}, runtime=vf.SubprocessConfig(), model=os.environ["OPENAI_MODEL"], client=client)
    trace = await vf.Agent(config).run(Sum(SumData(idx=0, prompt=task["prompt"], answer=task["answer"])))
    assert trace.ok, trace.errors
    json.dump(trace.reward, open(os.environ["EVENKEEL_REWARD"], "w"))

asyncio.run(main())
"""


def test_a_verifiers_environment_with_a_harness_calls_two_tools_at_once(play: Play, encoder: ChatEncoder, tmp_path: Path) -> None:
    """Its own chat harness (streamed, behind its interception server), a toolset served by MCP, and its reward. The harness's program runs
    by this environment's interpreter, where verifiers would have uv make one from an index. The model reads its calls as it said them."""
    (tmp_path / "tools.py").write_text(TOOLS)
    calls = [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": {"a": 10, "b": 20}}]
    called = "\n".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in calls)
    script = Script(encoder, called, "3 and 30")
    one = play(python_of("verifiers"), HARNESS, script, Prompt("train/0/0", "1 + 2, 10 + 20", (1,), "3 and 30"))
    assert (one.error, one.reward, one.turns, one.sequence_count) == (None, 1.0, 2, 1)
    first, second = (encoder.tokenizer.decode(read, skip_special_tokens=False) for read in script.read)
    assert second.startswith(f"{first}{called}<|im_end|>") and second.count("3<|im_end|>") == second.count("30<|im_end|>") == 1
