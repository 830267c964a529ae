"""What the rollout's settings refuse, and how they say it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from evenkeel.correction.errors import ConfigError
from evenkeel.rollout.config import OverlongConfig, RewardConfig, RolloutConfig, SamplingConfig, TaskConfig
from evenkeel.rollout.engine_settings.engine_config import EngineConfig

CHAIN_SUM = {"kind": "reasoning_gym", "dataset": "chain_sum"}


@pytest.mark.parametrize(
    ("setting", "neutral"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty: 1.0"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: 0.0"),
        ({"presence_penalty": 0.5}, "presence_penalty: 0.0"),
        ({"min_tokens": 4}, "min_tokens: 0"),
    ],
)
def test_sampling_that_would_bias_the_ratios_is_refused_with_the_remedy(setting: dict[str, float], neutral: str) -> None:
    with pytest.raises(ValidationError, match=f"every importance ratio would be biased. Set {neutral}"):
        SamplingConfig(**setting)  # type: ignore[arg-type]


def test_neutral_sampling_and_any_temperature_pass() -> None:
    assert SamplingConfig(top_p=1.0, repetition_penalty=1.0, temperature=0.7).temperature == 0.7  # type: ignore[call-arg]
    assert not SamplingConfig(top_p=1, min_p=0).is_partial and SamplingConfig(top_k=2).is_partial


@pytest.mark.parametrize("top_k", [-1, 0, 1])
def test_other_words_for_the_whole_vocabulary_and_greedy_answers_are_refused(top_k: int) -> None:
    with pytest.raises(ValidationError, match=rf"top_k = {top_k}: .*leave it out"):
        SamplingConfig(top_k=top_k)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": {"kind": "reasoning_gym"}, "task": {"kind": "file", "path": "a.jsonl"}}, "scores only the questions that it made"),
        ({"task": CHAIN_SUM | {"prompt_template": "solve it"}}, "lacks {question}"),
        ({"task": CHAIN_SUM | {"options": {"seed": 3}}}, "rollout.task.seed"),
        ({"task": CHAIN_SUM | {"dataste": 1}}, "dataste"),
        ({"reward": {"kind": "function", "path": "no_colon"}}, "path"),
        ({"sampling": {"samples_per_group": 1}}, "greater than or equal to 2"),
        ({"sampling": {"max_tokens": 62}, "engine": {"context_length": 64}}, "leaves no room for a prompt in the engine's context of 64"),
        ({"sampling": {"max_tokens": 1}, "engine": {"context_length": 7}}, "leaves no room for a prompt"),
        ({"sampling": {"max_tokens": 62}, "engine": {"max_total_tokens": 64, "context_length": 80}}, "in the KV cache of 64 tokens"),
        ({"sampling": {"max_tokens": 8}, "overlong": {"kind": "penalise", "ramp_tokens": 9}}, "even an empty answer"),
        ({"overlong": {"kind": "drop"}}, "'train', 'mask', 'penalise'"),
        ({"min_workers": 4, "max_workers": 2}, "min_workers = 4 is more than max_workers = 2: lower the one or raise the other"),
        ({"max_workers": 2}, "max_workers = 2 without min_workers: a pool that follows the load needs both"),
        ({"min_workers": 2}, "min_workers = 2 without max_workers"),
        ({"workers": 8, "min_workers": 1, "max_workers": 4}, "workers = 8, which the run would begin with, is not between min_workers = 1"),
        ({"slots": 0}, "greater than 0"),
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RolloutConfig.model_validate({"task": CHAIN_SUM, "reward": {"kind": "reasoning_gym"}} | changes)
    assert message in str(caught.value)


def test_room_for_a_prompt_is_what_max_tokens_leaves_of_the_context() -> None:
    config = RolloutConfig.model_validate({"task": CHAIN_SUM, "reward": {"kind": "reasoning_gym"}, "sampling": {"max_tokens": 100}})
    assert config.with_context(256).longest_prompt(config.only_entry) == 154, "SGLang keeps two tokens of the context"
    with pytest.raises(ConfigError, match=r"context_length = 300 is more than the model's context of 256 tokens"):
        config.model_copy(update={"engine": EngineConfig(context_length=300)}).with_context(256)
    with pytest.raises(ConfigError, match="no room"):
        _ = config.with_context(102).longest_prompt(config.only_entry)
    assert config.with_context(103).longest_prompt(config.only_entry) == 1
    limited = config.with_entries(lambda entry: entry.model_copy(update={"task": entry.task.model_copy(update={"max_prompt_tokens": 40})}))
    assert limited.with_context(256).longest_prompt(limited.only_entry) == 40


def test_every_field_says_what_it_means() -> None:
    """`evenkeel config --explain` prints these lines, so none may be missing."""
    unions: tuple[Any, ...] = (TaskConfig, RewardConfig, OverlongConfig)
    schemas = [TypeAdapter(union).json_schema() for union in unions]
    schemas.append(RolloutConfig.model_json_schema())
    silent = [
        f"{name}.{field}"
        for schema in schemas
        for name, model in schema["$defs"].items()
        for field, described in model.get("properties", {}).items()
        if "description" not in described
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("changes", "first", "fewest", "most"),
    [
        ({}, 1, 1, 1),
        ({"workers": 3}, 3, 3, 3),
        ({"min_workers": 2, "max_workers": 5}, 2, 2, 5),
        ({"workers": 3, "min_workers": 2, "max_workers": 5}, 3, 2, 5),
    ],
)
def test_sizes_of_the_pool(changes: dict[str, int], first: int, fewest: int, most: int) -> None:
    config = RolloutConfig.model_validate({"task": CHAIN_SUM, "reward": {"kind": "reasoning_gym"}} | changes)
    assert (config.workers, config.fewest_workers, config.most_workers) == (first, fewest, most)
    assert config.is_elastic == ("max_workers" in changes)
    assert RolloutConfig.model_validate(config.model_dump()) == config, "as a resume reads it from config.yaml"


def test_a_top_k_of_the_whole_vocabulary_leaves_nothing_out() -> None:
    """SGLang gives up an answer of which it is to report kept sets, and there are none."""
    settings = SamplingConfig(samples_per_group=2, max_tokens=8, top_k=64)
    assert settings.of(65) is settings and settings.is_partial
    assert not settings.of(64).is_partial and settings.of(64).max_tokens == 8


EXACT = {"kind": "exact_match"}
SUMS = {"name": "sums", "task": CHAIN_SUM, "reward": EXACT}
WORDS = {"name": "words", "task": {"kind": "reasoning_gym", "dataset": "spell_backward"}, "reward": {"kind": "reasoning_gym"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": [SUMS, WORDS], "task": CHAIN_SUM}, "rollout.tasks and rollout.task: each of several tasks has its own"),
        ({"tasks": [SUMS, SUMS]}, "two of them have the name sums"),
        ({"tasks": [SUMS | {"weight": {0: 1, 9: 0}}, WORDS | {"weight": {0: 0, 5: 0}}]}, "from step 9 on no task has a weight above 0"),
        ({"tasks": [SUMS | {"weight": {3: 1}}]}, "none is given for the first steps"),
        ({"tasks": [SUMS | {"name": "a/b"}]}, "String should match pattern"),
        (
            {"tasks": [SUMS | {"sampling": {"temperature": 0.5}}]},
            "sampling.temperature = 0.5: the tokens of a batch are corrected under one",
        ),
        ({"tasks": [SUMS | {"sampling": {"max_tokens": 300}}]}, "is more than rollout.sampling.max_tokens = 256"),
        ({"tasks": [SUMS | {"reward": {"kind": "environment"}}]}, "without rollout.environment"),
        ({"tasks": [], "task": CHAIN_SUM, "reward": EXACT, "solve_rate_floor": 0.1}, "there is nothing to choose from"),
        ({"tasks": [], "task": None, "reward": None}, "nothing would be asked"),
    ],
)
def test_tasks_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RolloutConfig.model_validate(changes)
    assert message in str(caught.value)


def test_one_task_is_a_list_of_one() -> None:
    """What is asked of the tasks is asked alike, and a change of each comes back to where it was written."""
    one = RolloutConfig.model_validate({"task": CHAIN_SUM, "reward": EXACT})
    several = RolloutConfig.model_validate({"tasks": [SUMS, WORDS | {"weight": {0: 1, 5: 3}, "sampling": {"max_tokens": 9}}]})
    assert [entry.name for entry in one.entries] == [""] and [entry.name for entry in several.entries] == ["sums", "words"]
    assert [several.sampling_of(name).max_tokens for name in ("sums", "words")] == [256, 9]
    assert [several.entries[1].weight_at(step) for step in (0, 4, 5, 99)] == [1, 1, 3, 3]
    assert several == RolloutConfig.model_validate(several.model_dump(mode="json")), "config.yaml is read again"
    for config in (one, several):
        seeded = config.with_entries(lambda entry: entry.model_copy(update={"task": entry.task.model_copy(update={"seed": 7})}))
        assert {entry.task.seed for entry in seeded.entries} == {7} and seeded.with_entries(lambda entry: entry) == seeded
    with pytest.raises(ConfigError, match="has 2 tasks, and this takes one"):
        _ = several.only_entry
