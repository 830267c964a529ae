"""Deadlines follow from answers and bytes, in an order in which nobody stops waiting before what is waited for may be late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from actors.cluster.head_watch import _head_hangs_s, _raylet_hangs_s
from actors.commands.cli import app
from actors.commands.recipe import load_config
from actors.config import RunConfig
from actors.record.run_folder import RunFolder
from actors.settings.deadlines import (
    as_text,
    bucket_s,
    bytes_of,
    group_s,
    inversions,
    new_parts_s,
    newer_weights_s,
    table,
    tokens_call_s,
    tokens_s,
    weights_fetch_s,
    with_deadlines,
)
from correction.errors import ConfigError

ROOT = Path(__file__).parents[3]


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
    assert engine.generate_s < group_s(config.rollout) < 2 * group_s(config.rollout) < run.batch_s
    assert group_s(config.rollout) <= run.evaluation_s
    own_s = engine.update_s + 2 * engine.control_s
    assert weights_fetch_s(config) == pytest.approx(run.sync_s - own_s), "an engine keeps its time"
    assert weights_fetch_s(config) == pytest.approx(60 + size / run.bytes_per_s)
    assert engine.control_s + engine.update_s < run.sync_s < 3 * run.sync_s < run.receipts_s < run.batch_s
    assert 2 * engine.start_s <= run.start_s < run.batch_s, "a batch outlives the start of a worker's replacement"
    assert config.rollout.engine.weight_group_timeout_s < engine.update_s, "a broadcast that is stuck fails before its engine is lost"
    collective_s = config.learner.collective_timeout_s
    assert max(run.step_s, run.checkpoint_s) < collective_s, "the driver's call is late before a rank that waits for a slower one fails"
    assert run.checkpoint_s < run.disk_s
    tokens_ = tokens_s(64 * config.rollout.sampling.samples_per_group * tokens, run.bytes_per_s)
    assert tokens_ < tokens_call_s(tokens_) < run.batch_s, "what is fetched of the object store is late before its batch is"
    assert inversions(config) == []


@pytest.mark.parametrize(("groups", "rate"), [(16_384, 1e8), (64, 1e5)])
def test_a_batch_whose_tokens_take_long_is_waited_for(groups: int, rate: float) -> None:
    """A large one, and a slow network: its groups are finished, and none more is until it is there."""
    config = run_config(sampling={"max_tokens": 1024})
    config = config.model_copy(update={"groups_per_step": groups, "deadlines": type(config.deadlines)(bytes_per_s=rate)})
    run = with_deadlines(config, 10**6).deadlines
    tokens = tokens_s(groups * config.rollout.sampling.samples_per_group * 1024, rate)
    assert run.batch_s == tokens_call_s(tokens) + 30.0 > 3600.0
    set_ = type(config.deadlines)(bytes_per_s=rate, batch_s=2000.0)
    (told,) = inversions(with_deadlines(config.model_copy(update={"deadlines": set_}), 10**6))
    assert told.startswith("deadlines.batch_s = 2000 s leaves no time beyond the way of its tokens, which may take ")


@pytest.mark.parametrize("size", [10**9, 16 * 10**9, 61 * 10**9])
def test_a_dead_member_costs_the_learner_a_bucket_s_time_not_a_model_s(size: int) -> None:
    """256 MB at 100 MB/s in addition to the 60 s of an engine's own collective, whatever the model; sync_s is 693 s for one of 16 GB."""
    config = with_deadlines(run_config(), size)
    bytes_ = config.weight_sync.bucket_bytes
    assert bucket_s(config) == 60 + bytes_ / 1e8 < 70
    assert config.rollout.engine.weight_group_timeout_s < bucket_s(config) < config.rollout.engine.deadlines.update_s
    (line,) = [one for one in table(config, size) if one.what.startswith("one bucket of a broadcast, in the learner")]
    assert line.seconds == bucket_s(config)


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


