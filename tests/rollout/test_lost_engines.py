"""An engine that is lost while programs of agents are under way: another one takes its place in the same worker, and they wait; once, until
a group is finished."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from evenkeel.correction.errors import EngineError
from evenkeel.rollout.config import AgentConfig, AgentReward, SamplingConfig
from evenkeel.rollout.door.agents import Agents
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine.temporary_files import passing_folder
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.engine_settings.request_lengths import RequestLengths
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.sampler import Player, Sampler
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import Group, Prompt, Trajectory, VersionSpan
from tests.conftest import BackgroundLoop
from tests.rollout.door_scene import MODEL
from tests.rollout.engine_scene import TOLERANCE, buckets_of
from tests.rollout.hf_reference import hf_model, largest_difference, perturbed, tiny_weights
from tests.rollout.test_session import expected

SAMPLES, TURNS = 4, 4
AGENT = f"""
import json, os
from openai import OpenAI

client, messages = OpenAI(max_retries=0), []
for turn in range({TURNS}):
    messages.append({{"role": "user", "content": f"{{turn}} + 4 ="}})
    asked = dict(model=os.environ["OPENAI_MODEL"], messages=messages, max_tokens=8)
    if os.getpid() % 2:
        said = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **asked))
    else:
        said = client.chat.completions.create(**asked).choices[0].message.content
    messages.append({{"role": "assistant", "content": said}})
json.dump([message["content"] for message in messages[1::2]], open(f"said {{os.getpid()}}", "w"))
json.dump(1.0, open(os.environ["EVENKEEL_REWARD"], "w"))
"""


@pytest.fixture(scope="module")
def encoder(tiny_model: Path) -> ChatEncoder:
    return ChatEncoder(AutoTokenizer.from_pretrained(tiny_model))


class Killed:
    """An engine whose scheduler is killed in the middle of the first third turn that it is asked for."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine, self._has_killed = engine, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Any, *, begun: Any, **how: Any) -> list[Trajectory]:
        scheduler = self._engine.process_ids["scheduler"]
        is_last = begun[0].turns == 3 and not self._has_killed
        self._has_killed |= is_last
        if is_last:
            os.kill(scheduler, signal.SIGSTOP)
        asked = asyncio.ensure_future(self._engine.generate(prompt_ids, begun=begun, **how))
        if is_last:
            await asyncio.sleep(0.1)
            assert self._engine.requests_in_flight
            os.kill(scheduler, signal.SIGKILL)
        return await asked


def played(encoder: ChatEncoder, folder: Path, engine: Any, another: Any) -> Any:
    """Starts agents and a sampler over an engine: (the agents, the sampler)."""

    async def made() -> tuple[Agents, Sampler]:
        config = AgentConfig(command=(sys.executable, "agent.py"), folder=folder, processes=SAMPLES)
        agents = await Agents.start(config, MODEL, encoder, None)
        player = Player(encoder, RewardPool(AgentReward()), SamplingConfig(samples_per_group=SAMPLES, max_tokens=400), agents=agents)
        return agents, Sampler(engine, {"": player}, seed=4, another=another)

    return made()


