"""Groups played in an environment on the real engine: every token of every turn has the logprob of the weights that sampled it, also
where weights change while environments wait, an engine fails, or a worker leaves. Then the engine stands for the next one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from evenkeel.correction.errors import EngineError
from evenkeel.rollout.config import AnswerSampling, EnvironmentConfig, EnvironmentReward, SamplingConfig
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.environments.environments import EnvironmentPool
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.sampler import Player, Sampler
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import FinishReason, Group, Prompt, Trajectory, UnfinishedGroup, ids_of
from tests.conftest import BackgroundLoop
from tests.rollout.engine_scene import TOLERANCE, buckets_of
from tests.rollout.hf_reference import hf_model, largest_difference, perturbed, tiny_weights
from tests.rollout.test_session import expected

pytestmark = pytest.mark.engine
ROUNDS = """
import asyncio
from pathlib import Path

class Rounds:
    async def reset(self, task):
        return task["prompt"]

    async def step(self, turn):
        folder = Path(__file__).parent
        (folder / f"turn {turn.number}").touch()
        if (folder / "gate").exists():
            (folder / f"waits {id(self)}").touch()
        while (folder / "gate").exists():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        return f"{turn.number} + {len(turn.token_ids)} = ", float(len(turn.token_ids)), turn.number == 3
"""
PROMPT = Prompt("train/0/0", "3 + 4 = ", (1,), "7")
SAMPLES = 6
SETTINGS = SamplingConfig(samples_per_group=SAMPLES, max_tokens=600)


@pytest.fixture
def encoder(tiny_model: Path) -> ChatEncoder:
    """Half of the tokens that are no characters end a turn: a model of random weights has short turns then, and no text has them."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    broken = [token for token in range(len(tokenizer)) if "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token])]
    return ChatEncoder(tokenizer, configured={"generation_config.json": broken[::2]})


