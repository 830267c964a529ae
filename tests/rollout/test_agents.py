"""Rollouts played by programs: what they are given, what becomes of one that fails, and that nothing of theirs outlives them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from transformers import AutoTokenizer

from evenkeel.correction.errors import ConfigError, EngineError
from evenkeel.rollout.config import AgentConfig, FoldersTask, RolloutConfig
from evenkeel.rollout.continuation import is_begun, is_unfinished
from evenkeel.rollout.door.agents import Agents, Score
from evenkeel.rollout.session import Session
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import FailureKind, FinishReason, Prompt, Trajectory
from tests.conftest import BackgroundLoop
from tests.rollout.door_scene import AT_ONE, MODEL, Script, user
from tests.rollout.folder_scene import bubblewrap, needs_bubblewrap, write_folder
from tests.rollout.reward_scene import is_running, wait_until

__all__ = ["bubblewrap"]
PROMPT = Prompt("train/0/7", "1 + 2", (5, 6), "3", {"level": 4})
ASKING = """
import json, os, sys, time, urllib.request

def ask(*said, **more):
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, **more}).encode()
    named = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, named)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

def reward(value):
    open(os.environ["EVENKEEL_REWARD"], "w").write(json.dumps(value))

task = json.load(open(os.environ["EVENKEEL_TASK"]))
"""


@pytest.fixture(scope="module")
def encoder(tiny_model: Path) -> ChatEncoder:
    return ChatEncoder(AutoTokenizer.from_pretrained(tiny_model))


@contextlib.asynccontextmanager
async def started(
    encoder: ChatEncoder, folder: Path, score: Score | None = None, *, node: str = "127.0.0.1", **settings: Any
) -> AsyncIterator[Agents]:
    """Agents whose program is FOLDER/agent.py, or what the prompt's answer says, run by name."""
    (folder / "asking.py").write_text(ASKING)
    config = AgentConfig(command=(sys.executable, "agent.py"), folder=folder, **({"processes": 1} | settings))
    agents = await Agents.start(config, MODEL, encoder, score, node=lambda: node)
    try:
        yield agents
    finally:
        await agents.close()