def tokens_of_turns(one: Trajectory, turns: int) -> list[int]:
    """What was sampled in the first turns."""
    return [token for segment in one.segments if segment.sampled is not None and segment.turn < turns for token in segment.ids]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_program_outlives_its_engine(engine_loop: BackgroundLoop, tiny_model: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    """It is killed in the middle of the first third turn of four programs, whose clients never ask twice. Each of them waits for the engine
    that takes its place, and for that one's first weights, which are newer. What each was told stays, and all logprobs are those of one
    forward of transformers, by the weights of each token; of one program, at least, there are whole turns of before."""
    (tmp_path / "agent.py").write_text(AGENT)
    prompt = Prompt("train/0/0", "", (1,), "")
    newer = perturbed(tiny_weights(tiny_model), seed=1)

    async def run() -> Group:
        config = EngineConfig(device="cpu", max_total_tokens=16_384, max_running_requests=16)
        start = partial(RolloutEngine.start, tiny_model, config)
        killed = await start(name="engine to be killed")
        agents, sampler = await played(encoder, tmp_path, Killed(killed), partial(start, name="its successor", has_weights=False))
        try:
            playing = asyncio.ensure_future(sampler.group(prompt, group_id=1, admitted_version=0))
            while not sampler.lost_of and not playing.done():
                await asyncio.sleep(0.01)
            assert "the scheduler process" in sampler.lost_of
            await sampler.succeeded()
            assert sampler.lost_of and not playing.done(), "it has no weights yet"
            await sampler.engine.update_weights(1, buckets_of(newer, 2))
            group = await playing
            assert sampler.lost_of == "" and sampler.generated_tokens >= sum(len(one.response_ids) for one in group.trajectories)
            return group
        finally:
            await agents.close()
            await sampler.close()

    group = engine_loop.run(run(), timeout_s=800)
    assert isinstance(group, Group)
    told = sorted(json.loads(path.read_text()) for path in tmp_path.glob("said *"))
    assert len(told) == SAMPLES, "each program is the one that began"
    models = {0: hf_model(tiny_model), 1: hf_model(tiny_model, newer)}
    for one in group.trajectories:
        assert (one.reward, one.error, one.turns) == (1.0, None, TURNS)
        assert one.version_spans[-1].version == 1
        assert largest_difference(one.behavior_logprobs, expected(models, one)[0]) < TOLERANCE
    kept = [one for one in group.trajectories if VersionSpan(0, 0, len(tokens_of_turns(one, 2))) in one.version_spans]
    assert kept, "two turns of one program, at least, are those of the engine that was killed"
    texts = [[encoder.text_of(s.ids) for s in one.segments if s.sampled is not None] for one in group.trajectories]
    assert sorted(texts) == told


class Dying:
    """Lost at the first turn that it is asked for."""

    sampled_tokens = requests_in_flight = 0
    name, is_lost, is_dirty, is_leaving = "engine", False, False, False
    lengths = RequestLengths(together=20_000, prompt=20_000)

    async def read(self, *_: Any) -> None: ...

    async def shutdown(self) -> None: ...

    async def generate(self, *_: Any, **__: Any) -> list[Trajectory]:
        self.is_lost = True
        return self.raise_if_lost() or []

    def raise_if_lost(self) -> None:
        raise EngineError("the engine is gone")


def test_what_ends_two_engines_ends_no_third_one(engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path) -> None:
    """It may be this very turn. The group is others' to sample; to them both engines are one that it has cost."""
    (tmp_path / "agent.py").write_text(AGENT)
    engines = [Dying(), Dying(), Dying()]

    async def another() -> Dying:
        return engines.pop()

    async def run() -> None:
        agents, sampler = await played(encoder, tmp_path, engines.pop(), another)
        try:
            with pytest.raises(EngineError, match="the engine is gone"):
                await sampler.group(Prompt("train/0/0", "", (1,), ""), group_id=1, admitted_version=0)
            assert sampler.lost_of == ""
        finally:
            await agents.close()

    engine_loop.run(run())
    assert len(engines) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_successor_has_the_first_one_s_folder_or_does_not_start(
    engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """What it leaves behind is removed with the worker. Once it has its weights it is like any other: an update that fails later is no
    loss of before. One that fails to start, with whatever error, is the last."""
    (tmp_path / "agent.py").write_text(AGENT)
    outside, seen = tempfile.gettempdir(), list[tuple[str, str]]()

    async def another() -> Dying:
        seen.append((tempfile.gettempdir(), os.environ["TMPDIR"]))
        if fails:
            raise KeyError("a port")
        there = Dying()
        there.is_dirty = True
        return there

    async def run() -> Path:
        with passing_folder() as folder:
            agents, sampler = await played(encoder, tmp_path, Dying(), another)
            os.environ["TMPDIR"] = tempfile.tempdir = outside
            try:
                playing = asyncio.ensure_future(sampler.group(Prompt("train/0/0", "", (1,), ""), group_id=1, admitted_version=0))
                while not seen:
                    await asyncio.sleep(0.01)
                await sampler.succeeded()
                if not fails:
                    assert "the engine is gone" in sampler.lost_of
                    sampler.has_its_weights()
                    assert sampler.lost_of == "" and sampler.engine.is_dirty
                    sampler.have_no_successor()
                with pytest.raises(EngineError, match="the engine is gone"):
                    await playing
            finally:
                await agents.close()
            return folder

    folder = engine_loop.run(run())
    assert seen == [(str(folder), str(folder))] and tempfile.gettempdir() == outside
    assert ("nothing takes the place of an engine that was lost" in caplog.text) == ("KeyError" in caplog.text) == fails
