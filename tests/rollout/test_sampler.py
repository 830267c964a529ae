"""The coordinator: a prompt becomes a scored group, through a real engine and real reward processes."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from evenkeel.actors.config import RunConfig
from evenkeel.evaluation import evaluate_folder
from evenkeel.filter import Bounds, filter_questions
from evenkeel.recipe import load_config
from evenkeel.rollout.config import AnswerSampling, ExactMatchReward, MaskOverlong, RolloutConfig, SamplingConfig
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.packing import is_left_out
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.sampler import Player, Sampler, sample_seed
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import FinishReason, Group, Prompt, Trajectory
from tests.conftest import BackgroundLoop
from tests.tiny_models import SPECIAL_TOKENS

pytestmark = pytest.mark.engine
RECIPE = Path(__file__).parents[2] / "recipes" / "nano_spell_backward.yaml"


GREETER = """
class Greeter:
    async def reset(self, task):
        return task["prompt"]

    async def step(self, turn):
        return "go on", {"said": 0.25, "number": turn.number}, turn.number == 1
"""


def test_each_prompt_is_answered_and_scored_as_its_task_says(
    shared_engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, tmp_path: Path
) -> None:
    """One engine, two tasks: one with short answers that a function scores, and one played in an environment. A prompt's task
    stands in its id, so groups may come in any order."""
    (tmp_path / "greeter.py").write_text(GREETER)
    (tmp_path / "lengths.py").write_text("def score(completion): return float(len(completion) > 0)")
    task = {"kind": "file", "path": "none"}
    config = RolloutConfig.model_validate(
        {
            "tasks": [
                {"name": "short", "task": task, "reward": {"kind": "function", "path": "lengths:score", "folder": tmp_path}}
                | {"sampling": {"max_tokens": 3}},
                {"name": "played", "task": task | {"system_prompt": "Be kind."}, "reward": {"kind": "environment"}}
                | {"environment": {"path": "greeter:Greeter", "folder": tmp_path, "max_turn_tokens": 4}},
            ],
            "sampling": {"samples_per_group": 2, "max_tokens": 60},
        }
    )
    encoders = ChatEncoder.of_entries(tiny_model, config)
    prompts = {name: Prompt(f"{name}/train/0/0", "3 + 4 =", encoders[name].encode("3 + 4 ="), "7") for name in encoders}
    assert len(prompts["played"].token_ids) > len(prompts["short"].token_ids), "it has the system prompt of its task"

    async def sample() -> tuple[Group, ...]:
        players = {}
        for entry in config.entries:
            how = config.sampling_of(entry.name), encoders[entry.name], "model", prompts[entry.name]
            players[entry.name] = await Player.start(entry, *how, lambda: "127.0.0.1")
        sampler = Sampler(shared_engine, players, seed=5)
        try:
            asked = (sampler.group(one, group_id=n, admitted_version=shared_engine.version) for n, one in enumerate(prompts.values()))
            return tuple(await asyncio.gather(*asked))  # type: ignore[arg-type]
        finally:
            for player in players.values():
                await player.close()

    short, played = engine_loop.run(sample())
    assert [(one.response_tokens <= 3, one.turns, one.reward) for one in short.trajectories] == [(True, 1, 1.0)] * 2
    assert [(one.reward, one.reward_components) for one in played.trajectories] == [(0.25, {"said": 0.25, "number": 0.0})] * 2
    assert all(one.response_tokens == 4 and one.turn_rewards == (0.25,) for one in played.trajectories), "a turn of this model is cut"


def test_a_prompt_becomes_a_scored_group(shared_engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path) -> None:
    """The answer to beat is what the engine itself samples with the first seed: exactly the trajectories with that text score 1."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    encoder = ChatEncoder(tokenizer)
    question = [{"role": "user", "content": "3 + 4 ="}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    prompt = Prompt("train/0/0", "3 + 4 =", tuple(tokenizer(text)["input_ids"]), "")
    settings = SamplingConfig(samples_per_group=3, max_tokens=20)

    async def sample() -> tuple[Group, Trajectory, int, list[Trajectory], Trajectory]:
        rewards = RewardPool(ExactMatchReward(processes=1))
        sampler = Sampler(shared_engine, {"": Player(encoder, rewards, settings)}, seed=5)
        before = sampler.generated_tokens
        try:
            (first,) = await shared_engine.generate(prompt.token_ids, max_tokens=20, seeds=[sample_seed(5, prompt.prompt_id, 0)])
            expected = encoder.text_of(first.response_ids)
            group = await sampler.group(replace(prompt, answer=expected), group_id=7, admitted_version=shared_engine.version, topk=2)
            asked = await asyncio.gather(*(sampler.answer(prompt, AnswerSampling()) for _ in range(2)))
            greedy = [answer for (answer,) in asked]
            assert greedy[0].response_ids == greedy[1].response_ids
            sampled = await sampler.answer(prompt, AnswerSampling(samples=3, temperature=1.0))
            assert [one.response_ids for one in sampled] == [one.response_ids for one in group.trajectories], "the same seeds, the same way"
            likeliest = await sampler.answer(prompt, AnswerSampling(samples=2, temperature=1.0, top_p=1e-6))
            assert [one.response_ids for one in likeliest] == [greedy[0].response_ids] * 2, "the likeliest token alone is left"
            asked = [first, *group.trajectories, *greedy, *sampled, *likeliest]
            return group, greedy[0], sampler.generated_tokens - before, asked, first
        finally:
            await rewards.close()

    group, greedy, generated, everything, first = engine_loop.run(sample())
    assert (group.group_id, group.admitted_version, len(group.trajectories)) == (7, shared_engine.version, 3)
    assert group.trajectories[0].response_ids == first.response_ids
    for trajectory in group.trajectories:
        assert (trajectory.prompt_id, tuple(trajectory.prompt_ids)) == ("train/0/0", prompt.token_ids)
        assert {span.version for span in trajectory.version_spans} == {shared_engine.version}
        assert trajectory.text == encoder.text_of(trajectory.response_ids)
        assert trajectory.reward == float(trajectory.text.strip() == group.prompt.answer.strip())
        top = trajectory.top_logprobs
        assert top is not None and len(top.ids) == top.k * len(trajectory.response_ids)
    assert len({tuple(one.response_ids) for one in group.trajectories}) == 3, "each sample has a seed of its own"
    assert greedy.top_logprobs is None and greedy.is_valid
    assert generated == sum(len(one.response_ids) for one in everything)


def test_an_answer_ends_at_what_the_engine_by_itself_doesn_t_know(
    shared_engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path
) -> None:
    """The same greedy answers without and with one of their tokens among the ends: with it they stop there, that token trains and its text
    isn't scored, and they count as finished even if they have max_tokens tokens by then."""
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(tiny_model))
    prompt = Prompt("held_out/0/0", "3 + 4 =", encoder.encode("3 + 4 ="), "x")

    async def answer(using: ChatEncoder, max_tokens: int) -> Trajectory:
        rewards = RewardPool(ExactMatchReward(processes=1))
        sampler = Sampler(shared_engine, {"": Player(using, rewards, SamplingConfig(samples_per_group=2, max_tokens=max_tokens))})
        try:
            return (await sampler.answer(prompt, AnswerSampling()))[0]
        finally:
            await rewards.close()

    whole = engine_loop.run(answer(encoder, 8))
    first = {token: place for place, token in reversed(list(enumerate(whole.response_ids)))}
    place, end = next((place, token) for token, place in first.items() if place > 1 and token not in encoder.ends.ids)
    knowing = ChatEncoder(encoder.tokenizer, configured={"generation_config.json": (end,)})
    for max_tokens in (8, place + 1):
        ended = engine_loop.run(answer(knowing, max_tokens))
        assert ended.response_ids == whole.response_ids[: place + 1] and ended.finish_reason is FinishReason.STOP
        assert ended.text == encoder.tokenizer.decode(list(whole.response_ids[:place]))
        assert not is_left_out(ended, MaskOverlong())
    cut = engine_loop.run(answer(encoder, place + 1))
    assert cut.finish_reason is FinishReason.LENGTH and is_left_out(cut, MaskOverlong())


