"""Deadlines follow from answers and bytes, in an order in which nobody stops waiting before what is waited for may be late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenkeel.actors.cluster.head_watch import _head_hangs_s, _raylet_hangs_s
from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.deadlines import (
    bucket_s,
    bytes_of,
    flush_s,
    group_s,
    new_parts_s,
    newer_weights_s,
    reading_s,
    scoring_s,
    tokens_call_s,
    tokens_s,
    weights_fetch_s,
)
from evenkeel.actors.settings.resolve import with_deadlines


def run_config(**rollout: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": "model",
            "steps": 1,
            "groups_per_step": 64,
            "rollout": {
                "task": {"kind": "reasoning_gym", "dataset": "chain_sum"},
                "reward": {"kind": "reasoning_gym"},
                "engine": {"device": "cpu"},
                **rollout,
            },
        }
    )


SCALES = [(16, 10**6), (256, 10**9), (32_768, 10**9), (256, 60 * 10**9), (32_768, 60 * 10**9)]


@pytest.mark.parametrize(("tokens", "size"), SCALES)
def test_who_waits_for_something_waits_longer_than_it_may_take(tokens: int, size: int) -> None:
    config = with_deadlines(run_config(sampling={"max_tokens": tokens}), size)
    run, engine = config.deadlines, config.rollout.engine.deadlines
    assert engine.heartbeat_s < engine.generate_s, "a dead engine is known before its answers are late"
    assert 2 * engine.heartbeat_s < run.part_heartbeat_s < run.batch_s, "a frozen part is known long before its batch is late"
    assert run.driver_s > max(_head_hangs_s(), _raylet_hangs_s()) + 60, "the watch over Ray, which may block the event loop, comes first"
    assert engine.generate_s < group_s(config.rollout, config.places) < 2 * group_s(config.rollout, config.places) < run.batch_s
    assert group_s(config.rollout, config.places) <= run.evaluation_s
    own_s = engine.update_s + 2 * engine.control_s
    assert weights_fetch_s(config) == pytest.approx(run.sync_s - own_s), "an engine keeps its time"
    assert weights_fetch_s(config) == pytest.approx(60 + size / run.bytes_per_s)
    assert engine.control_s + engine.update_s < run.sync_s < 3 * run.sync_s < run.receipts_s < run.batch_s
    assert 2 * engine.start_s <= run.start_s < run.batch_s, "a batch outlives the start of a worker's replacement"
    assert run.start_s < new_parts_s(run.start_s)
    reward = config.rollout.reward
    assert max(reward.deadline_s, reward.start_deadline_s) < scoring_s(config.rollout) < group_s(config.rollout, config.places)
    assert 2 * run.step_s < flush_s(run.step_s) and 2 * run.step_s + run.receipts_s < newer_weights_s(run.step_s, run.sync_s)
    assert run.disk_s <= reading_s(run.disk_s, 8 * size, run.bytes_per_s)
    assert config.rollout.engine.weight_group_timeout_s < engine.update_s, "a broadcast that is stuck fails before its engine is lost"
    collective_s = config.learner.collective_timeout_s
    assert max(run.step_s, run.checkpoint_s) < collective_s, "the driver's call is late before a rank that waits for a slower one fails"
    assert run.checkpoint_s < run.disk_s
    tokens_ = tokens_s(64 * config.rollout.sampling.samples_per_group * tokens, run.bytes_per_s)
    assert tokens_ < tokens_call_s(tokens_) < run.batch_s, "what is fetched of the object store is late before its batch is"


@pytest.mark.parametrize(("groups", "rate"), [(16_384, 1e8), (64, 1e5)])
def test_a_batch_whose_tokens_take_long_is_waited_for(groups: int, rate: float) -> None:
    """A large one, and a slow network: its groups are finished, and none more is until it is there."""
    config = run_config(sampling={"max_tokens": 1024})
    config = config.model_copy(update={"groups_per_step": groups, "deadlines": type(config.deadlines)(bytes_per_s=rate)})
    run = with_deadlines(config, 10**6).deadlines
    tokens = tokens_s(groups * config.rollout.sampling.samples_per_group * 1024, rate)
    assert run.batch_s == tokens_call_s(tokens) + 30.0 > 3600.0


@pytest.mark.parametrize("size", [10**9, 16 * 10**9, 61 * 10**9])
def test_a_dead_member_costs_the_learner_a_bucket_s_time_not_a_model_s(size: int) -> None:
    """256 MB at 100 MB/s in addition to the 60 s of an engine's own collective, whatever the model; sync_s is 693 s for one of 16 GB."""
    config = with_deadlines(run_config(), size)
    bytes_ = config.weight_sync.bucket_bytes
    assert bucket_s(config) == 60 + bytes_ / 1e8 < 70
    assert config.rollout.engine.weight_group_timeout_s < bucket_s(config) < config.rollout.engine.deadlines.update_s


def test_an_engine_waits_for_the_largest_bucket_of_a_broadcast() -> None:
    """A tensor is sent as a whole: an embedding of 1.24 GB takes 12 s at 100 MB/s, and 124 s at a tenth of that."""
    for rate, seconds in ((1e8, 72.4), (1e7, 184.0)):
        config = run_config()
        config = config.model_copy(update={"deadlines": type(config.deadlines)(bytes_per_s=rate)})
        config = with_deadlines(config, 16 * 10**9, 124 * 10**7)
        assert config.rollout.engine.weight_group_timeout_s == pytest.approx(seconds)
        assert config.rollout.engine.weight_group_timeout_s < bucket_s(config) < config.rollout.engine.deadlines.update_s


