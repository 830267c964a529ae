"""Seven and more causes planted in real runs are each named rightly, and ten runs that learn are left in peace.

A planted run samples and scores with real engine and reward processes until it has been told why, or 10 steps' worth of groups long: the
weights have no part in any of the causes. The runs that learn are whole ones, with the learner.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from evenkeel.actors.carriers import StoredGroup
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.no_learning import CAUSES, LearningWatch
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.sampler import Player, Sampler
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tasks.tasks import Task, build_task
from evenkeel.rollout.trajectory import Group, Prompt
from lab.kept_engines import KeptEngines, recipe

pytestmark = [pytest.mark.engine, pytest.mark.slow]
STEPS = 10
REWARDS = """
    def constant(completion): return 1.0
    def zero(completion): return 0.0
    def nine(completion, answer): return 0.9 * (completion.strip() == answer)
    def fails(completion, answer):
        if completion.strip() != answer: raise ValueError("not the answer")
        return 1.0
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptEngines]:
    model = tmp_path_factory.mktemp("kept") / "model"
    with KeptEngines.start(recipe(model, "dynamic_sampling=false")) as kept:
        yield kept


def function(name: str) -> str:
    return f"rollout.reward={{kind: function, path: 'planted_rewards:{name}', processes: 1}}"


EXACT = "{kind: exact_match, processes: 1%s}"
AFTER_HASHES = EXACT % ", extraction: {kind: after, marker: '####'}"
PLANTED = [
    ("unscored", [function("fails")], "not the answer"),
    ("extraction", [f"rollout.reward={AFTER_HASHES}"], "the reward saw ''"),
    ("cut", ["rollout.sampling.max_tokens=1"], "max_tokens = 1"),
    ("all_right", ["rollout.sampling.temperature=0.001"], "evenkeel filter"),
    ("constant", [function("constant")], "reward 1"),
    ("blind", [function("zero")], "reward 0"),
    ("never_right", [f"rollout.reward={EXACT % ''}"], "rollout.task.prompt_template"),
    ("one_answer", ["rollout.sampling.temperature=0.001"], "temperature = 0.001"),
    ("below", [function("nine")], "set evaluation.correct_at: 0.9"),
]


@pytest.mark.parametrize(("cause", "overrides", "said"), PLANTED, ids=[one[0] for one in PLANTED])
def test_a_planted_cause_is_named(
    kept: KeptEngines, cause: str, overrides: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_rewards.py").write_text("\n".join(line.removeprefix("    ") for line in REWARDS.splitlines()))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = recipe(kept.config.model, "dynamic_sampling=false", *overrides)
    if cause in ("all_right", "never_right"):
        prompts = [_task(config).train_prompt(place) for place in range(32)]
        answers = kept.loop.run(_greedy_answers(kept, config, prompts)) if cause == "all_right" else ["another's"] * len(prompts)
        lines = [{"prompt": prompt.text, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = f"rollout.task={{kind: file, path: {path}, held_out_size: 1}}", f"rollout.reward={EXACT % ''}"
        config = recipe(kept.config.model, "dynamic_sampling=false", *overrides, *words)
    (told,) = kept.loop.run(_told(kept, config))
    beginning = next(one for one in CAUSES if one.name == cause).sentence.partition("{")[0]
    assert told.startswith(beginning) and said in told and told.count(", answer ") == 2


async def _told(kept: KeptEngines, config: RunConfig) -> list[str]:
    """What a run with this configuration is told while it samples."""
    told: list[str] = []
    watch, task = LearningWatch(config, lambda _, text: told.append(text), told.append), _task(config)
    async with _sampler(kept, config) as sampler:
        for step in range(STEPS):
            places = range(step * config.groups_per_step, (step + 1) * config.groups_per_step)
            for group in await asyncio.gather(*(sampler.group(task.train_prompt(p), group_id=p, admitted_version=0) for p in places)):
                await _finished(watch, group)
            watch.trained()
    return told


async def _finished(watch: LearningWatch, group: Group | Any) -> None:
    watch.finished(StoredGroup(group.facts, group))
    for _ in range(5):  # a look at groups that are here already takes a few turns of the loop
        await asyncio.sleep(0)


@asynccontextmanager
async def _sampler(kept: KeptEngines, config: RunConfig) -> AsyncIterator[Sampler]:
    rewards = RewardPool(config.rollout.reward, config.rollout.task)
    try:
        encoder = ChatEncoder.of_folder(config.model, config.rollout.task)
        yield Sampler(kept.engine, {"": Player(encoder, rewards, config.rollout.sampling)})
    finally:
        await rewards.close()


async def _greedy_answers(kept: KeptEngines, config: RunConfig, prompts: Sequence[Prompt]) -> list[str]:
    async with _sampler(kept, config) as sampler:
        return [one.text for (one,) in await asyncio.gather(*(sampler.answer(prompt, AnswerSampling()) for prompt in prompts))]


def _task(config: RunConfig) -> Task:
    return build_task(config.rollout.task, ChatEncoder.of_folder(config.model, config.rollout.task))


HEALTHY: list[tuple[str, dict[str, Any]]] = [
    ("tis-token", {}), ("grpo", {}), ("dapo", {}), ("gspo", {}), ("mis-full", {}), ("cispo", {}), ("dppo-binary-tv", {}),
    ("tis-token", {"learning_rate": 1e-3}), ("tis-token", {"optimizer_steps_per_batch": 4}), ("grpo", {"max_staleness": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "settings"), HEALTHY, ids=[f"{number}-{preset}" for number, (preset, _) in enumerate(HEALTHY)])
def test_a_run_that_learns_is_left_in_peace(kept: KeptEngines, preset: str, settings: dict[str, Any]) -> None:
    record = kept.run(preset, steps=STEPS, seed=11 + len(settings) + len(preset), **settings)
    told: list[str] = []

    async def watched() -> None:
        watch = LearningWatch(kept.config, lambda _, text: told.append(text), told.append)
        for groups in record.batches:
            for group in groups:
                await _finished(watch, group)
            watch.trained()

    asyncio.run(watched())
    assert told == []