@pytest.fixture
def start(
    engine: RolloutEngine, engine_loop: BackgroundLoop, encoder: ChatEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Sampler]]:
    """Samplers of the one engine, each with environments of its own."""
    (tmp_path / "rounds.py").write_text(ROUNDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    pools = []

    def sampler() -> Sampler:
        pools.append(EnvironmentPool(EnvironmentConfig(path="rounds:Rounds", processes=1)))
        player = Player(encoder, RewardPool(EnvironmentReward()), SETTINGS, environments=pools[-1])
        return Sampler(engine, {"": player}, seed=4, places=4)

    yield sampler
    engine.is_leaving = False
    for pool in pools:
        engine_loop.run(pool.close())


def check(rollouts: tuple[Trajectory, ...], models: dict[int, Any], encoder: ChatEncoder) -> None:
    """Four turns each, whose steps' rewards are their lengths; what was read is the template's text of the whole conversation."""
    assert len(rollouts) == SAMPLES
    for one in rollouts:
        assert (one.turns, one.finish_reason, one.error) == (4, FinishReason.STOP, None)
        assert one.reward == len(one.response_ids) and one.tool_s >= 0.8
        assert largest_difference(one.behavior_logprobs, expected(models, one)[0]) < TOLERANCE
        turns = [segment.ids for segment in one.segments if segment.sampled is not None]
        for turn, reading in zip(turns, one.later, strict=False):
            read = f"\n<|im_start|>user\n{one.later.index(reading)} + {len(turn)} = <|im_end|>\n<|im_start|>assistant\n"
            assert encoder.tokenizer.decode(list(reading.ids), skip_special_tokens=False).endswith(read)


def test_a_group_s_weights_change_while_its_environments_wait(
    start: Callable[[], Sampler], engine: RolloutEngine, engine_loop: BackgroundLoop, encoder: ChatEncoder, tiny_model: Path, tmp_path: Path
) -> None:
    """All after their first turn; while they wait the engine has nothing to do."""
    begun, new, gate = engine.version, perturbed(tiny_weights(tiny_model), seed=1), tmp_path / "gate"
    between: list[tuple[float, float]] = []
    gate.touch()

    async def run() -> tuple[Group | UnfinishedGroup, tuple[Trajectory, ...]]:
        sampler = start()
        told = partial(sampler.group, between=lambda begin, end: between.append((begin, end)))
        playing = asyncio.ensure_future(told(PROMPT, group_id=1, admitted_version=begun, topk=2))
        while len(list(tmp_path.glob("waits *"))) < SAMPLES:
            await asyncio.sleep(0.01)
        assert engine.requests_in_flight == 0
        await engine.update_weights(begun + 1, buckets_of(new, 2))
        gate.unlink()
        return await playing, await sampler.answer(PROMPT, AnswerSampling())

    group, greedy = engine_loop.run(run())
    assert isinstance(group, Group)
    models = {begun: hf_model(tiny_model), begun + 1: hf_model(tiny_model, new)}
    check(group.trajectories, models, encoder)
    assert len(between) == 3 * SAMPLES, "what lies between four turns; the evaluation has asked for none"
    assert all([span.version for span in one.version_spans] == [begun, begun + 1] for one in group.trajectories)
    assert all(one.version_spans[0].end == one.later[0].after for one in group.trajectories)
    (one,) = greedy
    assert one.turns == 4 and one.is_valid and one.text.count("<|im_start|>user") == 3


@pytest.mark.parametrize("how", ["leaves", "fails", "dies with its worker"])
def test_rollouts_under_way_go_on_with_another_engine(
    how: str,
    start: Callable[[], Sampler],
    engine: RolloutEngine,
    engine_loop: BackgroundLoop,
    encoder: ChatEncoder,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was sampled and read by then is kept to the token. An engine that fails again at once has added nothing: its error is raised, as
    it is to an evaluation, which hands nothing back."""

    async def run() -> tuple[Group | UnfinishedGroup, Group | UnfinishedGroup]:
        first, second = start(), start()
        playing = asyncio.ensure_future(first.group(PROMPT, group_id=1, admitted_version=0))
        assert first.so_far([1]) == {}
        while not (tmp_path / "turn 1").exists():
            await first.turned()
        with monkeypatch.context() as patch:
            if how == "leaves":
                await first.hand_back()
            elif how == "dies with its worker":
                there = first.so_far([1, 2])
                assert set(there) == {1}
                playing.cancel()
                await asyncio.wait({playing})
                assert first.so_far([1]) == {}
                return there[1], await second.group(PROMPT, group_id=1, admitted_version=0, begun=there[1])
            else:
                asked = asyncio.ensure_future(first.answer(PROMPT, AnswerSampling()))
                await first.turned()

                async def fail(*_: Any, **__: Any) -> None:
                    raise EngineError("its scheduler died")

                patch.setattr(RolloutEngine, "generate", fail)  # set on the instance, it would stay there
            left = await playing
            engine.is_leaving = False
            assert isinstance(left, UnfinishedGroup)
            assert str(left.failed) == ("its scheduler died" if how == "fails" else "None")
            if how == "fails":
                with pytest.raises(EngineError, match="its scheduler died"):
                    await asked
                with pytest.raises(EngineError, match="its scheduler died"):
                    await first.group(PROMPT, group_id=1, admitted_version=0, begun=left)
        return left, await second.group(PROMPT, group_id=1, admitted_version=0, begun=left)

    left, group = engine_loop.run(run())
    assert isinstance(left, UnfinishedGroup) and isinstance(group, Group)
    assert left.lost_tokens == group.lost_tokens == 0
    assert left.tokens > 0 and any(1 < one.turns < 4 for one in left.answers)
    for before, one in zip(left.answers, group.trajectories, strict=True):
        assert one.token_ids[: len(before.token_ids)] == before.token_ids or not before.response_ids
    check(group.trajectories, {engine.version: hf_model(tiny_model)}, encoder)


def test_tokens_of_rollouts_that_are_begun_again_are_counted_as_lost(
    start: Callable[[], Sampler], engine_loop: BackgroundLoop, tmp_path: Path
) -> None:
    """The environments answer otherwise than what there was of the rollouts says."""

    async def run() -> tuple[UnfinishedGroup, Group | UnfinishedGroup]:
        first, second = start(), start()
        playing = asyncio.ensure_future(first.group(PROMPT, group_id=1, admitted_version=0))
        while not (tmp_path / "turn 1").exists():
            await first.turned()
        there = first.so_far([1])[1]
        playing.cancel()
        await asyncio.wait({playing})
        others = (tuple(replace(reading, ids=reading.ids + ids_of([5])) for reading in one.later) for one in there.answers)
        begun = replace(there, answers=tuple(replace(one, later=later) for one, later in zip(there.answers, others, strict=True)))
        return begun, await second.group(PROMPT, group_id=1, admitted_version=0, begun=begun)

    begun, group = engine_loop.run(run())
    assert isinstance(group, Group)
    assert group.lost_tokens == sum(one.response_tokens for one in begun.answers if one.later) > 0


@pytest.mark.slow
def test_an_engine_that_is_killed_in_the_middle_of_many_sessions_loses_none(
    start: Callable[[], Sampler], engine: RolloutEngine, engine_loop: BackgroundLoop, encoder: ChatEncoder, tiny_model: Path, tmp_path: Path
) -> None:
    """54 sessions, some of them in their third turn: each ends on the other engine, from all the turns that were whole by then."""
    prompts = [Prompt(f"train/0/{i}", f"{i} + 4 = ", (1,), "7") for i in range(9)]

    async def run() -> tuple[list[UnfinishedGroup | None], list[Group]]:
        config = EngineConfig(device="cpu", max_total_tokens=32_768, max_running_requests=64)
        killed = await RolloutEngine.start(tiny_model, config, name="engine to be killed", version=engine.version)
        first, second = start(), start()
        first.engine = killed
        try:
            playing = [asyncio.ensure_future(first.group(p, group_id=i, admitted_version=0)) for i, p in enumerate(prompts)]
            while not (tmp_path / "turn 2").exists():
                await asyncio.sleep(0.01)
            os.kill(killed.process_ids["scheduler"], signal.SIGKILL)
            left = await asyncio.gather(*playing, return_exceptions=True)
        finally:
            await killed.shutdown()
        assert all(isinstance(one, UnfinishedGroup | EngineError) for one in left), left
        handed = [one if isinstance(one, UnfinishedGroup) else None for one in left]
        going_on = (second.group(p, group_id=i, admitted_version=0, begun=handed[i]) for i, p in enumerate(prompts))
        return handed, await asyncio.gather(*going_on)

    handed, groups = engine_loop.run(run())
    begun = {one.group_id: one for one in handed if one is not None}
    assert any(answer.turns == 3 for one in begun.values() for answer in one.answers)
    for group in groups:
        check(group.trajectories, {engine.version: hf_model(tiny_model)}, encoder)
        answers = begun[group.group_id].answers if group.group_id in begun else ()
        for before, one in zip(answers, group.trajectories, strict=False):
            assert not before.response_ids or one.token_ids[: len(before.token_ids)] == before.token_ids