def test_a_program_plays_a_rollout(
    engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the task, an address and the usual variables; what it writes is the reward; the same process runs the next one, which finds
    nothing of the first. The door is added to those that it reaches without a proxy."""
    (tmp_path / "agent.py").write_text(
        "from asking import *\n"
        "first = ask(task['prompt'])\n"
        "second = ask(task['prompt'], first, str(task['metadata']['level']))\n"
        "import tempfile\n"
        "names = {**os.environ, 'LEFT': ' '.join(os.listdir(tempfile.gettempdir())), 'MADE': tempfile.mkdtemp()}\n"
        "json.dump(names, open('seen.json', 'w'))\n"
        "reward({'right': float(second == task['answer']), 'style': 0.5})\n"
    )
    for name in ("RAY_AUTH_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "ANTHROPIC_API_KEY", "MY_JUDGE"):
        monkeypatch.setenv(name, f"secret of {name}")
    monkeypatch.setenv("OPENAI_API_KEY", "secret of the user's own")
    monkeypatch.setenv("NO_PROXY", "judge.example")

    async def run() -> list[Trajectory]:
        async with started(encoder, tmp_path, variables=("MY_JUDGE", "NO_PROXY")) as agents:
            found = []
            for second in ("3", "4"):
                found.append(await agents.rollout(PROMPT, None, AT_ONE).play(Script(encoder, "hm", second).begin))
            return found

    right, wrong = engine_loop.run(run())
    assert [one.reward_components for one in (right, wrong)] == [{"right": 1.0, "style": 0.5}, {"right": 0.0, "style": 0.5}]
    assert (right.reward, wrong.reward) == (1.5, 0.5) and right.error is None and right.prompt_id == PROMPT.prompt_id
    whole = [user("1 + 2"), {"role": "assistant", "content": "hm"}, user("4")]
    end = encoder.ends.of_turn
    assert right.token_ids.tolist() == [*encoder.encode(whole), *encoder.tokenizer.encode("3", add_special_tokens=False), end]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["MY_JUDGE"] == "secret of MY_JUDGE" and seen["OPENAI_MODEL"] == MODEL and "PATH" in seen
    assert [name for name, value in seen.items() if value.startswith("secret")] == ["MY_JUDGE"]
    assert seen["NO_PROXY"] == seen["no_proxy"] == "judge.example,127.0.0.1"
    assert seen["LEFT"] == "" and Path(seen["MADE"]).parent == Path(seen["TMPDIR"])
    assert not any(Path(seen[name]).exists() for name in ("EVENKEEL_TASK", "TMPDIR")), "its files are gone"


def test_a_program_is_given_the_node_s_address(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> None:
    """If the door listens there; it is reached without a proxy, too."""
    (tmp_path / "agent.py").write_text("from asking import *\nask('1')\njson.dump(dict(os.environ), open('seen.json', 'w'))\nreward(1)\n")

    async def run() -> Trajectory:
        async with started(encoder, tmp_path, bind="node", node="127.0.0.3") as agents:
            return await agents.rollout(PROMPT, None, AT_ONE).play(Script(encoder, "said").begin)

    one = engine_loop.run(run())
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (one.reward, urlsplit(seen["OPENAI_BASE_URL"]).hostname, seen["NO_PROXY"], seen["no_proxy"]) == (1.0, *["127.0.0.3"] * 3)


def test_an_address_that_nobody_could_reach_is_refused() -> None:
    for bind in ("0.0.0.0", "::", "localhost", "", "fe80::1%eth0"):
        with pytest.raises(ValueError, match=f"bind = '{bind}': programs need an address that they can reach"):
            AgentConfig(command=("true",), bind=bind)
    assert AgentConfig(command=("true",), bind="FD00:0::1").bind == "fd00::1", "as clients name it"
    assert [AgentConfig(command=("true",), bind=bind).is_beyond_loopback for bind in ("node", "10.0.0.1", "127.0.0.2", "::1")] == [
        *[True] * 2,
        *[False] * 2,
    ]


@needs_bubblewrap
@pytest.mark.usefixtures("bubblewrap")
def test_a_program_runs_what_the_model_says_in_a_task_folder_s_sandbox(
    engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path
) -> None:
    """It talks to the door; the command can't."""
    (tmp_path / "agent.py").write_text(
        "from asking import *\n"
        "import asyncio\n"
        "from evenkeel.rollout.task_folders.sandbox import opened\n"
        "async def play():\n"
        "    sandbox = await opened(task['metadata'])\n"
        "    door = os.environ['OPENAI_BASE_URL'].split('/')[2].replace(':', '/')\n"
        "    away = await sandbox.run(f'exec 3<>/dev/tcp/{door}')\n"
        "    ran = await sandbox.run(ask(task['prompt']))\n"
        "    ask(task['prompt'], SAID, f'{away.code} {ran.text}')\n"
        "    reward(await sandbox.reward())\n"
        "    await sandbox.close()\n"
        "SAID = 'echo heron | tee answer.txt'\n"
        "asyncio.run(play())\n"
    )
    path = write_folder(tmp_path / "set" / "one")
    prompt = replace(PROMPT, metadata={"folder": str(path), "sandbox": FoldersTask(path=path.parent).sandbox})

    async def run() -> Trajectory:
        async with started(encoder, tmp_path) as agents:
            return await agents.rollout(prompt, None, AT_ONE).play(Script(encoder, "echo heron | tee answer.txt", "Done.").begin)

    one = engine_loop.run(run())
    assert (one.reward, one.turns, one.error) == (1.0, 2, None)
    assert "user\n1 heron\n[exit code 0]<" in encoder.tokenizer.decode(one.token_ids.tolist(), skip_special_tokens=False)


FAILURES = {
    "raise SystemExit('the tool is away')": "ended with exit code 1: the tool is away",
    "os.kill(os.getpid(), 9)": "ended with signal SIGKILL",
    "ask('1', temperature=0.2)": "(the door had refused: temperature = 0.2: the run samples at 1",
    "ask('1'); ask('1', 'other', '2')": "(the door had refused: message 1: its content was 'said', and comes back as 'other'",
    "raise SystemExit(os.environ['OPENAI_API_KEY'])": "ended with exit code 1: KEY",
    "pass": "ended without a turn of the model",
    "ask('1')": "the agent's reward can't be used: it has written none",
    "ask('1'); reward(float('nan'))": "the agent's reward can't be used: reward = nan is not finite",
    "ask('1'); reward(10**400)": "the agent's reward can't be used: reward is too large: a reward is at most 1e+18",
    "ask('1'); reward(os.environ['OPENAI_API_KEY'] + 'x' * 60_000)": "the agent's reward can't be used: reward = 'KEYxxx",
    "ask('1'); reward('x' * 100_000)": "the agent's reward can't be used: it has more than 65536 bytes",
    "ask('1'); os.mkfifo(os.environ['EVENKEEL_REWARD'])": "the agent's reward can't be used: it is no regular file",
    "x = bytearray(3 << 30)": "MemoryError",
}
"""Programs, and what is said of their rollouts."""


def test_a_program_that_fails_costs_its_own_rollout(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> None:
    """One that writes megabytes to its outputs has done no wrong; nor has one whose conversation was cut, which ends badly then."""
    (tmp_path / "agent.py").write_text("from asking import *\nexec(task['prompt'])\n")
    fine = {
        "print('x' * 50_000_000); sys.stderr.write('y' * 5_000_000); ask('1'); reward(1)": FinishReason.STOP,
        "said = ask('1'); reward(1); ask('1', said, '2')": FinishReason.LENGTH,
    }

    async def run() -> list[Trajectory]:
        async with started(encoder, tmp_path, processes=3, max_turns=1, memory_gib=2.0) as agents:
            prompts = [replace(PROMPT, text=program) for program in (*FAILURES, *fine)]
            playing = [agents.rollout(prompt, None, AT_ONE).play(Script(encoder, "said").begin) for prompt in prompts]
            return list(await asyncio.gather(*playing))

    found = engine_loop.run(run())
    for (program, sentence), one in zip(FAILURES.items(), found, strict=False):
        assert one.error is not None and sentence in one.error and "\n" not in one.error, (program, one.error)
        assert len(one.error) < 1000
        assert (one.reward, one.failure) == (None, FailureKind.REWARD)
    for one, finish in zip(found[len(FAILURES) :], fine.values(), strict=True):
        assert (one.error, one.reward, one.finish_reason) == (None, 1.0, finish)


def test_a_task_that_can_t_be_written_down_costs_its_own_rollout(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> None:
    """Keys that JSON doesn't have, no room for temporary files. The next rollout is played."""
    (tmp_path / "agent.py").write_text("from asking import *\nask('1'); reward(1)\n")

    async def run() -> list[Trajectory]:
        async with started(encoder, tmp_path) as agents:

            async def played(prompt: Prompt) -> Trajectory:
                return await agents.rollout(prompt, None, AT_ONE).play(Script(encoder, "said").begin)

            found = [await played(replace(PROMPT, metadata={(1, 2): 3}))]  # type: ignore[dict-item]
            with pytest.MonkeyPatch.context() as without:
                without.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
                found.append(await played(PROMPT))
            return [*found, await played(PROMPT)]

    keys, room, fine = engine_loop.run(run())
    assert str(keys.error).startswith("the agent's program can't be given its task (keys must be str, int, ")
    assert str(room.error).startswith("the agent's program can't be given its task ([Errno 2] No such file or directory: ")
    assert [one.failure for one in (keys, room)] == [FailureKind.REWARD] * 2 and fine.reward == 1.0


def test_a_program_that_hangs_is_ended(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> None:
    """At its deadline, wherever it is; the next one runs."""
    (tmp_path / "agent.py").write_text("from asking import *\nask('1')\nif task['prompt'] == 'hang': time.sleep(600)\nreward(1)\n")

    async def run() -> tuple[Trajectory, Trajectory]:
        async with started(encoder, tmp_path, deadline_s=5.0) as agents:
            late = await agents.rollout(replace(PROMPT, text="hang"), None, AT_ONE).play(Script(encoder, "said").begin)
            return late, await agents.rollout(PROMPT, None, AT_ONE).play(Script(encoder, "said").begin)

    late, fine = engine_loop.run(run())
    assert late.failure is FailureKind.REWARD_TIMEOUT and late.error is not None
    assert late.error.startswith("the agent took more than 5 s for a rollout (rollout.agent.deadline_s)")
    assert fine.reward == 1.0


def test_time_without_an_engine_is_not_the_program_s(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> None:
    """A rollout would fail by its deadline because an engine was lost."""
    (tmp_path / "agent.py").write_text("from asking import *\nask('1')\ntime.sleep(2)\nreward(1)\n")

    async def run() -> Trajectory:
        async with started(encoder, tmp_path, deadline_s=1.0) as agents:
            return await agents.rollout(PROMPT, None, AT_ONE, time.monotonic).play(Script(encoder, "said").begin)

    assert engine_loop.run(run()).reward == 1.0


def test_what_a_program_starts_ends_with_it(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> None:
    """A daemon in a session of its own, which keeps the outputs open."""
    (tmp_path / "agent.py").write_text(
        "from asking import *\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    open('new', 'w').write(str(os.getpid()))\n"
        "    os.rename('new', 'daemon')\n"
        "    time.sleep(600)\n"
        "while not os.path.exists('daemon'): time.sleep(0.01)\n"
        "ask('1'); reward(1)\n"
    )

    async def run() -> tuple[Trajectory, bool]:
        async with started(encoder, tmp_path) as agents:
            one = await agents.rollout(PROMPT, None, AT_ONE).play(Script(encoder, "said").begin)
            return one, is_running(int((tmp_path / "daemon").read_text()))

    one, is_there = engine_loop.run(run())
    assert one.reward == 1.0 and not is_there


def test_a_worker_that_leaves_keeps_what_there_is(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> None:
    """The program waits for a tool of its own. It is ended at once; another one goes on from its turn. A rollout that waits for a process
    isn't begun."""
    (tmp_path / "agent.py").write_text(
        "from asking import *\n"
        "said = ask('1')\n"
        "open('new', 'w').write(str(os.getpid()))\n"
        "os.rename('new', 'waiting')\n"
        "while not os.path.exists('go_on'): time.sleep(0.01)\n"
        "reward(float(ask('1', said, '2') == 'second'))\n"
    )

    async def run() -> tuple[Trajectory, Trajectory]:
        async with started(encoder, tmp_path) as agents:
            left = agents.rollout(PROMPT, None, AT_ONE)
            playing = asyncio.ensure_future(left.play(Script(encoder, "first").begin))
            while not (tmp_path / "waiting").exists():
                await asyncio.sleep(0.01)
            waiting = agents.rollout(PROMPT, None, AT_ONE)
            queued = asyncio.ensure_future(waiting.play(Script(encoder).begin))
            await asyncio.sleep(0.05)
            waiting.stop()
            left.stop()
            handed = await playing
            assert is_begun(await queued)
            process = int((tmp_path / "waiting").read_text())
            assert await asyncio.to_thread(wait_until, lambda: not is_running(process))
            (tmp_path / "go_on").touch()
            return handed, await agents.rollout(PROMPT, handed, AT_ONE).play(Script(encoder, "second").begin)

    handed, whole = engine_loop.run(run())
    assert (encoder.text_of(handed.response_ids), handed.reward, handed.error) == ("first", None, None) and not is_begun(handed)
    assert whole.reward == 1.0 and whole.turns == 2
    assert whole.token_ids[: len(handed.token_ids)] == handed.token_ids


def test_a_worker_that_leaves_waits_for_no_program_s_start(
    engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process is started by its first rollout, and comes to nothing: each Python here waits first of all."""
    monkeypatch.syspath_prepend(str(tmp_path))
    starts = "import os, time\nopen({0!r} + '/starting', 'w').close()\nwhile not os.path.exists({0!r} + '/go_on'): time.sleep(0.01)\n"
    (tmp_path / "agent.py").write_text("import time\ntime.sleep(60)\n")

    async def run() -> Trajectory:
        async with started(encoder, tmp_path, processes=2, start_deadline_s=20.0) as agents:
            (tmp_path / "sitecustomize.py").write_text(starts.format(str(tmp_path)))
            left = [agents.rollout(PROMPT, None, AT_ONE) for _ in range(2)]
            playing = [asyncio.ensure_future(one.play(Script(encoder).begin)) for one in left]
            while not (tmp_path / "starting").exists():
                await asyncio.sleep(0.01)
            for one in left:
                one.stop()
            try:
                return (await asyncio.gather(*playing))[1]
            finally:
                (tmp_path / "go_on").touch()

    assert is_unfinished(engine_loop.run(run())), "nothing, and no error of the program's: another worker goes on"


def test_an_engine_that_is_lost_is_no_fault_of_the_program(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("from asking import *\nask('1')\n")

    async def lost(begun: Trajectory, line: int) -> Session:
        raise EngineError("the engine is gone")

    async def run() -> None:
        async with started(encoder, tmp_path) as agents:
            with pytest.raises(EngineError, match="the engine is gone"):
                await agents.rollout(PROMPT, None, AT_ONE).play(lost)

    engine_loop.run(run())


def test_a_reward_function_scores_what_a_program_has_played(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> None:
    """All that follows the prompt is its text; the program is given no file to write to."""
    (tmp_path / "agent.py").write_text("from asking import *\nask('1', ask('1'), '2')\nassert 'EVENKEEL_REWARD' not in os.environ\n")

    async def score(one: Trajectory, prompt: Prompt) -> Trajectory:
        return replace(one, reward=float(len(prompt.answer)), reward_components={one.text: 1.0})

    async def run() -> Trajectory:
        async with started(encoder, tmp_path, score) as agents:
            return await agents.rollout(PROMPT, None, AT_ONE).play(Script(encoder, "ab", "cd").begin)

    one = engine_loop.run(run())
    assert one.reward == 1.0 and list(one.reward_components) == [one.text]
    assert one.text == encoder.text_of(one.answer_ids) and one.text.startswith("ab<|im_end|>") and one.text.endswith("cd")


def test_the_program_of_the_page(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> None:
    """docs/agents.md's, with OpenAI's own client, and its settings: the model calls the tool twice at once, and answers."""
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text().split("## A program")[1].split("\n## ")[0]
    code, settings = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.DOTALL)
    rollout = RolloutConfig.model_validate(yaml.safe_load(settings)["rollout"])
    assert rollout.agent is not None and rollout.reward.kind == "agent"
    (tmp_path / rollout.agent.command[-1]).write_text(code)
    calls = [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": {"a": 10, "b": 20}}]
    called = "\n".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in calls)
    script = Script(encoder, called, "3")

    async def run() -> Trajectory:
        config = rollout.agent.model_copy(update={"folder": tmp_path, "processes": 1})  # type: ignore[union-attr]
        agents = await Agents.start(config, MODEL, encoder, None)
        try:
            return await agents.rollout(PROMPT, None, AT_ONE).play(script.begin)
        finally:
            await agents.close()

    one = engine_loop.run(run())
    assert (one.error, one.reward, one.turns) == (None, 1.0, 2)
    results = [{"role": "tool", "content": text} for text in ("3", "30")]
    assert script.read[1] == list(encoder.encode([user(PROMPT.text), {"role": "assistant", "content": called}, *results]))


def test_a_program_that_isnt_there_is_said_at_the_start(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> None:
    async def run(**settings: Any) -> None:
        config = AgentConfig(**{"command": (sys.executable,), "folder": tmp_path} | settings)
        await Agents.start(config, MODEL, encoder, None)

    for settings, sentence in (
        ({"command": ("agnet",)}, "rollout.agent.command = ['agnet']: no program agnet in PATH or "),
        ({"folder": tmp_path / "x"}, "as the folder "),
        ({"tool_parser": "qwen26"}, "rollout.agent.tool_parser = qwen26: SGLang has no such parser"),
        ({"bind": "192.0.2.1"}, "rollout.agent.bind = 192.0.2.1: the door can't listen on 192.0.2.1 ("),
    ):
        with pytest.raises(ConfigError) as error:
            engine_loop.run(run(**settings))
        assert sentence in str(error.value)