def test_long_answers_and_many_bytes_need_no_setting() -> None:
    """32,768 tokens at 5 a second are 6,554 s, three of them one after the other; 60 GB at 100 MB/s are 600 s on their way."""
    config = with_deadlines(run_config(sampling={"max_tokens": 32_768}), 60 * 10**9)
    run, engine = config.deadlines, config.rollout.engine.deadlines
    assert engine.generate_s == pytest.approx(3 * 32_768 / 5)
    assert engine.update_s == 720 and run.sync_s == pytest.approx(60 + 600 + 720 + 2 * 180)
    assert run.checkpoint_s == pytest.approx(8 * 600)
    small = with_deadlines(run_config(), 10**6)
    assert small.rollout.engine.deadlines.generate_s == pytest.approx(3 * 256 / 5) and small.deadlines.checkpoint_s == 600


def test_an_evaluation_during_training_has_time_for_its_share_of_the_places() -> None:
    """512 questions on one engine of 64 places are ten answers of 32,768 tokens in turn, two of them training's last groups; 128 beside
    training's groups thirteen."""
    alone = run_config(sampling={"max_tokens": 32_768})
    beside = alone.model_copy(update={"evaluation": type(alone.evaluation)(every_steps=10)})
    took = [with_deadlines(config, 10**6).deadlines.evaluation_s for config in (alone, beside)]
    assert took[1] - took[0] == pytest.approx((13 - 10) * 32_768 / 5)


def test_an_evaluation_has_time_for_the_questions_of_every_task_and_for_what_plays_each_wave() -> None:
    """512 questions of each of three tasks, on 64 places: 24 waves in place of 8, and training's last two. In each an environment may
    take 900 s, twice if a rollout is repeated."""
    one = {"task": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "reward": {"kind": "reasoning_gym"}}
    other = [one | {"name": name} for name in "bc"]
    environment = {"path": "my_environment:Calculator", "max_turns": 2, "max_tool_s": 900.0, "deadline_s": 0.1, "start_deadline_s": 0.1}
    tool = one | {"reward": {"kind": "environment"}, "environment": environment}

    def took(**tasks: Any) -> float:
        return with_deadlines(run_config(sampling={"max_tokens": 32_768}, **tasks), 10**6).deadlines.evaluation_s

    three = took(task=None, reward=None, tasks=[one | {"name": "a"}, *other])
    assert three - took() == pytest.approx((26 - 10) * 32_768 / 5)
    assert took(task=None, reward=None, tasks=[tool | {"name": "a"}, *other]) > 26 * (32_768 / 5 + 2 * 900)


def test_a_start_that_is_set_is_shared_out_in_order() -> None:
    """An engine has half of it, so that it is given up before whoever waits for its worker; a batch outlives it."""
    config = run_config()
    config = config.model_copy(update={"deadlines": type(config.deadlines)(start_s=90.0)})
    short = with_deadlines(config, 10**10)
    assert (short.deadlines.start_s, short.rollout.engine.deadlines.start_s) == (90.0, 45.0)
    longer = config.model_copy(update={"deadlines": type(config.deadlines)(start_s=9000.0)})
    longer = with_deadlines(longer, 10**10)
    assert longer.rollout.engine.deadlines.start_s == 400.0 and longer.deadlines.batch_s > 9000.0


def test_slower_rates_make_all_that_depends_on_them_longer() -> None:
    """They are what there is to set for slow engines, networks and disks."""
    config = run_config(sampling={"max_tokens": 1024})
    usual = with_deadlines(config, 10**10)
    slow = with_deadlines(config.model_copy(update={"deadlines": type(config.deadlines)(tokens_per_s=0.1, bytes_per_s=1e6)}), 10**10)
    for name in ("start_s", "sync_s", "batch_s", "step_s", "checkpoint_s", "evaluation_s"):
        assert getattr(slow.deadlines, name) > getattr(usual.deadlines, name)
    for name in ("start_s", "generate_s", "update_s", "control_s"):
        assert getattr(slow.rollout.engine.deadlines, name) > getattr(usual.rollout.engine.deadlines, name)
    assert slow.learner.collective_timeout_s > usual.learner.collective_timeout_s


def test_bytes_are_those_of_the_weights(tmp_path: Path) -> None:
    for name, size in (("model-1.safetensors", 70), ("model-2.safetensors", 30), ("tokenizer.json", 1000)):
        (tmp_path / name).write_bytes(bytes(size))
    assert bytes_of(tmp_path) == 100 and bytes_of(tmp_path / "none") == 0


def test_a_group_waits_for_its_turns_and_for_its_environment() -> None:
    """Of eight turns, each may wait for the engine as long as an answer may; and the environment for its time, twice if it is repeated."""
    environment = {"path": "my_environment:Calculator", "max_turns": 8, "max_tool_s": 900.0}
    config = with_deadlines(run_config(reward={"kind": "environment"}, environment=environment), 10**9)
    limit_s = group_s(config.rollout, config.places)
    assert limit_s > 8 * config.rollout.engine.deadlines.generate_s + 2 * 900
    assert limit_s <= config.deadlines.evaluation_s and 2 * limit_s < config.deadlines.batch_s


def test_a_turn_of_a_group_that_takes_no_slot_waits_for_those_of_all_others() -> None:
    """Of 64 groups a step, one step ahead, a worker may hold all 128, and 16 of them have a turn in the engine at a time. Healthy groups
    were given up, and discarded the second time."""
    environment = {"path": "my_environment:Calculator", "max_turns": 2}
    config = with_deadlines(run_config(reward={"kind": "environment"}, environment=environment), 10**9)
    rollout, generate_s = config.rollout, config.rollout.engine.deadlines.generate_s
    assert (config.places, rollout.slots_per_worker) == (128, 16)
    assert group_s(rollout, 128) - group_s(rollout, 16) == pytest.approx(2 * (8 - 1) * generate_s)