@pytest.mark.parametrize("user", ["eval", "filter"])
def test_evaluations_and_filters_go_by_the_ends_and_lengths_of_the_model(
    user: str,
    shared_engine: RolloutEngine,
    engine_loop: BackgroundLoop,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a folder whose generation config names one end more, with questions of exactly the length that is left, on the shared engine: it
    is asked to stop at all ends of the model, and takes every question. One token more, and a question is passed over."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7]}')
    encoder, lengths = ChatEncoder(AutoTokenizer.from_pretrained(folder)), EngineConfig(context_length=64).lengths
    longest = lengths.longest_prompt(10) - len(encoder.encode(""))
    rows = [{"prompt": letter * (longest + more), "answer": "x"} for letter in "abcdefgh" for more in (0, 1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"model={folder}", f"rollout.task={{kind: file, path: {tmp_path / 'rows.jsonl'}, held_out_size: 1}}"]
    words += ["rollout.reward={kind: exact_match, processes: 1}", "rollout.sampling.max_tokens=10", "rollout.engine.context_length=64"]
    asked: list[tuple[int, object]] = []

    async def start(*_: object, **__: object) -> RolloutEngine:
        return shared_engine

    async def stays() -> None:
        pass

    async def generate(self: RolloutEngine, prompt_ids: Sequence[int], **how: Any) -> list[Trajectory]:
        asked.append((len(prompt_ids), how["stop_ids"]))
        return await asyncio.wrap_future(engine_loop.start(whole(self, prompt_ids, **how)))

    whole = RolloutEngine.generate
    monkeypatch.setattr(RolloutEngine, "start", start)
    monkeypatch.setattr(RolloutEngine, "generate", generate)
    monkeypatch.setattr(shared_engine, "shutdown", stays)
    said: list[str] = []
    if user == "eval":
        result = evaluate_folder(folder, str(RECIPE), words, problems=1, samples=None, say=said.append)
        assert (len(result.answers), result.failed) == (1, 0)
    else:
        config = load_config(RunConfig, RECIPE, words)
        found = filter_questions(config, tmp_path / "kept.jsonl", Bounds.of(2, 0, None), questions=None, say=said.append)
        assert [one.unscored for one in found] == [0] * 7
    end = SPECIAL_TOKENS.index("<|im_end|>")
    assert set(asked) == {(lengths.longest_prompt(10), (end, 7))} and len(asked) == (1 if user == "eval" else 7)