def test_what_a_recipe_sets_stays_and_is_all_that_a_dump_has() -> None:
    """So that a resume with longer answers has longer deadlines; deriving twice gives the same."""
    config = run_config(engine={"device": "cpu", "deadlines": {"update_s": 50.0}})
    config = config.model_copy(update={"deadlines": type(config.deadlines)(batch_s=100.0)})
    whole = with_deadlines(config, 10**10)
    assert (whole.deadlines.batch_s, whole.rollout.engine.deadlines.update_s) == (100.0, 50.0)
    assert whole.deadlines.sync_s == pytest.approx(60 + 100 + 50 + 2 * 80)
    assert with_deadlines(whole, 10**10) == whole
    written = yaml.safe_load(yaml.safe_dump(whole.model_dump(mode="json")))
    assert written["deadlines"]["batch_s"] == 100.0 and "sync_s" not in written["deadlines"]
    assert "generate_s" not in written["rollout"]["engine"]["deadlines"]
    longer = RunConfig.model_validate(written | {"rollout": written["rollout"] | {"sampling": {"max_tokens": 10_000}}})
    assert with_deadlines(longer, 10**10).rollout.engine.deadlines.generate_s == pytest.approx(3 * 10_000 / 5)
    assert [sentence.partition(" = ")[0] for sentence in inversions(whole)] == ["deadlines.batch_s"]


def test_a_collective_of_several_ranks_or_a_broadcast_that_is_set_too_short_is_told() -> None:
    config = run_config()
    several = {"data_parallel": 2, "collective_timeout_s": 600.0}
    told = inversions(with_deadlines(config.model_copy(update={"learner": type(config.learner)(**several)}), 10**9))
    assert [sentence.partition(" leaves")[0] for sentence in told] == ["learner.collective_timeout_s = 600 s"]
    assert "beyond deadlines.step_s, which may take 1800 s" in told[0]
    slow = run_config(engine={"device": "cpu", "weight_group_timeout_s": 500.0})
    assert inversions(with_deadlines(slow, 10**9)) == [], "nothing is broadcast"
    slow = slow.model_copy(update={"weight_sync": type(config.weight_sync)(transport="broadcast")})
    assert [sentence.partition(" = ")[0] for sentence in inversions(with_deadlines(slow, 10**9))] == ["rollout.engine.deadlines.update_s"]


def test_config_yaml_shows_derived_deadlines_and_a_resume_derives_them_anew(tmp_path: Path) -> None:
    """Under `derived`, so that a resume with longer answers, or with one of them set, doesn't meet the old value. Earlier folders
    don't have the key."""
    config = run_config(engine={"device": "cpu", "deadlines": {"update_s": 50.0}})
    whole = with_deadlines(config, 10**10)
    with RunFolder.create(tmp_path / "run", "run") as folder:
        folder.write_config(whole)
        written = folder.read_config()
    of_engine = written["rollout"]["engine"]["deadlines"]
    assert written["learner"]["derived"]["collective_timeout_s"] == 60 + 1800
    assert (written["deadlines"]["derived"]["sync_s"], of_engine["update_s"]) == (pytest.approx(60 + 100 + 50 + 2 * 80), 50.0)
    assert of_engine["derived"] == {"start_s": 400.0, "generate_s": pytest.approx(3 * 256 / 5), "control_s": 80.0}
    read = run_config_of(tmp_path / "run")
    assert read.deadlines == config.deadlines and read.rollout.engine.deadlines == config.rollout.engine.deadlines
    assert with_deadlines(read, 10**10).deadlines == whole.deadlines
    assert run_config_of(tmp_path / "run", "deadlines.sync_s=77").deadlines.sync_s == 77.0
    earlier = whole.model_dump(mode="json")
    assert "derived" not in earlier["deadlines"] and RunConfig.model_validate(earlier).deadlines == config.deadlines
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("sync_s:", "of_another_version_s:"))
    assert run_config_of(tmp_path / "run").deadlines == config.deadlines, "what was derived under a name of its time is no setting"
    with pytest.raises(ConfigError, match=r"deadlines.derived.sync_s: that shows what a run has derived; set deadlines.sync_s itself"):
        run_config_of(tmp_path / "run", "deadlines.derived.sync_s=77")


def run_config_of(folder: Path, *overrides: str) -> RunConfig:
    return load_config(RunConfig, folder / "config.yaml", overrides)


def test_the_table_has_every_key_and_says_what_is_set() -> None:
    config = run_config()
    lines = table(config, 10**9)
    keys = {line.key for line in lines}
    for section, prefix in ((config.deadlines, "deadlines"), (config.rollout.engine.deadlines, "rollout.engine.deadlines")):
        assert {f"{prefix}.{name}" for name in section.DERIVED} <= keys
    assert not any(line.is_set for line in lines)
    assert {"learner.collective_timeout_s", "rollout.engine.weight_group_timeout_s"} <= keys
    run = with_deadlines(config, 10**9).deadlines
    others = {run.driver_s, run.disk_s, run.receipts_s, newer_weights_s(run.step_s, run.sync_s)}
    assert others | {new_parts_s(run.start_s)} <= {line.seconds for line in lines if not line.key}
    shown = as_text(table(config.model_copy(update={"deadlines": type(config.deadlines)(sync_s=77.0)}), 10**9)).splitlines()
    assert [line.split()[:3] for line in shown if line.endswith("(set)")] == [["77", "s", "deadlines.sync_s"]]


@pytest.mark.parametrize(("tokens", "size"), SCALES)
def test_what_contains_another_stands_below_it_in_the_table(tokens: int, size: int) -> None:
    """As their definitions have it; and it is at least as long."""
    config = run_config(sampling={"max_tokens": tokens})
    lines = table(config, size)

    def row(key: str) -> int:
        return [line.key for line in lines].index(key)

    engine, seconds = "rollout.engine.deadlines", [line.seconds for line in lines]
    at = {line.what.partition(":")[0].partition(",")[0]: i for i, line in enumerate(lines) if not line.key}
    group, receipts = at["a group"], at["receipts of all workers"]
    for part, contains in (
        (row(f"{engine}.generate_s"), group),
        (group, row("deadlines.batch_s")),
        (row("deadlines.start_s"), row("deadlines.batch_s")),
        (receipts, row("deadlines.batch_s")),
        (row("deadlines.sync_s"), receipts),
        (row(f"{engine}.update_s"), row("deadlines.sync_s")),
        (row(f"{engine}.start_s"), row("deadlines.start_s")),
        (row("rollout.reward.deadline_s"), at["rewards of a group"]),
        (row("rollout.reward.start_deadline_s"), at["rewards of a group"]),
        (at["a batch's tokens on their way to the service"], at["the object store's answer about these tokens"]),
        (at["the object store's answer about these tokens"], row("deadlines.batch_s")),
        (at["a batch's tokens on their way to the service"], at["wide fields of a batch in a rank"]),
        (row("deadlines.step_s"), at["wide fields of a batch in a rank"]),
        (row("deadlines.step_s"), at["lines of the last steps"]),
        (row("deadlines.checkpoint_s"), at["the run folder's disk"]),
        (at["the run folder's disk"], at["reading a checkpoint"]),
        (row("deadlines.step_s"), at["an engine that joins"]),
        (row("deadlines.step_s"), row("learner.collective_timeout_s")),
        (group, row("deadlines.evaluation_s")),
    ):
        assert part < contains and seconds[part] <= seconds[contains], (lines[part], lines[contains])


def test_explain_prints_the_deadlines_of_the_recipe() -> None:
    """The command, with what one setting changes."""
    path = ROOT / "recipes" / "nano_spell_backward.yaml"
    words = ("model=/no/such/model", "deadlines.sync_s=77")
    done = CliRunner().invoke(app, ["config", str(path), *words, "--explain"])
    assert done.exit_code == 0, done.output
    _, heading, lines = done.output.partition("\nDeadlines of this recipe (")
    known, _, lines = lines.partition("):\n")
    assert heading and known == "its weights, /no/such/model, are not there yet, and count as none"
    assert lines == as_text(table(load_config(RunConfig, path, words), 0)) + "\n"
    shown = {line.split()[2]: line for line in lines.splitlines()}
    assert shown["deadlines.sync_s"].split()[0] == "77" and shown["deadlines.sync_s"].endswith("(set)")
    assert {"deadlines.batch_s", "rollout.engine.deadlines.generate_s"} <= shown.keys()


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_recipe_turns_an_order_around(recipe: Path) -> None:
    assert inversions(with_deadlines(load_config(RunConfig, recipe), 10**9)) == []


def test_bytes_are_those_of_the_weights(tmp_path: Path) -> None:
    for name, size in (("model-1.safetensors", 70), ("model-2.safetensors", 30), ("tokenizer.json", 1000)):
        (tmp_path / name).write_bytes(bytes(size))
    assert bytes_of(tmp_path) == 100 and bytes_of(tmp_path / "none") == 0
